"""The targets `fp8` and `nvfp4`: checkpoints in compressed-tensors' layout, which vLLM, SGLang and transformers load.

    fp8      weight          e4m3 [O, D], weight_scale fp32 [O, 1]: a scale a row; activations are rounded at each use, by token
    nvfp4    weight_packed   two values a byte [O, D / 2], weight_scale e4m3 [O, D / 16], weight_global_scale fp32 [1];
                             activations stay in 16 bits

Embeddings, norms, routers, the head and what is beside the text model stay in 16 bits, and so do experts whose files have them
in one tensor (gpt-oss, Gemma 4). Weights are rounded once, from the float32 sum of base and adapter. What was trained on in the
same format and has no adapter leaves with the bytes it was trained on; `fp8:base` is that of every weight, with the adapter
beside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import CommandError
from pronghorn.export.checking import Reference, Verdict, difference, score
from pronghorn.export.job import Job, copy_files
from pronghorn.export.usage import Usage
from pronghorn.kernels.quant.fp8_cast import fp8_quantize
from pronghorn.kernels.quant.nvfp4 import BLOCK, nvfp4_quantize
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import require_adapter
from pronghorn.model.merge_stream import MergedWeights, merging, whole_weights, write_config
from pronghorn.model.sharded import write_sharded
from pronghorn.model.stock import CompressedWeights, read_compressed, stock_of

# What programs multiply as one matrix: one scale of the whole for all of them.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
ADAPTER = "adapter"  # its folder beside the weights of `fp8:base`


def _nvfp4_names(name: str, packed: Tensor, scales: Tensor, whole: Tensor) -> dict[str, Tensor]:
    """compressed-tensors divides by the scale of the whole tensor."""
    return {f"{name}_packed": packed, f"{name}_scale": scales, f"{name}_global_scale": 1 / whole.float().reshape(1)}


def _fp8_names(name: str, values: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {name: values.view(torch.float8_e4m3fn), f"{name}_scale": scales[:, None]}


def _together(names: Iterable[str]) -> list[list[str]]:
    clusters: dict[tuple[str, str], list[str]] = {}
    for name in names:
        owner, _, part = name.removesuffix(".weight").rpartition(".")
        fused = next((parts[0] for parts in FUSED if part in parts), part)
        clusters.setdefault((owner, fused), []).append(name)
    return list(clusters.values())


@dataclass(frozen=True)
class Scheme:
    format: str  # of our table
    layout: str  # compressed-tensors' name
    weights: dict[str, Any]
    activations: dict[str, Any] | None
    quantize: Callable[[Tensor], StoredTensor]
    named: Callable[..., dict[str, Tensor]]  # a weight's parts, as files name them
    multiple: int  # a row's values, or the weight stays wide
    one_scale: bool = False  # of what is multiplied as one matrix

    def stored(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """As files have them."""
        found: dict[str, Tensor] = {}
        for names, rows, q in self._quantized(weights):
            values, scales, *whole = q.tensors().values()
            for name, own_values, own_scales in zip(names, values.split(rows), scales.split(rows), strict=True):
                found |= self.named(name, own_values, own_scales, *whole)
        return found

    def rounded(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """There and back."""
        found: dict[str, Tensor] = {}
        for names, rows, q in self._quantized(weights):
            found |= dict(zip(names, q.dequantize(dtype=torch.float32).split(rows), strict=True))
        return found

    def _quantized(self, weights: dict[str, Tensor]) -> Iterator[tuple[list[str], list[int], StoredTensor]]:
        """With names and rows of the weights in it."""
        for names in _together(weights) if self.one_scale else [[name] for name in weights]:
            yield names, [len(weights[name]) for name in names], self.quantize(torch.cat([weights[name] for name in names]))


FLOAT: dict[str, Any] = {"type": "float", "symmetric": True}
SCHEMES = {
    "fp8": Scheme(
        "fp8",
        "float-quantized",
        {**FLOAT, "num_bits": 8, "strategy": "channel", "dynamic": False},
        {**FLOAT, "num_bits": 8, "strategy": "token", "dynamic": True},
        fp8_quantize,
        _fp8_names,
        1,
    ),
    "nvfp4": Scheme(
        "nvfp4",
        "nvfp4-pack-quantized",
        {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": BLOCK, "dynamic": False,
         "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
        None,
        nvfp4_quantize,
        _nvfp4_names,
        BLOCK,
        one_scale=True,
    ),
}  # fmt: skip


class Compressed:
    """A source of weights (model/sharded.py) in few bits, from one of float32."""

    def __init__(self, source: MergedWeights, scheme: Scheme, dtype: torch.dtype) -> None:
        self.source, self.scheme, self.dtype = source, scheme, dtype
        self.layout = [self._compressed(group) for group in source.layout]

    def group(self, number: int) -> dict[str, Tensor]:
        return self._compressed(self.source.group(number))

    def _compressed(self, group: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        to_quantize: dict[str, Tensor] = {}
        whole = {name.removesuffix("_scale_2") for name in group if name.endswith("_scale_2")}  # NVFP4 as it was trained on
        for name, tensor in group.items():
            if name in whole:
                found |= _nvfp4_names(name, tensor, group[f"{name}_scale"], group[f"{name}_scale_2"])
            elif name.removesuffix("_2").removesuffix("_scale") in whole:
                continue
            elif name not in self.source.products or tensor.itemsize == 1:
                found[name] = tensor
            elif tensor.shape[-1] % self.scheme.multiple:
                found[name] = tensor.to(self.dtype)
            else:
                to_quantize[name] = tensor
        return found | self.scheme.stored(to_quantize)

    def wide(self) -> list[str]:
        """Modules with a matrix that stay as they are: compressed-tensors' `ignore`."""
        named = {name: tensor for group in self.layout for name, tensor in group.items()}
        found = {"lm_head"}
        for name, tensor in named.items():
            if name.endswith(".weight") and tensor.ndim == 2 and tensor.itemsize > 1 and "embed" not in name:
                found.add(name.removesuffix(".weight"))
        return sorted(found)


def quantization_config(scheme: Scheme, ignore: list[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": scheme.weights, "input_activations": scheme.activations, "format": scheme.layout}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def refuse(job: Job) -> None:
    if job.has_adapter:
        require_adapter(job.checkpoint)
    if job.variant == "base" and job.recipe.stored_as != "fp8":
        raise CommandError(
            what="--to fp8:base needs a run that trained on an FP8 base model",
            why=f"method: {job.recipe.method} stores the base model in {FORMATS[job.recipe.stored_as].title}",
            fix="use --to fp8, which merges the adapter and quantizes the result",
        )


def size(job: Job, kind: str) -> int:
    """From the shapes."""
    return sum(tensor.nbytes for group in _packed(job, kind).layout for tensor in group.values())


def _packed(job: Job, kind: str) -> Compressed:
    scheme, dtype = SCHEMES[kind], _wide(job.dtype)
    if job.variant == "base":
        storage, cpu = FORMATS[scheme.format], torch.device("cpu")
        source: Any = MergedWeights(job.recipe.model, storage, dtype, compute=job.dtype, device=cpu, to=storage)
    else:
        original = job.options.base == "original"
        source = merging(job.checkpoint, job.recipe, dtype, original=original, to=FORMATS[scheme.format])
    return Compressed(source, scheme, dtype)


def write(job: Job, kind: str) -> None:
    packed = _packed(job, kind)
    scheme, dtype, source = packed.scheme, packed.dtype, packed.source
    write_sharded(job.folder, packed, job.report, label="quantizing")
    write_config(source, job.folder, dtype)
    file = job.folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(scheme, _short(packed.wide()))
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    job.copy_tokenizer()
    if job.variant == "base":
        (job.folder / ADAPTER).mkdir()
        copy_files(job.checkpoint, job.folder / ADAPTER)
    elif job.merged_onto:
        job.facts["merged_onto"] = job.merged_onto


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of what is not quantized: programs that load such files compute in 16 bits."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def _short(names: list[str]) -> list[str]:
    """One pattern for the same module of every layer."""
    found = {re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)) if re.search(r"\.\d+\.", name) else name for name in names}
    return sorted(f"re:{name}" if "\\" in name else name for name in found)


def check(job: Job, reference: Reference, kind: str) -> Verdict:
    """compressed-tensors reads the files; the trained weights, merged in memory and rounded here, are to say the same."""
    if find_spec("compressed_tensors") is None:
        return Verdict.skipped("compressed-tensors is not installed: pip install compressed-tensors")
    files = read_compressed(job.folder)
    if job.variant == "base":
        expected, dtype = job.expected(reference, job.recipe), _wide(job.dtype)
    else:
        expected, dtype = score(_rounded_model(job, files, SCHEMES[kind]), reference.rows, job.report), job.dtype
    adapter = job.folder / ADAPTER
    model = stock_of(files.config, files.plain | files.read, adapter if adapter.is_dir() else None)
    found = score(model, reference.rows, job.report)
    beyond = difference(expected, found)
    wrong = job.tolerance(reference, dtype).exceeded(beyond)
    return reference.verdict(found, job.limit(), "compressed-tensors and transformers", wrong=wrong, beyond=beyond)


def _rounded_model(job: Job, files: CompressedWeights, scheme: Scheme) -> Any:
    """What the files should have: the trained weights, each rounded once. Where the files have what was trained on, nothing
    is rounded. All in the dtypes that they are read in: compressed-tensors gives bf16 of NVFP4."""
    source = whole_weights(job.checkpoint, job.base_recipe)
    config, weights = source.model.config, {name: value for one in source.found for name, value in one.items()}
    config.tie_word_embeddings = config.tie_word_embeddings and not source.untied
    rounded = {name: value for name, value in weights.items() if name in files.read}
    rounded = {name: value for name, value in rounded.items() if not torch.allclose(files.read[name].float(), value, 2**-7, 0)}
    weights |= scheme.rounded(rounded)
    read = files.plain | files.read
    return stock_of(config, {name: value.to(read[name].dtype) for name, value in weights.items() if name in read})


def usage(job: Job) -> list[Usage]:
    name = quote(Path(job.recipe.output).name)
    line = "vllm serve path/to/this/folder"
    if job.variant == "base":
        line += f" --enable-lora --max-lora-rank {job.recipe.lora.r} --lora-modules {name}=path/to/this/folder/{ADAPTER}"
    return [Usage("vLLM", line), Usage("SGLang", "python -m sglang.launch_server --model-path path/to/this/folder")]
