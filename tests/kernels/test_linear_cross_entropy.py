"""Linear + cross-entropy: error against float64 truth at most twice plain torch's, on both paths, for every option."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pronghorn.kernels.loss import cross_entropy_rows as rows_of_logits
from pronghorn.kernels.loss import linear_cross_entropy as op
from pronghorn.kernels.loss.linear_cross_entropy import (
    IGNORED,
    Terms,
    chunk_rows,
    linear_cross_entropy,
    linear_cross_entropy_forward,
    linear_cross_entropy_reference,
)
from pronghorn.kernels.runtime.dispatch import use_triton
from tables import covering, table

pytestmark = pytest.mark.usefixtures("casts_as_a_gpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CUDA = torch.cuda.is_available()
OPTIONS = {"softcap": 5.0, "logit_scale": 0.25, "label_smoothing": 0.1, "z_loss": 1e-2}


class Problem:
    """Random inputs whose logits spread over about +-10, with every fifth row ignored."""

    def __init__(self, rows: int, width: int, vocabulary: int, dtype: torch.dtype, device: str, *, bias: bool = False,
                 weights: bool = False, terms: dict[str, float] | None = None) -> None:  # fmt: skip
        self.hidden = torch.randn(rows, width, device=device).to(dtype)
        self.weight = (torch.randn(vocabulary, width, device=device) * 3 / width**0.5).to(dtype)
        self.labels = torch.randint(vocabulary, (rows,), device=device)
        self.labels[4::5] = IGNORED
        self.bias = torch.randn(vocabulary, device=device).to(dtype) if bias else None
        self.weights = torch.rand(rows, device=device) * 2 if weights else None
        self.terms = terms or {}

    def reference(self, dtype: torch.dtype, grad_scale: float = 1.0) -> dict[str, torch.Tensor]:
        leaves = {
            name: tensor.detach().to(dtype).requires_grad_()
            for name, tensor in (("d_hidden", self.hidden), ("d_weight", self.weight), ("d_bias", self.bias))
            if tensor is not None
        }
        weights = None if self.weights is None else self.weights.to(torch.promote_types(dtype, torch.float32))
        loss, rows = linear_cross_entropy_reference(
            leaves["d_hidden"], leaves["d_weight"], self.labels, bias_V=leaves.get("d_bias"), weights_N=weights, **self.terms
        )
        grads = torch.autograd.grad(loss, list(leaves.values()), torch.full_like(loss, grad_scale))
        return {"loss": loss.detach(), "row_losses": rows, **dict(zip(leaves, grads, strict=True))}

    def ours(self, *, trained: bool = True, **options: Any) -> dict[str, torch.Tensor]:
        result = linear_cross_entropy_forward(
            self.hidden, self.weight, self.labels, bias_V=self.bias, weights_N=self.weights, terms=Terms(**self.terms),
            needs=(True, trained, self.bias is not None), **options,
        )  # fmt: skip
        return {name: tensor for name, tensor in result._asdict().items() if tensor is not None}

    def check(self, got: dict[str, torch.Tensor], grad_scale: float = 1.0) -> None:
        """Root-mean-square and largest error of every result: at most twice plain torch's.

        Plus half a rounding step of the result's dtype, and at least two of fp32: plain torch may be right by luck where
        one number (the label's own gradient, the loss) is the largest by far.
        """
        truth, plain = self.reference(torch.float64, grad_scale), self.reference(self.hidden.dtype, grad_scale)
        assert got.keys() == truth.keys()
        self._check(got, truth, plain)

    def check_hidden(self, got: dict[str, torch.Tensor], grad_scale: float) -> None:
        """The same without the gradients of weight and bias."""
        self._check(got, self.reference(torch.float64, grad_scale), self.reference(self.hidden.dtype, grad_scale))

    @staticmethod
    def _check(got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
        for name, tensor in got.items():
            assert tensor.isfinite().all(), name
            tiny = max(torch.finfo(tensor.dtype).eps / 2, 2 * torch.finfo(torch.float32).eps)
            for norm in (2, float("inf")):
                ours, theirs = (torch.linalg.vector_norm(t.double() - truth[name], norm) for t in (tensor, plain[name]))
                size = torch.linalg.vector_norm(truth[name], norm)
                assert ours <= 2 * theirs + tiny * size, f"{name}: {ours / size:.2e}, plain torch {theirs / size:.2e}"


@pytest.fixture
def once(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where kernels run, the rows are gone through once, and leave factors."""
    left: list[bool] = []
    raw = op.linear_cross_entropy_forward

    def spy(*args: Any, **options: Any) -> Any:
        result = raw(*args, **options)
        left.append(result.factors is not None)
        return result

    monkeypatch.setattr(op, "linear_cross_entropy_forward", spy)
    yield
    assert left
    assert all(found == use_triton(torch.zeros(1, device=device)) for found in left)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rows a chunk, the smallest there is."""
    monkeypatch.setattr(op, "GPU_SCRATCH_BYTES", 1)
    monkeypatch.setattr(op, "CPU_SCRATCH_BYTES", 1)


EVERY = list(itertools.product([False, True], repeat=len(OPTIONS)))


# Every combination in one dtype in turn, none and all of them in each.
@table(("dtype", "chosen"), [*covering(DTYPES, EVERY), *itertools.product(DTYPES, (EVERY[0], EVERY[-1]))])
def test_every_combination_of_options(device: str, dtype: torch.dtype, chosen: tuple[bool, ...]) -> None:
    """Bias and weights, which no option knows of, so that each of the two occurs with and without each option and the other."""
    bias, weights = chosen[0] != chosen[1], chosen[2] != chosen[3]
    terms = {name: value for (name, value), wanted in zip(OPTIONS.items(), chosen, strict=True) if wanted}
    problem = Problem(9, 64, 259, dtype, device, bias=bias, weights=weights, terms=terms)
    problem.check(problem.ours())


# The wide ones are several tiles of columns, whose partial sums depend on the dtype.
@table(
    ("dtype", "shape"),
    [
        *covering(DTYPES, [(1, 64, 2), (3, 96, 49), (33, 576, 1000), (17, 64, 8192)]),
        *((dtype, (3, 72, 8257)) for dtype in DTYPES),
    ],
)
@pytest.mark.usefixtures("small_chunks")
def test_odd_shapes_over_several_chunks(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    problem = Problem(*shape, dtype, device)
    problem.check(problem.ours())


@pytest.mark.parametrize("vocabulary", [50_257, 262_144] + [49_152, 128_256, 151_936] * CUDA)
def test_real_vocabularies(device: str, vocabulary: int) -> None:
    problem = Problem(2, 32 if CUDA else 8, vocabulary, torch.bfloat16, device)
    problem.labels[0] = vocabulary - 1
    problem.check(problem.ours())


@table(("dtype", "as_tensor"), list(itertools.product(DTYPES, [False, True])))
def test_gradients_take_a_scale_known_up_front(device: str, dtype: torch.dtype, as_tensor: bool) -> None:
    """0.003 is no power of two, and far from one: it must not be rounded to the inputs' dtype on its way."""
    problem = Problem(9, 64, 259, dtype, device, bias=True)
    got = problem.ours(grad_scale=torch.tensor(0.003, device=device) if as_tensor else 0.003)
    problem.check(got, grad_scale=0.003)


def test_fp16_gradients_do_not_vanish_under_a_small_scale(device: str) -> None:
    """Probabilities of 1e-3 times 2**-16 are below fp16's smallest number, their sums over the vocabulary are not."""
    problem = Problem(6, 64, 1000, torch.float16, device)
    problem.weight *= 0.02  # nearly uniform
    truth = problem.reference(torch.float64, 2.0**-16)["d_weight"]
    got = problem.ours(grad_scale=2.0**-16)["d_weight"].double()
    assert (got - truth).norm() < 2e-3 * truth.norm()


# Soft-cap and scale change what a factor is; a bias is added before either, in both shapes' way over the columns.
@table(
    ("dtype", "terms", "shape", "bias"),
    [
        (dtype, terms, *shape)
        for dtype, terms, shape in covering(
            [torch.float32, torch.bfloat16],
            [{}, {"softcap": 5.0}, {"softcap": 5.0, "logit_scale": 0.25}],
            [((33, 64, 259), False), ((3, 72, 8257), True)],
            together=(0, 2),
        )
    ],
)
@pytest.mark.usefixtures("small_chunks")
def test_rows_with_factors_are_as_near_once_multiplied(
    device: str, dtype: torch.dtype, terms: dict[str, float], shape: tuple[int, int, int], bias: bool, once: None
) -> None:
    problem = Problem(*shape, dtype, device, bias=bias, weights=True, terms=terms)
    problem.check_hidden(by_autograd(problem, 0.003), 0.003)


@table(
    ("dtype", "first", "rise"),
    [
        (torch.float32, -400.0, 100.0),
        (torch.bfloat16, -1000.0, 35.0),
        (torch.float32, 2000.0, -300.0),
        (torch.bfloat16, -3000.0, 400.0),
    ],
)
def test_a_row_may_rise_and_fall_by_hundreds_from_block_to_block(
    device: str, dtype: torch.dtype, first: float, rise: float, once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block of 64 columns lies `rise` above the one before: exp of a difference of 88 is beyond fp32."""
    monkeypatch.setattr(rows_of_logits, "CONFIG", rows_of_logits.Tile(64, 4, 2))
    problem = Problem(12, 16, 330, dtype, device, bias=True)
    assert problem.bias is not None
    problem.bias += (first + rise * (torch.arange(330, device=device) // 64)).to(dtype)
    problem.labels[:6] = torch.tensor([0, 63, 64, 200, IGNORED, 329], device=device)
    got = by_autograd(problem, 1.0)
    assert got["row_losses"].max() > 50
    problem.check_hidden(got, 1.0)


def by_autograd(problem: Problem, scale: float) -> dict[str, torch.Tensor]:
    """With a frozen head."""
    hidden = problem.hidden.detach().requires_grad_()
    loss, rows = linear_cross_entropy(
        hidden, problem.weight, problem.labels, bias_V=problem.bias, weights_N=problem.weights, **problem.terms
    )
    (gradient,) = torch.autograd.grad(loss * scale, hidden)
    return {"loss": loss.detach(), "row_losses": rows, "d_hidden": gradient}


@table("broken", [float("nan"), float("inf"), -float("inf")])
def test_factors_hide_no_broken_row(device: str, broken: float, once: None) -> None:
    problem = Problem(8, 64, 259, torch.bfloat16, device)
    sane = by_autograd(problem, 1.0)
    problem.hidden[1, 5] = broken
    problem.labels[2] = 259
    got = by_autograd(problem, 1.0)
    others = [0, 3, 4, 5, 6, 7]
    assert not got["loss"].isfinite()
    for row in (1, 2):
        assert not got["row_losses"][row].isfinite()
        assert not got["d_hidden"][row].isfinite().any()
    for name in ("row_losses", "d_hidden"):
        assert torch.equal(got[name][others], sane[name][others])
    assert (got["d_hidden"][4] == 0).all()


def test_rows_may_be_strided(device: str) -> None:
    problem = Problem(9, 64, 259, torch.bfloat16, device)
    dense = problem.ours()
    wide = torch.full((9, 80), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, :64] = problem.hidden
    problem.hidden = wide[:, :64]
    for name, tensor in problem.ours().items():  # on a GPU another stride may take another product
        torch.testing.assert_close(tensor, dense[name], rtol=1e-2, atol=1e-2)


def test_ignored_rows_give_nothing_whatever_they_hold(device: str) -> None:
    problem = Problem(10, 64, 259, torch.float32, device, weights=True, terms=OPTIONS)
    before = problem.ours(trained=False)
    problem.hidden[4::5] = float("nan")
    after = problem.ours(trained=False)
    for name in before:
        assert torch.equal(before[name], after[name]), name
    assert (after["d_hidden"][4::5] == 0).all()
    assert (after["row_losses"][4::5] == 0).all()


@table("label", [-1, -101, 259, 260, 2**31, 2**40])
def test_a_label_out_of_range_gives_nan_in_its_row_alone(device: str, label: int) -> None:
    problem = Problem(8, 64, 259, torch.float32, device)
    sane = problem.ours()
    problem.labels[2] = label
    got = problem.ours()
    others = [row for row in range(8) if row != 2]
    assert got["loss"].isnan()
    assert got["row_losses"][2].isnan()
    assert got["d_hidden"][2].isnan().all()
    assert torch.equal(got["row_losses"][others], sane["row_losses"][others])
    assert torch.equal(got["d_hidden"][others], sane["d_hidden"][others])


@table("dtype", DTYPES)
def test_autograd_multiplies_by_the_incoming_gradient(device: str, dtype: torch.dtype) -> None:
    problem = Problem(9, 64, 259, dtype, device, bias=True, weights=True, terms=OPTIONS)
    assert problem.bias is not None
    leaves = [tensor.requires_grad_() for tensor in (problem.hidden, problem.weight, problem.bias)]
    loss, rows = linear_cross_entropy(
        problem.hidden, problem.weight, problem.labels, bias_V=problem.bias, weights_N=problem.weights, **OPTIONS
    )
    assert not rows.requires_grad
    (loss * 0.003).backward(retain_graph=True)
    got = {"loss": loss.detach(), "row_losses": rows}
    for name, leaf in zip(("d_hidden", "d_weight", "d_bias"), leaves, strict=True):
        assert leaf.grad.dtype == dtype
        got[name] = leaf.grad
    problem.check(got, grad_scale=0.003)
    for leaf in leaves:
        leaf.grad = None
    (loss * 0.003).backward()  # the graph was kept for it
    for name, leaf in zip(("d_hidden", "d_weight", "d_bias"), leaves, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, got[name])
    with pytest.raises(RuntimeError, match="recompute the loss"):
        loss.backward()


def test_only_what_needs_a_gradient_gets_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(9, 64, 259, torch.float32, device)
    asked: list[tuple[bool, bool]] = []
    raw = op.linear_cross_entropy_forward

    def spy(*args: Any, **options: Any) -> Any:
        asked.append(tuple(options["needs"][:2]))
        return raw(*args, **options)

    monkeypatch.setattr(op, "linear_cross_entropy_forward", spy)
    problem.hidden.requires_grad_()
    frozen, _ = linear_cross_entropy(problem.hidden, problem.weight, problem.labels)
    with torch.no_grad():
        evaluated, _ = linear_cross_entropy(problem.hidden, problem.weight, problem.labels)
    assert asked == [(True, False), (False, False)]
    assert frozen.requires_grad
    assert not evaluated.requires_grad
    assert torch.equal(frozen.detach(), evaluated)


def test_float64_stays_float64() -> None:
    problem = Problem(6, 16, 37, torch.float64, "cpu", bias=True, terms=OPTIONS)
    truth = problem.reference(torch.float64)
    for name, tensor in problem.ours().items():
        torch.testing.assert_close(tensor, truth[name], rtol=1e-12, atol=1e-12)


def test_no_rows_at_all(device: str) -> None:
    problem = Problem(0, 64, 259, torch.bfloat16, device)
    got = problem.ours()
    assert got["loss"] == 0
    assert got["d_hidden"].shape == (0, 64)
    assert (got["d_weight"] == 0).all()


def test_smaller_chunks_give_the_same_loss_and_gradient() -> None:
    torch.manual_seed(0)
    rows, words = 1500, 10_000
    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(words, 8)
    labels = torch.randint(words, (rows,))
    most, fewer = (chunk_rows(rows, words, torch.float32, torch.device("cpu"), share) for share in (1, 4))
    assert most > fewer
    results = []
    for share in (1, 4):
        loss, rows = linear_cross_entropy(hidden, weight, labels, chunk_share=share)
        (gradient,) = torch.autograd.grad(loss, hidden)
        results.append((rows, gradient))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="measures GPU memory")
@pytest.mark.parametrize("trained", [False, True])
def test_scratch_at_16k_rows(trained: bool) -> None:
    problem = Problem(16_384, 4096, 128_256, torch.bfloat16, "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = problem.ours(trained=trained)
    outputs = sum(tensor.nbytes for tensor in got.values())
    assert torch.cuda.max_memory_allocated() - before - outputs < 1e9


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="captures a CUDA graph")
def test_a_captured_graph_follows_its_inputs() -> None:
    problem = Problem(100, 64, 1000, torch.bfloat16, "cuda", weights=True, terms=OPTIONS)
    scale = torch.tensor(0.5, device="cuda")
    problem.ours(grad_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = problem.ours(grad_scale=scale)
    problem.hidden.normal_()
    problem.labels.random_(1000)
    scale.fill_(0.125)
    graph.replay()
    fresh = problem.ours(grad_scale=scale)
    for name, tensor in fresh.items():
        torch.testing.assert_close(captured[name], tensor, msg=name)
