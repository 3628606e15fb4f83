"""NF4 weights back to bf16, one or a whole layer's in one launch, and bf16 weights to NF4. "T" is the number of rows."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, compare, compiled, peer, replaced
from pronghorn.kernels.quant import nf4 as op

# Llama-3.1-8B: q, k, v, o, gate, up, down
LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))


def cases() -> list[dict[str, Any]]:
    sizes = [(4096, 4096), (14336, 4096), (17408, 5120)]  # rows, width
    one = [{"T": T, "D": D, "pass": name} for T, D in sizes for name in ("dequantize", "dequantize strided")]
    return [*one, {"T": 0, "D": 0, "pass": "dequantize layer"}, {"T": 14336, "D": 4096, "pass": "quantize"}]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        dry, whole = case.get("dry", False), case["pass"] == "dequantize layer"
        shapes = [(16, D) if dry else (T, D) for T, D in (LAYER if whole else ((case["T"], case["D"]),))]
        weights = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02 for shape in shapes]
        self.weight = weights[0]
        self.stored = [op.nf4_quantize(weight) for weight in weights]
        extra = 0 if case["pass"] == "dequantize" else 64  # columns behind the weight, for the adapters
        self.outs = [torch.empty(T, D + extra, device=DEVICE, dtype=torch.bfloat16)[:, :D] for T, D in shapes]
        self.table = op.NF4Table([op.DequantizeJob(q, out) for q, out in zip(self.stored, self.outs, strict=True)])
        self.name = f"{case['pass']} " + ("8B, 7 weights" if whole else f"{shapes[0][0]} x {shapes[0][1]}")
        self.moved_bytes = sum(q.nbytes + weight.nbytes for q, weight in zip(self.stored, weights, strict=True))

    def whole_layer(self) -> list[torch.Tensor]:
        self.table.run()
        return self.outs

    def values(self) -> list[torch.Tensor] | torch.Tensor:
        """The truth: rounded to bf16 once."""
        values = [op.nf4_dequantize_reference(q, torch.bfloat16) for q in self.stored]
        return values if len(values) > 1 else values[0]


def _dequantize_calls(case: dict[str, Any], data: _Data) -> dict[str, Any]:
    if case["pass"] == "dequantize layer":
        return {"ours": data.whole_layer}
    q, out = data.stored[0], data.outs[0]
    calls: dict[str, Any] = {"ours": lambda: op.nf4_dequantize(q, out=out)}
    if case["pass"] == "dequantize":
        calls["torch"] = lambda: op.nf4_dequantize_reference(q, torch.bfloat16)
        function = compiled(op.nf4_dequantize_reference)
        calls["torch.compile"] = None if function is None else lambda: function(q, torch.bfloat16)
        calls["bitsandbytes"] = _bitsandbytes(data)
    return calls


def _bitsandbytes(data: _Data) -> Any:
    """Quantized by itself; it makes the nested scales in a launch of its own, which belongs to its time."""
    quantize, dequantize = (peer("bitsandbytes.functional", name) for name in ("quantize_4bit", "dequantize_4bit"))
    if quantize is None or dequantize is None:
        return None
    packed, state = quantize(data.weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    return lambda: dequantize(packed, state)


def _parts(q: op.NF4Tensor) -> list[torch.Tensor | None]:
    return [q.packed, q.absmax, q.nested_absmax]


def _quantize_calls(data: _Data) -> dict[str, Any]:
    quantize = peer("bitsandbytes.functional", "quantize_4bit")

    def theirs() -> list[torch.Tensor | None]:
        packed, state = quantize(data.weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        return [packed, state.absmax, state.state2.absmax]

    return {
        "ours": lambda: _parts(op.nf4_quantize(data.weight)),
        "torch": lambda: _parts(op.nf4_quantize_reference(data.weight)),
        "bitsandbytes": None if quantize is None else theirs,
    }


def run(case: dict[str, Any]) -> list[Line]:
    """The error of `dequantize` must be 0. That of `quantize` tells of numbers that differ from plain torch's: a reciprocal
    on a GPU may be off by the last bit, so a few neighbours in millions are right; bitsandbytes' line is the yardstick."""
    data = _Data(case)
    if case["pass"] == "quantize":
        truth = _parts(op.nf4_quantize_reference(data.weight))
        return compare("nf4", data.name, _quantize_calls(data), lambda: truth, moved_bytes=data.moved_bytes)
    return compare("nf4", data.name, _dequantize_calls(case, data), data.values, moved_bytes=data.moved_bytes)


def sweep(case: dict[str, Any]) -> list[Line]:
    if case["pass"] == "quantize":
        return []
    lines = []
    for config in op.CONFIGS:
        with replaced(op, "_config", lambda config=config: config):
            data = _Data(case)  # a table is built for its config
            calls = {f"{config.lookup} groups {config.groups} warps {config.warps}": _dequantize_calls(case, data)["ours"]}
            lines += compare("nf4", data.name, calls, data.values, moved_bytes=data.moved_bytes)
    return lines
