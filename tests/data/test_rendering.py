"""Templates that never end, want all memory or write without end: a sentence, exit code 2, and the process as it was."""

from __future__ import annotations

import mmap
import resource
import signal
import threading
import time

import pytest

from pronghorn.data.encode.encode import Encoder
from pronghorn.data.read.formats import Example
from pronghorn.data.template import rendering
from pronghorn.data.template.rendering import RowError, within_limits
from pronghorn.data.template.templates import chat_template
from pronghorn.errors import DataError
from samples import CHATML, make_tokenizer
from tables import table

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
    "{% endfor %}"
)
DOUBLING = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOPS, "does not terminate"),
        ("{{ 9 ** (9 ** 8) % 7 }}", "does not terminate"),
        ("{{ (10 ** 4000) ** (10 ** 4000) }}", "does not terminate|too much memory"),
        (DOUBLING, "does not terminate|too much memory"),  # a slow core copies for longer than is allowed here
        ("{{ '%9999999999d' % 1 }}", "too much memory"),
        ("{{ 'a'.center(9999999999) }}", "too much memory"),
        ("{{ 'a' | center(9999999999) }}", "too much memory"),
        ("{{ 'x' * 10 ** 11 }}", "too much memory"),
        ("{{ 'x' * 10 ** 5 }}", "produces too much text"),
    ],
)
def test_a_template_without_measure_is_stopped(template: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 0.1)
    monkeypatch.setattr(rendering, "LETTERS", 1 << 10)
    state = signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError, match=said) as caught:
        chat_template(make_tokenizer(template)).render(TALK)
    assert not isinstance(caught.value, RowError)  # other rows are no better
    assert (caught.value.exit_code, caught.value.fix) == (2, "set data.chat_template to a template you trust")
    assert (signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_AS)) == state
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@table(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages[7].content + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ (10 ** 5000) | string }}",
        "{{ '%q' % 1 }}",
    ],
)
def test_what_a_template_does_wrong_is_told_with_the_row(template: str) -> None:
    with pytest.raises(RowError, match="does not accept this conversation") as caught:
        chat_template(make_tokenizer(CHATML + template)).render(TALK, where="a.jsonl:17")
    assert caught.value.where == "a.jsonl:17"


def test_a_template_that_python_cannot_compile() -> None:
    deep = "".join(f"{{% for a{n} in [1] %}}" for n in range(30)) + "{% endfor %}" * 30
    with pytest.raises(DataError, match=r"not valid Jinja|does not accept"):
        chat_template(make_tokenizer(deep)).render(TALK)


def test_only_one_row_makes_it_run_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 0.3)
    encoder = Encoder(make_tokenizer("{% if messages[0].content == 'run' %}" + LOOPS + "{% endif %}" + CHATML))
    assert len(encoder.encode(Example("chat", "row 0", messages=tuple(TALK))).ids)
    with pytest.raises(DataError, match="does not terminate") as caught:
        encoder.encode(Example("chat", "row 1", messages=({"role": "user", "content": "run"}, TALK[1])))
    assert caught.value.where == "row 1"


def test_a_long_conversation_may_take_what_it_needs() -> None:
    long = [{"role": "user", "content": "q" * 30_000_000}, {"role": "assistant", "content": "a"}]
    assert len(within_limits(lambda: long[0]["content"] * 2, long, "")) == 60_000_000


@pytest.mark.parametrize(("template", "said"), [(CHATML, "<|im_start|>user"), (LOOPS, "does not terminate")])
def test_in_another_thread(template: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no timer of the kernel, and a watch in its place; the thread goes on as it was."""
    monkeypatch.setattr(rendering, "SECONDS", 0.3)
    found: list[str] = []

    def render() -> None:
        try:
            found.append(chat_template(make_tokenizer(template)).render(TALK).text)
        except DataError as error:
            found.append(error.what)
        found.append("and went on")

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    assert said in found[0]
    assert found[1] == "and went on"


def test_a_process_that_grew_since_the_last_rendering_has_its_room() -> None:
    """A model that is loaded in between takes more than the limit allows a template; the limit counts from then."""
    calls = []

    def render() -> str:
        calls.append(1)
        return bytearray(64 << 20)[:4].decode()

    within_limits(lambda: "first", TALK, "")
    with mmap.mmap(-1, 3 << 30, prot=mmap.PROT_READ):
        time.sleep(2 * rendering.JUST_NOW)
        assert within_limits(render, TALK, "") == "\0" * 4
    assert len(calls) == 1
