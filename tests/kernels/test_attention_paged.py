"""Decoding attention over pages: error against float64 at most twice plain torch's, on both paths; groups share a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pronghorn.kernels.attention.attention_paged import PAGE, Segments, paged_attention, paged_attention_reference, write_pages
from tables import table

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "window shorter than the answers": {"window": 5},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "everything": {"window": 100, "softcap": 3.0, "sinks": True},
    "a head for each": {"heads": (4, 4)},
    "odd width": {"width": 24},
    "wide groups": {"heads": (16, 1), "width": 32},
    "above 256": {"heads": (8, 1), "width": 512},
    "above 256, everything": {"heads": (6, 2), "width": 264, "window": 70, "softcap": 3.0, "sinks": True},
    "16 bits": {"dtype": torch.float16, "width": 64},
    "16 bits, everything": {"dtype": torch.float16, "window": 100, "softcap": 3.0, "sinks": True},
}
PROMPTS = {130: (0, 3, 4), 64: (1,), 1: (6, 2)}  # tokens of a prompt: its answers' rows; row 5 belongs to nobody
ANSWERS = {0: 1, 1: 64, 2: 65, 3: 200, 4: 7, 6: 3}  # tokens of each answer


def tables(device: str) -> tuple[list[Segments], torch.Tensor, int]:
    """Prompts and answers in pages drawn at random. Unused entries of the tables name a page that must not be read."""
    pages = iter(torch.randperm(40).tolist())

    def segment(length: int, first: int, members: list[int], most: int) -> tuple[list[int], int, int, list[int]]:
        used = [next(pages) for _ in range(-(-length // PAGE))]
        return used + [41] * (5 - len(used)), length, first, members + [-1] * (most - len(members))

    def columns(rows: list[Any]) -> Segments:
        return Segments(*(torch.tensor(list(x), dtype=torch.int32, device=device) for x in zip(*rows, strict=True)))

    prompts = [segment(length, 0, list(rows), 8) for length, rows in PROMPTS.items()]
    of_row = {row: length for length, rows in PROMPTS.items() for row in rows}
    answers = [segment(length, of_row[row], [row], 1) for row, length in ANSWERS.items()]
    position = torch.tensor([of_row[row] + ANSWERS[row] - 1 if row in of_row else 0 for row in range(7)], device=device)
    return [columns(prompts), columns(answers)], position.to(torch.int32), 42


@pytest.fixture
def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the interpreter add their terms as a GPU's do in float32; numpy adds them in blocks."""
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def dot(self: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
        found = sums.data
        for k in range(a.data.shape[1]):
            terms = a.data[:, k, None].astype("float64") * b.data[None, k].astype("float64")
            found = (found + terms).astype("float32")  # one rounding: a multiply-add
        return interpreter.TensorHandle(found, sums.dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@table("name", list(CASES))
@pytest.mark.usefixtures("one_after_the_other")
def test_decoding_is_as_good_as_plain_torch(device: str, judge: Callable[..., None], name: str) -> None:
    case = {"heads": (8, 2), "width": 16, "dtype": torch.float32, "window": None, "softcap": None, "sinks": False} | CASES[name]
    (N, K), H, dtype = case["heads"], case["width"], case["dtype"]
    parts, position, pages = tables(device)
    wide = torch.full((7, N * H + 5), float("nan"), dtype=dtype, device=device)
    wide[:, : N * H] = torch.randn(7, N * H)
    q = wide[:, : N * H].unflatten(1, (N, H))
    k, v = (torch.randn(pages, K, PAGE, H, dtype=dtype, device=device) for _ in range(2))
    k[41] = v[41] = float("nan")
    options = {"scale": H**-0.5, "window": case["window"], "softcap": case["softcap"]}
    sinks = torch.randn(N, dtype=dtype, device=device) if case["sinks"] else None
    out = torch.full_like(wide, float("nan"))
    got = paged_attention(q, k, v, parts, position, **options, sinks_N=sinks, out=out[:, : N * H].unflatten(1, (N, H)))

    def expected(number: torch.dtype) -> torch.Tensor:
        where = [Segments(*(x.cpu() for x in part)) for part in parts]
        tensors = (x.to(number).cpu() for x in (q, k, v))
        return paged_attention_reference(
            *tensors, where, position.cpu(), **options, sinks_N=None if sinks is None else sinks.to(number).cpu()
        )

    plain, truth = expected(dtype), expected(torch.float64)
    judge(got, plain, truth, name)
    if H > 256:  # sums in parts: 0.5 times plain torch's error; one after the other it was 1.5 times
        assert (got.cpu() - truth).norm() < (plain - truth).norm()
    assert (got[5] == 0).all()
    assert out[:, N * H :].isnan().all()


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_add_up(device: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.kernels.attention import attention_paged

    monkeypatch.setattr(attention_paged, "splits_of", lambda *_: splits)
    parts, position, pages = tables(device)
    q, k, v = torch.randn(7, 4, 16), torch.randn(pages, 2, PAGE, 16), torch.randn(pages, 2, PAGE, 16)
    q, k, v = (x.to(device) for x in (q, k, v))
    got = paged_attention(q, k, v, parts, position, scale=0.3, out=torch.empty_like(q))
    where = [Segments(*(x.cpu() for x in part)) for part in parts]
    true = paged_attention_reference(q.cpu(), k.cpu(), v.cpu(), where, position.cpu(), scale=0.3)
    torch.testing.assert_close(got.cpu(), true, rtol=1e-5, atol=1e-5)


def test_keys_and_values_are_written_to_their_places(device: str) -> None:
    K, H, places = 3, 8, [0, 5 * PAGE + 63, 2 * PAGE, 0]
    k, v = torch.randn(4, 2 * K * H + 5, device=device)[:, : 2 * K * H].unflatten(1, (2 * K, H)).split(K, dim=1)
    pages = [torch.zeros(6, K, PAGE, H, dtype=torch.float16, device=device) for _ in range(2)]
    write_pages(*pages, torch.tensor(places, device=device), k, v)
    for written, rows in zip(pages, (k, v), strict=True):
        expected = torch.zeros_like(written)
        for place, row in zip(places, rows, strict=True):
            expected[place // PAGE, :, place % PAGE] = row.half()
        assert torch.equal(written[1:], expected[1:])  # page 0 belongs to nobody
