"""How captures that fail are repeated and told. Captures as such need a GPU: test_captured_layers.py, test_graphed_step.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pronghorn.model.capture import Graphs, Work, first_line
from tables import table


class Failing(Graphs):
    """Captures as on a GPU, of which the first few fail."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        self.told: list[Exception] = []
        super().__init__(torch.device("cpu"), failed=self.told.append)
        self.captures, self.errors, self.trials = True, list(errors), 0

    def attempt(self, work: Work) -> None:
        self.trials += 1

    def capture(self, works: Sequence[Work]) -> list[Work]:
        if self.errors:
            raise self.errors.pop(0)
        return [replayed for _ in works]


def replayed() -> None:
    pass


def work() -> None:
    pass


def broken() -> RuntimeError:
    """As torch tells it: the error that came first is behind the one that says so."""
    try:
        try:
            raise RuntimeError("CUDA error: not permitted while capturing\nmore of it")
        finally:
            raise RuntimeError("CUDA error: failed due to a previous error during capture")
    except RuntimeError as error:
        return error


@table(
    ("errors", "tried", "trials"),
    [([], False, 1), ([], True, 0), ([broken()], False, 2), ([broken()], True, 1), ([broken(), broken()], True, 2)],
)
def test_a_capture_that_fails_is_repeated_after_a_trial(errors: list[Exception], tried: bool, trials: int) -> None:
    graphs = Failing(errors)
    graphs.tried = tried
    assert graphs.captured(work) == [replayed]
    assert (graphs.trials, graphs.told, graphs.captures) == (trials, [], True)


def test_one_that_goes_on_failing_is_told_with_its_first_error() -> None:
    graphs = Failing([broken(), broken()])
    assert graphs.captured(work) == [work]
    assert [first_line(error) for error in graphs.told] == ["CUDA error: not permitted while capturing"]
    assert graphs.captured(work) == [work]  # and no more of them are tried
    assert graphs.trials == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_the_capture_after_a_failed_one_works() -> None:
    told: list[Exception] = []
    graphs, total, calls = Graphs(torch.device("cuda", 0), failed=told.append), torch.zeros(4, device="cuda"), list[bool]()

    def add() -> None:
        calls.append(torch.cuda.is_current_stream_capturing())
        total.add_(1)
        if calls == [False, True]:
            torch.cuda.synchronize()  # not permitted while capturing

    (replay,) = graphs.captured(add)
    assert (calls, told, graphs.captures) == ([False, True, False, True], [], True)
    replay()
    assert total.tolist() == [3.0] * 4  # two trials and the replay
