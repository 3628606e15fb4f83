"""Packs: the documents of one micro-batch side by side, in tensors of few sizes. The loader fills them, the step reads them.

Every tensor is declared once: its axes, its dtype and what its padding holds (`Column`). Sizes, padding, empty packs, copies
and the inputs of a captured step follow from that, so a further tensor is one more line. An axis gets its sizes from the data
(data/pack/batches.py: `Shapes`). Axes:

    T tokens, padding included      E entries of `cu_seqlens`      S = E - 1 segments between them
    N loss rows                     D = E slots for documents, of which the last is never used
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, float32, int32, int64

WHOLE = (0, 1)  # of PackedDocuments.part
IGNORED = -100  # torch's cross-entropy skips this label


@dataclass(frozen=True)
class Column:
    """The declaration of a tensor."""

    axes: str  # names, or fixed sizes: "C 2"; "... T": any number of dimensions before the last one
    dtype: torch.dtype
    fill: float = 0  # what padding holds; with `of`, counted from the end of that axis
    of: str = ""  # the axis that the values are places on

    @cached_property
    def dims(self) -> dict[str, int]:
        """Axis -> dimension, counted from the last one."""
        axes = self.axes.split()
        return {axis: i - len(axes) for i, axis in enumerate(axes) if axis.isalpha()}

    @cached_property
    def _numpy(self) -> np.dtype[Any]:
        return torch.empty(0, dtype=self.dtype).numpy().dtype

    def filled(self, sizes: Mapping[str, int]) -> float:
        return self.fill + sizes[self.of] if self.of else self.fill

    def padded(self, values: npt.NDArray[Any], sizes: Mapping[str, int]) -> npt.NDArray[Any]:
        shape = list(values.shape)
        for axis, dim in self.dims.items():
            shape[dim] = sizes[axis]
        if values.shape == tuple(shape):
            return values.astype(self._numpy, copy=False)
        result = np.full(shape, self.filled(sizes), self._numpy)
        result[tuple(map(slice, values.shape))] = values
        return result


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Tensors by their declarations. A subclass declares them as `Annotated[Tensor, Column(...)]`, or `Tensor | None` with the
    default None where not every pack has one."""

    columns: ClassVar[dict[str, Column]] = {}

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        cls.columns = {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}

    def __post_init__(self) -> None:
        _ = self.sizes

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name in self.columns if (value := getattr(self, name)) is not None}

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size."""
        found: dict[str, int] = {}
        for name, tensor in self.tensors.items():
            for axis, dim in self.columns[name].dims.items():
                if found.setdefault(axis, tensor.shape[dim]) != tensor.shape[dim]:
                    raise ValueError(f"{name} is {list(tensor.shape)}, but axis {axis} of the pack has {found[axis]}")
        return found

    @classmethod
    def padded(cls, sizes: Mapping[str, int], values: Mapping[str, npt.NDArray[Any]], **facts: object) -> Self:
        return cls(**{name: torch.from_numpy(cls.columns[name].padded(one, sizes)) for name, one in values.items()}, **facts)

    @classmethod
    def blank(cls, sizes: Mapping[str, int], device: torch.device | str, **facts: object) -> Self:
        """Nothing but padding, in the tensors that every pack has."""
        made: dict[str, Any] = {}
        for name, one in cls.columns.items():
            if not hasattr(cls, name):  # it has no default
                shape = [int(axis) if axis.isdigit() else sizes[axis] for axis in one.axes.split() if axis != "..."]
                made[name] = torch.full(shape, one.filled(sizes), dtype=one.dtype, device=device)
        return cls(**made, **facts)

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same pack with `change` done to each tensor."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors.items()})

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def copy_from(self, other: Self) -> None:
        """Overwrite the tensors, in place, with those of a pack of the same shape."""
        for name, tensor in self.tensors.items():
            tensor.copy_(getattr(other, name), non_blocking=True)

    def cut(self, **limits: int) -> Self:
        """At most so much of each axis that is named. Places that are cut off become what padding holds."""
        sizes = self.sizes
        sizes |= {axis: min(sizes[axis], limit) for axis, limit in limits.items()}
        parts = {}
        for name, whole in self.tensors.items():
            declared, part = self.columns[name], whole
            for axis, dim in declared.dims.items():
                part = part.narrow(dim, 0, sizes[axis])
            parts[name] = part.clamp(max=declared.filled(sizes)) if declared.of in limits else part
        return replace(self, **parts)


@dataclass(frozen=True, kw_only=True)
class PackedDocuments(Pack):
    """Where the documents of a pack lie: all that layers need to know of it."""

    positions_T: Annotated[Tensor, Column("... T", int64)]  # from 0 in each document; [3, T]: time, row, column (M-RoPE)
    cu_seqlens: Annotated[Tensor, Column("E", int32, of="T")]  # document boundaries
    # of each segment of `cu_seqlens` that of the prompt it shares with others; -1: none
    prompt_of_S: Annotated[Tensor | None, Column("S", int32, -1)] = None
    longest: int  # tokens in the longest document
    typical: int = 0  # mean length of the documents, each token counted; 0: tokens by boundaries
    # Of a pack that ranks share (world.context), this rank's number and how many they are: T are then its rows, and
    # `cu_seqlens` counts those of the whole pack.
    part: tuple[int, int] = WHOLE

    @property
    def shape(self) -> tuple[Any, ...]:
        """What makes two packs the same work: they may run through the same captured step."""
        return (*self.sizes.items(), self.longest)

    @property
    def shares_prompts(self) -> bool:
        return self.prompt_of_S is not None

    @property
    def position_ids(self) -> Tensor:
        """As transformers' models take them: [1, T], or [3, 1, T]."""
        return self.positions_T.unsqueeze(-2)


@dataclass(frozen=True, kw_only=True)
class PackedBatch(PackedDocuments):
    """One micro-batch.

    Batches of preference data say of each document what it is in its group (`document_N`, `roles_D`, `firsts_D`), so that an
    objective adds up log-probabilities by `index_add(0, document_N, ...)` into D sums and compares `sums[firsts_D]` with
    `sums` wherever `roles_D > 0`.

    A batch with shared prompts (`shares_prompts`) has the tokens that all answers of a group begin with only once. Its segments
    follow each other group by group, each prompt right before its answers, then padding:

        [prompt 1 | chosen 1 | rejected 1 | prompt 2 | chosen 2 | rejected 2 | ... | padding]

    Each segment is a causal document of its own in `cu_seqlens`. States and convolutions of an answer go on from its prompt
    (kernels/conv/shared_prompts.py), and it attends to all rows of its prompt
    (`prompt_of_S`; kernels/attention/attention_shared.py, which reads keys from the prompt's first row to the answer's last: so
    what is between them costs time). With a window positions count: `positions_T` goes on from the prompt's length in every
    answer. The label of an answer's first token is predicted by the last row of its prompt: this row stands in `loss_rows` once
    for each answer of the group, with its own `labels_N` and `document_N`. A group without a common token has no segment for
    its prompt.
    """

    ids_T: Annotated[Tensor, Column("T", int64)]
    # already shifted: labels_T[t] is the token to predict at t, or IGNORED; or see labels_N
    labels_T: Annotated[Tensor, Column("T", int64, IGNORED)]
    loss_rows: Annotated[Tensor, Column("N", int64, -1, of="T")]  # the t with a label, which the last t never has
    tokens: int = 0  # real tokens: T less padding
    loss_tokens: int = 0  # labels: `loss_rows` less padding
    documents: tuple[int, ...] = ()  # row numbers in the table
    # what an objective knows of each loss row (a reference's log-probabilities)
    given_KN: Annotated[Tensor | None, Column("... N", float32)] = None
    # of preference data: the place in `documents` of each loss row's label
    document_N: Annotated[Tensor | None, Column("N", int64, -1, of="D")] = None
    # 0 chosen (KTO: desirable), 1 rejected (undesirable), 2.. more rejected; or -1
    roles_D: Annotated[Tensor | None, Column("D", int64, -1)] = None
    firsts_D: Annotated[Tensor | None, Column("D", int64, -1, of="D")] = None  # the place of the group's chosen document
    margins_D: Annotated[Tensor | None, Column("D", float32)] = None  # the group's margin; 0 where the data has none
    # of shared prompts: the label of each loss row, in place of labels_T[loss_rows]
    labels_N: Annotated[Tensor | None, Column("N", int64, IGNORED)] = None

    @property
    def every_row(self) -> bool:
        """Whether `loss_rows` is simply every t: nothing has to be gathered."""
        return self.labels_N is None and len(self.loss_rows) == len(self.ids_T)

    @property
    def row_labels(self) -> Tensor:
        """The label of each loss row, whether or not prompts are shared."""
        if self.labels_N is not None:
            return self.labels_N
        return self.labels_T if self.every_row else self.labels_T.index_select(0, self.loss_rows)

    def beginning(self, tokens: int) -> Self:
        """The first so many tokens, to compile or time with: every row has a loss if every row had one, else at most half."""
        return self.cut(T=tokens, N=tokens if self.every_row else tokens // 2)
