"""The three displays: what they print, how little, and that they never stop a run."""

import io
import itertools
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import synthetic_events
from terminal_screen import CTRL_C, Terminal

from pronghorn.report.display import JsonDisplay, LiveDisplay, PlainDisplay, make_display
from pronghorn.report.stages import Stages

STEP = {"event": "step", "loss": 1.0, "lr": 1e-4, "tokens": 100, "seconds": 0.5}


def test_json_is_the_events_themselves(capsys):
    display = make_display(json=True)
    assert isinstance(display, JsonDisplay)
    events = [STEP | {"step": 1, "loss": "nan"}, {"event": "notice", "text": "ü\n\x1b[31m"}]
    for event in events:
        display.handle(event)
    display.progress("read", 1, 2)
    display.close()
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == events


def test_without_a_terminal_the_lines_are_plain_and_few(capsys):
    now = [0.0]
    display = PlainDisplay(clock=lambda: now[0])
    display.handle({"event": "start", "run": "r", "steps": 2000, "recipe": {"model": "m"}, "resumed_from": None})
    for number in range(1, 2001):
        now[0] += 0.1
        display.handle(STEP | {"step": number})
    display.close()
    lines = capsys.readouterr().out.splitlines()
    steps = [int(line.split("/")[0].split()[1].replace(",", "")) for line in lines if line.startswith("step")]
    assert steps[0] == 1
    assert steps[-1] == 2000
    assert 60 <= len(steps) <= 60 + 14 + 3  # a minute at one a second, 140 s at one every ten
    assert all(b - a >= 10 for a, b in itertools.pairwise(steps[:-1]))  # never two within a second
    assert not any("\x1b" in line for line in lines)


def test_rare_events_always_get_their_line(capsys):
    display = PlainDisplay(clock=lambda: 0.0)
    for event in synthetic_events(200, resume_at=150):
        display.handle(event)
    text = capsys.readouterr().out
    for word in ("resumed from step 100", "evaluation at step 0:", "evaluation at step 200: loss", "best so far", "-> ",
                 "checkpoint at step 200: runs/hotel/checkpoint-200 (58.7 MB", "rows are longer",
                 "finished: 200 of 200 steps"):  # fmt: skip
        assert word in text, word


@pytest.mark.parametrize("flag", ["True", "False"])
def test_a_reader_that_goes_away_does_not_stop_the_run(flag):
    code = (
        "import sys; from pronghorn.report.display import make_display\n"
        f"display = make_display({flag})\n"
        "for i in range(20000): display.handle({'event': 'notice', 'text': 'x' * 100})\n"
        "display.close(); print('unseen'); sys.stderr.write('finished')"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b"finished"
    assert child.wait(20) == 0


def live_display(stages=None):
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system="truecolor", _environ={})
    return console, LiveDisplay(console, stages)


def plain_text(console):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_live_view_shows_step_loss_rate_time_and_stages():
    stages = Stages(started=time.monotonic() - 2.0)  # not this process's own start, which may be longer ago than a run's can be
    console, display = live_display(stages)
    display.progress("tokenize", 30, 100)
    until = time.monotonic() + 30  # it draws in a thread of its own, which a busy machine may keep waiting
    while "30 of 100" not in plain_text(console) and time.monotonic() < until:
        time.sleep(0.05)
    assert "30 of 100" in plain_text(console)
    for event in synthetic_events(60):
        with stages("step"):
            display.handle(event)
    display.close()
    display.close()
    last = "\n".join(plain_text(console).splitlines()[-3:])
    assert "60 of 60" in last
    assert re.search(r"loss +[▁▂▃▄▅▆▇█]+", last)
    assert "tokens/s" in last
    assert re.search(r"time +█+ ", last)
    assert "imports" in last
    assert "tokenize" not in last
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_terminal_that_goes_away_does_not_stop_the_run():
    class Terminal(io.StringIO):
        gone = False

        def write(self, text):
            if self.gone:
                raise OSError(5, "Input/output error")
            return super().write(text)

    for gone_from_the_start in (True, False):
        terminal = Terminal()
        display = LiveDisplay(Console(file=terminal, force_terminal=True, width=100))
        terminal.gone = gone_from_the_start
        for event in synthetic_events(120):
            display.handle(event)
            display.progress("read", 1, 2)
            terminal.gone = True
        display.close()


def in_a_terminal(code, **environment):
    """What a child prints when its standard output is a terminal."""
    leader, follower = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=follower, env=env | {"TERM": "xterm-256color"} | environment)
    os.close(follower)
    printed = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not block:
            break
        printed += block
    os.close(leader)
    assert child.wait(20) == 0
    return printed.decode()


def test_the_factory_looks_at_standard_output(capsys):
    assert isinstance(make_display(json=False), PlainDisplay)
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from synthetic_run import synthetic_events; from pronghorn.report.display import make_display\n"
        "display = make_display(False)\n"
        "for event in synthetic_events(60): display.handle(event)\n"
        "display.close()"
    )
    coloured, colourless, dumb = in_a_terminal(code), in_a_terminal(code, NO_COLOR="1"), in_a_terminal(code, TERM="dumb")
    assert re.search(r"\x1b\[3[0-9;]+m", coloured)
    assert "60 of 60" in colourless
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", colourless)
    assert "\x1b" not in dumb
    assert "step 60/60" in dumb


# Step 2 of 5 takes as long as nobody presses Ctrl-C, and a second more.
RUN = """
import time
from pronghorn.report.display import make_display
from pronghorn.report.stages import Stages
from pronghorn.train.run.signals import StopRequest
stages = Stages()
display = make_display(False, stages)
display.handle({"event": "start", "run": "r", "steps": 5, "recipe": {}})
with StopRequest(say=lambda text: display.handle({"event": "stopping", "text": text})) as stop:
    display.handle({"event": "step", "step": 1, "loss": 1.0, "lr": 1e-4, "tokens": 100, "seconds": 30.0})
    with stages("step"):
        while not stop.requested:
            time.sleep(0.01)
        time.sleep(SECONDS)
    display.progress("saving", 0, 0)
    time.sleep(0.5)
    display.progress("saving", 1, 1)
    time.sleep(0.5)
    display.handle({"event": "checkpoint", "step": 2, "path": "runs/r/checkpoint-2", "bytes": 1, "seconds": 0.1})
display.close()
print("the end")
"""


def test_ctrl_c_is_answered_at_once_and_the_answer_stays():
    with Terminal("-c", RUN.replace("SECONDS", "1")) as terminal:
        terminal.frames(lambda screen: "1 of 5" in screen)
        terminal.type(CTRL_C)
        terminal.frames(lambda screen: "stopping" in screen)
        frames = terminal.frames(lambda screen: "saving; Ctrl-C again quits now" in screen)
        frames_at_the_end = terminal.frames(lambda screen: "stopping    saved, writing the report" in screen)
        rest = terminal.frames(lambda _: False)
        assert terminal.process.wait(60) == 0
    assert len(frames) >= 3
    assert not any("step 3" in frame for frame in frames_at_the_end)  # there is no next one
    for frame in frames[:-1]:
        assert re.search(
            r"^stopping    finishing step 2, then saving \(about [\d.]+ s\); Ctrl-C again quits now$", frame, re.M
        ), frame
        assert frame.count("stopping") == 1
        assert "1 of 5" in frame  # the display goes on below and above it
    assert "checkpoint at step 2" in rest[-1]
    assert rest[-1].rstrip().endswith("the end")
    assert "stopping" not in rest[-1]  # it is over


def test_a_second_ctrl_c_says_what_it_did_and_the_cursor_is_back():
    with Terminal("-c", RUN.replace("SECONDS", "60")) as terminal:
        terminal.frames(lambda screen: "1 of 5" in screen)
        terminal.type(CTRL_C)
        terminal.frames(lambda screen: "stopping" in screen)
        terminal.type(CTRL_C)
        last = terminal.frames(lambda _: False)[-1]
        assert terminal.process.wait(60) == 130
    assert last.rstrip().endswith(
        "quit without saving; complete checkpoints are intact, the same command resumes from the last one"
    )
    assert terminal.printed.rindex("\x1b[?25h") > terminal.printed.rindex("\x1b[?25l")


@pytest.mark.parametrize("together", [True, False])
def test_without_a_terminal_the_sentence_is_a_line_of_the_log(tmp_path, together):
    code = (
        RUN.replace("SECONDS", "0")
        .replace("time.sleep(0.5)", "")
        .replace("while not stop.requested:", "import os; os.kill(os.getpid(), 2)\n        while not stop.requested:")
    )
    with (tmp_path / "log").open("w") as log:
        errors = log if together else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", code], stdout=log, stderr=errors, timeout=60, check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["r:", "step", "stopping:", "checkpoint", "the"]
    if not together:
        assert done.stderr.decode() == f"{lines[2]}\n"
