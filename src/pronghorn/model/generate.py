"""Greedy answers to many prompts at once, for evaluation, the demo and chat; one answer token by token, for serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.static_decode import StaticDecoding, why_not_static
from pronghorn.model.text_stack import in_mode

# Prompts in one batch. Each token is one launch of all layers, whatever the batch size.
BATCH = {"cpu": 32, "cuda": 128}
CACHED_TOKENS = 16_384  # of a batch, prompts and answers: 2 GB of keys and values for an 8B Llama in 16 bits


@dataclass(frozen=True, slots=True)
class Generated:
    text: str
    cut: bool  # truncated at the limit


def end_tokens(model: HFModel, tokenizer: Tokenizer) -> list[int]:
    """Every token that ends an answer: the model's own list, the tokenizer's, and the recipe's (of data.eot_tokens)."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ids = set(own if isinstance(own, list) else [own]) | {tokenizer.eos_token_id}
    ids |= set(tokenizer.convert_tokens_to_ids(list(getattr(tokenizer, "pronghorn_stop_tokens", ()))))
    return sorted(i for i in ids if i is not None)


def generate_answers(model: HFModel, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], **options: Any) -> list[str]:
    """The texts of `generate`."""
    return [one.text for one in generate(model, tokenizer, prompts, **options)]


def _endings(model: HFModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """How `model.generate` ends an answer, and pads."""
    stops = end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    return {"eos_token_id": stops or None, "pad_token_id": pad, "use_cache": True}


@torch.no_grad()
def generate(
    model: HFModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    capture: bool = False,
) -> list[Generated]:
    """Prompts of similar length share a batch, padded on the left; answers come back in the prompts' order. `capture`: on a
    GPU, decode with a CUDA graph where the model allows it (static_decode.py)."""
    device = next(model.parameters()).device
    ending = _endings(model, tokenizer)
    stops, pad = ending["eos_token_id"] or [], ending["pad_token_id"]
    answers = [Generated("", False)] * len(prompts)
    capture = capture and device.type == "cuda"
    if capture and (why := why_not_static(model)):
        say_once(f"answers are generated without a CUDA graph: {why}")
        capture = False
    done = 0
    with in_mode(model, training=False):
        waiting = list(batches([len(prompt) for prompt in prompts], batch_size or BATCH.get(device.type, 32), max_new_tokens))
        while waiting:
            chosen = waiting.pop(0)
            try:
                ids_BT, mask_BT = _padded([prompts[i] for i in chosen], pad, device)
                if capture:
                    decoding = StaticDecoding(model, ids_BT, mask_BT, new=max_new_tokens, stops=stops, pad=pad)
                    found = decoding.answers(capture=True)
                    del decoding
                else:
                    found = _generated(model, ids_BT, mask_BT, max_new_tokens, ending)
            except torch.OutOfMemoryError:
                if len(chosen) == 1:
                    raise
                found = None
            if found is None:  # outside the handler, which holds the failed call's tensors
                _empty_cache(device)
                say_once(f"not enough memory to generate {len(chosen)} answers at once: the batch is halved")
                half = len(chosen) // 2
                waiting[:0] = [chosen[:half], chosen[half:]]
                continue
            for i, tokens in zip(chosen, found, strict=True):
                end = next((at for at, token in enumerate(tokens, start=1) if token in stops), None)
                answers[i] = Generated(tokenizer.decode(tokens[:end], skip_special_tokens=True).strip(), cut=end is None)
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


def _padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their mask, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def _generated(
    model: HFModel, ids_BT: torch.Tensor, mask_BT: torch.Tensor, new: int, ending: dict[str, Any]
) -> list[list[int]]:
    out = model.generate(input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=new, **GREEDY, **ending)
    rows: list[list[int]] = out[:, ids_BT.shape[1] :].tolist()
    return rows


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def sample_answer(
    model: HFModel, tokenizer: Tokenizer, prompt: Sequence[int], *, max_new_tokens: int, temperature: float
) -> str:
    """One answer drawn from the model's own probabilities, flattened (above 1) or sharpened by the temperature."""
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
        max_new_tokens=max_new_tokens, **_endings(model, tokenizer),
    )  # fmt: skip
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()


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
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    on_token: Callable[[int, torch.Tensor], bool],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float = 1.0,
    seed: int | None = None,
) -> None:
    """One answer. `on_token` gets every token, the one that ends it included, with the logits it was chosen from, and returns
    whether that is enough. `temperature` 0: always the likeliest token. A `seed` makes sampling repeatable."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(prompt)], device=device)
    chosen = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    listener = _Listener(on_token)
    with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=seed is not None), suppress(_Enough):
        if seed is not None:
            torch.manual_seed(seed)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **(chosen if temperature > 0 else GREEDY),
            **_endings(model, tokenizer),
            max_new_tokens=max_new_tokens,
            streamer=listener,
            logits_processor=[listener],
        )
