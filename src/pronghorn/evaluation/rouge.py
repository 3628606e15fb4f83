"""ROUGE-L: what a text has of a reference, in the same order: the F-measure of their longest common subsequence of words.

As in the package `rouge-score`, without its stemmer: letters in lower case, words are runs of letters and digits, and
F = 2PR / (P + R), where P and R are the subsequence's share of the text's and of the reference's words. That package knows
ASCII only; here other letters count as well, and Chinese and Japanese characters are words of their own.
"""

from __future__ import annotations

import re

# Han (with its extensions), kana; then any run of letters and digits without these.
_ONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(f"[{_ONE}]|[^\\W_{_ONE}]+")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def common(one: list[str], other: list[str]) -> int:
    """Length of the longest common subsequence. The rows of the usual table differ by 0 or 1 from column to column, so a row is
    one integer with a bit a column (Hyyrö 2004): 30 times as fast as the table for answers of 200 words."""
    places: dict[str, int] = {}
    for i, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << i
    everywhere = (1 << len(one)) - 1
    row = everywhere
    for word in other:
        met = row & places.get(word, 0)
        row = (row + met | row - met) & everywhere
    return len(one) - row.bit_count()


def rouge_l(expected: str, answer: str) -> float:
    reference, said = words(expected), words(answer)
    shared = common(reference, said)
    return 2 * shared / (len(reference) + len(said)) if shared else 0.0
