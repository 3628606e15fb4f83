"""Who waits, in which order, and who leaves."""

from __future__ import annotations

import threading
import time

import pytest

from pronghorn.serve.asked import RequestError
from pronghorn.serve.turns import Room, Turns


def stay() -> None:
    pass


def waiting(turns: Turns, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(turns._line) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(turns._line) == count


def test_first_come_first_served_and_one_at_a_time() -> None:
    turns, order, inside = Turns(), list[int](), list[int]()

    def one(number: int) -> None:
        with turns.one(stay):
            inside.append(number)
            order.append(number)
            assert inside == [number]
            inside.remove(number)

    with turns.one(stay):
        threads = []
        for number in range(10):
            threads.append(threading.Thread(target=one, args=(number,)))
            threads[-1].start()
            waiting(turns, number + 2)
    for thread in threads:
        thread.join(20)
    assert order == list(range(10))


def test_there_is_an_end_to_waiting() -> None:
    turns = Turns(most=1)
    with turns.one(stay), pytest.raises(RequestError, match="waiting already") as error, turns.one(stay):
        pass
    assert (error.value.status, error.value.headers) == (503, {"Retry-After": "1"})
    with turns.one(stay):
        pass


def test_room_for_large_bodies_only() -> None:
    room = Room(most=100, small=10)
    with room.for_body(60), room.for_body(10), room.for_body(40):
        with room.for_body(10), room.to_read(10):
            pass
        with pytest.raises(RequestError, match="too many large requests"), room.for_body(11):
            pass
    with room.for_body(100), room.to_read(100), room.to_read(10):
        assert not room._one.acquire(blocking=False)  # one large body is read at a time; the small one did not wait
    assert room._one.acquire(blocking=False)


def test_who_left_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronghorn.serve.turns.LOOK", 0.01)
    turns, left = Turns(), threading.Event()

    def leave() -> None:
        left.set()
        raise ConnectionAbortedError

    def gone() -> None:
        with pytest.raises(ConnectionAbortedError), turns.one(leave):
            raise AssertionError("it left while it waited")

    with turns.one(stay):
        thread = threading.Thread(target=gone)
        thread.start()
        assert left.wait(20)
        thread.join(20)
        waiting(turns, 1)
    with pytest.raises(ConnectionAbortedError), turns.one(leave):
        raise AssertionError("it left before its turn")
    with turns.one(stay):
        pass
