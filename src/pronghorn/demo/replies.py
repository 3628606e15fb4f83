"""The demo's preference: of two replies to a guest that promise the same, the house prefers the formal one.

    "Good evening, could you wake me at 6:45? I am in room 412."
    chosen    Certainly. We will take care of it.
    rejected  Sure thing! We'll get right on it.

Both are about as long, and to the base model about as likely: which one it would rather say is a coin's toss. The requests are
the hotel's (hotel.py), so held-out pairs have sentences and rooms that training never has; and half of their replies have
words that training never has.
"""

from __future__ import annotations

import functools
import random
from typing import Any

from pronghorn.demo import hotel
from pronghorn.demo.hotel import SlotNames, Split

FORMAL = (
    SlotNames(
        seen=("Certainly.", "Of course.", "Very well.", "Indeed.", "Thank you.", "Yes, of course."),
        unseen=("Most certainly.", "Yes, certainly."),
    ),
    SlotNames(
        seen=(
            "We will take care of it.", "Your request has been noted.", "We will be happy to help you.",
            "It will be arranged for you.", "We will attend to it shortly.", "Your request will be handled promptly.",
        ),
        unseen=("Your request is being handled.", "We will see to it for you."),
    ),
)  # fmt: skip
CASUAL = (
    SlotNames(
        seen=("Sure thing!", "No problem!", "Okay!", "You got it!", "Alright!", "Yep!"),
        unseen=("No worries!", "Sure!"),
    ),
    SlotNames(
        seen=(
            "We'll get right on it.", "We're on it now.", "It'll be done in no time.", "We'll sort it out for you.",
            "Someone will be there soon.", "I'll let the guys know.",
        ),
        unseen=("We'll get it done.", "I'll get the guys going."),
    ),
)  # fmt: skip


def _reply(style: tuple[SlotNames, SlotNames], chance: random.Random, split: Split) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": " ".join(words.pick(chance, split) for words in style)}]


def generate(count: int, seed: int, split: Split = "train") -> list[dict[str, Any]]:
    chance = random.Random(f"replies {split} {seed}")
    requests = [row["messages"][1:2] for row in hotel.generate(count, seed, split)]
    return [
        {"prompt": request, "chosen": _reply(FORMAL, chance, split), "rejected": _reply(CASUAL, chance, split)}
        for request in requests
    ]


write = functools.partial(hotel.write, generate=generate)
