"""report.html while the run goes on: soon, often, and for a hundredth of the time at most."""

from synthetic_run import synthetic_events, write_run

from pronghorn.report import live
from pronghorn.report.live import EVERY, SHARE, LiveReport


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def pages_of(monkeypatch, cost, seconds, *, news_every=0):
    """(pages written, seconds they took) in a run of so many seconds with a step each second."""
    clock, written = Clock(), []

    def write(folder):
        clock.now += cost
        written.append(clock.now)

    monkeypatch.setattr(live, "write_html", write)
    report = LiveReport(None, clock)
    report.refresh(news=True)
    while clock.now < 100 + seconds:
        clock.now += 1.0
        report.refresh(news=bool(news_every) and clock.now % news_every < 1)
    return written


def test_cheap_pages_come_at_intervals_and_at_news(monkeypatch):
    written = pages_of(monkeypatch, 0.01, 600)
    assert written[0] < 101
    assert 500 / EVERY < len(written) <= 600 / EVERY + 1
    assert len(pages_of(monkeypatch, 0.001, 600, news_every=3)) > 150


def test_dear_pages_take_a_hundredth_of_the_time_whatever_the_news(monkeypatch):
    for news in (0, 1):
        written = pages_of(monkeypatch, 2.0, 2000, news_every=news)
        assert 5 <= len(written) <= 2000 * SHARE / 2.0 + 1


def test_a_page_that_cannot_be_written_stops_nothing(tmp_path):
    clock = Clock()
    report = LiveReport(tmp_path / "gone", clock)
    report.refresh(news=True)
    folder = write_run(tmp_path / "run", synthetic_events(20))
    assert LiveReport(folder, clock).refresh(news=True)
    assert (folder / "report.html").exists()
