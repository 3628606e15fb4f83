"""A trainer's batch, rows with padding or packed rows, as documents one after another; and its labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pronghorn.kernels.loss.cross_entropy_rows import IGNORED
from pronghorn.model.causal_lm import FastCausalLM

Inputs = Mapping[str, Any]  # of a model's forward, by name


@dataclass(frozen=True)
class Pack:
    """The documents of a batch of rows, one after another, without its padding."""

    shape: tuple[int, int]  # rows, tokens a row with padding
    real: Tensor | None  # places of the real tokens in the flattened rows; None: all of them
    positions: Tensor
    cu_seqlens: Tensor
    longest: int

    def unpacked(self, x_TD: Tensor) -> Tensor:
        """Back to rows, with zeros for padding."""
        if self.real is None:
            return x_TD.view(*self.shape, -1)
        rows = x_TD.new_zeros(self.shape[0] * self.shape[1], x_TD.shape[1])
        return rows.index_copy(0, self.real, x_TD).view(*self.shape, -1)


def packed(engine: FastCausalLM, inputs: Inputs) -> Pack | None:
    """None: a mask with holes, or image tokens, which see each other. Synchronizes twice a batch if a mask or positions must be
    read."""
    types = inputs.get("token_type_ids")
    if types is not None and engine.backbone is not engine.model.model and bool(types.any()):
        return None
    ids = inputs.get("input_ids")
    tokens = inputs["inputs_embeds"] if ids is None else ids
    rows, length = int(tokens.shape[0]), int(tokens.shape[1])
    device, mask, positions = tokens.device, inputs.get("attention_mask"), inputs.get("position_ids")
    in_row = torch.arange(length, device=device)[None] if positions is None else positions
    flat = in_row.expand(rows, -1).reshape(-1)
    if mask is not None:
        return _without_padding((rows, length), mask.to(device) != 0, flat)
    given = inputs.get("cu_seq_lens_q")
    if given is not None and inputs.get("max_length_q") is not None:
        return Pack((rows, length), None, flat, given.to(torch.int32), int(inputs["max_length_q"]))
    if positions is None:
        return _whole_rows((rows, length), flat)
    starts = torch.ones(rows, length, dtype=torch.bool, device=device)
    starts[:, 1:] = flat.view(rows, length).diff(dim=1) != 1  # a packed row: positions restart
    return Pack((rows, length), None, flat, *_bounds(starts.view(-1)))


def _bounds(starts_T: Tensor) -> tuple[Tensor, int]:
    cu_seqlens = pad(starts_T.nonzero().flatten(), (0, 1), value=starts_T.shape[0])
    return cu_seqlens.to(torch.int32), int(cu_seqlens.diff().max())


def _whole_rows(shape: tuple[int, int], flat: Tensor) -> Pack:
    rows, length = shape
    cu_seqlens = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=flat.device)
    return Pack(shape, None, flat, cu_seqlens, length)


def _without_padding(shape: tuple[int, int], mask: Tensor, flat: Tensor) -> Pack | None:
    if tuple(mask.shape) != shape:
        return None
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    runs, lengths = begins.sum(1), mask.sum(1)
    most_runs, fewest_runs, shortest = torch.stack([runs.max(), runs.min(), lengths.min()]).tolist()
    if most_runs > 1 or fewest_runs < 1:
        return None
    if shortest == shape[1]:
        return _whole_rows(shape, flat)
    real = mask.reshape(-1).nonzero().flatten()
    return Pack(shape, real, flat[real], *_bounds(begins.reshape(-1)[real]))


def targets_of(inputs: Inputs, pack: Pack) -> Tensor | None:
    """Each token's target; None: padding has targets."""
    targets = inputs.get("shift_labels")
    if targets is None:  # the label of each token is the next token's, within a row
        targets = pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
    targets = targets.reshape(-1).to(pack.positions.device)
    if pack.real is None:
        return targets
    kept = targets[pack.real]
    return None if bool((targets != IGNORED).sum() > (kept != IGNORED).sum()) else kept
