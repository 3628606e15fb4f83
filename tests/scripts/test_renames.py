"""Old names of trainers' arguments: what is made of each with the TRL that is installed, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from pronghorn.compat.dropin.sampling_params import SamplingParams
from pronghorn.compat.scripts import renames
from pronghorn.compat.scripts.fronts import arguments_front
from pronghorn.compat.scripts.notes import Notes
from pronghorn.compat.scripts.renames import STOPS, arguments_class, by_name, remember, translate_arguments, translate_trainer
from pronghorn.errors import CommandError
from samples import make_tokenizer

pytestmark = pytest.mark.usefixtures("_no_gpu")


@pytest.fixture
def notes() -> Notes:
    return Notes(lambda text: None)


@pytest.mark.parametrize(
    ("given", "made", "said"),
    [
        ({"max_seq_length": 512}, {"max_length": 512}, 1),
        ({"evaluation_strategy": "steps"}, {"eval_strategy": "steps"}, 1),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}, 1),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, {"warmup_steps": 5}, 0),
        ({"warmup_ratio": 0.0}, {}, 0),
        ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}, 1),
        ({"group_by_length": False}, {}, 0),
        ({"max_prompt_length": 64, "overwrite_output_dir": True}, {}, 2),
        ({"optim": "adamw_8bit"}, {"optim": "adamw_torch_fused"}, 1),
        ({"optim": "paged_adamw_8bit"}, {"optim": "adamw_torch_fused"}, 1),
        ({"optim": "lion_8bit"}, {"optim": "lion_8bit"}, 0),  # no other one takes the same steps
        ({"fp16": True, "bf16": False}, {"fp16": False, "bf16": False}, 1),
        ({"learning_rate": 1e-3, "nobody_knows": 1}, {"learning_rate": 1e-3, "nobody_knows": 1}, 0),
    ],
)
def test_arguments(
    given: dict[str, Any], made: dict[str, Any], said: int, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renames, "find_spec", lambda name: None)  # bitsandbytes is not installed
    assert translate_arguments(SFTConfig, given, notes) == {"bf16": False} | made
    assert len([line for line in notes.said if "TRL's default" not in line]) == said


def test_bitsandbytes_optimizers_stay_where_it_is_installed(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renames, "find_spec", lambda name: object())
    assert translate_arguments(SFTConfig, {"optim": "adamw_8bit"}, notes)["optim"] == "adamw_8bit"
    assert not any("optim" in line for line in notes.said)


def test_what_cannot_be_translated_is_refused(notes: Notes) -> None:
    with pytest.raises(CommandError, match="sampling_params is a object"):
        translate_arguments(GRPOConfig, {"vllm_sampling_params": object()}, notes)
    with pytest.raises(CommandError, match=r"GRPOConfig\(min_p=0.2\) contradicts vllm_sampling_params with min_p=0.1"):
        translate_arguments(GRPOConfig, {"vllm_sampling_params": SamplingParams(min_p=0.1), "min_p": 0.2}, notes)
    with pytest.raises(CommandError, match=r"SamplingParams\(n=2\)\) is not supported"):
        translate_arguments(GRPOConfig, {"vllm_sampling_params": SamplingParams(n=2)}, notes)
    with pytest.raises(CommandError, match="warmup_ratio=2"):
        translate_arguments(SFTConfig, {"warmup_ratio": 2}, notes)
    with pytest.raises(CommandError, match=r"max_seq_length=10\) contradicts max_length=20"):
        translate_arguments(SFTConfig, {"max_seq_length": 10, "max_length": 20}, notes)


def test_sampling_by_vllms_names(notes: Notes) -> None:
    params = SamplingParams(
        min_p=0.1, top_p=1.0, top_k=-1, seed=3407, stop=["</s>"], include_stop_str_in_output=True, max_tokens=9
    )
    given = {"vllm_sampling_params": params, "use_vllm": True, "vllm_gpu_memory_utilization": 0.6, "bf16": False}
    made = translate_arguments(GRPOConfig, given, notes)
    assert made.pop(STOPS) == ["</s>"]
    config = GRPOConfig(**made, report_to="none")
    assert (config.min_p, config.top_p, config.top_k, config.max_completion_length) == (0.1, 1.0, 0, 9)
    assert config.temperature == 1.0
    assert not config.use_vllm
    assert notes.said == [
        "GRPOConfig(vllm_sampling_params=...): its seed is dropped; answers are drawn by GRPOConfig(seed=...)",
        "GRPOConfig(vllm_sampling_params=...) becomes min_p=0.1, top_p=1.0, top_k=0, max_completion_length=9",
        "GRPOConfig(use_vllm=True) becomes False: model.generate() runs on Pronghorn's layers, in vLLM's place",
    ]
    assert translate_arguments(GRPOConfig, {"use_vllm": True, "vllm_mode": "server"}, notes)["use_vllm"] is True
    front = arguments_front(GRPOConfig, notes)
    settings = front(vllm_sampling_params={"stop": "###"}, bf16=False, report_to="none")
    with pytest.raises(CommandError, match=r"stop='###' is not supported"):
        translate_trainer(GRPOTrainer, {"args": settings, "processing_class": make_tokenizer()}, notes)
    settings = front(vllm_sampling_params={"stop": make_tokenizer().eos_token}, bf16=False, report_to="none")
    assert translate_trainer(GRPOTrainer, {"args": settings, "processing_class": make_tokenizer()}, notes)["args"] is settings


def test_arguments_of_older_preference_trainers(notes: Notes) -> None:
    """KTO and DPO have dropped them; ORPO and GRPO have not."""
    old = {"max_completion_length": 64, "label_pad_token_id": -100, "generate_during_eval": False, "rpo_alpha": None}
    assert translate_arguments(KTOConfig, {**old, "bf16": False}, notes) == {"bf16": False}
    assert [line.split(" is dropped")[0] for line in notes.said] == [
        f"KTOConfig({name}=...)" for name in ("max_completion_length", "label_pad_token_id", "generate_during_eval")
    ]
    assert translate_arguments(GRPOConfig, {"max_completion_length": 8, "bf16": False}, notes)["max_completion_length"] == 8
    with pytest.raises(CommandError, match="rpo_alpha") as caught:
        translate_arguments(DPOConfig, {"rpo_alpha": 1.0}, notes)
    assert "loss_weights" in caught.value.fix
    assert DPOConfig(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 1.0], bf16=False, report_to="none").loss_weights


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ({"per_device_train_batch_size": 1, "num_generations": 4}, 4),
        ({"per_device_train_batch_size": 1, "num_generations": 4, "gradient_accumulation_steps": 4}, 1),
        ({"per_device_train_batch_size": 8, "num_generations": 4}, 8),
        ({"per_device_train_batch_size": 1, "num_generations": 4, "steps_per_generation": 8}, 1),
    ],
)
def test_all_answers_to_a_prompt_go_through_together(given: dict[str, Any], batch: int, notes: Notes) -> None:
    made = translate_arguments(GRPOConfig, given, notes)
    assert GRPOConfig(**made, report_to="none").per_device_train_batch_size == batch
    assert any("num_generations completions" in line for line in notes.said) == (batch != given["per_device_train_batch_size"])


def test_a_class_of_arguments_for_each_trainer() -> None:
    derived = type("MyTrainer", (SFTTrainer,), {})
    assert [arguments_class(one) for one in (SFTTrainer, derived, DPOTrainer, Trainer)] == [
        SFTConfig,
        SFTConfig,
        DPOConfig,
        TrainingArguments,
    ]
    assert arguments_class(KTOTrainer).__name__ == "KTOConfig"


def test_a_trainer_as_scripts_call_it(notes: Notes) -> None:
    settings = TrainingArguments(output_dir="somewhere", learning_rate=3e-4, bf16=False, report_to="none", hub_token="mine")
    given = {
        "model": 1,
        "tokenizer": 2,
        "args": settings,
        "dataset_text_field": "words",
        "max_seq_length": 64,
        "packing": True,
        "dataset_num_proc": 2,
    }
    made = translate_trainer(SFTTrainer, given, notes)
    config = made.pop("args")
    assert made == {"model": 1, "processing_class": 2}
    assert type(config) is SFTConfig
    assert (config.dataset_text_field, config.max_length, config.packing, config.dataset_num_proc) == ("words", 64, True, 2)
    assert (config.learning_rate, config.output_dir, config.hub_token) == (3e-4, "somewhere", "mine")
    assert settings.learning_rate == 3e-4
    assert len(notes.said) == 6


def test_values_of_a_trainer_go_before_those_of_its_arguments_and_leave_them_alone(notes: Notes) -> None:
    settings = SFTConfig(output_dir="somewhere", bf16=False, max_length=1024, report_to="none")
    made = translate_trainer(SFTTrainer, {"args": settings, "max_seq_length": 64}, notes)
    assert made["args"].max_length == 64
    assert settings.max_length == 1024


@pytest.mark.parametrize(
    ("settings", "more", "length"),
    [
        (remember(SFTConfig("x", bf16=False, report_to="none"), {"output_dir"}), {}, 4096),
        (remember(SFTConfig("x", bf16=False, report_to="none", max_length=1024), {"max_length"}), {}, 1024),
        (remember(SFTConfig("x", bf16=False, report_to="none"), {"output_dir"}), {"max_seq_length": 512}, 512),
        (TrainingArguments("x", report_to="none"), {}, 4096),
        (SFTConfig("x", bf16=False, report_to="none"), {}, 1024),  # made elsewhere: as it is
    ],
)
def test_rows_are_as_long_as_the_model_was_loaded_for(settings: Any, more: dict[str, Any], length: int, notes: Notes) -> None:
    """TRL 1.15 cuts after 1,024 tokens, in silence, where nobody says otherwise."""
    model = SimpleNamespace(max_seq_length=4096)
    made = translate_trainer(SFTTrainer, {"model": model, "args": settings, **more}, notes)
    assert made["args"].max_length == length
    assert any("rows are truncated to the model's max_seq_length=4096" in line for line in notes.said) == (length == 4096)
    assert SFTConfig("x", bf16=False, report_to="none").max_length == 1024


def test_preference_trainers(notes: Notes) -> None:
    settings = TrainingArguments(output_dir="somewhere", bf16=False, report_to="none")
    made = translate_trainer(DPOTrainer, {"args": settings, "beta": 0.3, "max_length": 99, "max_prompt_length": 50}, notes)
    assert type(made["args"]) is DPOConfig
    assert (made["args"].beta, made["args"].max_length) == (0.3, 99)
    assert any("max_prompt_length=...) is dropped" in line for line in notes.said)


def test_what_is_given_by_place() -> None:
    assert by_name(SFTTrainer, ("m", "a"), {"train_dataset": 1}) == {"model": "m", "args": "a", "train_dataset": 1}
    passing_on = type("Passing", (SFTTrainer,), {"__init__": lambda self, *args, **kwargs: None})
    assert by_name(passing_on, ("m",), {}) == {"model": "m"}
    with pytest.raises(TypeError, match="an argument given twice"):
        by_name(SFTTrainer, ("m",), {"model": "n"})
