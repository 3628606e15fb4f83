"""Many processes give what one gives; killed, stopped or interrupted, they end in a sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from processes import alive
from pronghorn.data.encode import encoding_pool
from pronghorn.data.encode.encode import Encoder
from pronghorn.data.encode.encoding_pool import EncodingPool
from pronghorn.data.preference.preference_rows import Group
from pronghorn.data.read.formats import Example
from pronghorn.data.read.reading import Chunk
from pronghorn.errors import EnvironmentFault
from samples import CHATML, make_tokenizer


def chat(number: int, *messages: dict[str, Any]) -> Group:
    return Group(f"row {number}", (Example("chat", f"row {number}", messages=messages),))


ROWS = [chat(n, {"role": "user", "content": f"{n} or no?"}, {"role": "assistant", "content": f"yes {n}"}) for n in range(200)]
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}  # which CHATML does not write
ROWS[17] = chat(17, {"role": "user", "content": "?"}, CALLING)


def chunk(*rows: Group) -> Chunk:
    return Chunk(0, "messages", len(rows), [], groups=list(rows))


def encoded(pool: EncodingPool) -> tuple[list[list[int]], int]:
    done = []
    with pool:
        for at in range(0, len(ROWS), 8):
            done += list(pool.give(chunk(*ROWS[at : at + 8])))
        done += list(pool.rest())
    ids = [row.values.to_numpy().tolist() for _, (batch, _, _) in done for row in batch.column("ids")]
    return ids, sum(len(bad) for _, (_, bad, _) in done)


def test_all_cores_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(make_tokenizer(CHATML))
    alone, bad = encoded(EncodingPool(encoder, cores=1))
    monkeypatch.setattr(encoding_pool, "ROWS_WORTH_A_POOL", 20)
    pool = EncodingPool(encoder, cores=3)
    assert encoded(pool) == (alone, bad)
    assert pool._executor is not None
    assert (len(alone), bad) == (199, 1)


def test_a_killed_worker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_pool, "ROWS_WORTH_A_POOL", 0)
    parent = os.getpid()

    def out_of_memory(self: Encoder, examples: Any) -> Any:
        assert os.getpid() != parent
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Encoder, "encode_many", out_of_memory)
    with pytest.raises(EnvironmentFault, match=r"process \d+ was ended by SIGKILL") as caught:
        encoded(EncodingPool(Encoder(make_tokenizer(CHATML)), cores=2))
    assert caught.value.where.startswith("row 0 to row 7")


def test_stopped_workers_end_in_a_sentence_and_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_pool, "ROWS_WORTH_A_POOL", 0)
    monkeypatch.setattr(encoding_pool, "LOOK_EVERY", 0.02)
    waits: list[int] = []
    pool = EncodingPool(Encoder(make_tokenizer(CHATML)), cores=2, waiting=lambda: waits.append(1))
    workers: list[int] = []

    def stop_and_go_on() -> None:
        with pool:
            list(pool.give(chunk(*ROWS[:8])))
            list(pool.rest())
            workers.extend(worker.pid or 0 for worker in pool._workers)
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)
            list(pool.give(chunk(*ROWS[8:16])))
            list(pool.rest())

    with pytest.raises(EnvironmentFault, match="tokenizing hangs: process") as caught:
        stop_and_go_on()
    assert f"process {workers[0]} is stopped by a signal" in str(caught.value)
    assert (caught.value.where, caught.value.exit_code) == ("row 8 to row 15", 3)
    assert len(waits) >= encoding_pool.STANDING_STILL  # somebody was told meanwhile
    assert not any(alive(pid) for pid in workers)


def test_a_slow_worker_is_not_a_stopped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_pool, "ROWS_WORTH_A_POOL", 0)
    monkeypatch.setattr(encoding_pool, "LOOK_EVERY", 0.02)
    monkeypatch.setattr(encoding_pool, "STANDING_STILL", 2)
    encode_many, looks = Encoder.encode_many, iter(range(10**6))

    def slow(self: Encoder, examples: Any) -> Any:
        time.sleep(0.5)
        return encode_many(self, examples)

    monkeypatch.setattr(Encoder, "encode_many", slow)
    monkeypatch.setattr(EncodingPool, "_cpu_ticks", lambda self: [next(looks)])  # at every look it has worked
    pool = EncodingPool(Encoder(make_tokenizer(CHATML)), cores=2)
    with pool:
        assert sum(batch.num_rows for _, (batch, _, _) in [*pool.give(chunk(*ROWS[:8])), *pool.rest()]) == 8


@pytest.mark.usefixtures("imported_python")
def test_workers_leave_with_a_killed_parent() -> None:
    code = textwrap.dedent("""
        import sys, time; sys.path.insert(0, sys.argv[1])
        from samples import make_tokenizer
        from pronghorn.data.encode import encode
        from pronghorn.data.encode import encoding_pool
        from pronghorn.data.preference.preference_rows import Group
        from pronghorn.data.read.formats import Example
        from pronghorn.data.read.reading import Chunk
        encoding_pool.ROWS_WORTH_A_POOL = 0
        pool = encoding_pool.EncodingPool(encode.Encoder(make_tokenizer()), cores=2)
        list(pool.give(Chunk(0, "text", 1, [], groups=[Group("", (Example("text", "", text="a"),))]))); list(pool.rest())
        print(*pool._executor._processes, flush=True)
        time.sleep(60)
    """)
    folder = Path(__file__).parent.parent
    parent = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert workers
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers)


@pytest.mark.usefixtures("imported_python")
def test_an_interrupt_while_workers_are_made_is_not_lost() -> None:
    """It comes in a function that Python calls after a fork, where whatever it raises would be ignored. Workers end by SIGTERM
    as ever."""
    code = textwrap.dedent("""
        import os, signal, sys, time; sys.path.insert(0, sys.argv[1])
        from samples import make_tokenizer
        from pronghorn.data.encode import encode
        from pronghorn.data.encode import encoding_pool
        from pronghorn.data.preference.preference_rows import Group
        from pronghorn.data.read.formats import Example
        from pronghorn.data.read.reading import Chunk
        encoding_pool.ROWS_WORTH_A_POOL = 0
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts = iter([True])
        def after_a_fork():
            if next(interrupts, False):
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):
                    pass
        os.register_at_fork(after_in_parent=after_a_fork)
        pool = encoding_pool.EncodingPool(encode.Encoder(make_tokenizer()), cores=2)
        try:
            list(pool.give(Chunk(0, "text", 1, [], groups=[Group("", (Example("text", "", text="a"),))])))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        one = next(iter(pool._executor._processes.values()))
        one.terminate()
        deadline = time.monotonic() + 10
        while one.exitcode is None and time.monotonic() < deadline:  # the pool's own thread may be the one that is told of it
            time.sleep(0.01)
        print(one.exitcode, flush=True)
        os._exit(0)
    """)
    folder = Path(__file__).parent.parent
    ended = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.stdout.split(), "ignored" in ended.stderr) == (["interrupted", "-15"], False), ended.stderr
