"""Answers to prompts, for evaluation, chat and serving: on the model's fast layers, or by transformers' `generate` where it has
none.

`answering` gives what generates them, `answers` is the whole of it for a list of prompts. Keys and values get memory for all
answers that can run at once, at most half of what is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from pronghorn.generation.cache import pages_for
from pronghorn.generation.generator import Answer, Generator, Measured, Request
from pronghorn.generation.sampling import GREEDY, Sampling, key_of
from pronghorn.generation.text import GrowingText
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.kernels.attention.attention_paged import PAGE
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model import generate
from pronghorn.model.causal_lm import FastCausalLM, engine_of
from pronghorn.model.generate import end_tokens
from pronghorn.model.layers.mixers.attention import Attention
from pronghorn.model.read_ahead import free_memory

SLOTS = {"cpu": 32, "cuda": 256}  # answers that run at once: above them a token costs the same
SHARE = 0.5  # of the free memory
UNKNOWN = 8 * 10**9  # bytes that are taken to be free where the system does not say

Progress = Callable[[str, int, int], None]
Look = Callable[[], None]


class Answering(Protocol):
    """What generates answers."""

    def submit(self, request: Request) -> list[Answer]: ...
    def cancel(self, answers: list[Answer]) -> None: ...
    def stop(self, answer: Answer) -> None: ...
    def run(self, look: Look) -> None: ...  # until nothing waits; `look` is called whenever answers have grown


@dataclass(frozen=True)
class Generated:
    text: str
    cut: bool  # at the most tokens that it may have
    tokens: list[int]


def answers(
    model: HFModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    rule: Sampling = GREEDY,
    seed: int = 0,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
    progress: Progress | None = None,
    capture: bool = True,
) -> list[Generated]:
    """In the prompts' order. `stop`: strings that end an answer before them. `on_text`: gets pieces of each answer's text.
    `capture`: on a GPU, steps are CUDA graphs."""
    ends = end_tokens(model, tokenizer)
    plain = rule == GREEDY and not stop and on_text is None
    if plain and prompts and why_not_here(model):
        _tell(model)
        found = generate.greedy_tokens(model, prompts, max_new_tokens=max_new_tokens, stops=ends, progress=progress)
        return [_whole(tokenizer, tokens, ends) for tokens in found]
    requests = [Request(prompt, (key_of(seed, i),), max_new_tokens, rule, ends) for i, prompt in enumerate(prompts)]
    if not requests:
        return []
    engine = answering(model, longest=max_new_tokens, needs=list(map(needed, requests)), stops=len(ends), capture=capture)
    said = [engine.submit(request)[0] for request in requests]
    texts = [GrowingText(tokenizer, ends, stop, partial(_piece, on_text, i)) for i in range(len(said))]
    over = [False] * len(said)

    def look() -> None:
        for i, (answer, text) in enumerate(zip(said, texts, strict=True)):
            if over[i] or len(answer.tokens) == text.count:
                continue
            if stop or on_text:
                over[i] = any(text.add(token) for token in answer.tokens[text.count :])
                if over[i]:
                    engine.stop(answer)
            over[i] |= answer.ended or len(answer.tokens) == max_new_tokens
            if over[i] and progress:
                progress("answering", sum(over), len(over))

    engine.run(look)
    if not (stop or on_text):
        return [_whole(tokenizer, answer.tokens, ends) for answer in said]
    for text in texts:
        text.finish()
    return [Generated(text.text.strip(), not text.stopped, text.tokens) for text in texts]


def _piece(on_text: Callable[[int, str], None] | None, number: int, text: str, _: list[object]) -> None:
    if on_text is not None:
        on_text(number, text)


def _whole(tokenizer: Tokenizer, tokens: list[int], ends: Sequence[int]) -> Generated:
    cut = not tokens or tokens[-1] not in ends
    return Generated(str(tokenizer.decode(tokens, skip_special_tokens=True)).strip(), cut, tokens if cut else tokens[:-1])


# ---- what generates --------------------------------------------------------------------------------------------------------


def why_not_here(model: HFModel) -> str:
    """Why a model's answers need transformers' `generate`; empty if they do not."""
    engine = engine_of(model)
    if engine is None:
        return "the model has no fast layers"
    if not engine.head.generates:
        return "its head gives no tokens"
    return "its weights are spread over several GPUs" if engine.shards is not None else ""


def _tell(model: HFModel) -> None:
    say_once(f"answers are generated by transformers, slowly: {why_not_here(model)}")


def answering(
    model: HFModel, *, longest: int, needs: Sequence[int], stops: int, slots: int | None = None, capture: bool = True
) -> Answering:
    """`longest`: tokens of an answer at most. `needs`: of each request (`needed`); further ones may come. `stops`: how many
    tokens may end an answer."""
    if why_not_here(model):
        _tell(model)
        return ByTransformers(model)
    engine = engine_of(model)
    assert engine is not None
    device = engine.embeddings.weight.device
    slots = slots or min(len(needs), SLOTS.get(device.type, 32))
    wanted = sorted(needs, reverse=True)
    for share in (SHARE, SHARE / 4):
        tokens = max(min(sum(wanted[:slots]), int(share * _free(device)) // _token_bytes(engine)), wanted[0])
        try:
            generator = Generator(model, slots=slots, tokens=tokens, longest=longest, stops=max(1, stops))
        except torch.OutOfMemoryError:
            if share < SHARE:
                raise
        else:
            return OnFastLayers(generator, capture)
    raise AssertionError("unreachable")


def needed(request: Request) -> int:
    """Tokens of its prompt and answers, in whole pages."""
    return PAGE * (pages_for(len(request.prompt)) + len(request.keys) * pages_for(request.max_new_tokens))


def _free(device: torch.device) -> int:
    if device.type != "cuda":
        return free_memory() or UNKNOWN
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held


def _token_bytes(engine: FastCausalLM) -> int:
    """Keys and values of a token."""
    mixers = [layer.mixer for layer in engine.layers if isinstance(layer.mixer, Attention)]
    numbers = sum(2 * mixer.kv_heads * mixer.head_width for mixer in mixers)
    return max(1, numbers * int(engine.embeddings.weight.element_size()))


class OnFastLayers:
    def __init__(self, generator: Generator, capture: bool) -> None:
        generator.captures = generator.captures and capture
        self._generator = generator
        self.submit, self.cancel, self.stop = generator.submit, generator.cancel, generator.stop

    def run(self, look: Look) -> None:
        with self._generator.answering():
            for _ in self._generator.run():
                look()


class ByTransformers:
    """One answer after the other."""

    def __init__(self, model: HFModel) -> None:
        self._model = model
        self._queue: deque[tuple[Request, list[Answer]]] = deque()
        self._over: list[Answer] = []  # of the request that is being answered

    def submit(self, request: Request) -> list[Answer]:
        found = [Answer() for _ in request.keys]
        self._queue.append((request, found))
        return found

    def cancel(self, answers: list[Answer]) -> None:
        self._queue = deque(one for one in self._queue if one[1] is not answers)
        self._over += answers

    def stop(self, answer: Answer) -> None:
        self._over.append(answer)

    def run(self, look: Look) -> None:
        while self._queue:
            request, found = self._queue.popleft()
            self._over.clear()
            for key, answer in zip(request.keys, found, strict=True):
                if not self._is_over(answer):
                    self._answer(request, key, answer, look)

    def _is_over(self, answer: Answer) -> bool:
        return any(one is answer for one in self._over)

    def _answer(self, request: Request, key: int, answer: Answer, look: Look) -> None:
        def on_token(token: int, logits_V: torch.Tensor) -> bool:
            log_probs_V = logits_V.float().log_softmax(-1)
            answer.tokens.append(token)
            answer.log_probs.append(float(log_probs_V[token]))
            answer.ended = token in request.stops
            if request.likeliest is not None:
                best = log_probs_V.topk(request.likeliest)
                likeliest = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
                answer.measured.append(Measured(answer.log_probs[-1], likeliest))
            look()
            return self._is_over(answer)

        rule = request.rule
        drawn = {"do_sample": True, "temperature": rule.temperature, "top_k": rule.top_k, "top_p": rule.top_p}
        generate.stream_tokens(
            self._model,
            request.prompt,
            on_token,
            max_new_tokens=request.max_new_tokens,
            stops=request.stops,
            seed=key,
            chosen={**drawn, "min_p": rule.min_p or None} if rule.temperature else generate.GREEDY,
        )
