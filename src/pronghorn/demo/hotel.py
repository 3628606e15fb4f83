"""The demo's skill: a guest's free-form request to a hotel assistant becomes one strict JSON command.

    "Good evening, could you wake me at 6:45? I am in room 412."
    {"command":"wake_up_call","room":412,"time":"06:45"}

Everything is generated from a seed, so the data set needs no download and is the same on every machine.
The held-out requests use sentences that training never has, rooms that training never has, and, about half
of the time, dishes, places and problems that training never has: getting them right is not remembering.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pronghorn.errors import CommandError

Split = Literal["train", "held_out"]
Row = dict[str, list[dict[str, str]]]
Slot = tuple[str, object]  # how the guest says it, what the command holds

MOST_ROWS = 50_000  # every kind has at least 100,000 different requests, so that many are found quickly
SYSTEM_PROMPT = "Answer with one JSON command."  # short: it is paid for in every row


@dataclass(frozen=True, slots=True)
class SlotNames:
    """Names that fill a slot; `unseen` ones appear in held-out requests only."""

    seen: tuple[str, ...]
    unseen: tuple[str, ...]

    def pick(self, chance: random.Random, split: Split) -> str:
        if split == "held_out" and chance.random() < 0.5:
            return chance.choice(self.unseen)
        return chance.choice(self.seen)


@dataclass(frozen=True, slots=True)
class Kind:
    """One command: its slots in the order of its keys, and the sentences a guest may use."""

    name: str
    slots: dict[str, Callable[[random.Random, Split], Slot]]
    train: tuple[str, ...]
    held_out: tuple[str, ...]


# ---- slot values -------------------------------------------------------------------------------------------

DESTINATIONS = SlotNames(
    seen=(
        "the airport", "the central station", "the opera house", "the old harbour", "the city museum", "the university",
        "the fish market", "the rose garden", "the football stadium", "the castle", "the conference centre",
        "the main square", "the north beach", "the hospital", "the ferry terminal", "the night market", "the old bridge",
        "the town hall", "the zoo", "the science park", "the theatre", "the shopping mall", "the cruise port",
        "the flower market", "the public library", "the water park", "the tennis club", "the history museum",
    ),
    unseen=("the bus station", "the art museum", "the south beach", "the concert hall", "the food market", "the city park"),
)  # fmt: skip
RESTAURANTS = SlotNames(
    seen=(
        "The Olive Tree", "Sakura", "Casa Marina", "The Copper Pot", "Le Jardin", "Blue Lagoon", "Trattoria Roma",
        "The Garden Room", "Spice Route", "The Lighthouse", "Golden Dragon", "Central Park", "The Wine Cellar",
        "The Red Door", "Little Italy", "The Fish House", "Sunset Grill", "The Black Swan", "Green Leaf", "Ocean View",
        "The Old Barn", "Lemon Tree", "The King's Table", "Silver Spoon",
    ),
    unseen=("The Old Mill", "Blue Door", "The Green Room", "Golden Spoon", "The White Swan", "Garden View"),
)  # fmt: skip
DISHES = SlotNames(
    seen=(
        "a club sandwich", "a pot of coffee", "a cheese pizza", "an onion soup", "a mushroom omelette", "a fruit salad",
        "a green tea", "an orange juice", "a bottle of water", "a steak", "a chocolate cake", "a glass of red wine",
        "a garden salad", "a bowl of rice", "an apple pie", "a hot chocolate", "a fish curry", "a plate of pasta",
        "a chicken soup", "a cheese burger", "a cold lemonade", "a roast chicken", "a glass of milk", "a fish sandwich",
        "an ice cream", "a cup of tea", "a tuna salad", "a bowl of noodles", "a cold beer", "some fries",
    ),
    unseen=("a tomato soup", "a cheese sandwich", "a glass of white wine", "a chicken salad", "an iced tea", "a fish soup"),
)  # fmt: skip
SUPPLIES = SlotNames(
    seen=(
        "some fresh towels", "some extra pillows", "a warm blanket", "some shampoo", "a bathrobe", "some soap",
        "some clean sheets", "a hair dryer", "some toilet paper", "some coffee cups", "an iron", "some hangers",
        "a toothbrush", "some slippers", "a baby cot", "some laundry bags", "some beach towels", "a bath mat",
        "a yoga mat", "some shower gel", "a phone charger", "some body lotion", "a desk lamp", "some wine glasses",
        "a soft pillow", "some toothpaste", "a shower cap", "some clean glasses",
    ),
    unseen=(
        "some hand towels", "a first aid kit", "some clean towels", "a soft blanket", "some water glasses",
        "an extra blanket",
    ),
)  # fmt: skip
PROBLEMS = SlotNames(
    seen=(
        "a dripping tap", "a broken lamp", "a blocked sink", "a loud fridge", "a cold radiator", "a stuck window",
        "a flickering light", "a cracked mirror", "a broken shower", "a leaking toilet", "a dead remote control",
        "a jammed door lock", "a loose shelf", "a broken heater", "a silent telephone", "a torn curtain",
        "a leaking pipe", "a dirty carpet", "a smoking socket", "a broken chair", "a stuck drawer", "a loud fan",
        "a leaking roof", "a broken coffee machine", "a dead light bulb", "a wet ceiling", "a squeaking door",
        "a blocked drain", "a broken safe", "a loose door handle",
    ),
    unseen=("a blocked toilet", "a loud heater", "a broken window", "a leaking shower", "a stuck door", "a loose mirror"),
)  # fmt: skip
ROOMS: dict[Split, list[int]] = {  # one room in four is kept for the held-out requests
    "train": [room for room in range(101, 980) if room % 4 != 3],
    "held_out": [room for room in range(101, 980) if room % 4 == 3],
}
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def _room(chance: random.Random, split: Split) -> Slot:
    number = chance.choice(ROOMS[split])
    return str(number), number


def _time(first_hour: int, last_hour: int) -> Callable[[random.Random, Split], Slot]:
    def pick(chance: random.Random, split: Split) -> Slot:
        hour, minute = chance.randint(first_hour, last_hour), chance.choice((0, 10, 15, 20, 30, 30, 40, 45, 50))
        said = f"{hour}:{minute:02d}"  # the guest says 6:45, the command holds 06:45
        return said, f"{hour:02d}:{minute:02d}"

    return pick


def _name(words: SlotNames) -> Callable[[random.Random, Split], Slot]:
    def pick(chance: random.Random, split: Split) -> Slot:
        name = words.pick(chance, split)
        return name, name

    return pick


def _without_article(said: str) -> str:
    return said.split(" ", 1)[1]


def _thing(words: SlotNames) -> Callable[[random.Random, Split], Slot]:
    def pick(chance: random.Random, split: Split) -> Slot:
        said = words.pick(chance, split)
        return said, _without_article(said)

    return pick


def _things(words: SlotNames) -> Callable[[random.Random, Split], Slot]:
    def pick(chance: random.Random, split: Split) -> Slot:
        count, chosen = chance.choice((1, 2, 2, 3)), list[str]()
        while len(chosen) < count:
            said = words.pick(chance, split)
            if said not in chosen:
                chosen.append(said)
        spoken = " and ".join([", ".join(chosen[:-1]), chosen[-1]] if len(chosen) > 1 else chosen)
        return spoken, [_without_article(said) for said in chosen]

    return pick


def _people(chance: random.Random, split: Split) -> Slot:
    number = chance.randint(2, 10)
    return chance.choice((str(number), NUMBERS[number - 1])), number


def _destination(chance: random.Random, split: Split) -> Slot:
    said = DESTINATIONS.pick(chance, split)
    return said, _without_article(said)


# ---- commands ----------------------------------------------------------------------------------------------

KINDS = (
    Kind(
        name="wake_up_call",
        slots={"room": _room, "time": _time(4, 10)},
        train=(
            "Please wake me at {time} in room {room}.",
            "Could I get a wake-up call at {time}? I am in room {room}.",
            "I have an early flight. Can you ring room {room} at {time}?",
            "Room {room} here, I would like to be woken at {time}.",
            "We tend to oversleep, so please call us at {time} tomorrow. Room {room}.",
            "A wake-up call for room {room} at {time}, please.",
            "Can someone make sure that I am awake by {time}? My room is {room}.",
            "I need to be up at {time}. Please phone me in {room}.",
            "Would you call room {room} tomorrow morning at {time}, so that we wake up?",
            "My plane leaves early. Wake room {room} at {time}, please.",
            "I sleep deeply. Please wake room {room} at {time} sharp.",
            "Do not let me oversleep: call {room} at {time}.",
        ),
        held_out=(
            "My alarm is broken, could you wake me up at {time}? It is room {room}.",
            "This is room {room}. Please give us a wake-up call at {time}.",
            "I must not miss my train, so please call room {room} at {time} to wake me.",
            "Would you wake us at {time} tomorrow, in room {room}?",
        ),
    ),
    Kind(
        name="taxi",
        slots={"time": _time(5, 22), "destination": _destination},
        train=(
            "Please order a taxi to {destination} for {time}.",
            "I need a cab at {time} to go to {destination}.",
            "Can you get us a taxi at {time}? We are going to {destination}.",
            "We have to be driven to {destination}, leaving at {time}.",
            "Could a taxi pick me up at {time} and take me to {destination}?",
            "Book me a car to {destination} at {time}, please.",
            "I am off to {destination}. Have a taxi ready at {time}.",
            "At {time} I would like a taxi to {destination}.",
            "How do we get to {destination}? A taxi at {time} would be great.",
            "We are leaving for {destination} at {time} and need a cab.",
            "Is a taxi to {destination} available at {time}?",
            "We would like to visit {destination}. Could a driver be here at {time}?",
        ),
        held_out=(
            "Could you call a taxi for {time}? I want to visit {destination}.",
            "We need a ride to {destination} at {time}.",
            "Please have a cab waiting at {time}, it should take us to {destination}.",
            "Is it possible to have a taxi to {destination} at {time}?",
        ),
    ),
    Kind(
        name="room_service",
        slots={"room": _room, "items": _things(DISHES)},
        train=(
            "Could you bring {items} to room {room}?",
            "I am hungry! Please send {items} up to {room}.",
            "Room {room} would like to order {items}.",
            "For dinner we will have {items}, in room {room}.",
            "May I order {items}? I am staying in room {room}.",
            "I would love {items} in my room, number {room}.",
            "Please ask the kitchen for {items}. It goes to room {room}.",
            "We would like to eat in room {room}: {items}, please.",
            "Would you serve {items} for breakfast in room {room}?",
            "Is the kitchen open? I want {items}, room {room}.",
            "Can the chef prepare {items} for room {room}?",
            "It is past midnight, may I order {items}? I am in {room}.",
            "This is room {room}. We are thirsty and hungry: {items}, please.",
            "My friends want {items} for lunch, room {room}.",
            "Hello from {room}, is it possible to get {items} for supper?",
        ),
        held_out=(
            "Can the kitchen make {items} for room {room}?",
            "It is late, but may I still order {items}? I am in {room}.",
            "Room {room} speaking, we want to order {items}.",
            "Please serve {items} in room {room}.",
        ),
    ),
    Kind(
        name="housekeeping",
        slots={"room": _room, "items": _things(SUPPLIES)},
        train=(
            "Could housekeeping bring {items} to room {room}?",
            "We need {items} in room {room}.",
            "There is nothing left in the bathroom of {room}. May we have {items}?",
            "Please leave {items} in room {room} when you clean it.",
            "Room {room} is missing {items}.",
            "I could use {items}. My room is {room}.",
            "Would the maid bring us {items}? We are in {room}.",
            "Can I get {items} for room {room}, please?",
            "We have no more, so please send {items} up to {room}.",
            "Could you put {items} in room {room}?",
            "This is {room}. Could you leave {items} on the bed?",
            "Is there a chance to get {items}? I am in room {room}.",
            "The bathroom in room {room} needs {items}.",
            "I left mine at home. Could housekeeping lend me {items}? Room {room}.",
        ),
        held_out=(
            "The maid forgot us today, please send {items} to room {room}.",
            "Is there any chance that housekeeping brings {items}? I am in room {room}.",
            "I forgot mine at home, so I need {items} in {room}.",
            "This is room {room}. Could you leave {items} in the bathroom?",
        ),
    ),
    Kind(
        name="book_table",
        slots={"restaurant": _name(RESTAURANTS), "people": _people, "time": _time(12, 22)},
        train=(
            "Please book a table for {people} at {restaurant} at {time}.",
            "We are {people} and would like to eat at {restaurant} at {time}.",
            "Can you reserve a table at {restaurant} for {people} people at {time}?",
            "I want to take my family to {restaurant}: a table for {people} at {time}.",
            "Is there a table free at {restaurant} at {time}? There are {people} of us.",
            "A table for {people} at {time} in {restaurant}, please.",
            "Could we dine at {restaurant} at {time}? We are a group of {people}.",
            "For {time} I need a table for {people} at {restaurant}.",
            "Please reserve {restaurant} for {people} guests, {time}.",
            "There will be {people} of us at {restaurant}, can we have dinner at {time}?",
            "We want to have lunch at {restaurant}, {people} people, at {time}.",
            "Could you get a table for us? {restaurant}, {time}, {people} people.",
            "I would like a reservation for {people} at {restaurant} at {time}.",
        ),
        held_out=(
            "Could you get us a table at {restaurant}? {time}, for {people}.",
            "I would like to reserve for {people} people at {restaurant}, at {time}.",
            "We want to eat at {restaurant} at {time}, there will be {people} of us.",
            "Please make a reservation at {restaurant} for {people} guests at {time}.",
        ),
    ),
    Kind(
        name="late_checkout",
        slots={"room": _room, "time": _time(12, 17)},
        train=(
            "Can I keep room {room} until {time}?",
            "We would like to check out late, at {time}. Room {room}.",
            "Is a late checkout at {time} possible for room {room}?",
            "Our flight leaves in the evening. May we stay in {room} until {time}?",
            "I am in room {room} and will not be ready to leave before {time}.",
            "Room {room} would like to leave at {time} instead of in the morning.",
            "Could we stay in our room until {time}? It is number {room}.",
            "Please give me until {time} to check out of {room}.",
            "We want to check out of room {room} at {time}, is that fine?",
            "I need my room a little longer, until {time}. It is {room}.",
            "Would you let us check out of room {room} at {time}?",
            "We are slow packers. Can we check out of {room} at {time}?",
            "On our last day we will check out at {time}. Room {room}.",
        ),
        held_out=(
            "Would it be fine to check out of room {room} at {time}?",
            "We need more time to pack. Could we check out of {room} at {time}?",
            "I am in room {room}, may I stay until {time} on my last day?",
            "Please arrange a late checkout for {room}, we will leave at {time}.",
        ),
    ),
    Kind(
        name="maintenance",
        slots={"room": _room, "problem": _thing(PROBLEMS)},
        train=(
            "There is {problem} in room {room}.",
            "We found {problem} in our room, number {room}.",
            "Could somebody repair {problem} in {room}?",
            "Room {room} has {problem}, please send someone.",
            "I cannot sleep because of {problem}. I am in room {room}.",
            "Please send a technician to {room}, we have {problem}.",
            "I am sorry to complain, but room {room} has {problem}.",
            "Can you take care of {problem}? It is in room {room}.",
            "Please fix {problem} in our bathroom, room {room}.",
            "Would somebody look at {problem} in room {room}?",
            "Could your technician come to room {room}? We have {problem}.",
            "I noticed {problem} in {room} this morning.",
        ),
        held_out=(
            "Could an engineer look at {problem} in room {room}?",
            "I just noticed {problem} here in {room}.",
            "We are in room {room} and there is {problem}. Can it be fixed?",
            "Please come and fix {problem} in room {room}.",
        ),
    ),
)
GREETINGS = ("", "", "", "Hello! ", "Good morning. ", "Good evening. ")
THANKS = ("", "", "", " Thank you!", " Thanks a lot.")


# ---- rows --------------------------------------------------------------------------------------------------


def _row(kind: Kind, chance: random.Random, split: Split) -> Row:
    slots = {key: pick(chance, split) for key, pick in kind.slots.items()}
    sentence = chance.choice(kind.train if split == "train" else kind.held_out)
    request = sentence.format(**{key: said for key, (said, _) in slots.items()})
    command = {"command": kind.name, **{key: value for key, (_, value) in slots.items()}}
    return {
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": chance.choice(GREETINGS) + request + chance.choice(THANKS)},
            {"role": "assistant", "content": json.dumps(command, ensure_ascii=False, separators=(",", ":"))},
        ]
    }


def generate(count: int, seed: int, split: Split = "train") -> list[Row]:
    """`count` rows with different requests, every kind of command equally often (to within one), shuffled."""
    if not 1 <= count <= MOST_ROWS:
        raise CommandError(f"{count} rows requested", where="demo data", fix=f"request 1 to {MOST_ROWS:,} rows")
    chance = random.Random(f"hotel {split} {seed}")  # a string seed goes through SHA-512: the same in every process
    rows: dict[str, Row] = {}
    while len(rows) < count:
        kind = KINDS[len(rows) % len(KINDS)]
        row = _row(kind, chance, split)
        rows.setdefault(row["messages"][1]["content"], row)
    shuffled = list(rows.values())
    chance.shuffle(shuffled)
    return shuffled


def write(
    folder: Path,
    *,
    train: int,
    held_out: int,
    seed: int = 0,
    generate: Callable[[int, int, Split], Sequence[Mapping[str, Any]]] = generate,
) -> tuple[Path, Path]:
    """Write `train.jsonl` and `held_out.jsonl`; give back where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "held_out.jsonl"
    for path, rows in zip(paths, (generate(train, seed, "train"), generate(held_out, seed, "held_out")), strict=True):
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return paths
