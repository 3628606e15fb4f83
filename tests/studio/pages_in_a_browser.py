"""The way of a new user, continued (in_a_browser.py): what blocks a start, a fork, rollouts, the keyboard; and pictures."""

from __future__ import annotations

import base64
import json
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from in_a_browser import Page

SIZES = ((1280, 900), (400, 860))
STEPS = 400  # of the run, enough to be stopped in its middle
TEXT = "return document.querySelector('.lines textarea').value"
STEP = "return Number([...document.querySelectorAll('.tile')].find(e => e.innerText.startsWith('steps'))?.querySelector('dd')" \
    ".firstChild.textContent.replace(/,/g, '') || 0)"  # fmt: skip


# Pictures


def shots(page: Page, place: Path | None, pages: dict[str, str], below: str = "") -> None:
    """Each page at both widths, light and dark: it fits, is accessible, and is kept as a picture where that is asked for, from
    the heading `below` on."""
    for name, address in pages.items():
        page.go(address)
        for width, height in SIZES:
            for dark in (False, True):
                page.size(width, height, dark)
                time.sleep(1.5 if place else 0.3)  # the plots are drawn
                where = f"{name} at {width} px, {'dark' if dark else 'light'}"
                page.fits(where)
                page.accessible(where)
                if place:
                    picture(page, place / f"{name}-{width}-{'dark' if dark else 'light'}.png", width, below)
    page.size(*SIZES[0], dark=False)


def picture(page: Page, file: Path, width: int, below: str) -> None:
    page.js("scrollTo(0, 0)")
    found = "[...document.querySelectorAll('h2')].find(e => e.innerText === arguments[0])"
    top = int(page.js(f"return {found}.getBoundingClientRect().top - 20", below)) if below else 0
    tall = min(1700, int(page.js("return document.documentElement.scrollHeight")) - top)
    clip = {"x": 0, "y": top, "width": width, "height": tall, "scale": 1}
    taken = page.driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(base64.b64decode(taken["data"]))


# Pages


def nothing_is_trained(page: Page) -> None:
    """A row whose answer is cut off blocks the start, with its line, until bad rows are skipped."""
    text = page.js(TEXT)
    page.fill(".lines textarea", text.replace("max_length: 128", "max_length: 60\n  long: truncate"))
    page.shows("the row trains nothing")
    assert re.search(r"mine\.jsonl:\d+", page.text())
    assert page.js("return [...document.querySelectorAll('button')].find(e => e.innerText === 'Start').disabled")
    page.fill(".lines textarea", text)
    page.shows(" held out")
    assert not page.js("return [...document.querySelectorAll('button')].find(e => e.innerText === 'Start').disabled")


def a_fork(page: Page, home: Path) -> None:
    page.go("#/run?run=runs/mine")
    page.wait(lambda: page.js("return document.querySelectorAll('.checkpoints button').length") > 1, "no checkpoints")
    page.js("document.querySelector('.checkpoints button').click()")
    page.fill(".checkpoints + form input", "runs/again")
    page.js("document.querySelector('.checkpoints + form button').click()")
    page.wait(lambda: "again" in page.js("return location.hash"), "no new run")
    page.shows("interrupted")
    page.click("Resume")
    page.wait(lambda: page.js(STEP) == STEPS and "done" in page.text(), "it does not go on")

    def losses(run: str) -> list[float]:
        steps = map(json.loads, (home / "runs" / run / "run.jsonl").read_text().splitlines())
        return [float(found) for found in {one["step"]: one["loss"] for one in steps if one["event"] == "step"}.values()]

    assert losses("again") == losses("mine")


def rollouts(page: Page, home: Path) -> None:
    from studio_parts import make_run, start, step

    told = [{"prompt": "2 + 2", "answer": f"answer {number}", "reward": number / 10} for number in range(10)]
    sample = {"event": "samples", "time": 1001.0, "session": 1, "step": 1, "shown": told}
    make_run(home / "runs" / "rl", [start(), step(1), sample])
    page.go("#/run?run=runs/rl")
    page.shows("10 of 10")
    page.fill("[aria-label=rollouts] input[type=number]", "0.75")
    page.choose("[aria-label=rollouts] select", "highest")
    page.shows("2 of 10")
    answers = "return [...document.querySelectorAll('.sample .said:last-child')].map(e => e.innerText)"
    page.wait(lambda: page.js(answers) == ["answer 9", "answer 8"], "not the highest first")
    page.fill("[aria-label=rollouts] input[type=search]", "answer 8")
    page.shows("1 of 10")
    page.fill("[aria-label=rollouts] input[type=search]", "")
    page.shows("2 of 10")
    shots(page, None, {"rollouts": "#/run?run=runs/rl"})  # of a log made by hand: no picture to keep
    page.go("#/runs")
    page.shows("last event")
    shutil.rmtree(home / "runs" / "rl")


def by_keys(page: Page) -> None:
    """Every control of every page is reached by Tab, and is seen to be; g and a letter go to a page."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(*keys: str) -> None:
        ActionChains(page.driver).send_keys(*keys).perform()

    for letter, place in (
        ("r", "#/runs"),
        ("e", "#/recipe"),
        ("t", "#/talk"),
        ("q", "#/queue"),
        ("c", "#/jobs"),
        ("d", "#/data"),
    ):
        page.js("document.activeElement.blur()")
        press("g", letter)
        page.wait(lambda place=place: page.js("return location.hash") == place, f"g {letter} does not lead to {place}")
        page.wait(lambda: page.js("return document.querySelectorAll('main *').length") > 5, "no page")
        time.sleep(0.5)
        page.js("scrollTo(0, 0); document.activeElement.blur(); window.reached = new Set(); window.unseen = [];")
        controls = page.js(CONTROLS)
        for _ in range(len(controls) + 12):
            press(Keys.TAB)
            page.js(REACHED)
        assert page.js("return window.unseen") == [], f"focus is not seen on {place}"
        missed = page.js(
            f"return (() => {{ {CONTROLS} }})().filter(e => !window.reached.has(e)).map(e => e.outerHTML.slice(0, 120))"
        )
        assert missed == [], f"Tab does not reach {missed} on {place}"
    page.js("document.activeElement.blur()")
    press("?")
    page.wait(lambda: page.js("return document.querySelector('dialog').open"), "no list of keys")
    page.accessible("keys")
    press(Keys.ESCAPE)
    page.wait(lambda: not page.js("return document.querySelector('dialog').open"), "the list of keys stays")
    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    )
    assert page.js("const p = document.createElement('span'); p.className = 'pill live'; document.body.append(p);"
                   "const one = getComputedStyle(p, '::before').animationName; p.remove(); return one") == "none"  # fmt: skip
    page.size(*SIZES[0], dark=False)


# What takes the keyboard: of radio buttons and hidden parts there are none outside the dialog.
CONTROLS = (
    "return [...document.querySelectorAll('a[href], button, input, select, textarea, [tabindex=\"0\"]')]"
    ".filter(e => !e.disabled && !e.closest('dialog') && e.checkVisibility())"
)
REACHED = (
    "const e = document.activeElement; window.reached.add(e); const s = getComputedStyle(e);"
    "if (e !== document.body && e.id !== 'page' && !e.matches('.skip')"
    " && (s.outlineStyle === 'none' || parseFloat(s.outlineWidth) < 1)) window.unseen.push(e.outerHTML.slice(0, 120))"
)
