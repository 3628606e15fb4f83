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


def malformed_row(b: Bench) -> None:
    b.line(17, '{"messages": [{"role": "user", "content": "unfinished')


def misspelt_column(b: Bench) -> None:
    write_rows(b.train, [{"mesages": row["messages"]} for row in chat_rows(30)])


def empty_file(b: Bench) -> None:
    b.train.write_bytes(b"")


def utf16(b: Bench) -> None:
    b.train.write_bytes(b.train.read_text().encode("utf-16"))


def no_assistant_turn(b: Bench) -> None:
    b.line(3, json.dumps({"messages": [{"role": "user", "content": "hello?"}]}))


def all_rows_too_long(b: Bench) -> None:
    b.write(data=f"{{train: [{b.train}], max_length: 16, long: drop}}")


def unknown_key(b: Bench) -> None:
    b.write(train="{epochs: 1, batch_tokens: 512, capacity: 256, learning_rat: 1e-3, lr_: 3}")


def duplicate_key(b: Bench) -> None:
    b.recipe.write_text(b.recipe.read_text() + "precision: bf16\n")


def wrong_type(b: Bench) -> None:
    b.write(train="{epochs: soon, batch_tokens: 512, capacity: 256}")


def missing_model_folder(b: Bench) -> None:
    b.write(model=b.folder / "no-such-model")


def model_name_too_long(b: Bench) -> None:
    b.write(model="./" + "long" * 80)


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


def read_only_output(b: Bench) -> None:
    b.write(output="/proc/pronghorn/run")


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


def target_matches_nothing(b: Bench) -> None:
    b.write(lora="{targets: [q_prj]}")


def empty_evaluation_set(b: Bench) -> None:
    b.eval.write_text("")


def hub_name_without_network(b: Bench) -> None:
    b.write(model="somebody/some-model")


CASES: list[tuple[Callable[..., None], int, list[str]]] = [
    (malformed_row, 2, ["train.jsonl:17", "bad_rows: skip"]),
    (misspelt_column, 2, ["mesages", "did you mean", "messages"]),
    (empty_file, 2, ["train.jsonl", "empty"]),
    (utf16, 2, ["UTF-16", "iconv"]),
    (no_assistant_turn, 2, ["train.jsonl:3", "assistant"]),
    (all_rows_too_long, 2, ["too long", "max_length"]),
    (unknown_key, 2, ["train.learning_rat: unknown key", "train.lr_: unknown key", "did you mean `lr`", "recipe.yaml:4"]),
    (duplicate_key, 2, ["precision: this key appears twice", "recipe.yaml:7", "recipe.yaml:2"]),
    (wrong_type, 2, ["train.epochs", "'soon'", "recipe.yaml:4"]),
    (missing_model_folder, 2, ["no such model folder", "no-such-model"]),
    (model_name_too_long, 2, ["cannot open the model folder", "too long"]),
    (truncated_weights, 2, ["model.safetensors is damaged or incomplete", "ends 7 bytes early", "download it again"]),
    (pickled_weights, 2, ["pickled", "pytorch_model.bin", "safetensors"]),
    (tokenizer_larger_than_embeddings, 2, ["258", "200", "tokenizer"]),
    (template_missing, 2, ["template", "data.chat_template"]),
    (no_disk_space, 3, ["disk space", "missing"]),
    (read_only_output, 2, ["/proc/pronghorn/run", "output="]),
    (file_as_output, 2, ["taken", "output="]),
    (changed_recipe, 2, ["train.lr: 0.001 -> 0.007", "--fresh"]),
    (truncated_checkpoint, 2, ["adapter_model.safetensors"]),
    (flipped_bit, 2, ["training_state.safetensors", "SHA-256"]),
    (target_matches_nothing, 2, ["q_prj", "did you mean `q_proj`", "down_proj"]),
    (empty_evaluation_set, 2, ["eval.jsonl", "empty"]),
    (hub_name_without_network, 2, ["somebody/some-model", "Hub cache"]),
]


def state(folder: Path) -> dict[str, str]:
    """Every file and folder with its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(("spoil", "code", "said"), CASES, ids=[case[0].__name__ for case in CASES])
def test_bad_input(
    spoil: Callable[..., None],
    code: int,
    said: list[str],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "1000")
    bench = Bench(tmp_path, tiny_model)
    spoil(bench, monkeypatch) if spoil is no_disk_space else spoil(bench)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    before = state(tmp_path)
    capsys.readouterr()
    assert main(["train", str(bench.recipe)]) == code
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
