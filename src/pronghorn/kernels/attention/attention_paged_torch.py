"""Attention over pages (attention_paged.py) in plain torch, for a CPU, where an op on few rows costs more than its work.

What follows from the tables alone is made once for all layers of a step (`PagesRead`). One op copies pages into the order in
which they are read. What a table names must be finite beyond a segment's last token, too, where it counts nothing.

S = segments, M = members, L = tokens of the pages of a table's longest segment, X = S x K x J; else as in attention_paged.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

UNSEEN = -1e38  # finite, since -inf - -inf is NaN


class _Table(NamedTuple):
    pages_SJ: Tensor  # 0 for entries that are not used
    rows_SM: Tensor  # of the members; 0 for none
    member_B: Tensor  # each row's place in rows_SM; 0 for none
    seen_BL: Tensor  # tokens of its segment that a row sees

    @property
    def alone(self) -> bool:
        """Whether row b is the only member of segment b."""
        return self.rows_SM.shape[1] == 1 and torch.equal(self.rows_SM[:, 0], torch.arange(len(self.member_B)))


def _table(part: Sequence[Tensor], position_B: Tensor, page: int, window: int | None) -> _Table:
    pages_SJ, length_S, first_S, members_SM = part
    members_SM = members_SM[:, : max(1, int((members_SM >= 0).sum(1).max()))].long()
    pages_SJ = pages_SJ[:, : -(-int(length_S.max()) // page)].long()
    key_L = torch.arange(pages_SJ.shape[1] * page)
    there_SM, member_B = members_SM >= 0, torch.full((len(position_B),), -1)
    member_B[members_SM[there_SM]] = there_SM.flatten().nonzero()[:, 0]
    inside_B, member_B = member_B >= 0, member_B.clamp(min=0)
    segment_B = member_B // members_SM.shape[1]
    seen_BL = (key_L < length_S[segment_B][:, None]) & inside_B[:, None]
    if window is not None:
        seen_BL &= (position_B - first_S[segment_B])[:, None] - key_L < window
    used_SJ = key_L[::page] < length_S[:, None]
    return _Table(pages_SJ.masked_fill(~used_SJ, 0), members_SM.clamp(min=0), member_B, seen_BL)


def _joined(tables: Sequence[_Table]) -> _Table:
    """Tables in which nobody shares, as one: each row reads all its pages."""
    rows_B = torch.arange(len(tables[0].member_B))
    pages = [table.pages_SJ[table.member_B] for table in tables]
    return _Table(torch.cat(pages, 1), rows_B[:, None], rows_B, torch.cat([table.seen_BL for table in tables], 1))


class PagesRead:
    """What a step reads in layers with this window and number of key/value heads."""

    def __init__(
        self, parts: Sequence[Sequence[Tensor]], position_B: Tensor, heads: int, page: int, window: int | None
    ) -> None:
        tables = [_table(part, position_B, page, window) for part in parts if len(part[1]) and int(part[1].max())]
        if tables and all(table.rows_SM.shape[1] == 1 for table in tables):
            tables = [_joined(tables)]
        head_K = torch.arange(heads)[:, None]
        self.tables = [((table.pages_SJ[:, None] * heads + head_K).flatten(), table, table.alone) for table in tables]
        seen_BL = torch.cat([table.seen_BL for table in tables], 1) if tables else torch.zeros(len(position_B), 0).bool()
        self.bias_BL = torch.zeros(seen_BL.shape).masked_fill_(~seen_BL, UNSEEN)
        self.blind_B = ~seen_BL.any(1)
        self.some_blind = bool(self.blind_B.any())

    def attention(
        self, q_BNH: Tensor, k_PKCH: Tensor, v_PKCH: Tensor, *, scale: float, softcap: float | None, sinks_N: Tensor | None
    ) -> Tensor:
        (B, N, H), (_, K, C, _) = q_BNH.shape, k_PKCH.shape
        if not self.tables:
            return torch.zeros_like(q_BNH)
        q_BKGH, bias_BL = q_BNH.unflatten(1, (K, N // K)), self.bias_BL[:, None, None]
        k_pages, v_pages = k_PKCH.view(-1, C * H), v_PKCH.view(-1, C * H)
        place_X, table, alone = self.tables[0]
        if len(self.tables) == 1 and alone and softcap is None and sinks_N is None:
            k_BKLH, v_BKLH = (x.index_select(0, place_X).view(B, K, -1, H) for x in (k_pages, v_pages))
            out = F.scaled_dot_product_attention(q_BKGH, k_BKLH, v_BKLH, bias_BL.to(q_BNH.dtype), scale=scale)
        else:
            keys = [k_pages.index_select(0, place_X).view(len(table.pages_SJ), K, -1, H) for place_X, table, _ in self.tables]
            found = [
                _rows(_members(q_BKGH, table, alone) @ k_SKLH.transpose(2, 3), table, alone)
                for k_SKLH, (_, table, alone) in zip(keys, self.tables, strict=True)
            ]
            scores = scale * torch.cat(found, -1).float()
            scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)) + bias_BL
            if sinks_N is not None:
                scores = torch.cat([scores, sinks_N.float().view(K, -1, 1).expand(B, K, N // K, 1)], -1)
            shares, at = scores.softmax(-1).to(v_PKCH.dtype), 0
            out = torch.zeros(B, K, N // K, H)
            for place_X, table, alone in self.tables:
                p_BKGL, at = shares[..., at : at + table.seen_BL.shape[1]], at + table.seen_BL.shape[1]
                v_SKLH = v_pages.index_select(0, place_X).view(len(table.pages_SJ), K, -1, H)
                out += _rows(_members(p_BKGL, table, alone) @ v_SKLH, table, alone)
        out_BNH = out.flatten(1, 2)
        return out_BNH.masked_fill(self.blind_B[:, None, None], 0.0) if self.some_blind else out_BNH


def _members(rows_BKGY: Tensor, table: _Table, alone: bool) -> Tensor:
    """[S, K, M G, Y]"""
    return rows_BKGY if alone else rows_BKGY[table.rows_SM].transpose(1, 2).flatten(2, 3)


def _rows(found: Tensor, table: _Table, alone: bool) -> Tensor:
    """The reverse."""
    if alone:
        return found
    members: Tensor = found.unflatten(2, (table.rows_SM.shape[1], -1))  # type: ignore[no-untyped-call]
    return members.transpose(1, 2).flatten(0, 1)[table.member_B]
