"""Layouts of preference data as `objective: dpo` (pairs) and `kto` (marked answers) read them.

`+` is a chosen or good answer, `-` a rejected or bad one, each behind its prompt."""

from __future__ import annotations

from benchmarks.layout_parts import FROM, HI, KIND, PLAIN, A, S, U, no, read

N = {"role": "assistant", "content": "no"}
NO, PLAIN_NO = "<user>hi<end><assistant>«no<end>»", "hi«no<end>»"
BOTH, PLAIN_BOTH = (f"+ {HI}", f"- {NO}"), (f"+ {PLAIN}", f"- {PLAIN_NO}")
HUMAN = "\n\nHuman: hi\n\nAssistant:"
COMPARED = [
    read("pairs: text after text", {"prompt": "hi", "chosen": "ho", "rejected": "no"}, *PLAIN_BOTH, wanted="pairs"),
    read("pairs: messages after messages", {"prompt": [U], "chosen": [A], "rejected": [N]}, *BOTH, wanted="pairs"),
    read("pairs: text after messages", {"prompt": [U], "chosen": "ho", "rejected": "no"}, *BOTH, wanted="pairs"),
    read(
        "pairs: text after text with a system prompt",
        {"system": "be kind", "prompt": "hi", "chosen": "ho", "rejected": "no"},
        f"+ {KIND}",
        f"- <system>be kind<end>{NO}",
        wanted="pairs",
    ),
    read("pairs: two whole conversations", {"chosen": [U, A], "rejected": [U, N]}, *BOTH, wanted="pairs"),
    read(
        "pairs: whole conversations beside their prompt (UltraFeedback)",
        {"prompt": "hi", "chosen": [U, A], "rejected": [U, N], "score_chosen": 8.0},
        *BOTH,
        unused="prompt, score_chosen",
        wanted="pairs",
    ),
    read(
        "pairs: two transcripts (HH-RLHF)",
        {"chosen": f"{HUMAN} ho", "rejected": f"{HUMAN} no"},
        f"+ {HUMAN}« ho<end>»",
        f"- {HUMAN}« no<end>»",
        wanted="pairs",
    ),
    read(
        "pairs: ShareGPT and a message each",
        {"conversations": FROM[:1], "chosen": FROM[1], "rejected": {"from": "gpt", "value": "no"}},
        *BOTH,
        wanted="pairs",
    ),
    read("pairs: messages and texts", {"messages": [S, U], "chosen": "ho", "rejected": "no"}, f"+ {KIND}",
         f"- <system>be kind<end>{NO}", wanted="pairs"),
    read("pairs: Alpaca", {"instruction": "hi", "input": "", "chosen": "ho", "rejected": "no"}, *BOTH, wanted="pairs"),
    read(
        "pairs: several rejected answers, with a margin",
        {"prompt": [U], "chosen": [A], "rejected": [[N], [{"role": "assistant", "content": "na"}]], "margin": 0.5},
        *BOTH,
        "- <user>hi<end><assistant>«na<end>»",
        wanted="pairs",
    ),
    read(
        "pairs: other column names, by data.fields",
        {"question": "hi", "better": "ho", "worse": "no"},
        *PLAIN_BOTH,
        fields={"prompt": "question", "chosen": "better", "rejected": "worse"},
        wanted="pairs",
    ),
    read(
        "pairs: `chosen_response`, `rejected_response`",
        {"prompt": "hi", "chosen_response": "ho", "rejected_response": "no"},
        *PLAIN_BOTH,
        wanted="pairs",
    ),
    read(
        "pairs: one of them with the same answer twice",
        [{"prompt": [U], "chosen": [A], "rejected": [N]}, {"prompt": [U], "chosen": [A], "rejected": [A]}],
        *BOTH,
        told="identical",
        wanted="pairs",
    ),
    no("pairs: none in the file", {"messages": [U, A]}, "no preference data", "chosen: COLUMN", wanted="pairs"),
    no("pairs: a margin that is no number", {"prompt": "hi", "chosen": "ho", "rejected": "no", "margin": "wide"}, "margin",
       "number", wanted="pairs"),
    read(
        "marked: prompt, completion, label",
        [{"prompt": "hi", "completion": "ho", "label": True}, {"prompt": "hi", "completion": "no", "label": False}],
        *PLAIN_BOTH,
        wanted="marked",
    ),
    read(
        "marked: messages and kto_tag",
        [{"messages": [U, A], "kto_tag": "true"}, {"messages": [U, N], "kto_tag": "false"}],
        *BOTH,
        wanted="marked",
    ),
    read("marked: pairs, as two answers", {"prompt": [U], "chosen": [A], "rejected": [N]}, *BOTH, wanted="marked"),
    no("marked: no label", {"prompt": "hi", "completion": "ho"}, "no column marks answers", "label: COLUMN", wanted="marked"),
]  # fmt: skip
