"""Importing and using pronghorn changes no class, function, module or environment variable of the libraries under it.

In a process of its own: stock transformers and PEFT first train a step, so that what those libraries load lazily is there;
then every attribute of every one of their modules, every entry of every class, the insides of every function and the
contents of every module-level container are compared before and after pronghorn is imported, loads, adapts and trains.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "transformers", "peft")
# What these libraries write into themselves while they are used, and would for any caller.
COUNTERS = {"torch.utils.hooks:RemovableHandle.next_id"}  # torch numbers the hooks that modules are given
# transformers enters every subclass of its ModelOutput into these, ours as anybody's: one more entry, that names our class.
REGISTRIES = {
    "torch.utils._pytree:SUPPORTED_NODES", "torch.utils._pytree:SUPPORTED_SERIALIZED_TYPES",
    "torch.utils._pytree:SERIALIZED_TYPE_TO_PYTHON_TYPE", "torch.export.dynamic_shapes:SUPPORTED_NODES",
    "transformers.utils.generic:_registered_model_output_types",
}  # fmt: skip
OUR_CLASS = "pronghorn.compat.hf_forward.Output"

Snapshot = dict[str, Any]


def ours(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] in LIBRARIES


def insides(value: Any) -> Any:
    """What of a value could be changed in place."""
    if isinstance(value, types.FunctionType):
        return (value.__code__, value.__defaults__, value.__kwdefaults__, value.__dict__.get("__wrapped__"))
    if isinstance(value, (staticmethod, classmethod)):
        return insides(value.__func__)
    if isinstance(value, dict):
        # `dict.items`: lazy mappings of transformers would load every model there is when asked themselves.
        return [(repr(key)[:200], id(item)) for key, item in list(dict.items(value))]
    if isinstance(value, (list, tuple)):
        return [id(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(item)[:200] for item in value)
    return None


def snapshot() -> Snapshot:
    """Place -> (value, its insides); values are held, so that no identity is used twice."""
    found: Snapshot = {}
    for module_name, module in list(sys.modules.items()):
        if not ours(module_name) or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            found[f"{module_name}:{name}"] = (value, insides(value))
            if isinstance(value, type) and value.__module__ == module_name:
                for key, entry in list(vars(value).items()):
                    found[f"{module_name}:{name}.{key}"] = (entry, insides(entry))
    return found


def changes(before: Snapshot, after: Snapshot) -> list[str]:
    known_modules = {place.partition(":")[0] for place in before}
    found = []
    for place, (value, inside) in after.items():
        module, _, name = place.partition(":")
        if place in COUNTERS or module not in known_modules:
            continue
        if place in REGISTRIES and _only_ours_added(before[place][1], inside):
            continue
        if place not in before:
            # Packages load submodules, and names out of them, when they are asked for.
            lazily_loaded = isinstance(value, types.ModuleType) or ("." not in name and _belongs(module, name, value))
            if not lazily_loaded:
                found.append(f"{place} is new")
        elif before[place][0] is not value and not _equal_constants(before[place][0], value):
            found.append(f"{place} was replaced")
        elif before[place][1] != inside:
            found.append(f"{place} was changed inside")
    return found + [f"{place} is gone" for place in before if place not in after]


def _only_ours_added(before: list[Any], after: list[Any]) -> bool:
    return set(before) <= set(after) and all(OUR_CLASS in str(entry) for entry in set(after) - set(before))


def _belongs(module: str, name: str, value: Any) -> bool:
    """A lazy package kept a name that one of its own submodules defines."""
    return str(getattr(value, "__module__", "")).startswith(module) and getattr(value, "__name__", "") == name


def _equal_constants(one: Any, other: Any) -> bool:
    """Counters aside, a constant that was set to the same again."""
    return type(one) is type(other) and isinstance(one, (str, int, float, bool, bytes)) and one == other


# ---- the process -----------------------------------------------------------------------------------------------------


def use_stock(folder: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(folder)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config).train()
    train_a_step(model)
    model.gradient_checkpointing_enable()
    train_a_step(model)
    model.eval().generate(input_ids=torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2)
    model.save_pretrained(f"{folder}/stock-adapter")
    model.get_base_model().save_pretrained(f"{folder}/stock")


def train_a_step(model: Any) -> None:
    import torch

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(3, 259, (2, 9))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def use_ours(folder: str) -> None:
    import torch

    from pronghorn import FastLanguageModel

    for stored in ("load_in_16bit", "load_in_4bit", "load_in_fp8"):
        model, tokenizer = FastLanguageModel.from_pretrained(folder, **{stored: True})  # type: ignore[arg-type]
        model = FastLanguageModel.get_peft_model(model, r=4)
        train_a_step(model)
        FastLanguageModel.for_inference(model).generate(input_ids=torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2)
        model.save_pretrained(f"{folder}/adapter-{stored}")
        model.save_pretrained_merged(f"{folder}/merged-{stored}", tokenizer)


def compare_in_this_process(folder: str) -> dict[str, list[str]]:
    """What is changed after pronghorn is used, and what is found once it is sabotaged: the second shows that the first can
    fail, and comes from the same process, since what they do before takes all of the time."""
    use_stock(folder)
    environment, before = dict(os.environ), snapshot()

    def found() -> list[str]:
        return changes(before, snapshot()) + (["the environment was changed"] if dict(os.environ) != environment else [])

    import pronghorn
    import pronghorn.compat.dropin.language_model

    assert pronghorn.FastLanguageModel
    use_ours(folder)
    as_it_is = found()
    sabotage_libraries()
    return {"as it is": as_it_is, "with patches": found()}


def sabotage_libraries() -> None:
    """One of each kind of patch that this test must see."""
    import torch
    import transformers
    from peft.tuners.lora import Linear
    from transformers.models.llama import modeling_llama

    modeling_llama.LlamaAttention.forward = lambda self: None
    modeling_llama.apply_rotary_pos_emb = lambda *_: None
    transformers.Trainer_of_ours = 1
    torch.optim.AdamW.extra = 1
    Linear.forward.__defaults__ = (1,)
    transformers.loss.loss_utils.LOSS_MAPPING["ForCausalLM"] = None
    os.environ["SET_BY_PRONGHORN"] = "1"


def test_nothing_is_patched(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    run = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["as it is"] == []
    for patched in (
        "LlamaAttention.forward was replaced",
        "apply_rotary_pos_emb was replaced",
        "Trainer_of_ours is new",
        "AdamW.extra is new",
        "Linear.forward was changed inside",
        "LOSS_MAPPING was changed inside",
        "the environment was changed",
    ):
        assert any(patched in line for line in found["with patches"]), (patched, found)


if __name__ == "__main__":
    print(json.dumps(compare_in_this_process(sys.argv[1])))
