"""What preference training tells people about itself."""

from __future__ import annotations

from pronghorn.train.objectives.watch import WINDOW, Watch

SOUND = {"rewards/accuracies": 0.8, "rewards/accuracies_shorter": 0.75, "logps/chosen": -100.0}


def told(figures: dict[str, float], fall: float | None = 1.0, first: int = 1, steps: int = 2 * WINDOW) -> list[str]:
    watch = Watch()
    return [text for step in range(first, first + steps) for text in watch.look(step, figures, fall)]


def test_a_sound_run_is_told_nothing() -> None:
    assert told(SOUND) == []
    assert told({}) == []  # KTO has none of them
    assert told(SOUND | {"rewards/accuracies": 1.0}, first=11) == []  # late, that is what training is for


def test_pairs_that_are_too_easy() -> None:
    (text,) = told(SOUND | {"rewards/accuracies": 1.0}, steps=9)
    assert text.startswith("step 3: the model already separates all pairs")


def test_chosen_answers_that_become_unlikely() -> None:
    (text,) = told(SOUND, fall=15.0)
    assert text.startswith(f"step {WINDOW}: chosen answers are less likely than before training (15.0 nats, 15 %")
    assert told(SOUND, fall=None) == []


def test_lengths_that_are_learned() -> None:
    (text,) = told(SOUND | {"rewards/accuracies_shorter": 0.3})
    assert "accuracy 0.80, but 0.30 where the chosen answer is the shorter one" in text
