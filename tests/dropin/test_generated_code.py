"""Code that a model wrote: what it imports; in its process it can compute, and nothing else; its limits."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from processes import alive, wait_until
from pronghorn import check_python_modules, create_locked_down_function, execute_with_time_limit
from pronghorn.compat.dropin import generated_code
from pronghorn.compat.dropin.generated_code import LockedDown
from pronghorn.errors import EnvironmentFault
from tables import table


def test_imports_are_read() -> None:
    ok, info = check_python_modules("def f(x):\n    import math, os.path\n    from typing import Any\n    return x")
    assert ok
    assert info == {"stdlib": ["math", "os", "typing"], "non_stdlib": [], "relative_imports": 0}
    ok, info = check_python_modules("def f(x):\n    from numpy import matmul\n    from . import y\n    return x")
    assert not ok
    assert (info["non_stdlib"], info["relative_imports"]) == (["numpy"], 1)
    ok, info = check_python_modules("def f")
    assert not ok
    assert "SyntaxError" in info["error"]


def test_a_function_computes() -> None:
    double = "import math\ndef double(x):\n    return 2 * x\n"
    f = create_locked_down_function(
        double + "def f(rows, *, k=1):\n    print(rows)\n    return [double(math.sqrt(x)) + k for x in rows]"
    )
    assert f([1.0, 4.0], k=3) == [5.0, 7.0]
    assert f(np.array([9.0])) == [7.0]
    state = create_locked_down_function(
        "seen = []\ndef f(x):\n    seen.append(x)\n    return {'seen': seen, 'x': (x, None, 'é')}"
    )
    state(1)
    assert state(2) == {"seen": [1, 2], "x": [2, None, "é"]}
    with pytest.raises(TypeError, match="a object cannot be given"):
        state(object())
    assert state(3)["seen"] == [1, 2, 3]  # and is well afterwards


OPENS = "open({!r}).read()"


@table(("body", "kind"), [
    (OPENS.format("/etc/passwd"), PermissionError),
    (OPENS.format("/proc/self/environ"), PermissionError),
    ("open('made', 'w')", PermissionError),
    ("__import__('os').listdir('/')", PermissionError),
    ("__import__('os').posix_spawn('/bin/true', ['true'], {})", PermissionError),
    ("__import__('os').fork()", PermissionError),
    ("__import__('os').kill(1, 0)", PermissionError),
    ("__import__('os').kill(__import__('os').getppid(), 9)", PermissionError),
    ("__import__('socket').socket()", ImportError),
    ("__import__('_socket').socket()", (ImportError, PermissionError)),
    ("__import__('subprocess').run(['true'])", (ImportError, PermissionError)),
    ("__import__('ctypes').CDLL(None).socket(2, 1, 0)", None),
    ("np.matmul(1, 2)", NameError),
    ("json.dumps(1)", NameError),  # of the process's own globals
    ("1 / 0", ZeroDivisionError),
    ("int('x')", ValueError),
    ("f()", RecursionError),
    ("object()", TypeError),
    ("raise_(1)", NameError),
    ("exit(3)", (RuntimeError, NameError)),
    ("bytearray(1 << 34)", MemoryError),
])  # fmt: skip
def test_a_function_can_do_nothing_else(body: str, kind: Any) -> None:
    f = create_locked_down_function(f"def f():\n    return {body}")
    if kind is None:
        assert f() == -1  # the kernel refuses
        return
    with pytest.raises(kind):
        f()


def test_what_is_no_function() -> None:
    for source, kind in (("def f(", SyntaxError), ("x = 1", SyntaxError), ("1 / 0\ndef f(): pass", ZeroDivisionError)):
        with pytest.raises(kind):
            create_locked_down_function(source)


def test_limits_of_time() -> None:
    endless = create_locked_down_function("def f(x):\n    while x:\n        pass\n    return 1")

    def here(strategy: Any, x: int) -> Any:
        return strategy(x), os.getpid()

    play = execute_with_time_limit(0.3)(here)
    assert execute_with_time_limit(60)(here)(endless, 0) == (1, os.getpid())  # the script's own function runs here
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        play(endless, 1)
    with pytest.raises(RuntimeError, match="has ended"):
        endless(0)
    with pytest.raises(TimeoutError):
        play(lambda x: time.sleep(300), 1)
    found: list[BaseException] = []

    def elsewhere() -> None:
        try:
            play(create_locked_down_function("def f(x):\n    while x:\n        pass"), 1)
        except TimeoutError as error:
            found.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(found) == 1
    assert time.monotonic() - began < 200
    alive = create_locked_down_function("def f():\n    return 1")
    process = alive._process
    del alive
    assert process.returncode is not None


def test_its_process_lives_as_long_as_ours(tmp_path: Path) -> None:
    """Not as long as the thread that made it; and a killed script leaves nothing behind."""
    with ThreadPoolExecutor() as threads:
        (one,) = threads.map(create_locked_down_function, ["def f():\n    return 1"])
    assert one() == 1

    def script() -> None:
        endless = create_locked_down_function("def f():\n    while True:\n        pass")
        (tmp_path / "pid").write_text(f"{endless._process.pid}\n")
        endless()

    process = multiprocessing.get_context("fork").Process(target=script)
    process.start()
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
    process.kill()
    process.join()
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())), "it outlives its script")


def test_where_a_process_cannot_be_locked_code_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = (Path(generated_code.__file__).with_name("locked_child.py")).read_text(encoding="utf-8")
    (tmp_path / "locked_child.py").write_text(child.replace('"x86_64":', '"other":').replace('"aarch64":', '"another":'))
    monkeypatch.setattr(generated_code, "__file__", str(tmp_path / "x.py"))
    with pytest.raises(EnvironmentFault, match="cannot be locked: KeyError"):
        LockedDown("def f(): pass")
