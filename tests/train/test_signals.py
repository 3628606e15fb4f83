"""Ctrl-C and SIGTERM, sent to real processes (without torch: they start in 50 ms)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from pronghorn.train.run.signals import StopRequest

# Says `ready`, then works in steps of 10 ms; when asked to stop, finishes the step, "saves" for `saving` seconds, leaves.
LOOP = """
import sys, time
from pronghorn.train.run.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saving", flush=True)
    ended = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < ended:
        time.sleep(0.01)
    print("saved", flush=True)
sys.exit(128 + stop.signal_number)
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_first_signal_lets_the_loop_save_and_leave(number: signal.Signals, exit_code: int) -> None:
    process = start("import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + LOOP, "0")  # these tests may have nohup
    process.send_signal(number)
    out, err = process.communicate(timeout=50)
    assert out == "saving\nsaved\n"
    by_hand, other = "stopping: {}; press Ctrl-C again to quit immediately\n", f"stopping on {number.name}: {{}}\n"
    assert err == (by_hand if number == signal.SIGINT else other).format("finishing this step, then saving")
    assert process.returncode == exit_code


def test_what_was_started_with_nohup_goes_on_without_a_terminal() -> None:
    process = start("import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + LOOP, "0")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=50)[0] == "saving\nsaved\n"
    assert process.returncode == 143


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_second_ctrl_c_leaves_at_once(first: signal.Signals) -> None:
    process = start(LOOP, "60")
    process.send_signal(first)
    assert process.stdout.readline() == "saving\n"
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=50)
    assert time.monotonic() - sent < 40  # of 60
    assert (out, process.returncode) == ("", 130)
    assert "intact" in err


def test_repeated_sigterm_does_not_cut_the_save_short() -> None:
    process = start(LOOP, "0.3")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=50)
    assert (out, process.returncode) == ("saved\n", 143)
    assert err.count("\n") == 1


FORKING = """
import os, signal, sys, time
from pronghorn.train.run.signals import StopRequest
with StopRequest() as stop:
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    print("ready", flush=True)
    os.kill(child, signal.SIGINT)
    time.sleep(0.2)
    print("alive after Ctrl-C:", os.waitpid(child, os.WNOHANG) == (0, 0))
    os.kill(child, signal.SIGTERM)
    print("ended by signal", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print("parent asked to stop:", stop.requested)
"""


def test_a_forked_worker_survives_ctrl_c_and_obeys_sigterm() -> None:
    process = start(FORKING)
    out, err = process.communicate(timeout=50)
    assert out == "alive after Ctrl-C: True\nended by signal -15\nparent asked to stop: False\n"
    assert err == ""


def test_old_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_number == signal.SIGTERM
    assert {number: signal.getsignal(number) for number in before} == before
