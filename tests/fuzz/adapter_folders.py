"""Adapter folders with one thing wrong: refused with a sentence, or loaded, and then the model's logits are those of the model
that PEFT makes out of the same folder, where it can."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz.outcomes import Tally, mutated_bytes, mutated_value
from samples import make_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Values that mean something to PEFT.
KEYS: dict[str, tuple[Any, ...]] = {
    "r": (1, 2, 8, 10**9), "lora_alpha": (0, 1, 64, -1, 1e30), "use_rslora": (True,), "use_dora": (True,),
    "bias": ("all", "x"),
    "target_modules": ("all-linear", ".*q_proj", "(", ["q_proj"], ["lm_head"]), "rank_pattern": ({"q_proj": 2}, {".*": 10**8}),
    "alpha_pattern": ({"q_proj": 1}, {"(": 1}), "modules_to_save": (["norm"], ["x"]), "layers_to_transform": ([0], [7], -1),
    "init_lora_weights": ("pissa", "olora", "gaussian", "pissa_niter_2", "loftq", "lora_ga", 7), "fan_in_fan_out": (True,),
    "exclude_modules": ("q_proj", ["up_proj"]), "layer_replication": ([[0, 1]],), "lora_bias": (True,),
    "lora_dropout": (0.5, 2),
    "trainable_token_indices": ([1, 2],), "auto_mapping": ({"base_model_class": "A", "parent_library": "antigravity"},),
    "target_parameters": (["mlp.up_proj.weight"],), "peft_type": ("IA3", "ADALORA"), "loftq_config": ({"loftq_bits": 4},),
}  # fmt: skip


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    from pronghorn.model.stored_adapter import attach_adapter, base_name

    warnings.simplefilter("ignore")
    source, target, ids = folder / "whole", folder / "adapter", torch.arange(3, 30)[None]
    torch.manual_seed(0)
    whole = get_peft_model(make_model(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"]))
    for name, parameter in whole.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    whole.base_model.peft_config["default"].base_model_name_or_path = "a model"
    whole.save_pretrained(str(source))
    target.mkdir()

    def logits(model: Any) -> Any:
        with torch.no_grad():
            return model.eval()(input_ids=ids).logits

    def work(content: dict[str, bytes]) -> str:
        for name, data in content.items():
            (target / name).write_bytes(data)
        base_name(target)
        found = logits(attach_adapter(make_model(), target))
        try:
            expected = logits(PeftModel.from_pretrained(make_model(), str(target)))
        except Exception:  # noqa: BLE001 - whatever PEFT raises, there is nothing to compare with
            return "same"
        same = torch.allclose(found, expected, atol=1e-4, rtol=1e-3, equal_nan=True)
        return "same" if same else f"silent\nlogits differ by {float((found - expected).abs().max()):.3g}"

    tally = Tally("adapter_folders", count, seed)
    plain = {name: (source / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    for number in range(count):
        content, what = _mutated(plain, tally.random(number))
        tally.add(number, what, lambda content=content: work(content))  # type: ignore[misc]
    return tally.outcomes


def _mutated(plain: dict[str, bytes], chance: Any) -> tuple[dict[str, bytes], str]:
    kind = chance.random()
    if kind < 0.25:
        name = chance.choice((CONFIG, WEIGHTS))
        head = plain[name] if name == CONFIG else plain[name][:1600]  # names and shapes; numbers may be any
        changed, what = mutated_bytes(head, chance)
        return plain | {name: changed + plain[name][len(head) :]}, f"{name}: {what}"
    config: Any = json.loads(plain[CONFIG])
    if kind < 0.6:
        key = chance.choice(list(KEYS))
        config[key] = chance.choice(KEYS[key])
        what = f"{key} = {config[key]!r}"
    else:
        config, what = mutated_value(config, chance)
    return plain | {CONFIG: json.dumps(config).encode("utf-8", "surrogatepass")}, what
