"""The thread that generates all answers: continuous batching of the requests for one model, many clients at once.

The thread takes what waits, answers it in windows of steps, hands pieces of text to those who asked, and takes more between two
windows. Adapters of one base are used one at a time: who asks for another one waits until the answers under way have ended, and
from then on requests that come later for the first one wait, too.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from pronghorn.generation import generator
from pronghorn.generation.answering import Answering, answering, needed
from pronghorn.generation.generator import Completion
from pronghorn.generation.sampling import Sampling, key_of
from pronghorn.generation.text import GrowingText
from pronghorn.model.generate import end_tokens
from pronghorn.serve.asked import DEFAULT_TOKENS, Request, RequestError
from pronghorn.serve.models import Models, Served

LOOK = 0.5  # seconds between two looks at whether a waiting client is still there
MOST_WAITING = 400  # requests
SLOTS = 64  # answers that are generated at once
TOKENS = {"cpu": 16_384, "cuda": 131_072}  # keys and values, where no request needs more


@dataclass(frozen=True)
class Token:
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Piece:
    """A token of one of the answers to a request."""

    choice: int
    text: str
    tokens: Sequence[Token]


@dataclass(eq=False)
class Job:
    """One request, and the answers to it."""

    one: Served
    asked: Request
    prompt: list[int]
    max_tokens: int
    seed: int
    texts: list[GrowingText] = field(default_factory=list)
    pieces: queue.SimpleQueue[Piece | Exception | None] = field(default_factory=queue.SimpleQueue)  # None: the end
    left: bool = False  # whether nobody waits for it any more

    @property
    def needed(self) -> int:
        """Tokens of its prompt and of one answer, in whole pages."""
        return needed(generator.Request(self.prompt, (0,), self.max_tokens))

    def read(self, leave: Callable[[], None]) -> Iterator[Piece]:
        """Until all answers have ended. `leave` is called meanwhile; it raises where nobody wants them any more."""
        while True:
            leave()
            try:
                found = self.pieces.get(timeout=LOOK)
            except queue.Empty:
                continue
            if found is None:
                return
            if isinstance(found, Exception):
                raise found
            yield found


class Engine:
    def __init__(self, models: Models, told: Callable[[str], None], most: int = MOST_WAITING) -> None:
        self._models, self._told, self._most = models, told, most
        self._waiting: list[Job] = []
        self._under_way: list[tuple[Job, list[Completion]]] = []
        self._changed = threading.Condition()
        self._ending = False
        self._answering: Answering | None = None  # made for the first request, and for one that needs more
        self._tokens = self._longest = 0  # of all requests together, and of an answer, that it has room for
        self._thread = threading.Thread(target=self._work, daemon=True, name="answers")
        self._thread.start()

    # ---- for the threads of connections ------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        with self._changed:
            if self._ending:
                raise RequestError("the server is shutting down", status=503)
            if self.jobs >= self._most:
                raise RequestError(f"{self.jobs} requests are waiting already; try again later", status=503, retry=1)
            self._waiting.append(job)
            self._changed.notify()

    def leave(self, job: Job) -> None:
        """Frees its place, if it has one still."""
        job.left = True
        with self._changed:
            self._waiting = [other for other in self._waiting if other is not job]

    @property
    def jobs(self) -> int:
        """Requests that wait or are being answered."""
        return len(self._waiting) + len(self._under_way)

    def end(self) -> None:
        """Answers under way end where they are; who waits is told."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    # ---- the thread --------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if self._ending:
                    break
                one = self._waiting[0].one
            try:
                self._serve(one)
            except Exception:  # noqa: BLE001 - these requests fail, and the server goes on
                self._told(traceback.format_exc())
                failed = RequestError("internal server error; the traceback is in the server's output", status=500)
                self._answering = None  # what it holds is in disorder
                with self._changed:
                    if not self._under_way:  # else they wait on
                        self._under_way = [(job, []) for job in self._waiting if job.one is one]
                        self._waiting = [job for job in self._waiting if job.one is not one]
                for job, _ in self._under_way:
                    job.pieces.put(failed)
                self._under_way = []
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for job in waiting:
            job.pieces.put(RequestError("the server is shutting down", status=503))

    def _serve(self, one: Served) -> None:
        """Until somebody waits for another model, or for more room, or nobody."""
        with self._models.using(one) as model:
            first = next((job for job in self._waiting if job.one is one), None)
            if first is None:  # it left
                return
            if self._answering is None or not self._fits(first):
                self._answering = None  # its memory first
                self._longest = max(DEFAULT_TOKENS, first.max_tokens)
                self._tokens = max(TOKENS.get(model.device.type, TOKENS["cpu"]), first.needed)
                ends = max(len(end_tokens(model, served.tokenizer)) for served in self._models.all)
                needs = [first.needed, *[max(1, (self._tokens - first.needed) // SLOTS)] * (SLOTS - 1)]
                self._answering = answering(model, longest=self._longest, needs=needs, stops=ends, slots=SLOTS)
            self._take(one, self._answering)
            self._answering.run(partial(self._look, one, self._answering))

    def _fits(self, job: Job) -> bool:
        return job.needed <= self._tokens and job.max_tokens <= self._longest

    def _take(self, one: Served, answering: Answering) -> None:
        """What waits for this model and fits, unless somebody waits for something else."""
        with self._changed:
            taken = [job for job in self._waiting if job.one is one and self._fits(job)]
            if self._under_way and len(taken) < len(self._waiting):
                return
            self._waiting = [job for job in self._waiting if job not in taken]
        for job in taken:
            if job.left:
                continue
            asked, ends = job.asked, end_tokens(self._models.model, one.tokenizer)
            answers = answering.submit(
                generator.Request(
                    prompt=job.prompt,
                    keys=[key_of(job.seed, choice) for choice in range(asked.n)],
                    max_new_tokens=job.max_tokens,
                    rule=Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p),
                    stops=ends,
                    likeliest=asked.top_logprobs if asked.logprobs else None,
                )
            )
            job.texts = [
                GrowingText(one.tokenizer, ends, asked.stop, partial(self._hand_on, job, choice)) for choice in range(asked.n)
            ]
            self._under_way.append((job, answers))

    def _look(self, one: Served, answering: Answering) -> None:
        """Between two windows."""
        for job, answers in list(self._under_way):
            for text, answer in zip(job.texts, answers, strict=True):
                self._read(job, text, answer, answering)
            over = all(text.stopped or text.count == job.max_tokens for text in job.texts)
            if not (over or job.left or self._ending):
                continue
            answering.cancel(answers)
            self._under_way = [other for other in self._under_way if other[0] is not job]
            for text in job.texts:
                text.finish()
            job.pieces.put(None)
        if not self._ending:
            self._take(one, answering)

    def _read(self, job: Job, text: GrowingText, answer: Completion, answering: Answering) -> None:
        """Its new tokens."""
        for at in range(text.count, len(answer.tokens)):
            if text.stopped:
                break
            if text.add(answer.tokens[at], self._measured(job, answer, at) if job.asked.logprobs else None):
                answering.stop(answer)

    def _measured(self, job: Job, answer: Completion, at: int) -> Token:
        decode, measured = job.one.tokenizer.decode, answer.measured[at]
        top = tuple((decode([token]), value) for token, value in measured.likeliest)
        return Token(decode([answer.tokens[at]]), measured.log_prob, top)

    def _hand_on(self, job: Job, choice: int, text: str, tokens: list[Token]) -> None:
        if job.asked.stream:
            job.pieces.put(Piece(choice, text, tokens))
