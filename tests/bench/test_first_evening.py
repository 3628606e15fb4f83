"""docs/first-evening.md is what `python -m benchmarks.first_evening --write` makes: the same commands, each with its output."""

from __future__ import annotations

from pathlib import Path

from benchmarks.first_evening import HEAD, STEPS, TARGET, ran


def test_the_page_has_every_command_in_order() -> None:
    page = TARGET.read_text(encoding="utf-8")
    shown = [line.removeprefix("$ ").removesuffix(" > log.jsonl") for line in page.splitlines() if line.startswith("$ ")]
    assert shown == [command.partition(" # ")[0] for _, command in STEPS]
    assert page.startswith(HEAD)
    assert "Traceback" not in page
    assert "/tmp" not in page


def test_what_a_command_prints_is_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello\n")
    assert ran(tmp_path, "cat note.txt nowhere.txt").splitlines()[0] == "hello"
    assert "nowhere.txt" in ran(tmp_path, "cat note.txt nowhere.txt")  # errors, too
