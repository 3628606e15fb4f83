"""`apply_chat_template` as scripts know it: in transformers 4 it gave token ids, in transformers 5 it gives a dict of them.

What a script gets here is both: a tensor of ids, as `generate(input_ids=ids)` wants it, that also answers to `**ids` and
`ids["attention_mask"]`. Only where the script does not say `return_dict`, and only on the tokenizers that it is given: the
method is set on the instance.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import BatchEncoding

from pronghorn.hf_types import Tokenizer

METHOD = "apply_chat_template"


class Ids(torch.Tensor):
    """Token ids, and beside them what else the tokenizer gave. Whatever is computed from it is a plain tensor."""

    encoding: BatchEncoding
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(encoding: BatchEncoding) -> Ids:
        ids: Ids = encoding["input_ids"].as_subclass(Ids)
        ids.encoding = encoding
        return ids

    def to(self, *args: object, **kwargs: object) -> Any:
        return Ids.of(copy.copy(self.encoding).to(*args, **kwargs))  # which moves what it holds

    def cuda(self, *args: object, **kwargs: object) -> Any:
        return self.to("cuda")

    def keys(self) -> Any:
        return self.encoding.keys()

    def __getitem__(self, key: Any) -> Any:
        return self.encoding[key] if isinstance(key, str) else super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return key in self.encoding if isinstance(key, str) else bool(super().__contains__(key))  # type: ignore[no-untyped-call]

    @property
    def input_ids(self) -> Any:
        return self.encoding["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self.encoding["attention_mask"]


def with_ids(tokenizer: Tokenizer) -> Any:
    """The same tokenizer, whose chat template gives ids. It answers as before to who says `return_dict`."""
    inner = getattr(tokenizer, "tokenizer", None)  # of a processor; it has the same method
    for one in (tokenizer, inner):
        if one is not None and hasattr(one, METHOD) and METHOD not in vars(one):
            setattr(one, METHOD, functools.partial(_apply, one))
    return tokenizer


def _apply(tokenizer: Tokenizer, *args: object, **kwargs: object) -> Any:
    result = getattr(type(tokenizer), METHOD)(tokenizer, *args, **kwargs)
    if "return_dict" in kwargs or kwargs.get("return_assistant_tokens_mask") or not hasattr(result, "data"):
        return result
    ids = result["input_ids"]
    return Ids.of(result) if isinstance(ids, torch.Tensor) else ids
