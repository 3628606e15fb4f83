"""report.html: one safe, small, self-contained file from any log. How it looks was checked in a browser."""

import html.parser
import re
import time

import pytest
from synthetic_run import synthetic_events, write_run

from pronghorn.errors import EnvironmentFault
from pronghorn.report.answers import AnswerRow, read_answers, write_answers
from pronghorn.report.html import render_page, write_html

EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>\'"&'
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Outline(html.parser.HTMLParser):
    """Checks that elements nest, and collects their names, attributes and text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_says_what_happened(tmp_path):
    path = write_html(write_run(tmp_path / "run", synthetic_events(400, resume_at=250)))
    page = path.read_text(encoding="utf-8")
    assert path == tmp_path / "run" / "report.html"
    outline = Outline(page)
    text = " ".join(outline.text)
    for word in ("hotel", "HuggingFaceTB/SmolLM2-135M-Instruct", "NVIDIA H200", "perplexity", "resumed at 200",
                 "Gradient norm", "tokenize", "Suggestion:", "batch_tokens",
                 "were dropped", "cut off", "transformers 5.22.0", "log scale", "loss per token", "Evaluations"):  # fmt: skip
        assert word in text, word
    assert outline.tags.count("svg") == 5  # the loss has two, with and without a logarithmic axis
    assert [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith(".")] == []


def test_it_needs_no_network(tmp_path):
    page = render_page(synthetic_events(50))
    assert not re.search(r"https?://|@import|url\(|src=|href=", page)
    assert "default-src 'none'" in page


def test_text_of_the_run_is_never_read_as_html():
    events = synthetic_events(30)
    events.append({"event": "notice", "time": 1.0, "session": 1, "text": EVIL})
    for event in events:
        if event["event"] == "start":
            event["run"] = event["device"] = EVIL
            event["recipe"] = event["recipe"] | {"model": EVIL, EVIL: {EVIL: EVIL}, "data": {"train": [EVIL]}}
            event["versions"] = {EVIL: EVIL}
        if event["event"] == "end":
            event["why"] = event["reason"] = EVIL
        if event["event"] == "stages":
            event["seconds"] = event["seconds"] | {EVIL: 50.0}
    answers = [AnswerRow(EVIL, EVIL, EVIL, EVIL, 1, {EVIL: 0.5}, {})]
    page = render_page(events, EVIL, answers)
    plain = Outline(render_page(synthetic_events(30)))
    outline = Outline(page)
    assert outline.tags.count("script") == plain.tags.count("script")
    assert "img" not in outline.tags
    assert not [a for a in outline.attributes if a[1].startswith("on")]
    assert EVIL in "".join(outline.text)


def test_every_kind_of_poor_log_gives_a_page(tmp_path):
    step = {"event": "step", "time": 2.0, "session": 1, "step": 1, "loss": 2.5, "tokens": 10, "seconds": 0.1, "lr": 1e-4}
    logs = [
        [],
        synthetic_events(20)[:1],
        [step],
        [step | {"loss": "nan", "grad_norm": "inf"}],
        [step, step | {"step": 2, "loss": "inf"}],
        [{"event": "eval", "step": 0, "session": 1}],
        [{"event": "start", "session": 1}, {"event": "end", "session": 1}],
    ]
    for number, events in enumerate(logs):
        page = write_html(write_run(tmp_path / str(number), events)).read_text(encoding="utf-8")
        Outline(page)
        assert not re.search(r'[ "(]nan[%" ]', re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)), number
    assert "1 step with a non-finite loss" in render_page([step, step | {"step": 2, "loss": "nan"}])


def test_a_long_run_stays_small_and_quick(tmp_path):
    step = {"event": "step", "session": 1, "lr": 1e-4, "tokens": 1000, "seconds": 0.1}
    events = [step | {"time": float(i), "step": i, "loss": 1 + (i * 7919 % 1000) / 999.7, "grad_norm": (i * 31 % 977) / 97}
              for i in range(1, 30_001)]  # fmt: skip
    events[20_000]["loss"] = 0.123
    for i in range(0, 30_000, 150):
        events.append({"event": "eval", "time": 1.0, "session": 1, "step": i, "loss": 1.0, "best": False})
        events.append({"event": "notice", "time": 1.0, "session": 1, "text": "n" * 100})
    page = render_page(events, answers=[AnswerRow("p" * 9000, "e", "b" * 9000, "a" * 9000, 1, {}, {})] * 100)
    assert len(page) < 2_000_000
    assert "0.123" in page
    assert max(len(path) for path in re.findall(r' d="([^"]+)"', page)) < 2000 * 14
    assert page.count('class="said"') <= 30 * 4


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", synthetic_events(20))
    old = write_html(folder).read_text(encoding="utf-8")

    def fail(self, target):
        raise OSError("disk")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="disk"):
        write_html(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "run.jsonl"]
    assert (folder / "report.html").read_text(encoding="utf-8") == old


def words(page):
    return " ".join(" ".join(Outline(page).text).split())


def test_a_run_at_work_says_how_far_it_is_and_follows_its_file():
    events = [e for e in synthetic_events(100, end=None) if e["event"] != "stages"][:60]
    shift = time.time() - events[-1]["time"]
    for event in events:
        event["time"] += shift
    page = render_page(events)
    told = words(page)
    assert re.search(r"running: step 57 of 100, about \d+ s left, updated at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", told)
    assert 'data-updated="' in page
    assert "location.reload" in page
    done = render_page(synthetic_events(100))
    assert "data-updated" not in done.split("<script")[0]
    assert "updated at" not in words(done)


def with_data(**data):
    events = synthetic_events(30)
    for event in events:
        if event["event"] == "start":
            event["data"] = event["data"] | data
    return events


def test_the_data_section_tells_rows_drops_lengths_sources_and_columns():
    page = render_page(with_data(
        read=500, format="messages", dropped={"too long": 14, "bad row": 3}, unused_columns=["label", EVIL],
        sources=[{"name": "a/train.jsonl", "format": "messages", "rows": 500, "weight": 1.0},
                 {"name": "b.jsonl", "format": "text", "rows": 20, "weight": 2.5}],
        lengths={"shortest": 3, "median": 204, "mean": 230.4, "p95": 510, "longest": 900,
                 "bins": [[0, 100, 20], [100, 200, 480], [200, None, 1]]}))  # fmt: skip
    told = words(page)
    for word in ("rows read 500", "dropped: too long 14", "dropped: bad row 3", "columns not used label",
                 "a/train.jsonl messages 500 b.jsonl text 20 × 2.5", "median 204",
                 "held out 982 documents", "36 % carry loss"):  # fmt: skip
        assert word in told, word
    assert 'title="100 to 199 tokens: 480 rows"' in page
    assert 'title="200 or more tokens: 1 rows"' in page
    assert "<img" not in page


def test_answers_are_written_whole_or_not_at_all(tmp_path):
    write_answers(tmp_path, [{"answer": "half \ud83d", "scores": {"own": float("nan"), "exact": 1.0}}])
    (one,) = read_answers(tmp_path)
    assert (one.answer, one.scores) == ("half ?", {"exact": 1.0})
    assert list(tmp_path.iterdir()) == [tmp_path / "answers.jsonl"]
    with pytest.raises(EnvironmentFault, match="cannot write the answers"):
        write_answers(tmp_path / "gone" / "answers.jsonl", [])


def test_answers_stand_beside_what_was_expected_and_what_was_said_before(tmp_path):
    folder = write_run(tmp_path / "run", synthetic_events(30))
    rows = [{"row": i + 1, "prompt": f"ask {i}", "expected": "yes", "base": "no idea", "answer": "yes" if i else EVIL,
             "step": 30, "scores": {"exact": float(i > 0)}, "base_scores": {"exact": 0.0}} for i in range(70)]  # fmt: skip
    write_answers(folder, rows)
    told = words(write_html(folder).read_text(encoding="utf-8"))
    assert told.index("exact 69 of 70 before training: 0 of 70") < told.index("evaluation loss")  # the result comes first
    assert "before training after step 30" in told
    assert "ask 29" in told
    assert "ask 30" not in told
    assert "24 more, 30 of 70 in all; every one is in answers.jsonl" in told
    for wrong in (11, 69):
        for i, row in enumerate(rows):
            row["scores"] = {"exact": float(i < 70 - wrong)}
        write_answers(folder, rows)
        page = write_html(folder).read_text(encoding="utf-8")
        at_once = page[page.index("<h2>Answers") :].partition("<details>")[0]
        assert at_once.count(">ask ") == min(wrong, 30)  # no wrong answer is hidden
        assert f"ask {70 - wrong}" in at_once
        assert f"{wrong} of 70 wrong, listed first" in words(page)
    (folder / "answers.jsonl").write_bytes(b'{"prompt": 3}\n\xff\n[1]\n{"row"' + b"[" * 2000)
    assert [one.prompt for one in read_answers(folder)] == ["3"]
    assert "Answers" in words(write_html(folder).read_text(encoding="utf-8"))
    (folder / "answers.jsonl").unlink()
    assert "<h2>Answers" not in write_html(folder).read_text(encoding="utf-8")
