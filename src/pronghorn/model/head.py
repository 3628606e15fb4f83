"""What every head is: what follows the last layer, and what a model's files say of it.

A head is a class in a file of its own in model/heads/; an objective names the one that it needs (recipe_objective.py). A model
has one head, and the engine an instance of its class, which turns rows out of the last layer into what an objective reads: a
number for each row, or rows of numbers.

Its class says what others need to know of it: how a model gets it, which class of transformers loads the files, what of it is
trained whole beside an adapter, what it costs, how an export is used.

N = rows that the head reads, D = model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.model.final_norm import final_norm
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.types import GradBuffer, Shards
from pronghorn.model.router_stats import RouterStats
from pronghorn.packs import PackedBatch


class PackedRows(NamedTuple):
    """The rows of a packed batch that have labels, after the last layer."""

    h_ND: Tensor
    labels_N: Tensor
    grad_buffer: GradBuffer  # the layers'
    load: RouterStats | None  # of a mixture in training


class Outputs(NamedTuple):
    """What a head gives of each row."""

    values_N: Tensor  # float32, differentiable; the LM head: log-probabilities of the labels, 0 where a row is padding
    balance: Tensor | None = None  # the routers' auxiliary loss times its coefficient, where the config asks for it
    entropy_N: Tensor | None = None  # of the LM head, where it was asked for; nan of rows that it was not computed of


class Stack(Protocol):
    """The layers below (FastCausalLM), as a head uses them."""

    model: HFModel
    config: HFConfig
    norm: Norm
    shards: Shards | None
    balance: float

    @property
    def extra(self) -> int: ...


class Head(ABC):
    name: ClassVar[str]  # of its file
    title: ClassVar[str]  # of a model that has it
    gives: ClassVar[str]  # what such a model gives
    generates: ClassVar[bool] = False  # an output for each token of the vocabulary: it writes text, and may be the embeddings
    one_per_document: ClassVar[bool] = False  # whether it reads a row of each document, and not of each label
    weights: ClassVar[tuple[str, ...]] = ()  # parameters in float32 that are trained whole beside an adapter
    task: ClassVar[str]  # PEFT's word for it
    pipeline: ClassVar[str]  # the hub's
    usage: ClassVar[str] = ""  # lines of Python that follow the loading of `model` and `tokenizer`

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    # ---- a model's files ---------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def fits(cls, architecture: str) -> bool:
        """Whether transformers' class of this name has it."""

    @classmethod
    @abstractmethod
    def auto_class(cls, config: HFConfig) -> Any:
        """transformers' class that loads the whole model."""

    @classmethod  # noqa: B027  (the LM head asks for nothing)
    def require(cls, config: HFConfig, name: str) -> None:
        """Refuses a model that has not the head and cannot get it. `name`: for the error."""

    @classmethod
    def attach(cls, model: HFModel, seed: int, device: torch.device | None = None) -> Any:
        """The model with this head. One that is not in the files is drawn from the seed, on this device or, by default, on the
        embeddings'."""
        return model

    @classmethod  # noqa: B027
    def set_padding(cls, base: HFModel, pad_id: int) -> None:
        """Tells a model's own forward which token is none."""

    @classmethod
    def loading_options(cls, pad_id: int) -> str:
        """Options of `from_pretrained`, as code, where the base is a language model."""
        return ""

    # ---- packed rows -------------------------------------------------------------------------------------------------

    @abstractmethod
    def outputs(self, rows: PackedRows) -> Outputs:
        """For any objective."""

    @classmethod
    @abstractmethod
    def own_outputs(cls, base: HFModel, pack: PackedBatch) -> Outputs:
        """The same on transformers' layers."""

    @abstractmethod
    def sample_loss(self, h_ND: Tensor, labels_N: Tensor) -> Tensor:
        """A number made of all rows as a step makes its loss, for plans. `labels_N`: of the vocabulary. Outside of autocast."""

    def set_chunk_share(self, share: int) -> None:  # noqa: B027
        """Into how many parts the usual chunk of outputs is cut, where they are computed in chunks."""

    def chunk_rows(self, rows: int, dtype: torch.dtype, share: int) -> int:
        """Rows whose outputs are in memory at a time on a GPU, of so many."""
        return rows

    def normed(self, h_ND: Tensor, grad_buffer: GradBuffer | None = None) -> Tensor:
        """What the head multiplies. Outside of autocast."""
        buffer = GradBuffer() if grad_buffer is None else grad_buffer
        return final_norm(h_ND, self.stack.norm, buffer, self.stack.extra)
