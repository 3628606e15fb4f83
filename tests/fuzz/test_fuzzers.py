"""A few mutations of each subject (`make fuzz` has thousands), and that the judge sees what it is there to see."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fuzz import adapter_folders, cache_bits, data_files, preference_files, recipe_files, selection_files, tool_configs
from fuzz.outcomes import BAD, Tally, judged, mutated_bytes, mutated_value
from pronghorn.errors import DataError, EnvironmentFault, HealthStop


@pytest.mark.parametrize(("subject", "count"), [
    (cache_bits, 4), (data_files, 8), (preference_files, 6), (recipe_files, 10), (tool_configs, 20), (adapter_folders, 6),
    (selection_files, 6),
], ids=lambda one: getattr(one, "__name__", None))  # fmt: skip
def test_nothing_bad_comes_of_a_damaged_file(
    subject: object, count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes = subject.fuzz(count, 1, tmp_path)  # type: ignore[attr-defined]
    assert sum(outcomes.values()) == count
    assert not [outcome for outcome in BAD if outcomes[outcome]], capfd.readouterr().err
    assert outcomes["rebuilt" if subject is cache_bits else "refused"] > count // 4  # the mutations do reach something


def refuse(error: Exception) -> str:
    raise error


def run_away() -> str:
    while True:
        pass


def test_the_judge_knows_every_outcome() -> None:
    assert judged(lambda: "same") == ("same", "")
    assert judged(lambda: "silent\nother rows") == ("silent", "other rows")
    for clean in (DataError("no"), EnvironmentFault("no")):
        assert judged(lambda clean=clean: refuse(clean))[0] == "refused"  # type: ignore[misc]
    assert judged(lambda: refuse(HealthStop("no")))[0] == "traceback"
    outcome, detail = judged(lambda: refuse(IndexError("17")))
    assert (outcome, "IndexError: 17" in detail, "test_fuzzers.py" in detail) == ("traceback", True, True)
    assert judged(lambda: str(os.kill(os.getpid(), signal.SIGKILL))) == ("crash", "SIGKILL")
    assert judged(lambda: os._exit(3)) == ("crash", "exit code 3")
    assert judged(run_away, seconds=0.2)[0] == "hang"


def test_a_bad_outcome_tells_how_to_see_it_again(capfd: pytest.CaptureFixture[str]) -> None:
    tally = Tally("subject", 1, seed=7)
    tally.add(3, "byte 9 is b'x'", lambda: refuse(KeyError("a")))
    assert tally.outcomes == {"traceback": 1}
    assert "traceback: subject --seed 7, mutation 3: byte 9 is b'x': KeyError: 'a'" in capfd.readouterr().err
    assert tally.random(3).random() == Tally("subject", 100, seed=7).random(3).random() != tally.random(4).random()


def test_mutations_change_one_thing_and_say_which() -> None:
    tally = Tally("subject", 1, seed=0)
    rows = [{"a": {"b": [1, 2]}}]
    for number in range(300):
        chance = tally.random(number)
        for content in (b"some bytes", b""):
            changed, what = mutated_bytes(content, chance)
            assert isinstance(changed, bytes)
            assert what
        assert mutated_value(rows, chance)[1]
    assert rows == [{"a": {"b": [1, 2]}}]
