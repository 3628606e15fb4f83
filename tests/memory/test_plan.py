"""The planner against brute force over every level of every layer, in every order; budgets; notches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from real_layers import recomputing

from benchmarks.bench.workloads import MODELS
from pronghorn.errors import EnvironmentFault, RecipeError
from pronghorn.memory.costs import predicted_costs
from pronghorn.memory.forecast import problem_of as problem_for
from pronghorn.memory.gpus import GPUS
from pronghorn.memory.job import LEVELS, Job, peak_within, shape_of
from pronghorn.memory.levels import KEEP, Problem, Tables, evaluate
from pronghorn.memory.plan import host_room, make_plan, parse_budget, smallest_budget
from tables import table

GB = 10**9
HOST = 64 * GB


def problem_of(
    layers: int = 32, budget: float = 1000, host: int = HOST, pieces: tuple[int, ...] = (1,), **costs: float
) -> Problem:
    job = Job(shape_of(MODELS["llama-8b"] | {"num_hidden_layers": layers}), 16384)
    foretold = predicted_costs(job, GPUS["h200"])
    kind = replace(foretold.kinds[0], **{name: costs.pop(name) for name in ("recompute",) if name in costs})  # type: ignore[arg-type]
    foretold = replace(foretold, kinds=(kind,))
    return Problem(job, replace(foretold, **costs), int(budget * GB), host, pieces)  # type: ignore[arg-type]


def everything(problem: Problem) -> list[tuple[float, float, float]]:
    """(ms, host, peak) of all assignments of a choice to each layer, in all orders, and all pieces."""
    levels = np.array(list(itertools.product(range(len(LEVELS)), repeat=problem.job.shape.layers)))
    leaves = np.array(list(itertools.product((False, True), repeat=problem.job.shape.layers)))
    each = np.repeat(levels, len(leaves), axis=0), np.tile(leaves, (len(levels), 1))
    found = [Tables(problem, pieces).outcomes(*each) for pieces in problem.pieces]
    return [row for one in found for row in zip(one.ms.tolist(), one.host.tolist(), one.peak.tolist(), strict=True)]


COSTS: dict[str, dict[str, float]] = {
    "this link": {},
    "a slow link": {"to_host": 8e6, "from_host": 6e6},
    "a fast link": {"to_host": 4e8, "from_host": 4e8},
    "recomputing is dear": {"recompute": recomputing(30.0, 30.5, 31.0)},
    "attention is dear": {"recompute": recomputing(4.0, 9.0, 40.0)},
}


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_no_assignment_of_levels_is_faster(costs: dict[str, float]) -> None:
    outcomes, met = everything(problem_of(4, **costs)), 0
    for host in (0, 2 * GB, HOST):
        least = smallest_budget(problem_of(4, host=host, **costs)) / GB
        for more in (-0.01, 0.001, 0.5, 1.2, 2.1, 3.3, 6):
            problem = problem_of(4, least + more, host, **costs)
            fitting = [(ms, bytes_) for ms, bytes_, peak in outcomes if peak <= problem.budget and bytes_ <= host]
            if not fitting:
                with pytest.raises(RecipeError):
                    make_plan(problem)
                continue
            plan = make_plan(problem)
            assert plan.ms == pytest.approx(min(fitting)[0])
            assert plan.host_bytes == min(bytes_ for ms, bytes_ in fitting if ms < plan.ms + 1e-9)
            assert plan.needed_bytes <= problem.budget
            met += 1
    assert met >= 18


@table("host", [0, GB, 3 * GB, HOST])
@table("costs", [{}, COSTS["attention is dear"]])
def test_the_smallest_budget_is_the_smallest(host: int, costs: dict[str, float]) -> None:
    problem = problem_of(3, host=host, pieces=(1, 2), **costs)
    least = smallest_budget(problem)
    assert least == min(peak for _, bytes_, peak in everything(problem) if bytes_ <= host)
    assert make_plan(replace(problem, budget=least)).needed_bytes == least
    with pytest.raises(RecipeError):
        make_plan(replace(problem, budget=least - 1))


def test_more_memory_is_never_slower_and_is_used() -> None:
    plans = [make_plan(problem_of(32, budget)) for budget in (24, 32, 50, 80)]
    times = [plan.ms for plan in plans]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.1 * times[-1]
    assert plans[-1].counts() == {KEEP: 32}
    assert plans[-1].reasons == ("all activations fit: nothing is recomputed",)
    for plan in plans:
        assert len(plan.choices) == 32
        assert plan.needed_bytes <= plan.problem.budget
        assert plan.host_bytes <= HOST
        assert plan.peak_bytes == evaluate(plan.problem, plan.choices, plan.pieces).peak


def test_where_the_link_is_slow_nothing_leaves() -> None:
    fast, slow = make_plan(problem_of(32, 40)), make_plan(problem_of(32, 40, to_host=1e6, from_host=1e6))
    assert fast.offloaded
    assert not slow.offloaded
    assert slow.host_bytes == slow.slot_bytes == 0
    assert not make_plan(problem_of(32, 40, host=0)).offloaded
    some = make_plan(problem_of(32, 40, host=5 * GB))
    assert 0 < some.host_bytes <= 5 * GB


def test_pieces_make_smaller_budgets_possible() -> None:
    one, several = problem_of(12, pieces=(1,)), problem_of(12, pieces=(1, 2, 4, 8))
    assert smallest_budget(several) < smallest_budget(one) - GB
    assert make_plan(replace(several, budget=smallest_budget(several))).pieces > 1
    assert make_plan(several).pieces == 1  # with room, the MLP is done at once


def test_embeddings_leave_only_where_memory_needs_it() -> None:
    problem = replace(problem_of(8, pieces=(1, 4)), embeddings=(False, True))
    stay = replace(problem, embeddings=(False,))
    bytes_of_them = 128256 * 4096 * 2
    least = smallest_budget(problem)
    assert least == smallest_budget(stay) - bytes_of_them
    tight = make_plan(replace(problem, budget=least))
    assert tight.problem.job.host_embeddings
    assert tight.as_dict()["host_embeddings"]
    assert any("embeddings stay in host RAM (1.1 GB pinned)" in reason for reason in tight.reasons)
    assert not make_plan(problem).problem.job.host_embeddings
    a_little_short = make_plan(replace(problem, budget=make_plan(problem).needed_bytes - 1))
    assert a_little_short.problem.job.host_embeddings  # 2.4 ms over the link, and every layer keeps everything
    assert a_little_short.counts() == {KEEP: 8}
    assert a_little_short.ms == pytest.approx(make_plan(problem).ms + 16384 * 4096 * 2 / problem.costs.from_host)
    assert a_little_short.one_notch_lower().problem.job.host_embeddings  # what left does not come back
    assert smallest_budget(replace(problem, host=10**9)) == smallest_budget(replace(stay, host=10**9))  # no room for them there


def test_a_margin_is_left_for_what_nobody_foretold() -> None:
    problem = replace(problem_of(8, pieces=(1, 4)), margin=0.02)
    least = smallest_budget(problem)
    assert least == pytest.approx(smallest_budget(replace(problem, margin=0.0)) / 0.98, abs=2)
    assert make_plan(replace(problem, budget=least)).needed_bytes <= 0.98 * least
    with pytest.raises(RecipeError):
        make_plan(replace(problem, budget=least - 2))


def test_an_8b_model_trains_within_18_gb_and_every_larger_budget_is_faster() -> None:
    job = Job(shape_of(MODELS["llama-8b"]), 16384)
    costs, budgets = predicted_costs(job, GPUS["h200"]), (18, 20, 24, 40, 80)
    plans = [make_plan(problem_for(job, costs, budget * GB, HOST)) for budget in budgets]
    times = [plan.ms for plan in plans]
    assert times == sorted(set(times), reverse=True)
    for plan, budget in zip(plans, budgets, strict=True):
        assert plan.needed_bytes <= 0.99 * budget * GB


def test_too_little_is_told_with_what_would_do() -> None:
    problem = problem_of(32, 12)
    with pytest.raises(RecipeError) as caught:
        make_plan(problem)
    said = str(caught.value)
    least = smallest_budget(problem)
    assert f"{-(-least // 10**8) / 10:.1f} GB" in said
    assert caught.value.fix.startswith("set method: qlora (")  # what fits comes first, and half the tokens do not
    assert "train.capacity" not in said
    assert caught.value.fix.endswith(f"or memory.budget: {-(-least // 10**8) / 10:.1f}GB if the GPU has it")
    nothing = problem_of(32, 3)  # where nothing fits: what helps
    half = replace(nothing, job=nothing.job.with_capacity(8192))
    with pytest.raises(RecipeError, match=rf"8192 \({-(-smallest_budget(half) // 10**8) / 10:.1f} GB\)"):
        make_plan(nothing)


def test_notch_by_notch_down_to_the_smallest_plan() -> None:
    plan, notches = make_plan(problem_of(14, 80)), 0
    least = smallest_budget(plan.problem)
    while plan.needed_bytes > least:
        lower = plan.one_notch_lower()
        assert lower.peak_bytes < plan.peak_bytes
        assert lower.ms >= plan.ms
        assert any("did not fit, so this plan is smaller" in reason for reason in lower.reasons)
        plan, notches = lower, notches + 1
    assert 5 < notches < 60
    with pytest.raises(EnvironmentFault, match="no plan needs less"):
        plan.one_notch_lower()


@table(
    ("text", "expected"),
    [
        ("24GB", 24 * GB),
        ("24 GiB", 24 * 2**30),
        ("500MB", 5 * 10**8),
        ("512MiB", 2**29),
        ("1.5GB", 15 * 10**8),
        ("80%", peak_within(64 * GB)),
        ("auto", peak_within(int(70 * GB * 0.97))),
    ],
)
def test_budgets_are_read(text: str, expected: int) -> None:
    assert parse_budget(text, 80 * GB, 70 * GB) == expected


@pytest.mark.parametrize(("text", "said"), [("100GB", "exceeds the GPU"), ("120%", "exceeds"), ("lots", "not a budget")])
def test_budgets_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        parse_budget(text, 80 * GB)


def test_the_host_tells_its_room(tmp_path: Path) -> None:
    assert 0 <= host_room() < 10**14
    assert host_room(tmp_path) == 0  # a system that does not tell
    (tmp_path / "proc").mkdir()

    def free(gigabytes: int) -> int:
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {gigabytes * 10**9 // 1024} kB\n")
        return host_room(tmp_path)

    assert free(20) == pytest.approx(12e9, rel=1e-6)
    assert free(124) == pytest.approx(100e9, rel=1e-6)
    container = tmp_path / "sys/fs/cgroup"
    container.mkdir(parents=True)
    for name, text in (("max", "max\n"), ("current", f"{30 * 10**9}\n"), ("stat", f"anon 5\nfile {10**9}\n")):
        (container / f"memory.{name}").write_text(text)
    assert free(124) == pytest.approx(100e9, rel=1e-6)
    (container / "memory.max").write_text(f"{49 * 10**9}\n")
    assert free(124) == pytest.approx(12e9, rel=1e-6)


@table("gpu", ["h100", "rtx-pro-6000", "h200", "b200"])
def test_where_everything_fits_nothing_leaves(gpu: str) -> None:
    """Copies that hide behind compute cost nothing, but they are for nothing, too: not even a rounded sum may favour them."""
    job = Job(shape_of(MODELS["llama-8b"]), 16384)
    problem = Problem(job, predicted_costs(job, GPUS[gpu]), 82 * GB, HOST)
    assert make_plan(problem).counts() == {KEEP: 32}
    less = make_plan(replace(problem, budget=make_plan(problem).needed_bytes - 1))
    assert less.choices.count(KEEP) == 28  # two layers wait in buffers and one is on its way: four must leave to save one
