"""Memory for bodies of large requests."""

from __future__ import annotations

import pytest

from pronghorn.serve.asked import RequestError
from pronghorn.serve.room import Room


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
