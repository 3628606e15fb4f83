"""The process that writes an adapter as a GGUF file, with llama.cpp's converter imported. Started by gguf_lora.py, never by a
user.

llama.cpp has its own names, and for some families its own order of a weight's rows. The converter's model class knows both: it
gets B, which has the weight's rows, in the weight's place. Whatever else it might do to a weight would be lost, so the whole
product B A goes through it as well, and must be what comes out of the factors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def factors(model: Any, name: str, a: Any, b: Any) -> tuple[str, Any]:
    """llama.cpp's name of the weight, and B in its order."""
    import torch

    kept = model.filter_tensors((name, lambda: b))
    if kept is None:
        raise SystemExit(f"{name} has no counterpart in this model's GGUF file")
    name = kept[0]
    layer = next((int(part) for part in name.split(".") if part.isdecimal()), None)
    moved = list(model.modify_tensors(b, name, layer))
    whole = list(model.modify_tensors(b @ a, name, layer))
    if len(moved) != 1 or len(whole) != 1 or not torch.allclose(moved[0][1] @ a, whole[0][1], rtol=1e-4, atol=1e-7):
        raise SystemExit(f"{name} is split into several weights, or transposed, in this model's GGUF file")
    return str(moved[0][0]), moved[0][1]


def main(asked: str) -> None:
    job = json.loads(Path(asked).read_text(encoding="utf-8"))
    sys.path[:0] = job["paths"]  # the converter's, and where its own gguf lies
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from safetensors.torch import load_file

    source = Path(job["model"])
    hparams = ModelBase.load_hparams(source, False)
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    target = Path(job["target"])
    model = kind(source, gguf.LlamaFileType.ALL_F32, target, eager=True, dry_run=True, hparams=hparams)
    writer = gguf.GGUFWriter(str(target), gguf.MODEL_ARCH_NAMES[kind.model_arch])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, job["alpha"])
    writer.add_name(job["title"])
    weights = load_file(job["weights"])
    with torch.inference_mode():
        for name in job["names"]:
            a, b = weights[f"{name}.A"], weights[f"{name}.B"]
            place, moved = factors(model, f"{name}.weight", a, b)
            writer.add_tensor(f"{place}.lora_a", a.contiguous().numpy())
            writer.add_tensor(f"{place}.lora_b", moved.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1])
