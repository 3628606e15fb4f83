"""The metrics of a recipe (`eval.metrics`): what an answer scores beside the expected one, from 0 to 1, more is better.

    exact_match   the same text: in Unicode's composed form (NFC), without white space around it, runs of it as one space.
                  Case and punctuation count
    json_valid    all of the answer is JSON
    json_match    all of the answer is JSON, and the same value as the expected one; the order of keys is free, 412 is not "412"
    json_fields   of all fields that the two have, the share that both have with the same value
    regex         `eval.regex` with a group: what it finds last in the answer is what it finds last in the expected answer;
                  without a group: it is found in the answer. nan where that takes too long
    rouge_l       ROUGE-L (rouge.py)

`multiple_choice` asks the model how likely each choice is (choices.py). What a model thinks first does not count: a text is
judged from its last `</think>` on.
"""

from __future__ import annotations

import math
import re
import signal
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pronghorn.errors import DataError
from pronghorn.evaluation import strict_json
from pronghorn.evaluation.rouge import rouge_l

Scores = dict[str, float]
Judge = Callable[[str, str, str], Scores]  # prompt, expected, answer

THOUGHT = "</think>"
PATTERN_SECONDS = 1.0  # of CPU time, for a pattern and a text: (a+)+$ tries 2^n ways on n letters that do not end as it says
SLOW = f"the pattern took longer than {PATTERN_SECONDS:g} s"


def final_part(text: str) -> str:
    return text.rpartition(THOUGHT)[2].strip()


def normalized(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def exact_match(expected: str, answer: str) -> float:
    return float(normalized(expected) == normalized(answer))


def json_valid(expected: str, answer: str) -> float:
    return float(strict_json.is_json(answer))


def json_match(expected: str, answer: str) -> float:
    return float(strict_json.is_json(answer) and strict_json.same(strict_json.parse(expected), strict_json.parse(answer)))


def json_fields(expected: str, answer: str) -> float:
    if not strict_json.is_json(answer):
        return 0.0
    wanted, given = (strict_json.fields(strict_json.parse(text)) for text in (expected, answer))
    right = sum(path in given and strict_json.same(value, given[path]) for path, value in wanted.items())
    return right / len(wanted.keys() | given.keys())


def found(pattern: re.Pattern[str], text: str) -> str | None:
    """What the pattern finds last: its first group that took part, or all of it. DataError where that takes too long."""
    try:
        with _limited(PATTERN_SECONDS):
            matches = list(pattern.finditer(text))
    except TimeoutError:
        raise DataError(
            f"{SLOW}: {pattern.pattern!r:.200}",
            why=f"it tries very many ways to match a text that begins with {text[:80]!r}",
            fix="avoid repeats of repeats, such as (a+)+, and several .* in a row",
        ) from None
    if not matches:
        return None
    return next((group for group in matches[-1].groups() if group is not None), matches[-1].group())


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """TimeoutError after so much CPU time of this thread. `re` looks for signals while it matches. Python's handlers run in the
    main thread only, which is where answers are judged; in another there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began, running = time.thread_time(), True

    def look(*_: object) -> None:
        if running and time.thread_time() - began > seconds:  # the timer counts other threads' time, too
            raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 10)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if before is None else before)


def regex(pattern: re.Pattern[str]) -> Callable[[str, str], float]:
    def one(expected: str, answer: str) -> float:
        try:
            said = found(pattern, answer)
            return float(said is not None and (not pattern.groups or said == found(pattern, expected)))
        except DataError:
            return math.nan

    return one


TEXT_METRICS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "json_valid": json_valid,
    "json_match": json_match,
    "json_fields": json_fields,
    "rouge_l": rouge_l,
}
NEED_JSON = ("json_match", "json_fields")  # of the expected answers


def judge_of(names: Sequence[str], pattern: str | None = None) -> Judge:
    """One judge for all metrics of texts among `names`."""
    chosen = {name: TEXT_METRICS[name] for name in names if name in TEXT_METRICS}
    if "regex" in names:
        chosen["regex"] = regex(re.compile(pattern or ""))

    def judge(prompt: str, expected: str, answer: str) -> Scores:
        wanted, said = final_part(expected), final_part(answer)
        return {name: score(wanted, said) for name, score in chosen.items()}

    return judge
