"""How much better than others an answer is: TRL's formulas, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pronghorn.train.source.advantages import advantages, has_signal


@pytest.mark.parametrize("scale", ["group", "batch", "none", "rloo"])
def test_advantages_are_those_of_trl(scale: str) -> None:
    rewards = torch.tensor(np.random.default_rng(0).normal(size=(5, 4)), dtype=torch.float64)
    mean = rewards.mean(1, keepdim=True)
    wanted = {
        "group": (rewards - mean) / (rewards.std(1, keepdim=True) + 1e-4),
        "batch": (rewards - mean) / (rewards.std() + 1e-4),
        "none": rewards - mean,
        "rloo": rewards - (rewards.sum(1, keepdim=True) - rewards) / 3,
    }[scale]
    found = advantages(rewards.tolist(), scale)
    np.testing.assert_allclose(np.stack(found), wanted.numpy(), rtol=1e-12)
    # dealt out to two ranks, whose sums are added up
    halves = [rewards[:2], rewards[2:]]
    sums = [[float(part.numel()), float(part.sum())] for part in halves]
    squares = [float(((part - rewards.mean()) ** 2).sum()) for part in halves]

    def total(*numbers: float) -> list[float]:
        return [sum(column) for column in zip(*sums, strict=True)] if len(numbers) == 2 else [sum(squares)]

    dealt = [one for part in halves for one in advantages(part.tolist(), scale, total)]
    np.testing.assert_allclose(np.stack(dealt), wanted.numpy(), rtol=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none", "rloo"])
def test_equal_rewards_have_no_advantage_to_the_bit(scale: str) -> None:
    """Their mean is rounded: 0.1 is not the mean of seven times 0.1."""
    same, single, none, other = advantages([[0.1] * 7, [3.0], [], [0.0, 1.0]], scale)
    assert not same.any()
    assert single.tolist() == [0.0]
    assert len(none) == 0
    assert other[0] == -other[1] < 0
    assert [has_signal(group) for group in ([0.1] * 7, [3.0], [], [0.0, 1.0])] == [False, False, False, True]
