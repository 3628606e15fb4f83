"""The longest document of a budget: it fits, and one that is a little longer does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.bench.workloads import MODELS
from pronghorn.errors import RecipeError
from pronghorn.kernels.runtime.dispatch import CHIPS, Target
from pronghorn.memory import job as job_module
from pronghorn.memory.costs import predicted_costs
from pronghorn.memory.dry_run import held
from pronghorn.memory.forecast import max_context_report, problem_of
from pronghorn.memory.gpus import find_gpu
from pronghorn.memory.job import Job, shape_of
from pronghorn.memory.levels import Problem
from pronghorn.memory.max_context import EXACT, STEP, max_context, with_one_document
from pronghorn.memory.plan import make_plan, smallest_budget
from pronghorn.recipe import Recipe
from tables import first_of

H200 = find_gpu("h200")


@pytest.fixture(autouse=True)
def _few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of an MLP is run: 32 of them, many times over, would be the most of this file's time."""
    monkeypatch.setattr(job_module, "MOST_PIECES", 4)


def problem(budget: float, host: float = 0.0, **changes: Any) -> Problem:
    job = Job(shape_of(MODELS["tiny"] | {"num_hidden_layers": 8}), 4096, "qlora", **changes)
    return problem_of(job, predicted_costs(job, H200), int(budget), int(host))


@pytest.mark.parametrize(("budget", "host"), first_of([(200e6, 1e9), (400e6, 20e6), (200e6, 0)], 2))
def test_the_answer_fits_and_hardly_more_does(budget: float, host: float) -> None:
    asked = problem(budget, host)
    tokens = max_context(asked)
    assert tokens % STEP == 0
    assert make_plan(with_one_document(asked, tokens)).needed_bytes <= asked.usable
    with pytest.raises(RecipeError):
        make_plan(with_one_document(asked, tokens + tokens // EXACT + STEP))


def test_more_memory_is_a_longer_document() -> None:
    lengths = [max_context(problem(budget)) for budget in (150e6, 300e6)]
    assert sorted(set(lengths)) == lengths
    assert max_context(problem(50e6)) == 0
    assert max_context(problem(300e6, 2e9)) > lengths[1]


def test_one_document_a_micro_batch() -> None:
    one = with_one_document(problem(1e9, loss_rows=1024), 65536)
    assert (one.job.capacity, one.job.attended, one.job.documents) == (65536, 65536, 32)
    assert one.job.loss_rows == 16384  # a quarter, as before
    assert smallest_budget(one) > smallest_budget(problem(1e9, loss_rows=1024))


def test_the_report_is_of_that_length() -> None:
    def recipe(budget: str) -> Recipe:
        return Recipe.model_validate(
            {"model": "tiny", "method": "qlora", "data": {"train": ["x"]}, "memory": {"budget": budget}}
        )

    found = max_context_report(recipe("200MB"), MODELS["tiny"], gpu="h200")
    assert (
        found.as_dict()["capacity"]
        == found.step_tokens
        == max_context(
            problem_of(Job(shape_of(MODELS["tiny"]), 16384, "qlora"), found.plan.problem.costs, 200 * 10**6, 64 * 10**9)
        )
    )
    assert f"{found.step_tokens:,} tokens per step" in found.text()
    with pytest.raises(RecipeError, match="is too little"):
        max_context_report(recipe("20MB"), MODELS["tiny"], gpu="h200")


def test_nothing_overflows_where_a_tensor_has_more_elements_than_an_int32_counts() -> None:
    """Half a million tokens of an 8B model: sizes stay proportional to the tokens."""
    job = Job(shape_of(MODELS["llama-8b"]), 16384, "qlora", graphed=False, target=Target(CHIPS[8, 0]))
    asked = problem_of(job, predicted_costs(job, H200), 10**9, 10**12)
    needed = [
        smallest_budget(replace(with_one_document(asked, tokens), pieces=(4,), embeddings=(True,)))
        for tokens in (262144, 524288, 1048576)
    ]
    assert needed[2] - needed[1] == pytest.approx(2 * (needed[1] - needed[0]), rel=1e-3)


def test_ranks_that_share_a_document_have_room_for_a_longer_one() -> None:
    """A rank saves its part of everything; what all keys and values take stays for one layer at a time."""
    alone, shared = (problem(300e6, context=context) for context in (1, 4))
    for level in ("gate_up", "nothing"):
        whole, part = (held(with_one_document(one, 65536).job, level) for one in (alone, shared))
        assert part.saved <= (1 / 4 + 0.1) * whole.saved
        assert part.forward < whole.forward
    lengths = [max_context(one) for one in (alone, shared)]
    assert 2 * lengths[0] < lengths[1] < 4 * lengths[0]
    assert lengths[1] % (4 * STEP) == 0
    tokens = lengths[1]
    assert make_plan(with_one_document(shared, tokens)).needed_bytes <= shared.usable
    with pytest.raises(RecipeError):
        make_plan(with_one_document(shared, tokens + tokens // EXACT + 4 * STEP))
