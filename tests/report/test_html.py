"""report.html: one safe, small, self-contained file from any log. How it looks was checked in a browser."""

import html.parser
import re

import pytest
from synthetic_run import synthetic_events, write_run

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
                 "Gradient norm", "tokenize", "First thing to change", "answer at step 0", "answer at step 400", "batch_tokens",
                 "were dropped", "cut off", "transformers 5.22.0"):  # fmt: skip
        assert word in text, word
    assert outline.tags.count("svg") == 4
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
        if event["event"] == "eval":
            event["generations"] = [{"prompt": EVIL, "answer": EVIL, "expected": EVIL}]
        if event["event"] == "end":
            event["why"] = event["reason"] = EVIL
        if event["event"] == "stages":
            event["seconds"] = event["seconds"] | {EVIL: 50.0}
    page = render_page(events, EVIL)
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
    assert "1 step with a loss that is not a finite number" in render_page([step, step | {"step": 2, "loss": "nan"}])


def test_a_long_run_stays_small_and_quick(tmp_path):
    step = {"event": "step", "session": 1, "lr": 1e-4, "tokens": 1000, "seconds": 0.1}
    events = [step | {"time": float(i), "step": i, "loss": 1 + (i * 7919 % 1000) / 999.7, "grad_norm": (i * 31 % 977) / 97}
              for i in range(1, 100_001)]  # fmt: skip
    events[60_000]["loss"] = 0.123
    for i in range(0, 100_000, 500):
        events.append({"event": "eval", "time": 1.0, "session": 1, "step": i, "loss": 1.0, "best": False,
                       "generations": [{"prompt": "p" * 9000, "answer": "a" * 9000, "expected": "e"}] * 100})  # fmt: skip
        events.append({"event": "notice", "time": 1.0, "session": 1, "text": "n" * 100})
    page = render_page(events)
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
