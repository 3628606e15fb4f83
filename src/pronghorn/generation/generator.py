"""The host's half of generation: requests wait, get slots and pages, run, and end. Continuous batching.

A request is a prompt and how many answers it wants. Its prompt is read once, into pages that all its answers share. An answer
gets a slot and the pages for its longest form when it begins, so it never has to be stopped for want of memory. When it ends,
both go to the next one that waits. The order follows from lengths alone, never from time, and a draw depends on neither slot
nor neighbours, so a repeated call gives the same answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.errors import CommandError
from pronghorn.generation.cache import FreePages, pages_for
from pronghorn.generation.decoder import Decoder, Running, Start, Window
from pronghorn.generation.sampling import GREEDY, Drawn, Sampling
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.text_stack import in_mode

READ_TOKENS = 16_384  # of prompts, in one forward


@dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    keys: Sequence[int]  # one for each answer (sampling.key_of)
    max_new_tokens: int
    rule: Sampling = GREEDY
    stops: Sequence[int] = ()  # tokens that end an answer, and belong to it
    likeliest: int | None = None  # how many tokens, with their log-probabilities, are wanted at each place


class Measured(NamedTuple):
    """Log-probabilities without a temperature, in the whole vocabulary."""

    log_prob: float
    likeliest: Sequence[tuple[int, float]]


@dataclass
class Completion:
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # of the whole vocabulary
    kept_log_probs: list[float] = field(default_factory=list)  # among the tokens that the rule left
    ended: bool = False  # by a stop token; else it was cut
    measured: list[Measured] = field(default_factory=list)  # of each token, where `likeliest` is asked for


@dataclass
class _Prompt:
    """A request whose prompt is read."""

    request: Request
    answers: list[Completion]
    place: int
    pages: list[int]
    waiting: list[int]  # answers that have not begun
    running: list[int] = field(default_factory=list)  # slots


@dataclass
class _Running:
    """An answer that has a slot."""

    slot: int
    prompt: _Prompt
    answer: Completion
    pages: list[int]
    launched: int = 1  # tokens, with those of windows under way
    done: bool = False


class Generator:
    def __init__(self, model: HFModel, *, slots: int, tokens: int, longest: int, stops: int = 8) -> None:
        """`tokens`: how many keys and values can be stored. `longest`: tokens of an answer at most."""
        engine = engine_of(model)
        assert engine is not None
        self.model, self.engine = model, engine
        device = engine.embeddings.weight.device
        dtype = (
            torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else engine.embeddings.weight.dtype
        )
        pages = 1 + pages_for(tokens)
        self._decoder = Decoder(engine, slots=slots, pages=pages, longest=longest, stops=stops, dtype=dtype)
        self._free, self._pages, self._longest, self._most_stops = FreePages(pages), pages - 1, longest, stops
        self._slots, self._places = list(range(slots - 1, -1, -1)), list(range(slots - 1, -1, -1))
        self._queue: deque[tuple[Request, list[Completion]]] = deque()
        self._prompts: list[_Prompt] = []
        self._slot: dict[int, _Running] = {}

    @property
    def captures(self) -> bool:
        """Whether steps are CUDA graphs."""
        return bool(self._decoder.captures)

    @captures.setter
    def captures(self, on: bool) -> None:
        self._decoder.captures = on

    def generate(
        self,
        requests: Sequence[Request],
        progress: Callable[[str, int, int], None] | None = None,
        look: Callable[[list[list[Completion]]], None] | None = None,
    ) -> list[list[Completion]]:
        """The answers to each request, in order. `look` gets them after every window, as they are by then."""
        found = [self.submit(request) for request in requests]
        total, done = sum(len(request.keys) for request in requests), 0
        with self.answering():
            for ended in self.run():
                done += ended
                if progress and ended:
                    progress("answering", done, total)
                if look:
                    look(found)
        return found

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around `run`. Weights and adapters are read once."""
        with torch.no_grad(), in_mode(self.model, training=False):
            self._decoder.prepare()
            yield

    def submit(self, request: Request) -> list[Completion]:
        """Its answers, which grow while `run` is iterated. Between two windows more may be submitted."""
        needed = pages_for(len(request.prompt)) + pages_for(request.max_new_tokens)
        if not request.prompt or needed > self._pages or request.max_new_tokens > self._longest:
            raise CommandError(
                what=f"a prompt of {len(request.prompt)} tokens with an answer of up to {request.max_new_tokens} does not fit",
                why=f"there are pages for {self._pages} x 64 tokens, and answers have at most {self._longest}",
                fix="shorten the prompt, lower max_new_tokens, or give generation more memory",
            )
        assert len(request.stops) <= self._most_stops
        answers = [Completion() for _ in request.keys]
        self._queue.append((request, answers))
        return answers

    def cancel(self, answers: list[Completion]) -> None:
        """Those of one request, between two windows: what has not ended gets no further token, and its slots and pages are
        free."""
        self._queue = deque(one for one in self._queue if one[1] is not answers)
        for prompt in [prompt for prompt in self._prompts if prompt.answers is answers]:
            prompt.waiting.clear()
            for slot in list(prompt.running):
                self._end(self._slot[slot])
            if prompt in self._prompts:  # nothing of it ran
                self._forget(prompt)

    def stop(self, answer: Completion) -> None:
        """One that runs, between two windows."""
        for one in [one for one in self._slot.values() if one.answer is answer]:
            self._end(one)

    def run(self) -> Iterator[int]:
        """Windows of steps until nothing waits; after each the number of answers that ended in it. On a GPU a window begins
        before the one before it is looked at, so that the device never waits for the host."""
        before = None
        while self._queue or self._prompts:
            ended = self._admit()
            now = self._window()
            looked_at = before if self._decoder.captures else now
            if looked_at is not None:
                rows, window = looked_at
                ended += self._collect(rows, window.drawn(), window.rows)
            before = now
            yield ended

    # ---- who runs ------------------------------------------------------------------------------------------------

    def _admit(self) -> int:
        """Reads prompts and begins answers while there are slots and pages. An answer may end at once."""
        self._read()
        starts = []
        for prompt in self._prompts:
            request = prompt.request
            pages = pages_for(request.max_new_tokens)
            while prompt.waiting and self._slots and len(self._free) >= pages:
                number, slot, own = prompt.waiting.pop(0), self._slots.pop(), self._taken(pages)
                prompt.running.append(slot)
                self._slot[slot] = _Running(slot, prompt, prompt.answers[number], own)
                key, length = request.keys[number], len(request.prompt)
                starts.append(Start(slot, prompt.place, length, own, key, request.rule, request.max_new_tokens, request.stops))
        if not starts:
            return 0
        rows = [self._slot[one.slot] for one in starts]
        first = torch.stack([self._decoder.first_row(one.prompt) for one in starts])[None] if _wanted(rows) else None
        return self._collect(rows, [self._decoder.start(starts)], first)

    def _read(self) -> None:
        """Prompts for the slots that are free and not yet spoken for. Each leaves pages for at least one of its answers."""
        wanted = len(self._slots) - sum(len(prompt.waiting) for prompt in self._prompts)
        new, tokens = list[_Prompt](), 0
        while self._queue and wanted > 0 and self._places:
            request, answers = self._queue[0]
            own, one = pages_for(len(request.prompt)), pages_for(request.max_new_tokens)
            if len(self._free) < own + one or (new and tokens + len(request.prompt) > READ_TOKENS):
                break
            self._queue.popleft()
            place, pages = self._places.pop(), self._taken(own)
            new.append(_Prompt(request, answers, place, pages, list(range(len(answers)))))
            wanted, tokens = wanted - len(answers), tokens + len(request.prompt)
        if new:
            self._decoder.read([(prompt.place, prompt.request.prompt, prompt.pages) for prompt in new])
            self._prompts += new

    def _taken(self, count: int) -> list[int]:
        pages = self._free.take(count)
        if self._decoder.device.type == "cpu":
            self._decoder.states.clear(pages)
        return pages

    def _window(self) -> tuple[list[_Running], Window] | None:
        """Steps for answers that may have tokens left."""
        parts = []
        for prompt in self._prompts:
            most = prompt.request.max_new_tokens
            if slots := [slot for slot in prompt.running if self._slot[slot].launched < most]:
                parts.append((prompt, slots))
        if not parts:
            return None
        truncates = any(prompt.request.rule.truncates for prompt, _ in parts)
        keeps = any(prompt.request.likeliest is not None for prompt, _ in parts)
        running = [Running(len(p.request.prompt), p.pages, slots) for p, slots in parts]
        window = self._decoder.window(running, truncates, keeps)
        rows = [self._slot[slot] for slot in window.slots]
        for one in rows:
            one.launched += self._decoder.steps
        return rows, window

    def _collect(self, rows: Sequence[_Running], drawn: Sequence[Drawn], hidden: Tensor | None) -> int:
        """Adds what was drawn to the answers; frees what has ended. `hidden`: rows after the last layer, where logits
        are wanted, [steps, rows, D]."""
        columns = [[tensor.tolist() for tensor in one] for one in drawn]
        ended = 0
        for row, one in enumerate(rows):
            request, answer = one.prompt.request, one.answer
            for step, (tokens, log_probs, kept) in enumerate(columns):
                if one.done:
                    break
                if hidden is not None and request.likeliest is not None:
                    answer.measured.append(self._measured(hidden[step, row], tokens[row], request.likeliest))
                answer.tokens.append(tokens[row])
                answer.log_probs.append(log_probs[row])
                answer.kept_log_probs.append(kept[row])
                answer.ended = tokens[row] in request.stops
                if answer.ended or len(answer.tokens) == request.max_new_tokens:
                    self._end(one)
                    ended += 1
        return ended

    def _measured(self, h_D: Tensor, token: int, count: int) -> Measured:
        log_probs_V = self._decoder.log_probs(h_D[None])[0]
        best = log_probs_V.topk(count)
        return Measured(float(log_probs_V[token]), list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))

    def _end(self, one: _Running) -> None:
        """What a window under way still writes for it comes before whatever its pages are used for next."""
        one.done = True
        prompt = one.prompt
        del self._slot[one.slot]
        prompt.running.remove(one.slot)
        self._slots.append(one.slot)
        self._free.give(one.pages)
        if not prompt.running and not prompt.waiting:
            self._forget(prompt)

    def _forget(self, prompt: _Prompt) -> None:
        self._prompts.remove(prompt)
        self._places.append(prompt.place)
        self._free.give(prompt.pages)


def _wanted(rows: Sequence[_Running]) -> bool:
    return any(one.prompt.request.likeliest is not None for one in rows)
