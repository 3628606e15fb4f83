"""The generator of a model that other libraries call, kept between their calls.

A trainer generates in every step, and captured steps read pages at fixed addresses, so pages stay. They are as many as the
largest call so far needs, within a share of the memory that was free when they were made; answers beyond that wait for their
turn. Memory that runs out, here or in training, gets them back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pronghorn.generation.cache import SHARE, SLOTS, bytes_of_a_slot, bytes_of_a_token, free_bytes, pages_for, slots_within
from pronghorn.generation.generator import READ_TOKENS, Completion, Generator, Request
from pronghorn.kernels.attention.attention_paged import PAGE
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.memory.pages import LOGITS
from pronghorn.model.causal_lm import FastCausalLM

Look = Callable[[list[list[Completion]]], None]


class Sizes(NamedTuple):
    slots: int
    pages: int
    longest: int  # tokens of an answer
    stops: int

    def holds(self, others: Sizes) -> bool:
        return all(own >= other for own, other in zip(self, others, strict=True))


class KeptGenerator:
    def __init__(self, engine: FastCausalLM) -> None:
        self.engine, self.share = engine, SHARE
        self._generator: Generator | None = None
        self._sizes, self._dtype = Sizes(0, 0, 0, 0), torch.float32
        self._limit = 1 << 40  # of pages, by memory
        self.reads = 0  # tokens of prompts in one forward, at most so far

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptGenerator:
        """A copy of the model has its own."""
        twin = KeptGenerator(copy.deepcopy(self.engine, memo))
        twin.share = self.share
        return twin

    @property
    def nbytes(self) -> int:
        """What is kept between calls, and a step's logits."""
        slots, pages, *_ = self._sizes
        kept = pages * PAGE * bytes_of_a_token(self.engine, self._dtype) + slots * bytes_of_a_slot(self.engine, self._dtype)
        return kept + LOGITS * 4 * slots * int(self.engine.embeddings.weight.shape[0])

    def answers(self, requests: Sequence[Request], dtype: torch.dtype, look: Look | None = None) -> list[list[Completion]]:
        """`dtype`: of the layers. Outside of autocast and inference mode. `look`: at answers while they grow."""
        while True:
            least = max(pages_for(len(one.prompt)) + pages_for(one.max_new_tokens) for one in requests)
            try:
                return self._fitting(requests, least, dtype).generate(requests, None, look)
            except torch.OutOfMemoryError:
                pages = self._sizes.pages // 2
                self.give_back()
                if pages < least or look:  # what was shown cannot be repeated
                    raise
                self._limit = pages
            except BaseException:
                self.give_back()  # its slots are in use
                raise
            say_once(f"out of memory: keys and values of at most {pages * PAGE:,} tokens are stored from now on")

    def give_back(self) -> bool:
        """Frees pages and graphs. Returns whether there were any."""
        had, self._generator, self._sizes = self._generator is not None, None, Sizes(0, 0, 0, 0)
        if had and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return had

    def _fitting(self, requests: Sequence[Request], least: int, dtype: torch.dtype) -> Generator:
        device: torch.device = self.engine.embeddings.weight.device
        slots = min(sum(len(one.keys) for one in requests), SLOTS.get(device.type, 32))
        slots = min(
            slots, max(self._sizes.slots, slots_within(self.engine, dtype, slots, int(self.share * free_bytes(device))))
        )
        longest = max(one.max_new_tokens for one in requests)
        lengths = [len(one.prompt) for one in requests]
        self.reads = max(self.reads, *lengths, min(READ_TOKENS, sum(lengths)))
        prompts = sum(sorted((pages_for(len(one.prompt)) for one in requests), reverse=True)[:slots])
        pages = max(least, min(prompts + slots * pages_for(longest), self._limit))
        wanted = Sizes(slots, pages, pages_for(longest) * PAGE, max(len(one.stops) for one in requests))
        if self._generator is not None and self._dtype == dtype and self._sizes.holds(wanted):
            return self._generator
        largest = Sizes(*map(max, wanted, self._sizes, (1, 1, PAGE, 8)))
        self.give_back()
        # Prompts of the next call may be longer.
        pages = max(largest.pages, 2 * prompts + largest.slots * pages_for(largest.longest))
        if device.type == "cuda":
            room = int(self.share * free_bytes(device)) - largest.slots * bytes_of_a_slot(self.engine, dtype)
            self._limit = min(self._limit, room // (PAGE * bytes_of_a_token(self.engine, dtype)))
        self._sizes, self._dtype = largest._replace(pages=max(least, min(pages, self._limit))), dtype
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != self.engine.embeddings.weight.dtype):
            self._generator = Generator(
                self.engine.model,
                slots=largest.slots,
                tokens=self._sizes.pages * PAGE,
                longest=largest.longest,
                stops=largest.stops,
            )
        return self._generator
