"""Drawing from what top_k, top_p and min_p leave (kernels/sampling/truncated_draw.py), beside a sort in plain torch.

Bytes: the logits, once. The error is that of the drawn tokens' log-probabilities. The vocabulary has 128,256 tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, compare
from pronghorn.generation.sampling import Rules, Sampling, draw, drawn_by, uniforms

RULES = {
    "none": Sampling(),
    "top_k 50": Sampling(top_k=50),
    "top_p 0.9": Sampling(top_p=0.9),
    "min_p 0.1": Sampling(min_p=0.1),
    "all three": Sampling(0.7, top_k=50, top_p=0.95, min_p=0.01),
}


def cases() -> list[dict[str, Any]]:
    return [
        {"name": f"{rows} x 128,256, {name}", "T": rows, "rule": rule} for rows in (256, 16) for name, rule in RULES.items()
    ]


def run(case: dict[str, Any]) -> list[Line]:
    rows, generator = case["T"], torch.Generator(DEVICE).manual_seed(0)
    logits = 3 * torch.randn(rows, 4096 if case.get("dry") else 128_256, device=DEVICE, generator=generator)
    rules = Rules.empty(rows, torch.device(DEVICE))
    for tensor, value in zip(rules, vars(case["rule"]).values(), strict=True):
        tensor.fill_(value)
    key, place = torch.arange(rows, device=DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    calls = {
        "ours": lambda: draw(logits, rules, key, place, truncates=True)[1:],
        "torch": lambda: drawn_by(logits, rules, uniforms(key, place), truncates=True)[1:],
    }
    if case["rule"] == Sampling():
        calls["ours, untruncated"] = lambda: draw(logits, rules, key, place, truncates=False)[1:]
    return compare("truncated draw", case["name"], calls, calls["torch"], moved_bytes=logits.nbytes)
