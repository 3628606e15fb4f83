"""Greedy decoding of one batch with a static cache: on a GPU one step is captured and replayed for each token.

For a small model, launching the layers takes the host much longer than they take the GPU. All state is in tensors: tokens,
positions, the cache and its length. So a step is one CUDA graph (capture.py), and the host checks only now and then whether all
answers have ended. Before a graph is used, two of its steps are compared with the eager path; if they differ, or capture fails,
the eager path continues, with a notice.

B = prompts, T = tokens of the longest one, N = most tokens of an answer, L = T + N.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache, StaticLayer

from pronghorn.hf_types import HFModel
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.capture import Graphs, first_line
from pronghorn.model.causal_lm import base_of

FEWEST = 16  # tokens of an answer for which a graph is worth its capture
LOOKS = 8  # steps between two looks at whether all answers have ended
CHECKED = 2  # steps of a graph that are compared; one alone would not show a position that stands still


def why_not_static(model: HFModel) -> str:
    """Why a model's answers need transformers' `generate`; empty if they do not."""
    base = base_of(model)
    if not getattr(base, "_can_compile_fullgraph", False):
        return f"{type(base).__name__} has no fixed-shape decoding"
    if base.config._attn_implementation not in ("sdpa", "eager"):
        return f"attention is {base.config._attn_implementation}"
    if any(type(layer) is not StaticLayer for layer in StaticCache(config=base.config, max_cache_len=1).layers):
        return "sliding-window layers count their steps on the host"
    return ""


class _OneDtype(StaticLayer):  # type: ignore[misc]
    """Keys in the values' dtype, as attention takes them: under autocast with fp32 weights RoPE leaves the keys in fp32."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


class StaticDecoding:
    def __init__(self, model: HFModel, ids_BT: Tensor, mask_BT: Tensor, *, new: int, stops: list[int], pad: int) -> None:
        """Prompts, padded on the left, on the model's device."""
        self._model, self._new, self._pad, device = model, new, pad, ids_BT.device
        B, T = ids_BT.shape
        self._cache = StaticCache(config=base_of(model).config, max_cache_len=T + new)
        self._cache.layers = [_OneDtype(T + new) for _ in self._cache.layers]
        self._stops = torch.tensor(stops, dtype=torch.int64, device=device)
        self._mask_BL = torch.cat([mask_BT, mask_BT.new_ones(B, new)], 1)
        self._token_B1 = torch.empty(B, 1, dtype=torch.int64, device=device)
        self._position_B1 = mask_BT.sum(1, keepdim=True)
        self._ended_B = torch.zeros(B, dtype=torch.bool, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)  # tokens so far
        self._out_BN = torch.full((B, new), pad, dtype=torch.int64, device=device)
        logits = model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=(mask_BT.cumsum(1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self._take(logits[:, -1])

    def _take(self, logits_BV: Tensor) -> None:
        next_B = torch.where(self._ended_B, self._pad, logits_BV.argmax(-1))
        self._out_BN.index_copy_(1, self._at, next_B[:, None])
        self._ended_B.logical_or_((next_B[:, None] == self._stops).any(1))
        self._token_B1.copy_(next_B[:, None])
        self._at.add_(1)

    def step(self) -> None:
        """One more token for each prompt."""
        logits = self._model(
            input_ids=self._token_B1,
            attention_mask=self._mask_BL,
            position_ids=self._position_B1,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self._position_B1.add_(1)
        self._take(logits[:, -1])

    def answers(self, *, capture: bool) -> list[list[int]]:
        """The tokens of each, all of the same length: what follows an end is padding."""
        left = self._new - 1
        step = self.step
        if capture and left >= FEWEST + CHECKED:
            step = self._captured()
        for done in range(left):
            if done % LOOKS == 0 and bool(self._ended_B.all()):
                break
            step()
        tokens: list[list[int]] = self._out_BN[:, : int(self._at)].tolist()
        return tokens

    # A graph ------------------------------------------------------------------------------------------------------------

    def _captured(self) -> Any:
        """The step as a graph, or the step itself."""
        graphs = Graphs(
            self._token_B1.device,
            failed=lambda error: say_once(f"answers are generated without a CUDA graph: {first_line(error)}"),
        )
        before = [tensor.clone() for tensor in self._state()]
        (replay,) = graphs.captured(self.step)
        self._restore(before)
        if not graphs.captures:
            return self.step
        if not self._agrees(replay, before):
            say_once("answers are generated without a CUDA graph: its tokens differ from those of eager generation")
            return self.step
        return replay

    def _agrees(self, replay: Any, before: list[Tensor]) -> bool:
        """Compares a few steps of both from the same state. Keys and values written ahead are overwritten before they are
        read."""
        ends = []
        for step in (replay, self.step):
            self._restore(before)
            for _ in range(CHECKED):
                step()
            ends.append([tensor.clone() for tensor in self._state()])
        self._restore(before)
        return all(torch.equal(one, other) for one, other in zip(*ends, strict=True))

    def _state(self) -> list[Tensor]:
        """All that a step changes, but for keys and values."""
        filled = [layer.cumulative_length for layer in self._cache.layers]
        return [self._token_B1, self._position_B1, self._ended_B, self._at, self._out_BN, *filled]

    def _restore(self, state: list[Tensor]) -> None:
        for mine, kept in zip(self._state(), state, strict=True):
            mine.copy_(kept)
