"""Every verb of the command line, on trained runs: what it prints for people, pipes and machines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import get_session

from cli_parts import Place, lines, shown
from pronghorn.cli import main
from pronghorn.cli.new import BYTES_PER_TOKEN
from pronghorn.memory import forecast
from pronghorn.recipe_file import EXAMPLE, load_recipe, parse_recipe
from pronghorn.recipe_objective import NAMES
from samples import chat_rows, write_rows
from tables import table

# new --------------------------------------------------------------------------------------------------------------------


def test_new_writes_a_recipe_that_loads_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.yaml"
    assert "pronghorn check" in shown(capsys, "new", str(file))
    assert load_recipe(file).train.lr == 2e-4
    file.write_text("mine")
    assert main(["new", str(file)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main(["new", str(tmp_path / "no" / "folder.yaml")]) == 2
    assert shown(capsys, "new", "-") == EXAMPLE
    filled = shown(capsys, "new", "-", "--model", "./m y", "--data", "a.jsonl", "--data", "1: b.jsonl", "--method", "qlora")
    recipe, default = parse_recipe(filled), parse_recipe(EXAMPLE)
    assert (recipe.model, recipe.data.train, recipe.method) == ("./m y", ("a.jsonl", "1: b.jsonl"), "qlora")
    data = recipe.data.model_copy(update={"train": default.data.train})
    assert recipe.model_copy(update={"model": default.model, "method": "lora", "data": data}) == default
    assert len(filled.splitlines()) == len(EXAMPLE.splitlines())
    assert lines(capsys, "new", str(tmp_path / "other.yaml")) == [{"written": str(tmp_path / "other.yaml")}]


def test_new_writes_any_objective_with_what_belongs_to_it(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NAMES:
        text = shown(capsys, "new", "-", "--objective", name)
        plain = parse_recipe(EXAMPLE, [f"objective={name}", "eval.best=X", "eval.generations=0"])
        recipe = parse_recipe(text, ["eval.best=X", "eval.generations=0"])
        assert recipe.model_copy(update={"rewards": ()}) == plain, name
        assert max(map(len, text.splitlines())) <= 132
        assert ("batch_" in text) == (recipe.objective.kind.reads != "prompts")
    for name, row in {
        "grpo": {"prompt": "1 + 1 =", "answer": "2"},
        "dpo": {"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"},
        "reward": {"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"},
    }.items():
        data = write_rows(tmp_path / f"{name}.jsonl", [{**row, "prompt": f"{i} and {row['prompt']}"} for i in range(40)])
        file = str(tmp_path / f"{name}.yaml")
        shown(capsys, "new", file, "--objective", name, "--model", str(place.model), "--data", str(data))
        shown(capsys, "check", file, "rollouts.max_new_tokens=8" if name == "grpo" else "train.seed=1")
    assert main(["new", "-", "--objective", "ppo"]) == 2
    assert "did you mean `grpo`?" in capsys.readouterr().err


def test_new_holds_out_more_of_little_data(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert BYTES_PER_TOKEN == forecast.BYTES_PER_TOKEN
    default = parse_recipe(EXAMPLE)
    write_rows(here / "few.jsonl", chat_rows(50))
    write_rows(here / "many.jsonl", chat_rows(50) * 1_000)
    for name in ("few.jsonl", "many.jsonl", "missing.jsonl", "org/name"):  # nothing is known of the last two
        recipe = parse_recipe(shown(capsys, "new", "-", "--data", name))
        assert recipe.train == default.train
        assert (recipe.data.eval == 0.05) == (name == "few.jsonl"), name


# The verbs, for machines ------------------------------------------------------------------------------------------------


def test_train_prints_its_log_and_goes_on_where_it_stood(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe, output = str(place.recipe), f"output={tmp_path / 'run'}"
    events = lines(capsys, "train", recipe, output)
    assert [e["event"] for e in events][:1] + [e["event"] for e in events][-1:] == ["start", "end"]
    assert events == [json.loads(line) for line in (tmp_path / "run" / "run.jsonl").read_text().splitlines()]
    again = lines(capsys, "train", recipe, output)
    assert not [e for e in again if e["event"] == "step"]
    fresh = lines(capsys, "train", recipe, output, "--fresh")
    losses = [[e["loss"] for e in some if e["event"] == "step"] for some in (events, fresh)]
    assert losses[0] == losses[1] != []


def test_check_for_machines(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (facts,) = lines(capsys, "check", str(place.recipe), "train.epochs=2")
    (once,) = lines(capsys, "check", str(place.recipe))
    assert facts["steps"] == 2 * once["steps"] > 0
    assert (facts["documents"], facts["eval_documents"]) == (30, 4)


def test_data_stats_for_machines(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (stats,) = lines(capsys, "data", "stats", str(place.recipe))
    assert (stats["counts"]["read"], stats["counts"]["kept"], stats["counts"]["format"]) == (30, 30, "messages")
    assert 0.5 < stats["packing"]["efficiency"] <= 1


def test_data_show_for_machines(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = lines(capsys, "data", "show", str(place.recipe), "--row", "4")
    answer = chat_rows(30)[3]["messages"][1]["content"]
    assert row["where"].endswith("train.jsonl:4")
    assert row["trained_on"] == [f"{answer}<|im_end|>"]
    assert sum(token["loss"] for token in row["tokens"]) == row["loss_tokens"]


def test_data_audit_writes_what_check_and_train_read(place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = chat_rows(30)
    data = f"data.train={write_rows(tmp_path / 'a.jsonl', [*rows, *rows[:4]])}"
    folder = tmp_path / "new" / "audit"
    (facts,) = lines(capsys, "data", "audit", str(place.recipe), data, "-o", str(folder))
    copies = facts["left_out"]["rows"]
    assert copies >= 4
    assert json.loads((folder / "audit.json").read_text()) == facts
    assert sorted(file.name for file in folder.iterdir()) == ["audit.html", "audit.json", "select.json"]
    (checked,) = lines(capsys, "check", str(place.recipe), data, f"data.select={folder / 'select.json'}")
    assert (checked["documents"], checked["copies"]) == (34 - copies, 0)
    text = shown(capsys, "data", "audit", str(place.recipe), data, "--output", str(folder), "--gpu", "h200")
    own = f"{data} data.select={folder / 'select.json'} output={place.run}-selected"
    assert f"train {place.recipe} {own}\n" in text  # with the keys of this command
    taken = tmp_path / "taken-selected"
    taken.mkdir()
    text = shown(capsys, "data", "audit", str(place.recipe), data, f"output={tmp_path / 'taken'}", "-o", str(folder))
    assert f"output={taken}-2" in text
    assert "GPU seconds" in text
    assert main(["data", "audit", str(place.recipe), data, "--output", str(place.recipe / "no")]) == 3
    assert "choose another folder" in capsys.readouterr().err


def test_data_audit_reads_the_losses_of_a_run_or_asks_the_model(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = ("data", "audit", str(place.recipe), "-o", str(tmp_path / "audit"))
    with monkeypatch.context() as patched:  # before the pass, whose losses could not be written
        patched.setattr("pronghorn.train.run.row_scores.score_rows", lambda *_: pytest.fail("scored"))
        assert main([*audit[:3], "--score", "-o", str(place.recipe / "no")]) == 3
    assert "choose another folder" in capsys.readouterr().err
    (facts,) = lines(capsys, *audit, "--run", str(place.run))
    assert facts["scores"]["rows"] == facts["rows"] == 30
    assert [one["name"] for one in facts["reasons"]][5:] == ["known", "suspect"]  # no model was asked
    text = shown(capsys, *audit, "--score", "--leave-out", "off-task:0.5")
    assert "tokens forward through the model" in text
    losses = [json.loads(line)["loss"] for line in (tmp_path / "audit" / "scores.jsonl").read_text().splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 30
    select = json.loads((tmp_path / "audit" / "select.json").read_text())
    assert select["scored_seconds"] > 0
    assert {one["reason"] for one in select["left_out"]} >= {"off_task"}
    for words, said in (
        (("--leave-out", "off-task:0.2"), "--leave-out needs --score"),
        (("--run", str(place.run), "--leave-out", "off-task:0.2"), "--leave-out needs --score"),
        (("--leave-out", "known:0.2"), "--leave-out needs --run FOLDER or --score"),
        (("--score", "--leave-out", "known:2"), "not a reason and a share"),
        (("--score", "--leave-out", "suspect:0.1"), "not a reason and a share"),
        (("--score", "--run", str(place.run)), "use one of them"),
        (("--score", "objective=dpo"), "has no loss of each row"),
    ):
        assert main([*audit, *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("row", ["31", "0"])
def test_a_row_that_is_not_there(place: Place, capsys: pytest.CaptureFixture[str], row: str) -> None:
    assert main(["data", "show", str(place.recipe), f"--row={row}"]) == 2
    assert "choose --row from 1 to 30" in capsys.readouterr().err


def test_eval_for_machines(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (figures,) = lines(capsys, "eval", str(place.run))
    (other,) = lines(capsys, "eval", str(place.run), "--data", str(place.folder / "train.jsonl"))
    assert (figures["documents"], other["documents"]) == (4, 30)
    assert figures["perplexity"] == pytest.approx(torch.tensor(figures["loss"]).exp().item(), rel=1e-4)


def test_chat_answers_one_prompt(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (answer,) = lines(capsys, "chat", str(place.run), "--prompt", "add 1 and 2", "--max-tokens", "8")
    assert set(answer) == {"answer"}
    said = shown(capsys, "chat", str(place.run), "--prompt", "add 1 and 2", "--max-tokens", "8")
    assert said.strip("\n") == answer["answer"]


@table(("words", "said"), [
    (["--prompt", "a", "--max-tokens", "0"], "--max-tokens 0"), (["--prompt", "a", "--max-tokens", "-5"], "--max-tokens -5"),
    (["--json"], "--json needs --prompt"), (["--prompt", "a\udcff"], "not UTF-8 text"),
    (["--prompt", "a", "--system", "\udcfe"], "not UTF-8 text"),
])  # fmt: skip
def test_what_chat_cannot_do(place: Place, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["chat", str(place.run), *words]) == 2
    out, err = capsys.readouterr()
    assert said in out + err


def test_chat_ends_with_an_empty_line_or_the_end_of_input(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["hello", "there", ""], ["hello", "there"]):
        heard = iter(words)

        def listen(prompt: str, heard: Iterator[str] = heard) -> str:
            try:
                return next(heard)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", listen)
        assert shown(capsys, "chat", str(place.run), "--max-tokens", "3").count("model: ") == 2
    heard = iter(["hello", "/help", "/temperature 0.7", "/temperature hot", "again", "/new", "hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(heard))
    said = shown(capsys, "chat", str(place.run), "--max-tokens", "3")
    assert said.count("model: ") == 3
    for word in ("start a new conversation", "temperature 0.7", "use a number from 0 to 5", "new conversation"):
        assert word in said, word
    heard = iter(["hello", "/clear", "/exti", "/etc/passwd?", "/base", "hello", "/base", "/exit", "not heard"])
    monkeypatch.setattr("builtins.input", lambda _: next(heard))
    said = shown(capsys, "chat", str(place.run), "--max-tokens", "3")
    assert [line.partition(":")[0] for line in said.splitlines()[1:]] == [
        "model",
        "new conversation",
        "unknown command /exti; /help lists the commands",
        "model",
        "answers of the base model",
        "base",
        "model",
        "answers of the base model",
    ]
    assert next(heard) == "not heard"
    assert "readline" in sys.modules  # the arrow keys edit the line and bring back earlier ones
    (both,) = lines(capsys, "chat", str(place.run), "--base", "--prompt", "add 1 and 2", "--max-tokens", "3")
    assert both.keys() == {"answer", "base"}
    monkeypatch.setattr("builtins.input", lambda _: "bytes of another alphabet \udcff")
    assert main(["chat", str(place.run), "--max-tokens", "3"]) == 2
    assert "not UTF-8 text" in capsys.readouterr().err


def test_runs_are_listed_and_compared(place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (listed,) = lines(capsys, "runs", "--root", str(place.runs))
    assert {run["name"]: run["state"] for run in listed["runs"]} == {"run": "done", "slow": "done"}
    (both,) = lines(capsys, "runs", str(place.run), str(place.runs / "slow"))
    assert both["differences"] == {"train.lr": [0.01, 0.0001]}
    assert "train.lr" in shown(capsys, "runs", str(place.run), str(place.runs / "slow"))
    assert shown(capsys, "runs", "--root", str(tmp_path)) == f"no runs under {tmp_path}\n"
    assert main(["runs", str(place.run)]) == 2
    assert main(["runs", "--root", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("verb", [["eval"], ["chat", "--prompt", "x"], ["export", "--to", "adapter"]], ids=lambda v: v[0])
def test_a_folder_without_a_run_is_told(verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb[0], str(tmp_path), *verb[1:]]) == 2
    assert "no checkpoint found" in capsys.readouterr().err


# For people -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("no_color", ["", "1"], ids=["a pipe", "NO_COLOR"])
def test_no_escape_codes_without_a_terminal(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_color: str
) -> None:
    """`shown` looks for them."""
    monkeypatch.setenv("NO_COLOR", no_color)
    assert "«" in shown(capsys, "data", "show", str(place.recipe))
    assert "30 documents" in shown(capsys, "data", "stats", str(place.recipe))
    assert "memory" in shown(capsys, "check", str(place.recipe))
    assert "done" in shown(capsys, "runs", "--root", str(place.runs))
    assert "pronghorn chat" in shown(capsys, "train", str(place.recipe))
    assert "perplexity" in shown(capsys, "eval", str(place.run))


def on_a_terminal(*words: str, **environment: str) -> bytes:
    """What a command writes to a real terminal."""
    ours, its = os.openpty()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "pronghorn.cli", *words],
            stdout=its,
            stderr=its,
            stdin=its,
            env={**os.environ, "TERM": "xterm-256color", **environment},
        )
        os.close(its)
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            said += part
        assert child.wait(60) == 0
    finally:
        os.close(ours)
    return said


def test_colours_on_a_terminal_unless_no_color(place: Place) -> None:
    words = ("runs", "--root", str(place.runs))
    assert b"\x1b[32m" in on_a_terminal(*words)  # green: done
    plain = on_a_terminal(*words, NO_COLOR="1")
    assert b"done" in plain
    assert b"\x1b[32m" not in plain


@pytest.mark.parametrize("words", ["", "--json"], ids=["people", "machines"])
def test_a_reader_that_leaves_is_no_error(place: Place, words: str) -> None:
    command = f"{sys.executable} -m pronghorn.cli runs {words} --root {place.runs} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_sent_anywhere(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local files, online mode: a whole train, eval, chat and export never even looks up a host."""
    tried: list[Any] = []
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            tried.append(address)
            raise OSError("no network")
        return real(self, address)

    def look_up(*address: Any, **_: Any) -> Any:
        tried.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for name in list(os.environ):
        if name.startswith(("HF_", "TRANSFORMERS_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    run = str(tmp_path / "run")
    for words in (
        ["train", str(place.recipe), f"output={run}"],
        ["eval", run],
        ["export", run, "--to", "adapter"],
        ["chat", run, "--prompt", "hi", "--max-tokens", "3"],
        ["export", run, "--to", "merged"],
    ):
        assert main([*words, "--json"]) == 0, words
    assert tried == []
    with suppress(Exception):  # the watch works, and this is online mode
        get_session().get("https://huggingface.co")
    assert tried
