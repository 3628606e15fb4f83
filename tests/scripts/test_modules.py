"""Which of our modules answer to which names, and what is said of those that nobody answers to."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import trl

import pronghorn
from pronghorn.compat.dropin.sampling_params import SamplingParams
from pronghorn.compat.scripts.adaptor import Adaptor
from pronghorn.compat.scripts.modules import NotHere
from pronghorn.compat.scripts.notes import Notes
from pronghorn.errors import CommandError


@pytest.fixture
def notes() -> Notes:
    return Notes(lambda text: None)


def test_names_are_ours_and_only_inside(notes: Notes) -> None:
    with Adaptor(notes):
        import unsloth
        from unsloth import get_chat_template, is_bf16_supported
        from unsloth.chat_templates import train_on_responses_only

        assert is_bf16_supported is pronghorn.is_bf16_supported
        assert train_on_responses_only is pronghorn.train_on_responses_only
        assert get_chat_template.__wrapped__ is pronghorn.get_chat_template
        assert unsloth.chat_templates.train_on_responses_only is train_on_responses_only
        assert unsloth.__version__ == pronghorn.__version__
    assert "unsloth" not in sys.modules
    assert "unsloth.chat_templates" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("unsloth")
    assert notes.said == ["import unsloth gives pronghorn", "import unsloth.chat_templates gives pronghorn.chat_templates"]


def test_internals_that_people_import(notes: Notes, tiny_model: Path) -> None:
    """Some have a meaning here; classes of TRL and transformers are imported from wherever an editor found them."""
    with Adaptor(notes):
        from unsloth.models.rl import PatchFastRL
        from unsloth.tokenizer_utils import SFTConfig, load_correct_tokenizer
        from unsloth.trainer import SFTTrainer, _create_unsloth_optimizer

        assert issubclass(SFTTrainer, trl.SFTTrainer)
        assert SFTConfig(max_seq_length=5, report_to="none", bf16=False).max_length == 5
        assert PatchFastRL is pronghorn.PatchFastRL
        assert load_correct_tokenizer(tokenizer_name=str(tiny_model), padding_side="right").eos_token
        for name, fix in (("unsloth.save", "save_pretrained_merged"), ("unsloth.kernels.utils", "FastLanguageModel"),
                          ("unsloth.tokenizer_utils.check", "remove it"), ("unsloth_zoo.utils", "remove")):  # fmt: skip
            with pytest.raises(NotHere) as caught:
                importlib.import_module(name)
            assert fix in caught.value.fix
            assert "internal to the other library" in caught.value.why
    model = torch.nn.Module()
    model.embedding, model.linear = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 2)
    model.get_input_embeddings, model.get_output_embeddings = (lambda: model.embedding), lambda: None
    optimizer = _create_unsloth_optimizer(model, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}, embedding_lr=1e-5)
    assert [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [
        (1e-3, 0.1, 2),
        (1e-5, 0.1, 1),
    ]


def test_what_is_not_here_is_a_sentence_and_an_import_error(notes: Notes) -> None:
    with Adaptor(notes):
        with pytest.raises(NotHere, match=r"unsloth.no_such_name is not in Pronghorn"):
            from unsloth import no_such_name  # noqa: F401
        with pytest.raises(NotHere, match=r"unsloth_zoo.utils is not in Pronghorn\n  why: .*internal to the other library"):
            importlib.import_module("unsloth_zoo.utils")
        with pytest.raises(NotHere, match=r"unsloth_zoo.patch is not in Pronghorn"):
            from unsloth_zoo import patch  # noqa: F401
        with pytest.raises(CommandError, match="generates data with its own server"):
            from unsloth.dataprep import SyntheticDataKit  # noqa: F401
        with pytest.raises(ImportError):  # as a script asks that goes on without
            from unsloth import other_name  # noqa: F401


def test_ours_also_where_the_other_library_is_installed(tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unsloth.py").write_text("raise RuntimeError('the real one')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Adaptor(notes):
        import unsloth

        assert unsloth.is_bf16_supported is pronghorn.is_bf16_supported
    assert any("is installed but not used" in line for line in notes.said)


def test_a_process_with_the_other_library_is_refused(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    with pytest.raises(CommandError, match="unsloth is already imported in this process"), Adaptor(notes):
        pass


def test_vllm_is_stood_in_for_in_the_script_alone(notes: Notes) -> None:
    """TRL and transformers look for vLLM and must not find it."""
    asked = """
from vllm import SamplingParams
import vllm, importlib.util
from vllm.sampling_params import SamplingParams as Same
assert vllm.SamplingParams is SamplingParams is Same
assert vllm.sampling_params.SamplingParams is SamplingParams
assert importlib.util.find_spec("vllm") is None
"""
    with Adaptor(notes):
        script = {"__name__": "__main__"}
        exec(asked, script)
        assert script["SamplingParams"] is SamplingParams
        assert "vllm" not in sys.modules
        for line in ("from vllm import LLM", "from vllm.lora.request import LoRARequest", "import vllm.utils"):
            with pytest.raises(NotHere, match=r"vllm.* is not in Pronghorn") as caught:
                exec(line, script)
            assert "model.fast_generate" in caught.value.fix
        with pytest.raises(ModuleNotFoundError):
            exec("import vllm", {"__name__": "trl.something"})
    assert notes.said == [
        f"import {name} gives SamplingParams of Pronghorn, which generates in vLLM's place"
        for name in ("vllm", "vllm.sampling_params")
    ]
