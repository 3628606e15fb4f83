"""`make studio-test`: the way of a new user, in Chromium, from an empty folder to a run that is stopped and resumed.

Needs chromium and chromedriver (Debian's packages, installed where that is allowed), selenium (PyPI) and axe-core (npm, checked
by its SHA-256). Where one of them is missing and cannot be had it says so and ends with 0. `--shots FOLDER` keeps pictures of
each page.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pages_in_a_browser import SIZES, STEP, STEPS, TEXT, a_fork, by_keys, nothing_is_trained, rollouts, shots

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS)]
KEPT = TESTS.parent / ".venv" / "studio-test"  # what was downloaded for this test
SELENIUM = "selenium==4.51.0"
AXE = "axe-core@4.14.0"
AXE_SHA256 = "2277b0a3ef47af9b52497faa3e71598e86e0a0e5e6eb295207a5657ede4709af"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
PATIENCE = 120.0  # seconds for anything, so that nothing hangs


# What a browser's console says of a server that was killed: nobody listens, or an answer broke off.
KILLED = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
NOT_LET_IN = "status of 401"


class LeftOutError(Exception):
    """Why there can be no test on this machine."""


# What it needs ----------------------------------------------------------------------------------------------------------------


def chromium() -> tuple[str, str]:
    def found() -> tuple[str | None, str | None]:
        browsers = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
        return next(filter(None, browsers), None), shutil.which("chromedriver")

    if not all(found()) and shutil.which("apt-get") and os.geteuid() == 0:
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium", "chromium-driver"]
        for command in (install, ["apt-get", "update", "-qq"], install):
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=600, check=False)
            if all(found()):
                break
    browser, driver = found()
    if not browser or not driver:
        raise LeftOutError("there is no chromium with chromedriver, and apt-get does not install them here")
    return browser, driver


def selenium() -> None:
    try:
        import selenium as _  # noqa: F401
    except ModuleNotFoundError:
        place = KEPT / SELENIUM
        if not (place / "selenium").is_dir():
            told = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", place, SELENIUM], check=False)
            if told.returncode:
                raise LeftOutError(f"{SELENIUM} cannot be installed") from None
        sys.path.append(str(place))


def axe() -> str:
    place = KEPT / "axe-core-4.14.0.tgz"
    KEPT.mkdir(parents=True, exist_ok=True)
    if not place.is_file():
        with suppress(OSError, subprocess.TimeoutExpired):
            words = ["npm", "pack", "--silent", "--pack-destination", str(KEPT), AXE]
            subprocess.run(words, capture_output=True, timeout=120, check=False)
    if not place.is_file():
        raise LeftOutError(f"npm does not fetch {AXE} here")
    content = place.read_bytes()
    if hashlib.sha256(content).hexdigest() != AXE_SHA256:
        raise SystemExit(f"{AXE} is not what it was")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        file = archive.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode()


# The browser -----------------------------------------------------------------------------------------------------------------


class Page:
    def __init__(self, driver: Any, checker: str) -> None:
        self.driver, self._checker, self.clicks = driver, checker, 0

    def wait(self, found: Callable[[], Any], what: str) -> Any:
        until = time.monotonic() + PATIENCE
        while not (one := found()):
            assert time.monotonic() < until, f"{what}; the page says:\n{self.text()}\n{self.driver.get_log('browser')}"
            time.sleep(0.1)
        return one

    def text(self) -> str:
        return str(self.js("return document.body.innerText"))

    def js(self, code: str, *given: Any) -> Any:
        return self.driver.execute_script(code, *given)

    def shows(self, text: str) -> None:
        self.wait(lambda: text in self.text(), f"no {text!r}")

    def element(self, name: str, kind: str = "button,a") -> Any:
        """By what it says, as people find it."""
        code = (
            "return [...document.querySelectorAll(arguments[0])].find(e => e.innerText.trim() === arguments[1] && !e.disabled)"
        )
        return self.wait(lambda: self.js(code, kind, name), f"no {kind} {name!r}")

    def click(self, name: str, kind: str = "button,a") -> None:
        self.clicks += 1
        self.element(name, kind).click()

    def fill(self, selector: str, text: str) -> None:
        """As typing does it, and then leaving the field."""
        self.wait(lambda: self.js("return !!document.querySelector(arguments[0])", selector), f"no {selector}")
        self.js(
            "const e = document.querySelector(arguments[0]);"
            "const set = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(e), 'value').set; set.call(e, arguments[1]);"
            "e.dispatchEvent(new Event('input', {bubbles: true})); e.dispatchEvent(new Event('change', {bubbles: true}))",
            selector,
            text,
        )

    def choose(self, selector: str, value: Any) -> None:
        """An option of a select, or a box ticked."""
        self.wait(lambda: self.js("return !!document.querySelector(arguments[0])", selector), f"no {selector}")
        tick, option = (
            "if (e.checked !== arguments[1]) e.click()",
            ("e.value = arguments[1]; e.dispatchEvent(new Event('change', {bubbles: true}))"),
        )
        self.js(
            f"const e = document.querySelector(arguments[0]); {tick if isinstance(value, bool) else option}", selector, value
        )

    def go(self, place: str) -> None:
        self.js("location.hash = arguments[0]", place)

    def size(self, width: int, height: int, dark: bool) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def accessible(self, where: str) -> None:
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": self._checker})  # not held by the page's policy
        done = (
            "const tell = arguments[arguments.length - 1], failed = e => ({impact: 'critical', id: String(e), nodes: []});"
            "axe.run().then(found => tell(found.violations), e => tell([failed(e)]))"
        )
        found = [one for one in self.driver.execute_async_script(done) if one["impact"] in ("serious", "critical")]
        told = [(one["id"], one.get("help"), [node["html"][:200] for node in one["nodes"][:4]]) for one in found]
        assert not told, f"{where}: {json.dumps(told, indent=1)}"

    def fits(self, where: str) -> None:
        beyond = (
            "const w = document.documentElement.clientWidth; if (document.documentElement.scrollWidth <= w) return [];"
            "return [...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > w + 1)"
            ".slice(0, 5).map(e => e.outerHTML.slice(0, 160))"
        )
        assert self.js(beyond) == [], f"{where} is wider than the screen: {self.js(beyond)}"

    def quiet(self, *expected: str) -> None:
        told = [one["message"] for one in self.driver.get_log("browser") if one["level"] in ("SEVERE", "WARNING")]
        told = [one for one in told if not any(part in one for part in (*KILLED, *expected))]
        assert not told, told


@contextmanager
def browser(checker: str) -> Iterator[Page]:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    program, driver = chromium()
    with tempfile.TemporaryDirectory() as profile:
        options = Options()
        options.binary_location = program
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        started = webdriver.Chrome(options=options, service=Service(driver))
        try:
            started.set_script_timeout(60)
            yield Page(started, checker)
        finally:
            started.quit()


# The studio ------------------------------------------------------------------------------------------------------------------


class Server:
    """`pronghorn studio` as a person starts it."""

    def __init__(self, home: Path, port: int = 0, *more: str) -> None:
        words = [sys.executable, "-m", "pronghorn.cli", "studio", "--no-browser", "--port", str(port), *more]
        self.process = subprocess.Popen(words, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        link = re.search(r"https?://\S+", self.process.stdout.readline())
        assert link, self.process.stdout.read()
        self.link = link[0]
        self.port = int(re.search(r":(\d+)/", self.link)[1])  # type: ignore[index]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


def folder(home: Path) -> None:
    """What a new user has: a model and a file of data."""
    from samples import chat_rows, make_model, make_tokenizer, write_rows

    make_model(num_hidden_layers=1).save_pretrained(home / "models" / "tiny")
    make_tokenizer().save_pretrained(home / "models" / "tiny")
    write_rows(home / "mine.jsonl", chat_rows(300))


# The way of a new user ----------------------------------------------------------------------------------------------------


def to_a_running_training(page: Page, server: Server) -> None:
    began = time.monotonic()
    page.driver.get(server.link)
    page.shows("No runs yet")
    page.click("Write a recipe")
    page.shows("valid")
    page.wait(lambda: page.js("return document.getElementById('key-model').value") == "models/tiny", "the model is not found")
    typed = {"data.max_length": "128", "train.batch_tokens": "512", "train.capacity": "256", "train.lr": "1e-2"}
    for key, value in typed.items():  # faster than the answers come
        page.fill(f"#key-{key.replace('.', chr(92) + '.')}", value)
    for key, value in typed.items():
        page.wait(lambda key=key, value=value: f"{key.split('.')[1]}: {value}" in page.js(TEXT), f"{key} is not in the text")
    text = page.js(TEXT)
    page.fill(".lines textarea", text.replace("lr: 1e-2", "lr: fast"))
    page.shows("is not a number")
    text = re.sub(r"(?m)^  # steps: 1000", f"  steps: {STEPS}", text)
    page.fill(
        ".lines textarea", re.sub(r"(?m)^  every: \S+", "  every: 40", text.replace("every: 200, keep", "every: 20, keep"))
    )
    page.wait(
        lambda: page.js("return document.getElementById('key-train.epochs') && 1") and "valid" in page.text(), "not valid"
    )
    page.shows(" held out")  # as `check` says it, by itself
    page.wait(lambda: f"steps: {STEPS}" in page.js(TEXT), "the text is not the typed one")
    page.click("Start")
    page.wait(lambda: "#/run?" in page.js("return location.hash"), "the run does not start")
    page.shows("running")
    took = time.monotonic() - began
    print(f"from the link to a running training: {took:.0f} s, {page.clicks} clicks", flush=True)


def live_stop_and_resume(page: Page, home: Path, server: Server) -> Server:
    page.wait(lambda: page.js(STEP) > 20, "no steps")
    assert page.js("return document.querySelectorAll('.plot canvas').length") >= 4
    server.kill()  # the run goes on, and the page says so
    page.shows("The studio does not answer")
    log = home / "runs" / "mine" / "run.jsonl"
    size = log.stat().st_size
    page.wait(lambda: log.stat().st_size > size, "the run has ended with the server")
    assert "then goes on by itself" in page.text()
    then = page.js(STEP)
    server = Server(home, server.port)  # by the same user in the same folder: the page that is open goes on
    page.wait(lambda: page.js(STEP) > then and "does not answer" not in page.text(), "the page does not recover")
    pid = json.loads((log.parent / "run.lock").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    page.shows("Nothing has been written since")
    assert f"kill -CONT {pid}" in page.text()
    os.kill(pid, signal.SIGCONT)
    page.wait(lambda: "Nothing has been written" not in page.text(), "a run that goes on is told to be silent")
    page.click("Stop and save")
    page.shows("interrupted")
    stopped = page.js(STEP)
    assert 0 < stopped < STEPS
    page.click("Resume")
    page.wait(lambda: page.js(STEP) > stopped and "running" in page.text(), "it does not go on")
    os.kill(server.process.pid, signal.SIGSTOP)  # the laptop is closed
    time.sleep(3)
    os.kill(server.process.pid, signal.SIGCONT)
    page.wait(lambda: "done" in page.js("return document.querySelector('.title .pill').innerText"), "it does not end")
    assert "resumed from" in page.text().lower()
    return server


def plan_and_data(page: Page, place: Path | None) -> None:
    page.go("#/recipe?file=mine.yaml")
    page.wait(
        lambda: page.js("return document.querySelectorAll('section[aria-label=plan] select option').length") > 5, "no GPUs"
    )
    page.js("const s = document.querySelector('section[aria-label=plan] select'); s.value = 'rtx4090';"
            "s.dispatchEvent(new Event('change', {bubbles: true}))")  # fmt: skip
    page.click("Plan")
    page.shows("peak memory")
    page.shows("pronghorn plan mine.yaml --gpu rtx4090")
    page.choose("section[aria-label=plan] input[type=checkbox]", True)
    page.click("Plan")
    page.shows("The longest document that fits")
    page.choose("section[aria-label=differences] select", "runs/mine")
    page.shows("The same recipe.")
    page.fill(".lines textarea", page.js(TEXT).replace("lr: 1e-2", "lr: 1e-3"))
    page.wait(lambda: page.js("return [...document.querySelectorAll('.diff td')].map(e => e.innerText)") == ["0.01", "0.001"],
              "train.lr is not told to differ")  # fmt: skip
    shots(page, place, {"plan": "#/recipe?file=mine.yaml"}, below="Plan")
    nothing_is_trained(page)
    page.go("#/data?file=mine.yaml")
    page.shows("near duplicates")
    assert page.js("return document.querySelectorAll('.datarow .t1').length") > 10
    page.click("Audit")
    page.go("#/jobs")
    link = page.element("audit", "a").get_attribute("href")  # once it has ended
    found = "const tell = arguments[arguments.length - 1]; fetch(arguments[0]).then(r => r.text()).then(tell)"
    assert "<html" in page.driver.execute_async_script(found, link)


def talk_and_export(page: Page, home: Path, place: Path | None) -> None:
    page.go("#/talk?run=runs/mine")
    page.click("Load the model")
    page.shows("System prompt")
    page.fill("input[type=range]", "1.5")  # so that the two answers differ
    page.fill("input[type=number]", "24")
    page.fill("form textarea", "please add 3 and 4")
    page.click("Send")
    page.wait(lambda: page.js("return document.querySelectorAll('.sides .card').length") == 2, "no answers")
    page.wait(
        lambda: page.js("return [...document.querySelectorAll('.sides .said')].every(e => e.innerText.trim() !== '…')"),
        "silent",
    )
    page.wait(lambda: page.js("return ![...document.querySelectorAll('button')].some(e => e.innerText === 'Stop')"), "no end")
    page.js("[...document.querySelectorAll('.sides button')][1].click()")
    page.wait((home / "data" / "preferences.jsonl").is_file, "not rated")
    shots(page, place, {"talk": "#/talk?run=runs/mine"})
    page.click("Unload the model")
    page.go("#/run?run=runs/mine")
    page.click("Formats and sizes")
    page.click("write adapter")
    exported = home / "runs" / "mine" / "export-adapter" / "adapter_config.json"
    page.wait(exported.is_file, "nothing is exported")
    page.shows("check:")
    page.wait(lambda: page.js("return document.querySelector('.checkpoints .pill')?.innerText") == "checked", "no verdict")
    fork = "document.querySelector('.checkpoints button').click()"
    page.js(fork)
    shots(page, place, {"export": "#/run?run=runs/mine"}, below="Checkpoints")
    page.js(fork)  # shut again


def queue(page: Page, home: Path) -> None:
    """The lock of a worker is held while the order is changed, so that nothing starts meanwhile."""
    rows = "return [...document.querySelectorAll('main tbody tr')].map(e => e.innerText.replace(/\\s+/g, ' '))"
    in_row = "[...document.querySelectorAll('main tbody tr')].find(e => e.innerText.includes(arguments[0]))"

    def press(command: str, button: str) -> None:
        find = f"return [...{in_row}.querySelectorAll('button')].find(e => e.innerText === arguments[1] && !e.disabled)"
        page.wait(lambda: page.js(find, command, button), f"no {button}").click()

    (home / ".studio" / "queue").mkdir(exist_ok=True)
    with (home / ".studio" / "queue" / "worker.lock").open("ab") as worker:
        fcntl.flock(worker, fcntl.LOCK_EX)
        page.go("#/data?file=mine.yaml")
        page.click("Add to queue")
        page.shows("The audit waits in the queue")
        page.go("#/recipe?file=mine.yaml")
        page.shows("valid")
        page.js("document.querySelector('section[aria-label=sweep] button:last-of-type').click()")
        page.shows("It waits in the queue")
        page.click("queue", "a")
        page.wait(lambda: len(page.js(rows)) == 2 and "data audit" in page.js(rows)[0], "not both, in their order")
        press("sweep mine.yaml", "↑")
        page.wait(lambda: "sweep mine.yaml" in page.js(rows)[0], "it does not move up")
        press("sweep mine.yaml", "cancel")
        page.wait(lambda: "cancelled" in page.js(rows)[1], "it is not cancelled")
    page.shows("No worker is there")
    page.go("#/recipe?file=mine.yaml")
    page.shows("valid")
    page.click("Add to queue")  # a command that is added starts a worker
    page.click("queue", "a")
    page.wait(lambda: sum(" done" in row for row in page.js(rows)) == 2, "what waits does not finish")
    page.element("audit", "a")
    assert not (home / "runs" / "mine-sweep").exists()


CHOOSE = "const s = [...document.querySelectorAll('.overlay select')][arguments[0]]; s.value = arguments[1];" \
    "s.dispatchEvent(new Event('change', {bubbles: true}))"  # fmt: skip


def figures_of_the_gpu(page: Page, home: Path) -> None:
    """This machine has none: the samples are written here."""
    run = home / "runs" / "mine"
    page.go("#/run?run=runs/mine")
    page.shows("Gradient norm")
    assert "GPU power" not in page.text()
    steps = [json.loads(line) for line in (run / "run.jsonl").read_text().splitlines() if '"event":"step"' in line]
    with (run / "gpu.jsonl").open("w") as log:
        for step in steps[::10]:
            gpu = {"memory": 6e9, "power": 100 + step["step"], "utilisation": 90, "energy": step["step"]}
            log.write(json.dumps({"time": step["time"], "session": step["session"], "gpus": [gpu]}) + "\n")
    page.go("#/runs?run=runs/mine")
    page.wait(lambda: page.js("return document.querySelectorAll('.overlay canvas').length") == 1, "no curve of the loss")
    page.js(CHOOSE, 0, "power")
    page.wait(lambda: "GPU power, W" in page.js("return document.querySelector('.overlay h3').innerText"), "another curve")
    page.wait(lambda: page.js("return document.querySelectorAll('.overlay canvas').length") == 1, "no curve of the power")
    page.js(CHOOSE, 0, "loss")
    page.js(CHOOSE, 1, "cost")
    page.shows("no price is known for these runs")
    page.go("#/run?run=runs/mine")
    for title in ("GPU memory, GB", "GPU power, W", "GPU utilisation, %", "Wh"):
        page.shows(title)


def gone(page: Page, home: Path) -> None:
    run = home / "runs" / "mine"
    page.go("#/run?run=runs/mine")
    page.shows("Training")
    with (run / "run.jsonl").open("ab") as log:
        log.write(b'{"event":"ste\n')
    page.shows("One line of run.jsonl cannot be read")
    run.rename(home / "elsewhere")
    page.shows("is no more")
    (home / "elsewhere").rename(run)
    page.wait(lambda: "is no more" not in page.text(), "it does not come back")


def forgotten(page: Page, home: Path, server: Server) -> Server:
    """Without the secret that outlives a server, its page says how to come back, and does so when the link was opened."""
    page.go("#/recipe?file=mine.yaml")
    page.shows("valid")
    page.fill(".lines textarea", page.js(TEXT) + "# being typed\n")
    server.kill()
    shutil.rmtree(home / ".cache" / "studio")
    server = Server(home, server.port)
    page.shows("does not know this browser")
    page.shows("the terminal shows the next one")
    window = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    page.driver.get(server.link)
    page.shows("Runs")
    page.driver.close()
    page.driver.switch_to.window(window)
    page.wait(lambda: "does not know" not in page.text(), "it does not come back")
    page.shows("ready 294 documents")  # what was asked meanwhile is asked again; 6 of 300 are held out
    time.sleep(1)
    assert page.js(TEXT).endswith("# being typed\n")
    return server


def names_are_text(page: Page, home: Path) -> None:
    """Whatever a run, its model, its note or the address is called."""
    from studio_parts import make_run, start, step

    script = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script>"
    named = {"run": script, "device": script, "recipe": {"model": script, "method": script, "output": script}}
    run = make_run(home / "runs" / "<img src=x onerror=pwned=1>", [start() | named, step(1), {"event": "notice", "text": script,
                   "time": 1, "session": 1}, {"event": "eval", "time": 2, "session": 1, "step": 1, "loss": 1.0, "generations":
                   [{"prompt": script, "answer": script}]}])  # fmt: skip
    (run / "answers.jsonl").write_text(json.dumps({"prompt": script, "answer": script}) + "\n")
    (run / "studio.json").write_text(json.dumps({"note": script, "tags": [script]}))
    address = quote(f"runs/{run.name}", safe="")
    for place in ("#/runs", f"#/runs?run={address}", f"#/run?run={address}", f"#/recipe?file={quote(script)}", "#/talk"):
        page.go(place)
        page.shows("<img src=x")
        time.sleep(0.5)
        assert page.js("return [window.pwned || 0, document.querySelectorAll('img, main script, [onerror]').length]") == [0, 0]
    shutil.rmtree(run)


def with_a_password_over_tls(page: Page, home: Path) -> None:
    """With a certificate that this test signs itself."""
    (home / "password").write_text("correct horse battery\n")
    (home / "password").chmod(0o600)
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*words, "-out", "cert.pem", "-keyout", "key.pem"], cwd=home, check=True, capture_output=True)
    server = Server(home, 0, *["--password-file", "password", "--tls-cert", "cert.pem", "--tls-key", "key.pem"])
    try:
        page.driver.execute_cdp_cmd("Security.setIgnoreCertificateErrors", {"ignore": True})
        page.driver.get(f"https://localhost:{server.port}/#/run?run=runs/mine")
        page.shows("Password")
        page.accessible("login")
        for typed in ("incorrect horse", "correct horse battery"):
            page.driver.find_element("id", "password").send_keys(typed)
            page.click("Log in")
            page.shows("That is not the password" if typed.startswith("in") else "tick runs to compare")
        (cookie,) = [one for one in page.driver.get_cookies() if str(server.port) in one["name"]]
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")
        page.quiet(NOT_LET_IN)
    finally:
        server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shots", type=Path, help="folder for pictures of each page")
    arguments = parser.parse_args()
    try:
        import starlette as _  # noqa: F401

        chromium()
        selenium()
        checker = axe()
    except (LeftOutError, ModuleNotFoundError) as error:
        print(f"studio-test left out: {error}")
        return
    with tempfile.TemporaryDirectory(prefix="studio-") as name, browser(checker) as page:
        home = Path(name)
        folder(home)
        os.environ["PRONGHORN_CACHE"] = str(home / ".cache")
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # so that commands are short
        server = Server(home)
        try:
            page.size(*SIZES[0], dark=False)
            to_a_running_training(page, server)
            server = live_stop_and_resume(page, home, server)
            print("live curves, server killed, stopped, resumed: yes", flush=True)
            plan_and_data(page, arguments.shots)
            print("plan and data: yes", flush=True)
            talk_and_export(page, home, arguments.shots)
            print("talk and export: yes", flush=True)
            a_fork(page, home)
            rollouts(page, home)
            by_keys(page)
            print("fork with the same losses, rollouts by reward, every control by the keyboard: yes", flush=True)
            queue(page, home)
            print("queue: moved, cancelled, finished: yes", flush=True)
            pages = {"runs": "#/runs", "run": "#/run?run=runs/mine", "recipe": "#/recipe?file=mine.yaml", "queue": "#/queue",
                     "data": "#/data?file=mine.yaml", "compare": "#/runs?run=runs/mine&run=runs/again",
                     "commands": "#/jobs"}  # fmt: skip
            shots(page, arguments.shots, pages)
            print("every page at 1280 and 400 px, light and dark, without a serious violation: yes", flush=True)
            figures_of_the_gpu(page, home)  # made by hand, so in no picture
            print("curves of the GPU, cost as an axis: yes", flush=True)
            gone(page, home)
            print("torn line, folder gone and back: yes", flush=True)
            page.quiet()
            names_are_text(page, home)
            page.quiet("status of 400")  # that is no name of a recipe
            server = forgotten(page, home, server)
            page.quiet(NOT_LET_IN)
            with_a_password_over_tls(page, home)
            print("names run nothing, back in after a restart, a password over TLS: yes", flush=True)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
