"""Answers by transformers' own `generate`: for models without fast layers. Many greedy ones at once, or one token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.text_stack import in_mode

# Prompts in one batch. Each token is one launch of all layers, whatever the batch size.
BATCH = {"cpu": 32, "cuda": 128}
CACHED_TOKENS = 16_384  # of a batch, prompts and answers: 2 GB of keys and values for an 8B Llama in 16 bits
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def end_tokens(model: HFModel, tokenizer: Tokenizer) -> list[int]:
    """Every token that ends an answer: the model's own list, the tokenizer's, and the recipe's (of data.eot_tokens)."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ids = set(own if isinstance(own, list) else [own]) | {tokenizer.eos_token_id}
    ids |= set(tokenizer.convert_tokens_to_ids(list(getattr(tokenizer, "pronghorn_stop_tokens", ()))))
    return sorted(i for i in ids if i is not None)


def _endings(stops: Sequence[int]) -> dict[str, Any]:
    """How `model.generate` ends an answer, and pads."""
    return {"eos_token_id": list(stops) or None, "pad_token_id": stops[0] if stops else 0, "use_cache": True}


@torch.no_grad()
def greedy_tokens(
    model: HFModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stops: Sequence[int],
    progress: Callable[[str, int, int], None] | None = None,
) -> list[list[int]]:
    """Prompts of similar length share a batch, padded on the left; answers come back in the prompts' order, up to the token
    that ends them."""
    device = next(model.parameters()).device
    answers: list[list[int]] = [[]] * len(prompts)
    done = 0
    with in_mode(model, training=False):
        waiting = list(batches([len(prompt) for prompt in prompts], BATCH.get(device.type, 32), max_new_tokens))
        while waiting:
            chosen = waiting.pop(0)
            try:
                found = _generated(model, [prompts[i] for i in chosen], max_new_tokens, _endings(stops), device)
            except torch.OutOfMemoryError:
                if len(chosen) == 1:
                    raise
                found = None
            if found is None:  # outside the handler, which holds the failed call's tensors
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                say_once(f"not enough memory to generate {len(chosen)} answers at once: the batch is halved")
                half = len(chosen) // 2
                waiting[:0] = [chosen[:half], chosen[half:]]
                continue
            for i, tokens in zip(chosen, found, strict=True):
                answers[i] = tokens[: next((at for at, token in enumerate(tokens, start=1) if token in stops), None)]
            done += len(chosen)
            if progress:
                progress("answering", done, len(prompts))
    return answers


def batches(lengths: Sequence[int], most: int, new: int) -> Iterator[list[int]]:
    """Groups prompts into batches: shortest first, limited by count and by the cache's size."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) == most or (len(batch) + 1) * (lengths[i] + new) > CACHED_TOKENS):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _generated(
    model: HFModel, prompts: Sequence[Sequence[int]], new: int, ending: dict[str, Any], device: torch.device
) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), ending["pad_token_id"], dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    given = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "max_new_tokens": new}
    rows: list[list[int]] = model.generate(**given, **GREEDY, **ending)[:, width:].tolist()
    return rows


class _Enough(Exception):
    """Ends `model.generate` from inside."""


class _Listener:
    """What `model.generate` calls at every token: with its logits, as a processor, and then with the token, as a streamer."""

    def __init__(self, on_token: Callable[[int, torch.Tensor], bool]) -> None:
        self._on_token = on_token
        self._logits: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._logits = scores[0]
        return scores

    def put(self, tokens: torch.Tensor) -> None:
        if self._logits is not None and self._on_token(int(tokens[0]), self._logits):  # first the prompt, without logits
            raise _Enough

    def end(self) -> None:
        pass


@torch.no_grad()
def stream_tokens(
    model: HFModel,
    prompt: Sequence[int],
    on_token: Callable[[int, torch.Tensor], bool],
    *,
    max_new_tokens: int,
    stops: Sequence[int],
    seed: int,
    chosen: dict[str, Any],
) -> None:
    """One answer. `on_token` gets every token, the one that ends it included, with the logits it was chosen from, and returns
    whether that is enough. `chosen`: how `generate` draws. The random numbers of others stay where they are."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(prompt)], device=device)
    listener = _Listener(on_token)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), in_mode(model, training=False), suppress(_Enough):
        torch.manual_seed(seed)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **chosen,
            **_endings(stops),
            max_new_tokens=max_new_tokens,
            streamer=listener,
            logits_processor=[listener],
        )
