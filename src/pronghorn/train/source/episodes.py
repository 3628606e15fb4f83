"""Episodes of several turns as tokens: what the model answered carries loss, what the user's code added does not.

A conversation is kept as token ids and only ever grows. What an episode asks is the whole of it so far: messages, a text, or
token ids. It has to begin with what was asked and answered before, and only what follows is rendered and tokenized: a history
that is rendered again may have other tokens than those that the model drew. Between an answer and a new message stands what the
chat template puts there, found by rendering a marker in place of the answer.
"""

from __future__ import annotations

import json
import math
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pronghorn.data.encode.encode import Encoder
from pronghorn.data.read.formats import Example
from pronghorn.data.template.rendering import applied, special_tokens
from pronghorn.errors import CommandError, DataError, counted
from pronghorn.generation.generator import Completion, Request
from pronghorn.generation.sampling import Sampling, key_of
from pronghorn.hf_types import Tokenizer
from pronghorn.recipe import Recipe
from pronghorn.rewards.episodes import Asked, EpisodePool
from pronghorn.rewards.pool import Fault, Reward
from pronghorn.rewards.scoring import GB, Scored

SURROGATES = re.compile("[\ud800-\udfff]")
EPISODE = "episode"  # the reward that it returns, in figures
SHORT = "a short answer"  # of a row without an expected one, when the episode is tried
MARKER = "the-answer-stands-here"
GROWS = "an episode asks the whole conversation so far: what it asked before, the answer, and what is new"
Generate = Callable[[Sequence[Request]], list[list[Completion]]]


@dataclass
class Episode:
    key: tuple[int, ...]  # seed, side, prompt and sample; the turn makes it an answer's
    ids: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)  # of answers
    log_probs: list[float] = field(default_factory=list)  # of their tokens
    text: str = ""  # of the last answer
    ended: bool = False
    turns: int = 0
    said: Any = None  # what was asked last
    tools: Any = None
    reward: Reward = None

    @property
    def answer(self) -> Completion:
        """All answers as one."""
        return Completion([token for a, b in self.runs for token in self.ids[a:b]], self.log_probs, self.log_probs, self.ended)


def returned_by(episode: Episode) -> Scored | None:
    """Its own reward, or why it has none; None: the recipe's rewards score its last answer."""
    if isinstance(episode.reward, Fault):
        return Scored(None, {}, f"{EPISODE}: {episode.reward.what}")
    if not episode.turns:
        return Scored(None, {}, f"{EPISODE}: it ended without an answer")
    return None if episode.reward is None else Scored(episode.reward, {EPISODE: episode.reward})


class Episodes:
    def __init__(self, file: Path, recipe: Recipe, tokenizer: Tokenizer) -> None:
        spec = recipe.answering
        memory = int(spec.reward_memory * GB)
        self._pool = EpisodePool(file, workers=spec.reward_workers, seconds=spec.reward_seconds, memory=memory)
        weakref.finalize(self, self._pool.close)
        self._tokenizer, self._encoder = tokenizer, Encoder(tokenizer)
        self._controls = None if recipe.data.control_tokens == "keep" else special_tokens(tokenizer)
        self._most, self._new = recipe.data.max_length, spec.max_new_tokens

    def play(
        self,
        generate: Generate,
        rows: Sequence[dict[str, Any]],
        keys: Sequence[tuple[int, ...]],
        rule: Sampling,
        stops: Sequence[int],
    ) -> list[Episode]:
        episodes = [Episode(key) for key in keys]

        def answer(asked: Sequence[Asked]) -> list[dict[str, Any]]:
            told: dict[int, dict[str, Any]] = {}
            wanted: dict[tuple[int, ...], list[int]] = {}  # episodes by what they ask: a prompt is read once for all of them
            for number, said in asked:
                try:
                    wanted.setdefault(tuple(self._grown(episodes[number], said["ask"], said["tools"])), []).append(number)
                except DataError as error:
                    told[number] = {"refused": error.what + (f" ({error.why})" if error.why else "")}
            requests = [
                Request(
                    ids, [key_of(*episodes[number].key, episodes[number].turns) for number in numbers],
                    min(self._new, self._most - len(ids)), rule, stops,
                )
                for ids, numbers in wanted.items()
            ]  # fmt: skip
            for request, numbers, found in zip(requests, wanted.values(), generate(requests), strict=True):
                for number, one in zip(numbers, found, strict=True):
                    told[number] = self._taken(episodes[number], request.prompt, one)
            return [told[number] for number, _ in asked]

        for episode, reward in zip(episodes, self._pool.play(rows, answer), strict=True):
            episode.reward = reward
        return episodes

    def tried(self, rows: Sequence[dict[str, Any]], expected: Sequence[str | None]) -> str:
        """What it says of some rows when `ask` gives their expected answers, or a short text where there is none. Refuses one
        that fails on all of them."""
        played = []
        for row, text in zip(rows, expected, strict=True):
            ids = self._tokens(text if text and text.strip() else SHORT)

            def generate(requests: Sequence[Request], ids: list[int] = ids) -> list[list[Completion]]:
                drawn = [ids[: one.max_new_tokens] for one in requests]
                return [[Completion(one, [0.0] * len(one), [], len(one) == len(ids))] for one in drawn]

            played += self.play(generate, [row], [(0,)], Sampling(), [])
        scored = [returned_by(one) for one in played]
        faults = [one.fault for one in scored if one is not None and one.fault]
        if len(faults) == len(played):
            raise CommandError(
                what=f"the episode failed on all of {counted(len(played), 'row')} that it was tried on: {faults[0]}",
                why="`ask` gave the rows' expected answers, or a short text",
                fix="fix the episode; where it cannot use an answer, return a number instead of raising. Each row has the "
                "columns " + ", ".join(sorted(rows[0])),
            )
        values = [one.total for one in scored if one is not None and one.total is not None]
        worth = f"{math.fsum(values) / len(values):.4g} on average" if values else "left to the rewards of the recipe (None)"
        turns = f"{sum(one.turns for one in played) / len(played):.3g} turns each"
        failed = f"; failed on {counted(len(faults), 'row')}: {faults[0]}" if faults else ""
        return f"{EPISODE}: {worth}, for expected answers to {counted(len(played), 'prompt')}, {turns}{failed}"

    def _taken(self, episode: Episode, asked: Sequence[int], answer: Completion) -> dict[str, Any]:
        start = len(asked)
        if episode.runs and episode.runs[-1][1] == start:  # nothing stands between two answers
            start = episode.runs.pop()[0]
        episode.ids = [*asked, *answer.tokens]
        episode.runs.append((start, len(episode.ids)))
        episode.log_probs += answer.log_probs
        episode.text, episode.ended = str(self._tokenizer.decode(answer.tokens, skip_special_tokens=True)), answer.ended
        episode.turns += 1
        return {"text": episode.text, "ids": answer.tokens, "history": episode.ids, "ended": answer.ended}

    def _grown(self, episode: Episode, said: object, tools: object) -> list[int]:
        """The tokens of all that is asked. Raises DataError."""
        before, first = episode.said, episode.turns == 0
        if not first and (type(said) is not type(before) or (tools is not None and tools != episode.tools)):
            raise DataError(GROWS, why="it has another form, or other tools")
        if not isinstance(said, str | list) or not said or not isinstance(tools, list | None):
            raise DataError("ask(...) takes messages, a text or token ids, and a list of tools", why=f"it got {said!r:.100}")
        if SURROGATES.search(json.dumps([said, tools], ensure_ascii=False)):
            raise DataError("a text has half a letter", why="surrogates such as \\ud800 have no tokens")
        if isinstance(said, str):
            ids = self._of_text(episode, said)
        elif all(type(one) is int for one in said):
            if said[: len(episode.ids)] != episode.ids or not all(0 <= one < len(self._tokenizer) for one in said):
                raise DataError(GROWS, why="its token ids do not begin with the last answer's `history`, or are none")
            ids = said
        else:
            ids = self._of_messages(episode, said, tools)
        if len(ids) >= self._most:
            raise DataError(f"no room for an answer: {len(ids)} tokens of data.max_length {self._most} are taken")
        episode.said, episode.tools = said, tools if first else episode.tools
        return ids

    def _of_text(self, episode: Episode, said: str) -> list[int]:
        if episode.turns == 0:
            return self._encoder.prompt_ids(Example("completion", "an episode", prompt=said))
        before = episode.said + episode.text
        if not said.startswith(before):
            raise DataError(GROWS, why="its text does not begin with the last one and its answer")
        return [*episode.ids, *self._tokens(said[len(before) :])]

    def _of_messages(self, episode: Episode, said: list[Any], tools: Any) -> list[int]:
        if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in said):
            raise DataError("a message is {role: ..., content: ...}", why=f"it got {said!r:.100}")
        count = len(episode.said or ())
        new = said if episode.turns == 0 else said[count + 1 :]
        for message in new:
            if self._controls and (found := self._controls.search(str(message.get("content") or ""))):
                raise DataError(f"a message has the control token {found[0]}", why="it would begin or end turns; remove it")
        if episode.turns == 0:
            given = tuple(tools) if tools else None
            return self._encoder.prompt_ids(Example("chat", "an episode", messages=tuple(said), tools=given))
        (old,) = said[count : count + 1] or [{}]
        if said[:count] != episode.said or (old.get("role"), old.get("content")) != ("assistant", episode.text) or not new:
            raise DataError(GROWS, why="its messages do not begin with the last ones and their answer, or none is new")
        shown = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARKER}, *new]
        text = str(applied(self._tokenizer, shown, tokenize=False))
        if text.count(MARKER) != 1:
            raise DataError("the chat template does not render an answer before these messages as it is")
        after = self._tokens(text.partition(MARKER)[2])
        return [*episode.ids, *(after[1:] if episode.ended and after[:1] == episode.ids[-1:] else after)]

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return found
