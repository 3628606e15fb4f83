"""The device's half of generation: prompts are read, then each step adds one token to each running answer.

A slot holds an answer that is being generated; its state is in tensors, [slots + 1], of which the last belongs to nobody. A
step works on rows, each of which names a slot, so that answers that end leave no hole: the next step has fewer rows. The host
says which slots run and which of them share a prompt; then a window of steps follows, between which nothing is read back. On a
GPU a step is one CUDA graph for each number of rows in BUCKETS, with rows of the slot that belongs to nobody at the end.

B = rows, V = vocabulary, D = prompts, W = steps of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.generation.cache import MixerStates, Prefill, Step, pages_for
from pronghorn.generation.sampling import Drawn, Rules, Sampling, draw
from pronghorn.kernels.attention.attention_paged import MEMBERS, PAGE, Segments
from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.capture import Graphs, Work, first_line
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.layers.types import Documents
from pronghorn.packs import PackedDocuments

STEPS = {"cpu": 1, "cuda": 8}  # of a window: a look at what has ended waits for the GPU
APART, ALIKE = 0.05, 0.5  # of log-probabilities at most; share of rows above which a graph is right
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)  # rows of a captured step


def _rounded(count: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if size >= count), count)


@dataclass(frozen=True)
class Start:
    """An answer that begins: what a slot is set to."""

    slot: int
    prompt: int  # its place in the table of prompts
    prompt_tokens: int
    pages: Sequence[int]
    key: int
    rule: Sampling
    most: int  # tokens of the answer
    stops: Sequence[int]


class Running(NamedTuple):
    """A prompt that has answers running."""

    tokens: int
    pages: Sequence[int]
    slots: Sequence[int]


Segment = tuple[int, Sequence[int], Sequence[int]]  # of a prompt: tokens, pages, and rows that read them


class _Bucket:
    """What a step of so many rows and segments of prompts reads and writes: always the same tensors."""

    def __init__(self, rows: int, segments: int, pages: int, steps: int, nobody: int, device: torch.device) -> None:
        def numbers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        self.slot_B = torch.full((rows,), nobody, device=device)
        self.prompts = Segments(
            numbers(segments, pages), numbers(segments), numbers(segments), numbers(segments, MEMBERS, fill=-1)
        )
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # steps so far
        self.drawn = Drawn(
            *(torch.zeros(steps, rows, dtype=kind, device=device) for kind in (torch.int64, torch.float32, torch.float32))
        )
        self.rows_BD: Tensor | None = None  # [steps, B, D], after the last layer, where somebody wants the logits
        self.step: Work | None = None
        self.compared = False  # its graph with an eager step
        self._filled: tuple[list[int], list[Segment]] | None = None

    def fill(self, slots: Sequence[int], segments: Sequence[Segment], nobody: int) -> None:
        self.at.zero_()
        if (now := (list(slots), list(segments))) == self._filled:
            return
        self._filled = now
        count, width = self.prompts.pages_SJ.shape
        rest = count - len(segments)
        pages = [[*own, *[0] * (width - len(own))] for _, own, _ in segments] + [[0] * width] * rest
        members = [[*rows, *[-1] * (MEMBERS - len(rows))] for _, _, rows in segments] + [[-1] * MEMBERS] * rest
        for target, values in (
            (self.slot_B, [*slots, *[nobody] * (len(self.slot_B) - len(slots))]),
            (self.prompts.pages_SJ, pages),
            (self.prompts.length_S, [tokens for tokens, _, _ in segments] + [0] * rest),
            (self.prompts.members_SM, members),
        ):
            given = torch.tensor(values, dtype=target.dtype)
            target.copy_(given.pin_memory() if target.is_cuda else given, non_blocking=True)


class Window:
    """What a window of steps drew, which may still be under way."""

    def __init__(self, slots: Sequence[int], drawn: Drawn, rows: Tensor | None) -> None:
        self.slots = slots  # in the order of rows
        self.rows = None if rows is None else rows[:, : len(slots)].clone()
        self._found = [tensor[:, : len(slots)].to("cpu", non_blocking=True, copy=True) for tensor in drawn]
        self._end = torch.cuda.Event() if drawn.token_B.is_cuda else None
        if self._end:
            self._end.record()

    def drawn(self) -> list[Drawn]:
        """Step by step. Waits for the window's end."""
        if self._end:
            self._end.synchronize()
        return [Drawn(*one) for one in zip(*self._found, strict=True)]


class Decoder:
    def __init__(self, engine: FastCausalLM, *, slots: int, pages: int, longest: int, stops: int, dtype: torch.dtype) -> None:
        """`longest`: tokens of an answer at most. `stops`: how many tokens may end one."""
        device = engine.embeddings.weight.device
        self.steps, self.captures = STEPS.get(device.type, 1), device.type == "cuda"
        self._buckets: dict[tuple[int, int, int, bool, bool], _Bucket] = {}
        self._graphs = Graphs(
            device, failed=lambda error: say_once(f"answers are generated without CUDA graphs: {first_line(error)}")
        )
        self._built_for: tuple[int, ...] = ()
        self.engine, self.slots, self.dtype, self.device = engine, slots, dtype, device
        rows = slots + 1
        self.states = MixerStates(engine, pages, 2 * rows, dtype, device)  # slots, then prompts

        def numbers(*shape: int, kind: torch.dtype = torch.int64, fill: int = 0) -> Tensor:
            return torch.full((rows, *shape), fill, dtype=kind, device=device)

        self._token, self._key, self._made, self._most = numbers(), numbers(), numbers(), numbers()
        self._prompt_tokens, self._runs = numbers(), numbers(kind=torch.bool)
        self._pages = numbers(pages_for(longest), kind=torch.int32)
        self._stops = numbers(stops, fill=-1)
        self._rules = Rules.empty(rows, device)
        # Of each prompt its last row after the last layer, from which all answers to it begin.
        self._last_rows = torch.zeros(rows, int(engine.config.hidden_size), dtype=dtype, device=device)

    def prepare(self) -> None:
        """Before windows: the model as it is now. Graphs that read memory that is gone are forgotten."""
        engine = self.engine
        engine.prepare(self.dtype)
        casts = [tensor.data_ptr() for layer in engine.layers for group in layer.groups for tensor in group.casts]
        if (now := (engine.rebuilt, *casts)) != self._built_for:
            self._buckets.clear()
            self._graphs.forget()
            self._built_for = now

    # ---- prompts -------------------------------------------------------------------------------------------------

    def read(self, prompts: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> None:
        """(place in the table, tokens, pages) of each prompt: one packed forward."""
        places, documents, pages = zip(*prompts, strict=True)
        lengths = [len(ids) for ids in documents]
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=self.device)
        place_T = torch.cat(
            [
                (torch.tensor(list(own))[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
                for own, length in zip(pages, lengths, strict=True)
            ]
        )
        pack = PackedDocuments(
            positions_T=torch.cat([torch.arange(length) for length in lengths]).to(self.device),
            cu_seqlens=bounds,
            longest=max(lengths),
        )
        where = torch.tensor(places, device=self.device)
        input_D = where + self.slots + 1
        cache = Prefill(self.states, place_T.to(self.device), bounds[1:].long(), bounds[:-1].long(), input_D)
        ids_T = torch.tensor([token for ids in documents for token in ids], device=self.device)
        self._last_rows[where] = self._hidden(ids_T, pack, cache, bounds[1:].long() - 1)

    # ---- answers -------------------------------------------------------------------------------------------------

    def start(self, answers: Sequence[Start]) -> Drawn:
        """Sets slots, and draws the first token of each answer."""
        slot = torch.tensor([one.slot for one in answers], device=self.device)
        prompt = torch.tensor([one.prompt for one in answers], device=self.device)
        pages, stops = self._pages.shape[1], self._stops.shape[1]
        for tensor, values in (
            (self._key, [one.key for one in answers]),
            (self._most, [one.most for one in answers]),
            (self._prompt_tokens, [one.prompt_tokens for one in answers]),
            (self._pages, [[*one.pages, *[0] * (pages - len(one.pages))] for one in answers]),
            (self._stops, [[*one.stops, *[-1] * (stops - len(one.stops))] for one in answers]),
        ):
            tensor[slot] = torch.tensor(values, dtype=tensor.dtype, device=self.device)
        self._rules.set(slot, [one.rule for one in answers])
        self._made[slot] = 0
        self._runs[slot] = True
        self.states.copy(prompt + self.slots + 1, slot)
        return self._drawn(self._last_rows[prompt], slot, truncates=any(one.rule.truncates for one in answers))

    def window(self, running: Sequence[Running], truncates: bool, keeps: bool = False) -> Window:
        """The next steps. `truncates`: whether a rule does. `keeps`: whether somebody wants the logits."""
        slots = [slot for prompt in running for slot in prompt.slots]
        row_of = {slot: row for row, slot in enumerate(slots)}
        segments = [
            (prompt.tokens, prompt.pages, [row_of[slot] for slot in prompt.slots[first : first + MEMBERS]])
            for prompt in running
            for first in range(0, len(prompt.slots), MEMBERS)
        ]
        bucket = self._bucket(len(slots), len(segments), max(len(pages) for _, pages, _ in segments), truncates, keeps)
        bucket.fill(slots, segments, self.slots)
        if not bucket.compared:
            self._compare(bucket, len(slots), truncates)
        assert bucket.step is not None
        for _ in range(self.steps):
            bucket.step()
        return Window(slots, bucket.drawn, bucket.rows_BD)

    def _bucket(self, rows: int, segments: int, pages: int, truncates: bool, keeps: bool) -> _Bucket:
        def made() -> _Bucket:
            bucket = _Bucket(rows, segments, pages, self.steps, self.slots, self.device)
            if keeps:
                bucket.rows_BD = self._last_rows.new_zeros(self.steps, rows, self._last_rows.shape[1])
            return bucket

        if not self.captures:
            bucket = made()
            bucket.step, bucket.compared = partial(self._step, bucket, truncates), True
            return bucket
        rows, segments = _rounded(rows, BUCKETS), _rounded(segments, BUCKETS)
        pages = 1 << (pages - 1).bit_length()
        key = (rows, segments, pages, truncates, keeps)
        if key not in self._buckets:
            bucket = self._buckets[key] = made()
            (bucket.step,) = self._graphs.captured(partial(self._step, bucket, truncates))
        return self._buckets[key]

    def _compare(self, bucket: _Bucket, rows: int, truncates: bool) -> None:
        """A graph's first step with the same one without it. A graph that reads what is gone draws something else in most rows;
        rounding changes a token in a thousand."""
        assert bucket.step is not None
        state = [self._token, self._made, self._runs, *self.states.at_places]
        before, found = [tensor.clone() for tensor in state], []
        for step in (partial(self._step, bucket, truncates), bucket.step):
            step()
            found.append([tensor[0, :rows].clone() for tensor in bucket.drawn[:2]])
            for tensor, kept in zip(state, before, strict=True):
                tensor.copy_(kept)
            for tensor in (bucket.at, *bucket.drawn):
                tensor.zero_()
        (tokens, log_probs), (replayed, of_replay) = found
        bucket.compared = True
        if float(((tokens == replayed) & ((log_probs - of_replay).abs() < APART)).float().mean()) <= ALIKE:
            say_once("answers are generated without CUDA graphs (slower): a replayed step differs from the same one without")
            self.captures = False
            bucket.step = partial(self._step, bucket, truncates)

    def _step(self, bucket: _Bucket, truncates: bool) -> None:
        """One more token for each row. A row that has ended draws on, into nowhere."""
        slot_B, rows = bucket.slot_B, len(bucket.slot_B)
        made_B, runs_B, before_B = self._made[slot_B], self._runs[slot_B], self._prompt_tokens[slot_B]
        own_B = (made_B - 1).clamp(min=0)  # the newest token's place among the answer's own
        page_B = self._pages[slot_B].gather(1, own_B[:, None] // PAGE)[:, 0].long()
        place_B = torch.where(runs_B, page_B * PAGE + own_B % PAGE, 0)
        position_B = before_B + own_B
        row_B = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        answers = Segments(self._pages[slot_B], (own_B + 1).int(), before_B.int(), row_B[:-1, None])
        cache = Step(self.states, place_B, position_B.int(), (bucket.prompts, answers), slot_B)
        pack = PackedDocuments(positions_T=position_B, cu_seqlens=row_B, longest=1)
        h_BD = self._hidden(self._token[slot_B], pack, cache)
        if bucket.rows_BD is not None:
            bucket.rows_BD.index_copy_(0, bucket.at, h_BD[None])
        drawn = self._drawn(h_BD, slot_B, truncates)
        for kept, found in zip(bucket.drawn, drawn, strict=True):
            kept.index_copy_(0, bucket.at, found[None].to(kept.dtype))
        bucket.at.add_(1)

    def _hidden(self, ids_T: Tensor, pack: PackedDocuments, cache: Prefill | Step, rows: Tensor | None = None) -> Tensor:
        engine = self.engine
        engine.buffers.forget()  # a layer that shares its buffer with no other would not load in a captured step
        spans_2T = spans(pack.cu_seqlens, len(ids_T))
        documents = Documents(
            pack.cu_seqlens,
            pack.longest,
            engine.positions.rotary(pack.positions_T, spans_2T),
            spans_2T,
            typical=pack.longest,
            query_scale_T=engine.positions.query_scale(pack.positions_T),
            chunks_S2=engine.positions.chunks(pack.cu_seqlens, len(ids_T)) if isinstance(cache, Prefill) else None,
            cache=cache,
        )
        return engine.prepared_hidden(engine.embed(ids_T).to(self.dtype), documents, rows)

    def _drawn(self, h_BD: Tensor, slot_B: Tensor, truncates: bool) -> Drawn:
        made_B = self._made[slot_B]
        logits_BV, terms = self.logits(h_BD), self.engine.lm.terms
        head = {"scale": terms["logit_scale"], "softcap": terms["softcap"] or 0.0}
        found = draw(logits_BV, self._rules.of(slot_B), self._key[slot_B], made_B, truncates=truncates, **head)
        ends_B = (found.token_B[:, None] == self._stops[slot_B]).any(1) | (made_B + 1 >= self._most[slot_B])
        runs_B = self._runs[slot_B]
        self._token[slot_B] = found.token_B
        self._made[slot_B] = made_B + runs_B
        self._runs[slot_B] = runs_B & ~ends_B
        return found

    def first_row(self, prompt: int) -> Tensor:
        return self._last_rows[prompt]

    def log_probs(self, h_BD: Tensor) -> Tensor:
        """Those of the whole vocabulary, without a temperature."""
        terms = self.engine.lm.terms
        logits_BV, softcap = self.logits(h_BD) * terms["logit_scale"], terms["softcap"]
        if softcap:
            logits_BV = softcap * torch.tanh(logits_BV / softcap)
        return torch.log_softmax(logits_BV, -1)

    def logits(self, h_BD: Tensor) -> Tensor:
        """float32, before the head's scale and soft-cap."""
        x_BD, weight, bias = self.engine.lm.inputs(h_BD)
        if x_BD.is_cuda and x_BD.dtype != torch.float32:
            logits = torch.mm(x_BD, weight.T, out_dtype=torch.float32)
            return logits if bias is None else logits.add_(bias.float())
        return F.linear(x_BD, weight, bias).float()
