"""`pronghorn run` and `python -m pronghorn.unsloth` as processes: what a script sees, prints and ends with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pronghorn.cli import main
from pronghorn.cli.run_script import split
from public_models import write_data, write_hub

pytestmark = pytest.mark.usefixtures("_no_gpu")
PUBLIC = Path(__file__).parent / "scripts" / "public"


def process(*words: str, folder: Path, module: str = "pronghorn.cli", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
    )


def test_a_script_trains_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Hugging Face's Trainer: TRL's own loss needs a GPU."""
    write_hub(tmp_path / "home" / "hub", only="unsloth/Qwen3-4B")
    write_data(tmp_path)
    ended = process(
        "run",
        str(PUBLIC / "plain_trainer.py"),
        "--epochs",
        "0.25",
        "--output",
        "mine",
        folder=tmp_path,
        HF_HOME=str(tmp_path / "home"),
        HF_HUB_OFFLINE="1",
    )
    assert ended.returncode == 0, ended.stderr
    assert "answer:" in ended.stdout
    assert (tmp_path / "mine" / "adapter_model.safetensors").is_file()
    for told in (
        "import unsloth gives pronghorn",
        "Trainer(tokenizer=...) becomes processing_class=...",
        "TrainingArguments(evaluation_strategy=...) becomes eval_strategy=...",
        "warmup_steps=...",
        "fp16=True) becomes fp16=False",
        *([] if find_spec("bitsandbytes") else ['optim="paged_adamw_8bit") becomes "adamw_torch_fused"']),
    ):
        assert sum(told in line for line in ended.stderr.splitlines() if line.startswith("pronghorn: ")) == 1, told


def test_arguments_and_exit_codes_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("here = True\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        "import atexit, sys, json, beside\nprint(json.dumps([sys.argv, sys.path[0], __name__]))\n"
        "atexit.register(lambda: print(sys.modules['__main__'].beside.here))\nsys.exit(7)\n",
        encoding="utf-8",
    )
    words = ["mine.py", "--", "--json", "a=b", "--help"]
    for command in (process("run", *words, folder=tmp_path), process(*words, folder=tmp_path, module="pronghorn.unsloth")):
        assert command.returncode == 7, command.stderr
        assert command.stdout.splitlines()[1] == "True"  # what it leaves for the end finds it
        assert json.loads(command.stdout.splitlines()[0]) == [words, str(tmp_path), "__main__"]
        assert command.stderr == ""


SPAWNS = """
import multiprocessing, sys
from dataclasses import dataclass
import transformers, unsloth, beside
here = multiprocessing.current_process().name
@dataclass
class Answer:
    squared: int
    seen: tuple
def square(x):
    return Answer(x * x, (sys.argv[1:], beside.here, unsloth.__name__, type(transformers).__name__, here != "MainProcess"))
if __name__ == "__main__":
    __spec__ = None  # as some scripts write, for the sake of a debugger
    for how in sys.argv[1:]:
        with multiprocessing.get_context(how).Pool(1) as pool:
            assert pool.map_async(square, [2, 3]).get(120) == [
                Answer(x * x, (sys.argv[1:], True, "unsloth", "View", True)) for x in (2, 3)
            ]
            print(how)
"""


def test_processes_that_a_script_starts_see_what_it_sees(tmp_path: Path) -> None:
    """Classes travel both ways. Without the adaptor in the child, a pool starts it again for ever."""
    (tmp_path / "beside.py").write_text("here = True\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text(SPAWNS, encoding="utf-8")
    ended = process("run", "mine.py", "spawn", "forkserver", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "spawn\nforkserver\n"
    assert ended.stderr == "pronghorn: import unsloth gives pronghorn\n"


def test_a_hook_for_exceptions_is_called(tmp_path: Path) -> None:
    """wandb marks a run as failed in one, rich prints in color in one."""
    text = "import sys\ndef hook(kind, error, trace):\n    {}\nsys.excepthook = hook\n1 / 0\n"
    for line, code, out, err in (
        ("print(kind.__name__, error, trace.tb_frame.f_code.co_filename == __file__, trace.tb_lineno)", 1,
         "ZeroDivisionError division by zero True 5\n", []),
        ("sys.exit(9)", 9, "", []),
        ("raise KeyError('mine')", 1, "",
         ["Error in sys.excepthook:", "KeyError: 'mine'", "Original exception was:", "ZeroDivisionError: division by zero"]),
    ):  # fmt: skip
        (tmp_path / "mine.py").write_text(text.format(line), encoding="utf-8")
        ended = process("run", "mine.py", folder=tmp_path)
        assert (ended.returncode, ended.stdout) == (code, out), ended.stderr
        assert [part for part in ended.stderr.splitlines() if part in err] == err


def test_ctrl_c_ends_a_script_with_its_traceback(tmp_path: Path) -> None:
    # A shell's background jobs ignore Ctrl-C, and so does what they start: the script hears it wherever the tests run.
    (tmp_path / "mine.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def work():\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(600)\n\n\nwork()\n",
        encoding="utf-8",
    )
    ended = process("run", "mine.py", folder=tmp_path)
    assert ended.returncode == 130
    assert ended.stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path / "mine.py"}", line 8, in <module>')
    assert ended.stderr.endswith("KeyboardInterrupt\n")
    assert "pronghorn" not in ended.stderr.replace(str(tmp_path), "")


def test_an_error_of_ours_and_one_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ours.py").write_text(
        "from unsloth import FastSentenceTransformer\nFastSentenceTransformer.from_pretrained('x')\n", encoding="utf-8"
    )
    (tmp_path / "own.py").write_text("open('/no/such/file')\n", encoding="utf-8")
    for name, code, last in (("ours.py", 2, "fix: "), ("own.py", 1, "FileNotFoundError: ")):
        with pytest.raises(SystemExit) as ended:
            main(["run", str(tmp_path / name)])
        assert ended.value.code == code
        shown = capsys.readouterr().err.splitlines()
        assert shown[-1].strip().startswith(last)
        assert next(line for line in shown if line.startswith("  File")).startswith(f'  File "{tmp_path / name}", line')
    assert main(["run"]) == 2


def test_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--explain"]) == 0
    assert "import unsloth.chat_templates   gives pronghorn.chat_templates" in capsys.readouterr().out
    assert main(["run", "--explain", str(PUBLIC / "vision.py")]) == 0
    assert "  vision.py:2  unsloth.trainer.UnslothVisionDataCollator is not supported: " in capsys.readouterr().out
    assert main(["run", "--json", "--explain", str(PUBLIC / "vision.py")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {one["where"] for one in facts["missing"]} == {"vision.py:2"}


def test_what_is_the_scripts_own() -> None:
    assert split(["run", "--explain", "a.py", "--json", "--", "x"]) == (["run", "--explain", "a.py"], ["--json", "--", "x"])
    assert split(["run"]) == (["run"], [])
    assert split(["train", "a.yaml", "--json"]) == (["train", "a.yaml", "--json"], [])
    assert split([]) == ([], [])
