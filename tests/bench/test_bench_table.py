from __future__ import annotations

from bench_rows import measured, several

from benchmarks.bench.table import cells
from benchmarks.side_by_side_tables import SUMMARY_HEAD, summary


def test_ratio_is_to_the_faster_way_of_unsloth_and_share_is_of_the_ceiling() -> None:
    lines = {line[1]: line for line in cells(several()) if line[0] == "llama-1b"}
    assert lines["Pronghorn"][2:] == ("120,000", "1.50", "80 %", "16.3 GiB", "14.1 s", "12.170 (30 steps)")
    assert lines["Unsloth"][3] == "1.00"
    assert lines["Unsloth, its checkpointing"][3] == "0.72"
    assert lines["matrix products alone"][2] == "150,000"


def test_ours_comes_first_and_nothing_is_left_out() -> None:
    lines = cells(several())
    assert [line[1] for line in lines[:4]] == ["Pronghorn", "Unsloth", "Unsloth, its checkpointing", "transformers + Liger"]
    assert lines[3][2].startswith("failed: OutOfMemoryError")
    assert lines[-1][:3] == ("qwen3-14b", "Pronghorn", "not installed: no module peft")


def test_unsloths_speed_is_that_of_the_same_work_under_another_name() -> None:
    ours = {
        "workload": "llama-1b-fp8",
        "system": "pronghorn",
        "status": "measured",
        "tokens_per_second": 200_000.0,
        "seconds_to_first_step": 10.0,
        "loss_last": 12.0,
        "warmup": 2,
        "steps": 3,
    }
    (line,) = [line for line in cells([*several(), ours]) if line[0] == "llama-1b-fp8"]
    assert line[3] == "2.50"  # of llama-1b's 80,000
    (line,) = [line for line in cells([ours]) if line[0] == "llama-1b-fp8"]
    assert line[3] == ""


def test_the_summary_has_a_line_for_each_work_and_says_why_unsloth_is_not_there() -> None:
    rows = [
        *several(),
        measured("gpt-oss-20b-4layers", "pronghorn", 1e5),
        measured("gpt-oss-20b-4layers", "padded", 2e4),
        {"workload": "gpt-oss-20b-4layers", "system": "unsloth", "status": "timed out", "why": "not done after 9 s"},
    ]
    _, _, one, other = summary(rows).splitlines()
    assert "**120,000** | 80,000 | 1.50 |  | 80 % | 16.3 GiB (16.3 GiB) | 14 s (14 s) |" in one
    assert "**100,000** | timed out: not done after 9 s |  | 20,000 (transformers, padded) |" in other
    assert one.count("|") == other.count("|") == len(SUMMARY_HEAD) + 1
