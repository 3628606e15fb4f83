"""What the mixers of a model have seen: keys and values in pages, the last inputs of convolutions, and states.

P = pages of PAGE tokens, K = key/value heads, H = head width, W = taps, D = channels; of Gated DeltaNet and Mamba-2 N, K, V =
value heads and the widths of keys and values. Page 0 belongs to nobody: padding is written there. A forward is a `Prefill` of
whole prompts, which attend to themselves as in training, or a `Step`, one token for each of B rows, over their pages. Both are
the `Cache` of their `Documents` (model/layers/types.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.attention.attention import attention_forward
from pronghorn.kernels.attention.attention_paged import PAGE, Segments, paged_attention, write_pages
from pronghorn.kernels.attention.attention_paged_torch import PagesRead
from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.kernels.conv.short_conv import short_conv_forward
from pronghorn.kernels.delta.delta_rule import delta_rule_forward
from pronghorn.kernels.delta.delta_step import delta_step
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.layers.mixers.attention import Attention
from pronghorn.model.layers.mixers.gated_delta import GatedDelta
from pronghorn.model.layers.mixers.mamba import Mamba
from pronghorn.model.layers.mixers.short_conv import ShortConv
from pronghorn.model.layers.part import Mixer
from pronghorn.model.layers.types import Documents, Inputs
from pronghorn.model.read_ahead import free_memory

SLOTS = {"cpu": 32, "cuda": 256}  # answers at once: from 165 rows on products are bound by arithmetic (H200)
SHARE = 0.5  # of free memory, for keys and values
UNKNOWN = 8 * 10**9  # bytes that are taken to be free where the system does not say


class FreePages:
    """Numbers of pages that nobody uses."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, 0, -1))  # without page 0; the lowest first

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        self._free += pages


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def mixers_of(engine: FastCausalLM) -> Iterator[tuple[int, Mixer]]:
    """Each with its layer's number; a layer may have two."""
    for layer in engine.layers:
        for mixer in (layer.mixer, layer.mixer and layer.mixer.beside):
            if mixer is not None:
                yield layer.index, mixer


def bytes_of_a_token(engine: FastCausalLM, dtype: torch.dtype) -> int:
    """The size of its keys and values in all layers."""
    mixers = [mixer for _, mixer in mixers_of(engine) if isinstance(mixer, Attention) and mixer.source is None]
    return max(1, sum(2 * mixer.kv_heads * mixer.head_width for mixer in mixers) * dtype.itemsize)


def bytes_of_a_slot(engine: FastCausalLM, dtype: torch.dtype) -> int:
    """What convolutions and states keep at its place and at a prompt's: 100 MB for Qwen3.5-9B."""
    found = 0
    for _, mixer in mixers_of(engine):
        if isinstance(mixer, ShortConv | GatedDelta | Mamba):
            channels, taps = mixer.taps.shape
            found += 2 * (taps - 1) * channels * dtype.itemsize
        if isinstance(mixer, GatedDelta | Mamba):
            _, K, N, V = mixer.heads
            found += 2 * 4 * N * K * V
    return found


def slots_within(engine: FastCausalLM, dtype: torch.dtype, slots: int, room: int) -> int:
    """How many of the slots there can be, so that half of `room`, in bytes, is left for keys and values."""
    each = bytes_of_a_slot(engine, dtype)
    return max(1, min(slots, room // 2 // each)) if each else slots


def free_bytes(device: torch.device) -> int:
    """What tensors may still take, within torch.cuda.set_per_process_memory_fraction."""
    if device.type != "cuda":
        return free_memory() or UNKNOWN
    (free, total), reserved = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return max(0, min(int(free), allowed) + reserved - torch.cuda.memory_allocated(device))


class MixerStates:
    """The tensors, of every layer. `places`: where inputs and states are: one for each slot and each prompt."""

    def __init__(self, engine: FastCausalLM, pages: int, places: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pages: dict[int, tuple[Tensor, Tensor]] = {}
        self.inputs: dict[int, Tensor] = {}  # [places, W - 1, D], the oldest first
        self.states: dict[int, Tensor] = {}  # [places, N, K, V], float32
        for index, mixer in mixers_of(engine):
            if isinstance(mixer, Attention) and mixer.source is None:
                shape = (pages, mixer.kv_heads, PAGE, mixer.head_width)
                self.pages[index] = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))  # type: ignore[assignment]
            elif isinstance(mixer, ShortConv | GatedDelta | Mamba):
                channels, taps = mixer.taps.shape
                self.inputs[index] = torch.zeros(places, taps - 1, channels, dtype=dtype, device=device)
            if isinstance(mixer, GatedDelta | Mamba):
                _, K, N, V = mixer.heads
                self.states[index] = torch.zeros(places, N, K, V, dtype=torch.float32, device=device)

    @property
    def at_places(self) -> list[Tensor]:
        """What every step of an answer replaces."""
        return [*self.inputs.values(), *self.states.values()]

    def write(self, layer: int, place_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """`place_T`: page and token in it, as one number."""
        write_pages(*self.pages[layer], place_T, k_TKH, v_TKH)

    def clear(self, pages: Sequence[int]) -> None:
        """Before they are used again, on a CPU: attention multiplies what lies beyond the last token by 0; NaN stays NaN."""
        chosen = torch.tensor(pages)
        for pair in self.pages.values():
            for stored in pair:
                stored.index_fill_(0, chosen, 0.0)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """From the places of prompts to those of answers."""
        for tensor in self.at_places:
            tensor[target] = tensor[source]


@dataclass(frozen=True)
class Prefill:
    states: MixerStates
    place_T: Tensor
    end_D: Tensor  # row after the last of each prompt
    start_D: Tensor
    input_D: Tensor  # its place for inputs of convolutions and states

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, out: Tensor, *, writes: bool = True, **options: Any
    ) -> None:
        if writes:
            self.states.write(layer, self.place_T, k_TKH, v_TKH)
        attention_forward(q_TNH, k_TKH, v_TKH, out=out, **options)

    def convolve(self, layer: int, bcx_TX: Tensor, taps_DW: Tensor, spans_2T: Tensor, out: Tensor) -> None:
        short_conv_forward(bcx_TX, taps_DW, spans_2T, out=out)
        B, _, x = bcx_TX.chunk(3, dim=-1)
        self._keep(layer, B * x)

    def _keep(self, layer: int, u_TD: Tensor) -> None:
        """A convolution's last inputs of each prompt."""
        kept = self.states.inputs[layer]
        back = torch.arange(kept.shape[1], 0, -1, device=u_TD.device)
        row = self.end_D[:, None] - back
        u = u_TD[row.clamp(min=0)].to(kept.dtype)
        kept[self.input_D] = u.masked_fill((row < self.start_D[:, None])[..., None], 0.0)

    def delta(
        self, layer: int, x_TX: Tensor, inputs: Inputs, g_TN: Tensor, beta_TN: Tensor, documents: Documents, *,
        skip_N: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        parts = inputs(x_TX, documents.spans_2T)
        self._keep(layer, x_TX)
        options: dict[str, Any] = {"final": self.states.states[layer], "places": self.input_D.int(), "skip_N": skip_N}
        return delta_rule_forward(*parts, g_TN, beta_TN, documents.chunks, documents.cu_seqlens, **options)[0]


@dataclass(frozen=True)
class Step:
    states: MixerStates
    place_B: Tensor
    position_B: Tensor
    parts: Sequence[Segments]
    input_B: Tensor
    read: dict[tuple[int | None, int], PagesRead] = field(default_factory=dict)  # of its layers, on a CPU

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, out: Tensor, *, writes: bool = True, **options: Any
    ) -> None:
        if writes:
            self.states.write(layer, self.place_B, k_TKH, v_TKH)
        given = {name: options[name] for name in ("scale", "window", "softcap", "sinks_N")}
        paged_attention(q_TNH, *self.states.pages[layer], self.parts, self.position_B, **given, out=out, read=self.read)

    def convolve(self, layer: int, bcx_TX: Tensor, taps_DW: Tensor, spans_2T: Tensor, out: Tensor) -> None:
        B, C, x = bcx_TX.chunk(3, dim=-1)
        seen = self._seen(layer, B * x)
        out.copy_(C * (seen * taps_DW.T.to(seen.dtype)).sum(1))

    def _seen(self, layer: int, u_BD: Tensor) -> Tensor:
        """[B, W, D]: a convolution's last inputs, with these. The oldest one is forgotten."""
        kept = self.states.inputs[layer]
        seen = torch.cat([kept[self.input_B], u_BD.to(kept.dtype)[:, None]], 1)
        kept[self.input_B] = seen[:, 1:]
        return seen

    def delta(
        self, layer: int, x_TX: Tensor, inputs: Inputs, g_TN: Tensor, beta_TN: Tensor, documents: Documents, *,
        skip_N: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Each answer's last inputs are a document of W tokens, of which the last one goes on."""
        seen_BWX = self._seen(layer, x_TX)
        B, W, _ = seen_BWX.shape
        bounds = torch.arange(0, (B + 1) * W, W, dtype=torch.int32, device=x_TX.device)
        q, k, v = (part[W - 1 :: W] for part in inputs(seen_BWX.flatten(0, 1), spans(bounds, B * W)))
        return delta_step(q, k, v, g_TN, beta_TN, self.states.states[layer], self.input_B.int(), skip_N)
