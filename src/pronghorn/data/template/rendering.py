"""A chat template is a program, and a file may bring any: it runs in its sandbox, and here within limits.

A rendering that takes 10 s of CPU time, a gigabyte beyond what the conversation itself needs, or writes a text out of all
proportion is stopped, with a sentence. (Real templates take a tenth of a millisecond.) The time is kept by a timer of the
kernel, whose signal Python looks at between two instructions and inside its arithmetic of long numbers; the memory by the
process's own limit, which is lowered while the template runs. Both need the main thread of a process, where rows are encoded.
In another thread (`pronghorn serve` renders in a request's) a watch raises the error there, between two instructions,
after the same time on the clock; the memory, which other threads need too, has no limit there.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from pronghorn.errors import DataError
from pronghorn.hf_types import Tokenizer

T = TypeVar("T")
CHANGING = re.compile(r"attribute '([a-z]\w*)' of '(list|dict|set)' object")
SECONDS = 10.0  # of CPU time, for one rendering
MEMORY = 1 << 30  # bytes beyond what the process has
MEMORY_A_LETTER = 64  # and for each letter of the conversation: texts are copied, and letters may take 4 bytes
LETTERS, LETTERS_A_LETTER = 1 << 24, 8  # the longest text, likewise

# What templates raise on rows they do not expect, besides their own raise_exception (a jinja2.TemplateError).
TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, SyntaxError,
    AssertionError,
)  # fmt: skip


class RowError(DataError):
    """Something is wrong with one row; others may be fine."""


class SandboxError(RowError):
    """The template changes a list or a dictionary, which the sandbox that transformers runs it in does not allow."""


def rendered(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], ask: bool = False, template: str | None = None
) -> str | None:
    """The text of a conversation, with the generation prompt if `ask`; None where the template refuses it. `template`: another
    one than the tokenizer's."""
    options = {"tokenize": False, "add_generation_prompt": ask, "chat_template": template}
    try:
        return str(applied(tokenizer, messages, **options))
    except RowError:
        return None


def applied(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **options: object) -> Any:
    """The template applied to a conversation, with the generation prompt unless `options` say otherwise. Raises RowError."""
    asked = {"add_generation_prompt": True, "return_dict": False, **options}
    return within_limits(lambda: tokenizer.apply_chat_template(list(messages), **asked), messages, "")


def special_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches every special token, and those that `data.eot_tokens` names."""
    # Read once: transformers builds this list from the vocabulary at every call.
    found = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    found |= {*tokenizer.all_special_tokens, *getattr(tokenizer, "pronghorn_eot_tokens", ())}
    longest_first = sorted((token for token in found if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")  # (?!) matches nothing


class _TimeIsUpError(BaseException):
    """Not an Exception, so that nothing on its way takes it for one of its own."""


def within_limits(render: Callable[[], T], messages: Sequence[Any], where: str) -> T:
    """What `render` returns, within the limits; what it raises, as our errors."""
    letters = sum(len(str(message.get("content") or "")) for message in messages)
    memory = MEMORY + MEMORY_A_LETTER * letters
    try:
        try:
            found = _limited(render, memory)
        except MemoryError:
            _last.clear()  # another thread may have taken much since it was last looked at
            found = _limited(render, memory)
    except TEMPLATE_ERRORS as error:
        raise _template_fault(error, where) from error
    except _TimeIsUpError as error:
        raise _beyond("does not terminate", f"it was stopped after {SECONDS:.0f} s of CPU time", where) from error
    except MemoryError as error:
        raise _beyond("needs too much memory", f"it asked for more than {MEMORY >> 30} GB", where) from error
    text = found[0] if isinstance(found, tuple) else found
    length = len(text) if isinstance(text, str) else 0
    if length > LETTERS + LETTERS_A_LETTER * letters:
        raise _beyond("produces too much text", f"{length:,} characters for a conversation of {letters:,}", where)
    return found


def _limited(work: Callable[[], T], memory: int) -> T:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return _watched(work)
    running = True

    def time_is_up(*_: object) -> None:
        if running:
            raise _TimeIsUpError

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _memory_now() + memory
    allowed = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    before = signal.signal(signal.SIGVTALRM, time_is_up)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min([limit, *allowed]), hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 1.0)  # and again, if the first one comes where it cannot be raised
        return work()
    finally:
        running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
        _last.update(process=os.getpid(), ended=time.monotonic())


def _watched(work: Callable[[], T]) -> T:
    thread, one_at_a_time, state = ctypes.c_ulong(threading.get_ident()), threading.Lock(), {"running": True}

    def time_is_up() -> None:
        with one_at_a_time:
            if state["running"]:
                state["raised"] = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_TimeIsUpError))

    watch = threading.Timer(SECONDS, time_is_up)
    watch.daemon = True
    watch.start()
    try:
        return work()
    finally:
        watch.cancel()
        with one_at_a_time:
            state["running"] = False
            if "raised" in state:  # if it has not come yet, it is not wanted any more
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)


_last: dict[str, float] = {}  # the process, its memory, and when a rendering last ended
JUST_NOW = 0.005  # seconds


def _memory_now() -> int:
    """Addresses in use, which is what the limit counts; asking takes as long as a rendering, so not between two that follow one
    another. After anything else it is asked again: under a limit below what is in use, Python itself does not get far (a model
    of some gigabytes may have been loaded since). Without /proc there is no limit."""
    if _last.get("process") != os.getpid() or time.monotonic() - _last["ended"] > JUST_NOW:
        try:
            _last["memory"] = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
        except OSError:
            _last["memory"] = 1 << 60
    return int(_last["memory"])


def _beyond(what: str, why: str, where: str) -> DataError:
    return DataError(
        f"the chat template {what}",
        where=where or "chat template",
        why=why,
        fix="set data.chat_template to a template you trust",
    )


def _template_fault(error: Exception, where: str) -> DataError:
    broken = isinstance(error, (jinja2.TemplateSyntaxError, SyntaxError))
    unsafe = isinstance(error, jinja2.exceptions.SecurityError)
    if unsafe and (changing := CHANGING.search(str(error))):
        return SandboxError(
            f"the chat template calls {changing[2]}.{changing[1]}, which its sandbox does not allow", where=where,
            why="transformers renders templates in a sandbox where they cannot change lists and dictionaries",
            fix="set data.chat_template to a version of the template that concatenates lists (a + [b]), or remove such rows",
        )  # fmt: skip
    if broken or unsafe:
        return DataError(
            "the chat template is not valid Jinja" if broken else "the chat template uses something that the sandbox forbids",
            where="chat template", why=str(error), fix="set data.chat_template to a template you trust",
        )  # fmt: skip
    return RowError(
        "the chat template does not accept this conversation", where=where, why=f"the template says: {error}",
        fix="change the row to what the template expects, or set data.chat_template to another template",
    )  # fmt: skip
