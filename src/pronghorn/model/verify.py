"""Does the fast model compute what the family's own layers compute? Loss and every trained gradient, on random documents.

Both run on the same documents, in the model's own precision (ask for float32 to see 1e-6): first the family's layers, one
document after the other, then ours on all of them in one pack. What differs is named, worst parameter first.

Every number of the config must matter, also one that matters in long documents only, and 215 tokens must do (365 where a mixer
reads documents in chunks of 64: one of them then has three):
- Some documents lie at the end of the context, or reach from its beginning to its end in a few tokens: frequencies of far
  positions, LongRoPE's long factors and queries scaled by position take part.
- A window wider than these documents is made narrow for the moment, in the family's layers and in ours. Whether ours had the
  config's window is asked before.
Memory and time are those of a step of so many tokens, forward and backward, twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from pronghorn.errors import ModelError
from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.model.causal_lm import FastCausalLM, base_of, engine_of, install
from pronghorn.model.families import rope_parameters, window
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.mixers.attention import Attention
from pronghorn.model.text_stack import in_mode
from pronghorn.packs import PackedBatch

DOCUMENTS = (37, 5, 64, 1, 20)  # tokens; short enough for any model, odd enough to show a wrong boundary
FAR = (48, 40)  # tokens of a document that reaches through the whole context, and of one at its end
NARROW = 24  # tokens: a window that some of these documents are longer than
CHUNKED = 150  # tokens of a document of several chunks
LAST = 2**20  # no position is larger
# Relative difference of the loss, and smallest cosine of a gradient with its counterpart. float32 differs by the order of
# sums (seen: 5e-7 and 1 - 1e-10 on nine families); half precision by its own rounding, twice.
# In FP8 both sides round activations and gradients to 3 mantissa bits, each in its own places.
FP8_TOLERANCE = (1e-2, 0.9)
TOLERANCES = {torch.float32: (1e-5, 0.99999), torch.float16: (5e-3, 0.99), torch.bfloat16: (2e-2, 0.97)}


@dataclass(frozen=True)
class Gradient:
    parameter: str
    cosine: float
    norm_ratio: float


@dataclass(frozen=True)
class Verdict:
    dtype: str
    loss_own: float
    loss_fast: float
    gradients: tuple[Gradient, ...]  # worst first
    loss_tolerance: float
    cosine_tolerance: float

    @property
    def loss_difference(self) -> float:
        return abs(self.loss_fast - self.loss_own) / abs(self.loss_own)

    def wrong(self) -> list[str]:
        """What is beyond the tolerance, in words."""
        said = []
        if not self.loss_difference <= self.loss_tolerance:
            said.append(f"the loss differs by {self.loss_difference:.1e} (tolerance {self.loss_tolerance:.0e})")
        # An error of relative size e turns a gradient by e (cosine 1 - e²/2) or stretches it by e: the same e for both. Ten
        # times 1 - cosine, as it was, is 1e-4 in float32, which a sound model fails: SmolLM2-135M's first layer differs by 2e-4
        # in norm, where transformers' own gradient is 9e-4 from float64's and ours 7e-4 (CPU, adapters on all linears).
        spread = math.sqrt(2 * (1 - self.cosine_tolerance))
        said += [
            f"{g.parameter}: cosine {g.cosine:.6f}, norm ratio {g.norm_ratio:.6f}"
            for g in self.gradients
            if not (g.cosine >= self.cosine_tolerance and abs(g.norm_ratio - 1) <= spread)
        ]
        return said

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"loss_difference": self.loss_difference, "wrong": self.wrong()}

    def table(self) -> Table:
        table = Table(title=f"fast layers compared with the transformers layers, {self.dtype}")
        for column in ("", "own", "fast", "difference"):
            table.add_column(column)
        table.add_row("loss", f"{self.loss_own:.6f}", f"{self.loss_fast:.6f}", f"{self.loss_difference:.1e}")
        for gradient in self.gradients[:5]:
            table.add_row(gradient.parameter, "", f"norm x {gradient.norm_ratio:.6f}", f"cosine {gradient.cosine:.8f}")
        table.add_row(f"({len(self.gradients)} gradients, worst shown)", "", "", "wrong" if self.wrong() else "equal")
        return table


def verify(model: HFModel, seed: int = 0) -> Verdict:
    """Raises ModelError that names what is wrong. The model's own gradients are put back as they were."""
    if why := install(model):
        raise ModelError(
            what="nothing to verify: this model trains on the transformers layers",
            why=why,
            fix="README.md lists the model types with fast layers",
        )
    engine = engine_of(model)
    assert engine is not None
    config = base_of(model).config.get_text_config()
    _require_windows(engine, config)
    in_chunks = any(layer.mixer is not None and layer.mixer.in_chunks for layer in engine.layers)
    lengths = DOCUMENTS + (CHUNKED,) * in_chunks
    ids, positions, bounds = _documents(config, lengths, next(model.parameters()).device, seed)
    ends = torch.isin(torch.arange(1, len(ids) + 1, device=ids.device), bounds)
    rows = (~ends).nonzero().flatten()  # the last token of a document predicts nothing
    pack = PackedBatch(
        ids_T=ids, labels_T=ids.roll(-1), positions_T=positions, cu_seqlens=bounds, loss_rows=rows, longest=max(lengths + FAR)
    )
    with in_mode(model, training=True), _random_adapters(model, seed), _narrow_windows(engine, config):
        own = _gradients(model, lambda: _own_loss(model, ids, positions, bounds))
        fast = _gradients(model, lambda: engine.packed_loss(pack)[0])
    dtype = next(engine.backbone.parameters()).dtype
    in_fp8 = any(layer.fp8 for layer in engine.layers)
    verdict = _compare(own, fast, dtype, FP8_TOLERANCE if in_fp8 else TOLERANCES[dtype])
    if wrong := verdict.wrong():
        raise ModelError(
            what=f"the fast layers differ from the transformers layers: {wrong[0]}",
            why="; ".join(wrong[1:4]) or "everything else agrees",
            fix="train with layers: own, and report the model type",
        )
    return verdict


def _documents(config: HFConfig, short: tuple[int, ...], device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Documents at the beginning of the context, `short`, and two far from it."""
    chance = torch.Generator().manual_seed(seed)
    lengths = short + FAR
    ids = torch.randint(0, config.vocab_size, (sum(lengths),), generator=chance)
    last = _last_position(config)
    place = torch.linspace(0, 1, FAR[0], dtype=torch.float64)
    through = torch.arange(FAR[0]) + (place**3 * max(0, last + 1 - FAR[0])).long()
    at_the_end = torch.arange(FAR[1]) + max(0, last + 1 - FAR[1])
    positions = torch.cat([*(torch.arange(length) for length in short), through, at_the_end])
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return ids.to(device), positions.to(device), bounds.to(device)


def _last_position(config: HFConfig) -> int:
    """A position at the end of the context, beyond the length with which a scaled RoPE began."""
    first = [int(parameters.get("original_max_position_embeddings") or 0) for parameters in rope_parameters(config)]
    return min(LAST, max(int(getattr(config, "max_position_embeddings", 0) or 0), 2 * max(first), *FAR)) - 1


def _require_windows(engine: FastCausalLM, config: HFConfig) -> None:
    for layer, mixer in _attending(engine):
        ours, theirs = mixer.options["window"], window(config, layer.index)
        if ours != theirs:
            raise ModelError(
                what=f"the fast layers differ from the transformers layers: layer {layer.index} has the window "
                f"{ours or 'none'}, but the config says {theirs or 'none'}",
                why="the config changed after the layers were built",
                fix="load the model again",
            )


def _attending(engine: FastCausalLM) -> list[tuple[DecoderLayer, Attention]]:
    return [(layer, layer.mixer) for layer in engine.layers if isinstance(layer.mixer, Attention)]


@contextmanager
def _narrow_windows(engine: FastCausalLM, config: HFConfig) -> Iterator[None]:
    """Narrows the windows of the family's layers, which read the config (masks) or the attention module, and of ours."""
    mixers = [mixer for _, mixer in _attending(engine)]
    holders = [config, *(mixer.module for mixer in mixers)]
    theirs = [(one, wide) for one in holders if (wide := getattr(one, "sliding_window", None) or 0) > NARROW]
    ours = [(mixer.options, wide) for mixer in mixers if (wide := mixer.options["window"]) is not None]
    try:
        for holder, _ in theirs:
            holder.sliding_window = NARROW
        for options, wide in ours:
            options["window"] = min(NARROW, wide)
        yield
    finally:
        for holder, wide in theirs:
            holder.sliding_window = wide
        for options, wide in ours:
            options["window"] = wide


@contextmanager
def _random_adapters(model: HFModel, seed: int) -> Iterator[None]:
    """LoRA's B is zero at the start, so A would have no gradient and half of the adapter would go unchecked."""
    zeros = [p for name, p in model.named_parameters() if "lora_B" in name and p.requires_grad and not p.any()]
    chance = torch.Generator().manual_seed(seed)
    for parameter in zeros:
        parameter.detach().copy_(0.02 * torch.randn(parameter.shape, generator=chance))
    try:
        yield
    finally:
        for parameter in zeros:
            parameter.detach().zero_()


def _own_loss(model: HFModel, ids: Tensor, positions: Tensor, bounds: Tensor) -> Tensor:
    """The family's own forward."""
    engine = engine_of(model)
    assert engine is not None
    with engine.outer_loop.own_layers() if engine.outer_loop else nullcontext():
        return sum(
            (_document_loss(model, ids, positions, start, stop) for start, stop in pairwise(bounds.tolist())),
            torch.zeros((), device=ids.device),
        )


def _document_loss(model: HFModel, ids: Tensor, positions: Tensor, start: int, stop: int) -> Tensor:
    """One after the other: in a pack, some families let documents see each other (gpt-oss in transformers 5.22). With a mask,
    gaps between positions begin no new document."""
    if stop - start < 2:
        return torch.zeros((), device=ids.device)
    row = ids[None, start:stop]
    logits = model(
        input_ids=row, attention_mask=torch.ones_like(row), position_ids=positions[None, start:stop], use_cache=False
    ).logits[0, :-1]
    return F.cross_entropy(logits.float(), ids[start + 1 : stop], reduction="sum")


def _gradients(model: HFModel, loss_of: Any) -> tuple[float, dict[str, Tensor]]:
    before = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    loss = loss_of()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        parameter.grad = before[name]
    return float(loss.detach()), found


def _compare(
    own: tuple[float, dict[str, Tensor]],
    fast: tuple[float, dict[str, Tensor]],
    dtype: torch.dtype,
    tolerance: tuple[float, float],
) -> Verdict:
    gradients = []
    for name, truth in own[1].items():
        ours = fast[1].get(name, torch.zeros_like(truth)).double().flatten()
        wide = truth.double().flatten()
        if not wide.any() and not ours.any():
            continue
        scale = wide.norm() * ours.norm()
        cosine = float(wide @ ours / scale) if scale > 0 else 0.0
        gradients.append(Gradient(name, cosine, float(ours.norm() / wide.norm())))
    ordered = tuple(sorted(gradients, key=lambda gradient: gradient.cosine))
    return Verdict(str(dtype).removeprefix("torch."), own[0], fast[0], ordered, *tolerance)
