import math

from pronghorn.report import number_format
from tables import table


@table(
    ("seconds", "text"),
    [(0.42, "0.42 s"), (0.999, "1.0 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"),
     (3599.6, "1 h 00 min"), (7500, "2 h 05 min"), (273_600, "3 d 4 h"), (math.nan, "–"), (None, "–")],
)  # fmt: skip
def test_duration(seconds, text):
    assert number_format.duration(seconds) == text


@table(
    ("value", "text"),
    [(0.012345, "0.01235"), (1.23456, "1.2346"), (12.3456, "12.35"), (1234.5, "1,234"), (math.nan, "nan"),
     (math.inf, "inf"), (None, "–"), (0.0, "0.00000"), (3e-7, "3e-07"), (2e9, "2e+09")],
)  # fmt: skip
def test_figure(value, text):
    assert number_format.figure(value) == text


def test_count_percent_size_and_moment():
    assert [number_format.count(v) for v in (950, 12345, 1_234_567, 4.56e9)] == ["950", "12,345", "1.23 M", "4.56 B"]
    assert [number_format.percent(v) for v in (0.712, 0.0421, 0.0031, 0)] == ["71 %", "4.2 %", "0.31 %", "0 %"]
    assert [number_format.size(v) for v in (812, 3_400_000)] == ["812 B", "3.4 MB"]
    assert number_format.moment(None) == "–"
    assert number_format.moment(1_760_000_000).startswith("2025-10-0")


def test_text_of_a_model_cannot_steer_the_terminal():
    assert number_format.one_line("a\nb\t c\x1b[31m\x07", 50) == "a b c\ufffd[31m\ufffd"
    assert number_format.one_line("abcdef", 4) == "abc…"
    assert number_format.one_line("abcd", 4) == "abcd"
