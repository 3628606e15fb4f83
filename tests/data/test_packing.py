from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pronghorn.data.pack.packing import Groups, max_documents, pack, pack_in_order, pack_stream


def instruction_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Lengths like those of instruction data: mean about 207, median 166, 95 % below 500, shortest 32."""
    drawn = np.random.default_rng(seed).lognormal(mean=np.log(166), sigma=0.67, size=count)
    return np.clip(drawn, 32, 1400).astype(np.int32)


@given(lengths=st.lists(st.integers(1, 100), max_size=300), capacity=st.integers(100, 400), window=st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_every_document_is_in_exactly_one_pack_and_no_pack_overflows(lengths: list[int], capacity: int, window: int) -> None:
    packs = list(pack_stream(lengths, capacity, window))
    assert sorted(i for members in packs for i in members) == list(range(len(lengths)))
    for members in packs:
        assert members
        assert sum(lengths[i] for i in members) <= capacity
        assert len(members) <= max_documents(capacity)


def test_instruction_data_fills_over_99_percent_of_16384_and_98_of_2048() -> None:
    lengths = instruction_lengths(100_000)
    assert 195 < lengths.mean() < 220
    assert pack(lengths, 16384, seed=1, epoch=0).efficiency(16384) > 0.99
    assert pack(lengths, 2048, seed=1, epoch=0).efficiency(2048) > 0.98


def test_same_seed_and_epoch_give_the_same_packs_and_others_do_not() -> None:
    lengths = instruction_lengths(2000)
    one, again = (pack(lengths, 2048, seed=3, epoch=1) for _ in range(2))
    assert np.array_equal(one.order, again.order)
    assert np.array_equal(one.starts, again.starts)
    for other in (pack(lengths, 2048, seed=3, epoch=2), pack(lengths, 2048, seed=4, epoch=1)):
        assert not np.array_equal(one.order[:100], other.order[:100])


def test_packs_do_not_change_between_versions() -> None:
    """A resumed run relies on them: whoever changes packing must also refuse old checkpoints."""
    packs = pack(np.arange(1, 41), 100, seed=7, epoch=3)
    assert [p.tolist() for p in packs][:3] == [[22, 35, 12, 0, 26], [37, 23, 25, 11], [4, 30, 33, 24, 3]]


def test_a_stream_is_served_without_reading_far_ahead() -> None:
    read = 0

    def lengths():
        nonlocal read
        for _ in range(10_000):
            read += 1
            yield 50

    packs = pack_stream(lengths(), 100, window=16)
    next(packs)
    assert read <= 16 + 2


def test_a_pack_is_a_fair_sample_of_the_data() -> None:
    """Long documents are spread over the epoch, not put into the same steps."""
    lengths = instruction_lengths(20_000)
    packs = pack(lengths, 16384, seed=1, epoch=0)
    means = np.array([lengths[packs[i]].mean() for i in range(len(packs) - 3)])  # the last ones take what is left
    expected = lengths.std() / np.sqrt(16384 / lengths.mean())
    assert means.std() < 1.5 * expected


@given(lengths=st.lists(st.integers(1, 30), max_size=120), together=st.integers(2, 4), capacity=st.integers(120, 300))
@settings(max_examples=25, deadline=None)
def test_documents_of_one_group_stay_side_by_side(lengths: list[int], together: int, capacity: int) -> None:
    groups = len(lengths) // together
    known = np.array(lengths[: groups * together], dtype=np.int32)
    for packs in (
        pack(Groups.alike(known, together), capacity, seed=1, epoch=0),
        pack_in_order(Groups.alike(known, together), capacity),
    ):
        assert sorted(packs.order.tolist()) == list(range(len(known)))
        for members in packs:
            assert known[members].sum() <= capacity
            assert len(members) <= max_documents(capacity)
            assert (members.reshape(-1, together) == members[::together, None] + np.arange(together)).all()
            assert (members[::together] % together == 0).all()
