"""Scripts after public notebooks of many kinds, as they are: all train, save, reload and generate.

Each file in public/ has a notebook's imports, calls, arguments and order; models and data of the same names are small, and come
from a hub's cache of our own. All of them run in this process, one after the other: an interpreter with TRL takes 8 s to start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

import test_nothing_is_patched
from image_text_models import save_image_text_model
from pronghorn.compat.scripts.notes import Notes
from pronghorn.compat.scripts.running import run
from pronghorn.errors import CommandError
from pronghorn.generation.generator import Generator, Request
from pronghorn.kernels.runtime import dispatch
from public_models import COMMIT, write_data, write_hub
from trl_on_a_cpu import TorchLogProbs

pytestmark = pytest.mark.usefixtures("_no_gpu")  # small numbers, and a stand-in for the GPU
PUBLIC = Path(__file__).parent / "public"
OF_PYTHON = ("__warningregistry__", "__slotnames__")  # Python notes there what was warned of, and what was copied
OTHERS = ("vision.py", "inference_only.py")  # which do not train
SCRIPTS = sorted(path.name for path in PUBLIC.iterdir() if path.suffix in (".py", ".ipynb") and path.name not in OTHERS)
ONLINE = sorted(path.name for path in (PUBLIC / "grpo").iterdir())  # which generate while they train
# Run elsewhere in the suite (alpaca_llama3 below, plain_trainer in test_run_script.py); `make dropin-cases` takes them all.
LATER = {"alpaca_llama3.py", "plain_trainer.py"}


class CudaIsCpu(TorchFunctionMode):
    """Notebooks write `.to("cuda")`: a stand-in for a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.to:
            args = tuple("cpu" if isinstance(one, str) and one == "cuda" else one for one in args)
            kwargs = {key: "cpu" if isinstance(one, str) and one == "cuda" else one for key, one in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("hub")
    write_hub(cache)
    return cache


@pytest.fixture
def notebook_room(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with data, a hub's cache with models, and TRL's loss without a GPU, where it is not ours."""
    import datasets

    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", TorchLogProbs)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    datasets.disable_progress_bars()
    yield tmp_path
    datasets.enable_progress_bars()


def run_script(script: str) -> tuple[dict[str, Any], Notes]:
    notes = Notes(lambda text: None)
    with CudaIsCpu():
        return vars(run(str(PUBLIC / script), notes=notes)), notes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "script" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-case")
        metafunc.parametrize("script", [name for name in SCRIPTS if every or name not in LATER])
    if "online" in metafunc.fixturenames:
        metafunc.parametrize("online", ONLINE)


def test_a_public_script_as_it_is(script: str, notebook_room: Path) -> None:
    """It has trained, saved what it trained, loaded that again and generated with it."""
    main, _ = run_script(script)
    trainer = main.get("trainer") or main["dpo_trainer"]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) >= 2
    assert all(math.isfinite(loss) for loss in losses)
    assert main["outputs"].shape[1] > 1
    if script == "qwen3_reasoning.py":  # which gives its trainer no length: the model's
        assert trainer.args.max_length == 2048
    saved = list(notebook_room.glob("*/adapter_model.safetensors"))
    if script == "full_finetuning.py":
        assert (notebook_room / "gemma-3-full" / "model.safetensors").is_file()
        return
    assert saved
    for path in saved:
        trained = {name: weight for name, weight in load_file(path).items() if "lora_B" in name}
        assert trained
        assert all(weight.any() for weight in trained.values())  # they begin as zeros


def test_a_public_script_that_generates_while_it_trains(
    online: str, notebook_room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the fast layers: each prompt of a step once. It has trained, and generated with what it trained."""
    asked: list[Sequence[Request]] = []
    own = Generator.generate
    monkeypatch.setattr(
        Generator, "generate", lambda self, requests, *rest: asked.append(requests) or own(self, requests, *rest)
    )
    monkeypatch.setattr(dispatch, "_said", set())
    main, notes = run_script(f"grpo/{online}")
    trainer = main["trainer"]
    rewards = [row["reward_std"] for row in trainer.state.log_history if "reward_std" in row]
    assert len(rewards) == 2
    assert all(std > 0 for std in rewards)
    groups = [requests for requests in asked if len(requests[0].keys) == trainer.args.num_generations]
    assert len(groups) == 2
    assert all(len(request.keys) == trainer.args.num_generations for requests in groups for request in requests)
    assert not [line for line in dispatch._said if line.startswith("generate: ")]
    assert not trainer.args.use_vllm
    assert len(main["outputs"]) == 1
    if "SamplingParams" in main:
        output = main["outputs"][0].outputs[0]
        assert output.text == main["tokenizer"].decode(output.token_ids, skip_special_tokens=True)
        assert "import vllm gives SamplingParams of Pronghorn, which generates in vLLM's place" in notes.said
    assert list(notebook_room.glob("grpo_saved_lora/*model.safetensors"))


def train_by_hand() -> Any:
    """alpaca_llama3.py as one writes it for this TRL, without the adaptor."""
    from datasets import load_dataset
    from transformers import TextStreamer
    from trl import SFTConfig, SFTTrainer

    from pronghorn import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained("unsloth/llama-3-8b", max_seq_length=2048)
    model = FastLanguageModel.get_peft_model(model, r=16)
    prompt = (
        "A task, and more about it. Write what completes it.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n{}"
    )
    texts = [
        prompt.format(row["instruction"], row["input"], row["output"]) + tokenizer.eos_token
        for row in load_dataset("yahma/alpaca-cleaned", split="train")
    ]
    config = SFTConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        warmup_steps=1,
        max_steps=3,
        learning_rate=2e-4,
        logging_steps=1,
        optim="adamw_8bit" if find_spec("bitsandbytes") else "adamw_torch_fused",
        weight_decay=0.01,
        lr_scheduler_type="linear",
        seed=3407,
        max_length=2048,
        output_dir="by-hand",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
    )
    trainer = SFTTrainer(model, config, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer)
    trainer.train()
    FastLanguageModel.for_inference(model)
    model.generate(**tokenizer(["a"], return_tensors="pt"), streamer=TextStreamer(tokenizer), max_new_tokens=4)
    model.save_pretrained("by-hand/adapter")
    FastLanguageModel.from_pretrained("by-hand/adapter", max_seq_length=2048)
    return trainer


def test_numbers_and_packages_are_as_without_the_adaptor(notebook_room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses, bit for bit; and afterwards every attribute of every module of the packages, every entry of every class
    and the insides of every function are what they were."""
    monkeypatch.setattr(test_nothing_is_patched, "LIBRARIES", ("torch", "transformers", "peft", "trl"))
    by_hand = train_by_hand()
    before = test_nothing_is_patched.snapshot()
    main, notes = run_script("alpaca_llama3.py")
    found = test_nothing_is_patched.changes(before, test_nothing_is_patched.snapshot())
    assert [line for line in found if not any(name in line for name in OF_PYTHON)] == []
    logs = [
        [(row["loss"], row["grad_norm"], row["learning_rate"]) for row in one.state.log_history if "loss" in row]
        for one in (main["trainer"], by_hand)
    ]
    assert len(logs[0]) == 3
    assert logs[0] == logs[1]
    # Each translation is told once, and nothing else.
    eight_bit = (
        'TrainingArguments(optim="adamw_8bit") becomes "adamw_torch_fused": bitsandbytes is not installed; '
        "same updates, 8 bytes of optimizer state per trained weight"
    )
    assert notes.said == [
        "import unsloth gives pronghorn",
        *([] if find_spec("bitsandbytes") else [eight_bit]),
        "TrainingArguments(fp16=True) becomes fp16=False: no GPU found, training runs in float32 on the CPU",
        "SFTTrainer(tokenizer=...) becomes processing_class=...",
        "SFTTrainer(args=TrainingArguments(...)) becomes SFTConfig with the same values",
        "SFTTrainer(dataset_text_field=...) moves into its args: SFTConfig(dataset_text_field=...)",
        "SFTTrainer(max_seq_length=...) moves into its args: SFTConfig(max_length=...)",
        "SFTTrainer(dataset_num_proc=...) moves into its args: SFTConfig(dataset_num_proc=...)",
        "SFTTrainer(packing=...) moves into its args: SFTConfig(packing=...)",
    ]


def test_a_script_for_inference_alone(notebook_room: Path) -> None:
    main, _ = run_script("inference_only.py")
    assert main["outputs"].shape[1] > 1


def test_a_script_that_needs_what_is_not_here_ends_with_the_sentence(notebook_room: Path, hub: Path) -> None:
    folder = hub / "models--unsloth--Llama-3.2-11B-Vision-Instruct"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    save_image_text_model("gemma3", folder / "snapshots" / COMMIT)
    with pytest.raises(CommandError, match=r"finetune_vision_layers=True") as caught:
        run_script("vision.py")
    assert caught.value.fix == "finetune_vision_layers=False"
