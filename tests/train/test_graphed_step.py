"""The graphed step: on a CPU its functions run without capture; on a GPU the same tests replay graphs."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from pronghorn.data.pack.batches import Shapes
from pronghorn.data.pack.loader import BatchLoader, StepBatch, StepPacking
from pronghorn.data.pack.packing import pack
from pronghorn.model.causal_lm import install
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.graphed_step import GraphedStep
from pronghorn.train.step.step import EagerStep, StepResult
from samples import ListTable, small
from tables import first_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
CAPACITY = 512
SMALL = small(hidden_size=64, intermediate_size=128, head_dim=16)


def model_of(kind: str = "llama", *, dtype: torch.dtype = torch.float32, full: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL) if kind == "llama" else Qwen3Config(**SMALL)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    if not full:
        model = add_adapter(model, Lora(r=4), seed=1)
    model = model.to(DEVICE)
    assert install(model) == ""
    return model.train()


def mixed_table(count: int) -> ListTable:
    """Documents with loss on every token next to ones with little of it: packs of several shapes."""
    random = np.random.default_rng(3)
    rows = [[int(token) for token in random.integers(3, 24, int(random.integers(8, 120)))] for _ in range(count)]
    return ListTable(rows, [list(random.random(len(row)) < (0.95 if random.random() < 0.5 else 0.1)) for row in rows])


def steps_of(table: ListTable, count: int, packs: int = 2) -> list[StepBatch]:
    shapes = Shapes.planned(table, pack(table.lengths, CAPACITY, seed=1, epoch=0), CAPACITY)
    loader = BatchLoader(
        table, StepPacking(CAPACITY, shapes=shapes, pin=DEVICE.type == "cuda"), packs_per_step=packs, seed=1, workers=0
    )
    return list(islice(loader, count))


def optimizer_of(model: Any, lr: float = 5e-3, **options: bool) -> FusedAdamW:
    return FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.01, **options)


def graphed(model: Any, precision: str = "fp32", said: list[str] | None = None, **options: bool) -> GraphedStep:
    say = (said if said is not None else []).append
    return GraphedStep(model, optimizer_of(model, **options), device=DEVICE, precision=precision, clip=0.5, say=say)


def eager(model: Any, precision: str = "fp32", **options: bool) -> EagerStep:
    return EagerStep(model, optimizer_of(model, **options), device=DEVICE, precision=precision, clip=0.5)  # type: ignore[arg-type]


def results_of(step: Any, batches: list[StepBatch]) -> list[StepResult]:
    """They come `depth` steps late, as in the loop."""
    results, under_way = [], 0
    for batch in batches:
        step.begin(batch)
        under_way += 1
        if under_way > step.depth:
            results.append(step.finish())
            under_way -= 1
    return results + [step.finish() for _ in range(under_way)]


def losses(step: Any, batches: list[StepBatch]) -> list[tuple[float, float]]:
    return [(r.loss, r.grad_norm) for r in results_of(step, batches)]


def test_each_document_has_its_loss_of_its_own_step() -> None:
    """Of several shapes: a pack's losses are sent before the next one's replay overwrites them."""
    batches = steps_of(mixed_table(100), 4, packs=3)
    assert len({pack.shape for batch in batches for pack in batch.batches}) > 1
    mine, eagers = results_of(graphed(model_of()), batches), results_of(eager(model_of()), batches)
    for batch, one, other in zip(batches, mine, eagers, strict=True):
        assert one.losses is not None
        assert len(one.losses) == len(batch.documents)
        assert one.losses == pytest.approx(other.losses, rel=1e-4, abs=1e-5)
        assert one.losses.sum() == pytest.approx(one.loss * batch.loss_tokens, rel=1e-5)


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("kind", first_of(["qwen3", "llama"]))
def test_fifty_steps_equal_the_eager_path(kind: str, full: bool) -> None:
    batches = steps_of(mixed_table(300), 50 if DEVICE.type == "cuda" else 4)
    assert len({batch.shape for step in batches for batch in step.batches}) > 1  # several graphs
    said: list[str] = []
    ours = losses(graphed(model_of(kind, full=full), said=said), batches)
    theirs = losses(eager(model_of(kind, full=full)), batches)
    for (loss, norm), (eager_loss, eager_norm) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(eager_loss, rel=1e-6)
        assert norm == pytest.approx(eager_norm, rel=1e-4)
    assert ours[-1][0] < ours[0][0]
    if DEVICE.type == "cuda":
        assert sum("captured a CUDA graph" in line for line in said) == len({b.shape for s in batches for b in s.batches})
        assert not any("eagerly" in line for line in said)


@pytest.mark.parametrize(
    "options", first_of([{"eight_bit": True, "paged": True}, {"eight_bit": True}, {"paged": True}]), ids=str
)
def test_other_moments_equal_the_eager_path(options: dict[str, bool]) -> None:
    """Clipping is rounded otherwise there, so that now and then a byte falls to the other side."""
    batches = steps_of(mixed_table(300), 30 if DEVICE.type == "cuda" else 3)
    said: list[str] = []
    model = model_of(full=True)
    step = graphed(model, said=said, **options)
    ours, theirs = losses(step, batches), losses(eager(model_of(full=True), **options), batches)
    for (loss, norm), (eager_loss, eager_norm) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(eager_loss, rel=1e-4)
        assert norm == pytest.approx(eager_norm, rel=1e-2)
    assert ours[-1][0] < ours[0][0]
    assert not any("eagerly" in line for line in said)
    moment = step.optimizer.state[model.model.embed_tokens.weight]["exp_avg"]
    assert moment.dtype == (torch.uint8 if options.get("eight_bit") else torch.float32)
    assert moment.device.type == ("cpu" if options.get("paged") else DEVICE.type)


@ON_GPU
def test_fifty_steps_in_bf16_stay_within_its_noise() -> None:
    batches = steps_of(mixed_table(300), 50)
    ours = losses(graphed(model_of(dtype=torch.bfloat16), "bf16"), batches)
    theirs = losses(eager(model_of(dtype=torch.bfloat16), "bf16"), batches)
    assert max(abs(a[0] / b[0] - 1) for a, b in zip(ours, theirs, strict=True)) < 2e-3


@ON_GPU
def test_a_batch_is_safe_from_kernels_that_wrote_its_memory_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are copied on a stream of their own, into memory that was another tensor's: here the kernels that fill that one
    are late. Seen with gpt-oss beside other processes: borders of documents became zeros, and the step ended in an assert."""
    batches = steps_of(mixed_table(60), 1, packs=1)
    step = graphed(model_of())
    clear = step._clear

    def clear_late() -> None:
        clear()
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(300_000_000)
            gone = [batches[0].batches[0].map(lambda tensor: torch.zeros_like(tensor, device=DEVICE)) for _ in range(2)]
            del gone

    monkeypatch.setattr(step, "_clear", clear_late)
    (ours,), (theirs,) = losses(step, batches), losses(eager(model_of()), batches)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_going_through_it_without_kernels_leaves_nothing(full: bool) -> None:
    """Here with them, and with the guard raised, as it is then: no weight or moment changes, and all sums are zero again."""
    batches = steps_of(mixed_table(60), 2)
    model = model_of(full=full)
    step = graphed(model)
    step._set_up(batches[0].batches[0])
    before = weights(model)
    step._adamw.skipped.fill_(1)
    step._run_dry(batches[0].batches[0].beginning(64).map(lambda tensor: tensor.to(DEVICE)))
    step._adamw.skipped.zero_()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(model).items())
    assert not any(tensor.any() for tensor in step._added_up)
    assert losses(step, batches) == losses(graphed(model_of(full=full)), batches)


@ON_GPU
def test_sums_are_clear_after_work_that_fails() -> None:
    step, total = graphed(model_of()), torch.zeros(1000, device=DEVICE)

    def fails() -> None:
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        total.add_(1.0)
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        step._graphs.attempt(fails)
    total.zero_()
    torch.cuda.synchronize()
    assert not total.any()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("broken", ["nan", "zero"])
def test_an_unsound_step_changes_nothing_nor_does_the_next(broken: str) -> None:
    model = model_of()
    step = graphed(model)
    batches = steps_of(mixed_table(100), 4)
    losses(step, batches[:2])
    before = weights(model)
    moments = {name: step.optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters() if p.requires_grad}
    last = model.get_base_model().model.norm.weight
    good = last.detach().clone()
    last.data.fill_(float("nan") if broken == "nan" else 0.0)  # all logits are equal: no gradient reaches an adapter
    step.begin(batches[2])
    last.data.copy_(good)  # the next step is sound by itself, and was begun before the host could know
    step.begin(batches[3])
    first, second = step.finish(), step.finish()
    assert (first.loss != first.loss) if broken == "nan" else (first.grad_norm == 0)
    assert second.grad_norm > 0
    assert all(torch.equal(p, before[name]) for name, p in weights(model).items())
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert torch.equal(step.optimizer.state[p]["exp_avg"], moments[name])
            assert step.optimizer.state[p]["step"] == 2


@pytest.mark.parametrize("options", [{}, {"eight_bit": True}], ids=str)
def test_a_loss_above_its_limit_is_left_out_and_the_next_step_counts(options: dict[str, bool]) -> None:
    """As if its batch had never come; the step after it was begun before the host could know."""
    batches = steps_of(mixed_table(100), 4)
    with_it, without = graphed(guarded := model_of(), **options), graphed(plain := model_of(), **options)
    with_it.guards_loss = True
    losses(with_it, batches[:2])
    losses(without, batches[:2])
    with_it.loss_limit = 1.0
    with_it.begin(batches[2])
    with_it.loss_limit = 1e6
    with_it.begin(batches[3])
    assert with_it.finish().loss > 1.0
    assert with_it.finish().grad_norm > 0
    losses(without, batches[3:])
    expected = weights(plain)
    assert all(torch.equal(p, expected[name]) for name, p in weights(guarded).items())
    assert with_it._adamw.skipped is not None
    assert int(with_it._adamw.skipped) == 0


def test_a_step_resumed_from_its_state_goes_on_bit_for_bit() -> None:
    batches = steps_of(mixed_table(200), 10 if DEVICE.type == "cuda" else 6)
    whole = model_of()
    losses(graphed(whole), batches)
    first = model_of()
    step = graphed(first)
    losses(step, batches[:4])
    second = model_of()
    second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
    resumed = graphed(second)
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        if mine.requires_grad:
            resumed.optimizer.state[mine] = {k: v.clone() for k, v in step.optimizer.state[theirs].items()}
    losses(resumed, batches[4:])
    expected = weights(whole)
    assert all(torch.equal(p, expected[name]) for name, p in weights(second).items())


def test_the_learning_rate_of_each_step_is_its_own() -> None:
    model = model_of()
    step = graphed(model)
    batches = steps_of(mixed_table(100), 3)
    losses(step, batches[:1])
    before = weights(model)
    step.optimizer.param_groups[0]["lr"] = 0.0
    losses(step, batches[1:2])
    assert all(torch.equal(p, before[name]) for name, p in weights(model).items())
    step.optimizer.param_groups[0]["lr"] = 1e-3
    losses(step, batches[2:])
    assert not all(torch.equal(p, before[name]) for name, p in weights(model).items())


@ON_GPU
def test_nothing_in_a_step_waits_for_the_device() -> None:
    model = model_of(dtype=torch.bfloat16)
    step = graphed(model, "bf16")
    batches = steps_of(mixed_table(300), 12)
    losses(step, batches)  # every shape was captured
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            step.begin(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(step.finish().loss > 0 for _ in batches)


@ON_GPU
def test_a_capture_that_fails_falls_back_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = model_of(dtype=torch.bfloat16), []
    step = graphed(model, "bf16", said)
    real = step._forward_backward

    def asks_the_device(inputs: Any, *rows: Any) -> None:
        real(inputs, *rows)
        float(step._loss)

    monkeypatch.setattr(step, "_forward_backward", asks_the_device)
    batches = steps_of(mixed_table(100), 4)
    found = losses(step, batches)
    assert len([line for line in said if "run eagerly" in line]) == 1
    expected = losses(graphed(model_of(dtype=torch.bfloat16), "bf16"), batches)
    assert found[-1][0] == pytest.approx(expected[-1][0], rel=2e-3)
