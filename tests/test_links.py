"""Links between the project's pages lead somewhere: the file is there, and so is the heading."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]


def anchor(heading: str) -> str:
    """As GitHub writes it."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link or (target.exists() and not heading):
            continue
        lines = target.read_text(encoding="utf-8").splitlines() if target.is_file() else []
        if heading not in [anchor(line) for line in lines if line.startswith("#")]:
            dead.append(link)
    return dead


def test_every_link_leads_somewhere() -> None:
    assert len(PAGES) > 20
    assert {page.name: dead for page in PAGES if (dead := dead_links(page))} == {}


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# Two words\n[x](#two-words) [x](a.md) [x](https://x.org/#y) [x](b.md) [x](a.md#three)\n")
    assert dead_links(page) == ["b.md", "a.md#three"]
