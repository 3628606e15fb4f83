"""Twenty-odd ways to get it wrong: each gives its exit code, a message with the fix, and leaves nothing behind or lost."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pronghorn.cli import main
from pronghorn.train.run import run_folder
from samples import chat_rows, make_model, make_tokenizer, write_rows


class Bench:
    """A sound recipe with its data and model, to be spoilt in one place."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.train = write_rows(folder / "train.jsonl", chat_rows(30))
        self.eval = write_rows(folder / "eval.jsonl", chat_rows(4, seed=1))
        self.output = folder / "run"
        self.recipe = folder / "recipe.yaml"
        self.write()

    def write(self, **changes: Any) -> None:
        lines = {
            "model": self.model,
            "precision": "fp32",
            "data": f"{{train: [{self.train}], eval: {self.eval}, max_length: 128, workers: 0}}",
            "train": "{epochs: 1, batch_tokens: 512, capacity: 256, lr: 1e-3}",
            "eval": "{every: 100, generations: 0}",
            "output": self.output,
        } | changes
        self.recipe.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))

    def line(self, number: int, text: str) -> None:
        lines = self.train.read_text().splitlines()
        lines[number - 1] = text
        self.train.write_text("\n".join(lines) + "\n")

    def copy_of_model(self) -> Path:
        target = self.folder / "model"
        shutil.copytree(self.model, target)
        self.model = target
        self.write()
        return target

    def trained(self) -> Path:
        assert main(["train", str(self.recipe), "--json"]) == 0
        return max(self.output.glob("checkpoint-*"))


def truncated_weights(b: Bench) -> None:
    file = b.copy_of_model() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def pickled_weights(b: Bench) -> None:
    model = b.copy_of_model()
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.")


def tokenizer_larger_than_embeddings(b: Bench) -> None:
    model = b.copy_of_model()
    make_model(vocab_size=200).save_pretrained(model)


def template_missing(b: Bench) -> None:
    model = b.copy_of_model()
    for file in model.glob("*chat_template*"):
        file.unlink()
    make_tokenizer(chat_template=None).save_pretrained(model)


def no_disk_space(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda _: SimpleNamespace(total=10**9, used=10**9, free=1000))


def file_as_output(b: Bench) -> None:
    (b.folder / "taken").write_text("a file, not a folder")
    b.write(output=b.folder / "taken")


def changed_recipe(b: Bench) -> None:
    b.trained()
    b.write(train="{epochs: 1, batch_tokens: 512, capacity: 256, lr: 7e-3}")


def truncated_checkpoint(b: Bench) -> None:
    file = b.trained() / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def flipped_bit(b: Bench) -> None:
    file = b.trained() / "training_state.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(bytes(content))


# What is spoilt -> (how, what is said).
CASES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "malformed row": (
        lambda b: b.line(17, '{"messages": [{"role": "user", "content": "unfinished'),
        ["train.jsonl:17", "bad_rows: skip"],
    ),
    "misspelt column": (
        lambda b: write_rows(b.train, [{"mesages": row["messages"]} for row in chat_rows(30)]),
        ["mesages", "did you mean", "messages"],
    ),
    "empty file": (lambda b: b.train.write_bytes(b""), ["train.jsonl", "empty"]),
    "utf16": (lambda b: b.train.write_bytes(b.train.read_text().encode("utf-16")), ["UTF-16", "iconv"]),
    "no assistant turn": (
        lambda b: b.line(3, json.dumps({"messages": [{"role": "user", "content": "hello?"}]})),
        ["train.jsonl:3", "assistant"],
    ),
    "all rows too long": (
        lambda b: b.write(data=f"{{train: [{b.train}], max_length: 16, long: drop}}"),
        ["too long", "max_length"],
    ),
    "unknown key": (
        lambda b: b.write(train="{epochs: 1, batch_tokens: 512, capacity: 256, learning_rat: 1e-3, lr_: 3}"),
        ["train.learning_rat: unknown key", "train.lr_: unknown key", "did you mean `train.lr`", "recipe.yaml:4"],
    ),
    "duplicate key": (
        lambda b: b.recipe.write_text(b.recipe.read_text() + "precision: bf16\n"),
        ["precision: this key appears twice", "recipe.yaml:7", "recipe.yaml:2"],
    ),
    "wrong type": (
        lambda b: b.write(train="{epochs: soon, batch_tokens: 512, capacity: 256}"),
        ["train.epochs", "'soon'", "recipe.yaml:4"],
    ),
    "missing model folder": (lambda b: b.write(model=b.folder / "no-such-model"), ["no such model folder", "no-such-model"]),
    "model name too long": (lambda b: b.write(model="./" + "long" * 80), ["cannot open the model folder", "too long"]),
    "truncated weights": (
        truncated_weights,
        ["model.safetensors is damaged or incomplete", "ends 7 bytes early", "download it again"],
    ),
    "pickled weights": (pickled_weights, ["pickled", "pytorch_model.bin", "safetensors"]),
    "tokenizer larger than embeddings": (tokenizer_larger_than_embeddings, ["258", "200", "tokenizer"]),
    "template missing": (template_missing, ["template", "data.chat_template"]),
    "no disk space": (no_disk_space, ["disk space", "missing"]),
    "read only output": (lambda b: b.write(output="/proc/pronghorn/run"), ["/proc/pronghorn/run", "output="]),
    "file as output": (file_as_output, ["taken", "output="]),
    "changed recipe": (changed_recipe, ["train.lr: 0.001 -> 0.007", "--fresh"]),
    "truncated checkpoint": (truncated_checkpoint, ["adapter_model.safetensors"]),
    "flipped bit": (flipped_bit, ["training_state.safetensors", "SHA-256"]),
    "target matches nothing": (lambda b: b.write(lora="{targets: [q_prj]}"), ["q_prj", "did you mean `q_proj`", "down_proj"]),
    "empty evaluation set": (lambda b: b.eval.write_text(""), ["eval.jsonl", "empty"]),
    "hub name without network": (lambda b: b.write(model="somebody/some-model"), ["somebody/some-model", "Hub cache"]),
}


def state(folder: Path) -> dict[str, str]:
    """Every file and folder with its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("case", CASES)
def test_bad_input(
    case: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, said = CASES[case]
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "1000")
    bench = Bench(tmp_path, tiny_model)
    spoil(bench, monkeypatch) if spoil is no_disk_space else spoil(bench)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    before = state(tmp_path)
    capsys.readouterr()
    assert main(["train", str(bench.recipe)]) == (3 if case == "no disk space" else 2)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # what can be made again is kept there, and is no concern here
    message = capsys.readouterr().err
    for part in said:
        assert part in message
    assert "fix:" in message
    assert "Traceback" not in message
    assert state(tmp_path) == before
    assert not Path("/tmp/owned").exists()


def test_the_sound_recipe_of_these_tests_trains(tiny_model: Path, tmp_path: Path) -> None:
    """Otherwise the cases above would prove nothing."""
    assert (Bench(tmp_path, tiny_model).trained() / "manifest.json").is_file()
