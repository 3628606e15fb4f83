"""What the studio answers: its page, and what the page asks for. Every answer is JSON, a file of the page or a stream."""

from __future__ import annotations

import json
import mimetypes
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pronghorn import __version__
from pronghorn.errors import PronghornError
from pronghorn.memory.gpus import GPUS
from pronghorn.program import command
from pronghorn.recipe import Recipe
from pronghorn.recipe_file import parse_recipe, scalar
from pronghorn.report.answers import read_answers
from pronghorn.report.html_style import STYLE
from pronghorn.report.run_log import plain
from pronghorn.serve.asked import SHOWN, RequestError
from pronghorn.small_files import read_small_text
from pronghorn.studio import control, live, preferences, questions, recipes, rollouts, talk
from pronghorn.studio.gate import LARGEST_FILE, POLICY_OF_REPORTS, UPLOAD, Gate, Keys, as_json, refused
from pronghorn.studio.jobs import FOLDER, Jobs, Worker
from pronghorn.studio.library import Library, write_notes
from pronghorn.studio.openapi import described
from pronghorn.studio.places import DATA, Places
from pronghorn.studio.queue import Queue
from pronghorn.train.run.run_folder import RECIPE_NAME
from pronghorn.yaml_file import LARGEST

MOST_STREAMS = 32
MOST_ANSWERS = 200
PAGES = ("report.html", "audit.html", "sweep.html")
SWEPT = re.compile(r"(train|lora)\.[a-z_]+=[0-9A-Za-z.,+-]+")
SAID = TypeAdapter(questions.Say)
KEY = re.compile(r"(train|eval|checkpoint|memory|health)(\.[a-z_]+)+=[0-9A-Za-z.,+-]+")
QUESTIONS = {"ready": "check", "plan": "plan", "rows": "data show", "stats": "data stats"}


class Studio:
    """The parts, and which of them answers which path."""

    def __init__(self, places: Places, folders: list[Path], keys: Keys, port: Callable[[], int]) -> None:
        self.places, self.library, self.jobs = places, Library(places, folders), Jobs(places.home)
        self.worker, self.talks = Worker(places.home), talk.Talks(self.jobs)
        self.queue = Queue(places.home, self.jobs)
        self._streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._static = _static_files()
        reading: dict[str, Callable[[Request], Any]] = {
            "/api/about": self.about, "/api/runs": self.runs, "/api/overlay": self.overlay, "/api/files": self.files,
            "/api/differences": self.differences, "/api/rollouts": self.rollouts, "/api/answers": self.answers,
            "/api/fields": lambda _: recipes.fields(),
            "/api/recipe": lambda request: recipes.load(places, request.query_params.get("file")),
            "/api/jobs": lambda _: self.jobs.all(), "/api/queue": lambda _: self.queue.listed(),
            "/api/job": lambda request: self.jobs.one(request.query_params.get("id"), with_output=True),
        }  # fmt: skip
        writing: dict[str, Callable[[Any], Any]] = {
            "/api/stop": self.stop, "/api/resume": self.resume, "/api/notes": self.notes, "/api/start": self.start,
            "/api/export": self.export, "/api/ask": self.ask, "/api/job/stop": self.stop_job, "/api/recipe/read": self.read,
            "/api/recipe/edit": self.edit, "/api/recipe/new": self.new, "/api/talk": self.open_talk,
            "/api/recipe/save": self.save, "/api/recipe/differences": self.against, "/api/fork": self.fork,
            "/api/sizes": self.sizes, "/api/prefer": self.prefer, "/api/queue/move": self.move,
            "/api/queue/cancel": self.cancel,
        }  # fmt: skip
        bodies = {path: questions.question_of(function) for path, function in writing.items()} | {"/api/talk/say": SAID}
        reading["/api/openapi.json"] = lambda _: described(routes, bodies, {**reading, **writing}, f"pronghorn-studio-{port()}")
        routes = [Route(path, _reading(function)) for path, function in reading.items()]
        routes += [Route(path, _writing(function, bodies[path]), methods=["POST"]) for path, function in writing.items()]
        routes += [
            Route(UPLOAD, self.upload, methods=["POST"]), Route("/api/live", self.live), Route("/page", self.page),
            Route("/api/talk/say", self.say, methods=["POST"]), Route("/{path:path}", self.static),
        ]  # fmt: skip
        self.app = Gate(Starlette(routes=routes), keys, port)

    def close(self) -> None:
        self.worker.close()
        self.library.close()

    # ---- the page --------------------------------------------------------------------------------------------------------

    async def static(self, request: Request) -> Response:
        found = self._static.get(request.url.path)
        if found is None:
            return refused(RequestError("there is nothing here", status=404))
        return Response(found[0], media_type=found[1], headers={"cache-control": "no-cache"})

    async def page(self, request: Request) -> Response:
        """report.html of a run, audit.html or sweep.html."""
        try:
            path = self.places.inside(request.query_params.get("file"))
        except RequestError as error:
            return refused(error)
        if path.name not in PAGES or not path.is_file():
            return refused(RequestError("there is no such page", status=404))
        return FileResponse(path, media_type="text/html", headers={"content-security-policy": POLICY_OF_REPORTS})

    def about(self, _request: Request) -> dict[str, Any]:
        return {"version": __version__, "home": str(self.places.home), "gpus": {gpu.name: gpu.sold_as for gpu in GPUS.values()},
                "vram": {gpu.name: gpu.memory / 1e9 for gpu in GPUS.values()}}  # fmt: skip

    def files(self, _request: Request) -> dict[str, Any]:
        return {"recipes": self.places.recipes(), "data": self.places.data(), "models": self.places.models()}

    # ---- runs ------------------------------------------------------------------------------------------------------------

    def runs(self, _request: Request) -> dict[str, Any]:
        return {"runs": self.library.rows()}

    def overlay(self, request: Request) -> Any:
        ask = request.query_params
        try:
            even_out = float(ask.get("smooth", "0"))
        except ValueError:
            raise RequestError("smooth is a number from 0 to 0.5") from None
        return self.library.overlay(ask.getlist("run"), ask.get("y", "loss"), ask.get("x", "step"), even_out)

    def differences(self, request: Request) -> Any:
        return self.library.differences(request.query_params.getlist("run"))

    def answers(self, request: Request) -> Any:
        rows = read_answers(self.library.reader(request.query_params.get("run")).folder)
        wrong_first = sorted(rows, key=lambda row: sum(row.scores.values()))
        return [plain(asdict(row)) for row in wrong_first[:MOST_ANSWERS]]

    def rollouts(self, request: Request) -> Any:
        ask = request.query_params
        wanted = rollouts.Wanted.of(*map(ask.get, ("text", "low", "high", "sort")))
        return rollouts.rollouts(self.library.reader(ask.get("run")).folder, wanted)

    async def live(self, request: Request) -> ASGIApp:
        try:
            reader = await run_in_threadpool(self.library.reader, request.query_params.get("run"))
        except RequestError as error:
            return refused(error)
        return self._stream(live.events(reader))

    def stop(self, given: questions.OfRun) -> dict[str, Any]:
        if (job := self._starting(given["run"])) is not None:
            pid = self.jobs.stop(job["id"])["pid"]
        else:
            pid = control.stop(self.library.reader(given["run"]).folder)
        return {"pid": pid, "command": f"kill -INT {pid}"}

    def stop_job(self, given: questions.OfJob) -> dict[str, Any]:
        return self.jobs.stop(given["id"])

    def move(self, given: questions.Move) -> dict[str, Any]:
        return self.queue.move(given["id"], given["to"])

    def cancel(self, given: questions.OfJob) -> dict[str, Any]:
        return self.queue.cancel(given["id"])

    def _starting(self, run: object) -> dict[str, Any] | None:
        """The command that trains this run and holds no lock yet: it imports its libraries."""
        of_it = [job for job in self.jobs.all() if job["running"] and job["verb"] == "train" and job["about"] == run]
        return of_it[0] if of_it and control.holder(self.places.inside(run)) is None else None

    def resume(self, given: questions.OfRun) -> dict[str, Any]:
        """The same command again. Without its recipe's file, the recipe that the log has is written down."""
        reader = self.library.read(given["run"])
        if control.holder(reader.folder) is not None:
            raise RequestError("the run is running", status=409)
        if (own := reader.folder / RECIPE_NAME).is_file():  # of `pronghorn fork`: the log has the keys of before
            self.places.require_recipe_inside(parse_recipe(read_small_text(own, LARGEST), name=own.name))
            return self.jobs.start("train", [self.places.word(own)], self.places.name(reader.folder))
        try:
            recipe = Recipe.model_validate(_without_nothing(reader.stats().recipe))
        except ValueError:
            raise RequestError("the log does not hold a recipe of this version", status=409) from None
        self.places.require_recipe_inside(recipe)
        file, words = self._file_of(recipe, reader.folder), []
        if file is None:
            file = self.places.home / FOLDER / "recipes" / f"{reader.folder.name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(
                _without_nothing(recipe.model_dump(mode="json", exclude_unset=True)), indent=1, ensure_ascii=False
            )
            file.write_text(f"# as the log of the run has it\n{text}\n", encoding="utf-8")
            words = [f"output={scalar(self.places.name(reader.folder))}"]
        return self.jobs.start("train", [self.places.word(file), *words], self.places.name(reader.folder))

    def _file_of(self, recipe: Recipe, folder: Path) -> Path | None:
        for name in self.places.recipes():
            path = self.places.home / name
            try:
                one = parse_recipe(read_small_text(path, LARGEST), name=name)
            except (PronghornError, OSError, UnicodeDecodeError):
                continue
            if (self.places.home / one.output).resolve() == folder and not one.differences(recipe):
                return path
        return None

    def fork(self, given: questions.Fork) -> dict[str, Any]:
        """A new run from a checkpoint of another; it is resumed like any other."""
        folder, new = self.library.reader(given["run"]).folder, self.places.inside(given["output"])
        words = given.get("keys", "").split()
        if wrong := [word for word in words if not KEY.fullmatch(word)]:
            raise RequestError(f"`{wrong[0][:SHOWN]}` is not a key that changes from here, such as train.lr=1e-4")
        if new.exists():
            raise RequestError(f"{self.places.name(new)} exists; choose another folder", status=409)
        words = [self.places.word(folder), self.places.word(new), *words, "--checkpoint", str(given["step"])]
        return self.jobs.start("fork", words, self.places.name(new))

    def notes(self, given: questions.Notes) -> dict[str, Any]:
        return write_notes(self.library.reader(given["run"]).folder, given.get("note", ""), given.get("tags", []))

    # ---- recipes and data ------------------------------------------------------------------------------------------------

    def edit(self, given: questions.Edit) -> dict[str, Any]:
        text = recipes.edit(given["text"], given["key"], given["value"])
        return {"text": text, **recipes.read(text, given.get("name") or "recipe")}

    def read(self, given: questions.Read) -> dict[str, Any]:
        return recipes.read(given["text"], given.get("name") or "recipe")

    def save(self, given: questions.Save) -> dict[str, Any]:
        return recipes.save(self.places, given["file"], given["text"], given.get("version"))

    def against(self, given: questions.Compare) -> dict[str, Any]:
        return self.library.against(given["run"], parse_recipe(given["text"]))

    def new(self, given: questions.New) -> dict[str, Any]:
        model, data, output = given.get("model") or "", given.get("data") or [], given.get("output") or "runs/my"
        text = recipes.started(model, data, given.get("method"), output)
        return {"text": text, **recipes.read(text)}

    def ask(self, given: questions.Ask) -> dict[str, Any]:
        """What the plan, or the data, of this text is; with the command that says the same."""
        question, text, changes = given["question"], given["text"], given.get("set", [])
        recipe = parse_recipe(text, changes)
        self.places.require_recipe_inside(recipe)
        asked = {key: given.get(key) for key in ("question", "gpu", "longest", "first", "search", "name")}
        found = self.worker.ask({**asked, "recipe": text, "set": changes})
        file, gpu = given.get("file") or "my.yaml", given.get("gpu")
        more = [*(["--gpu", gpu] if gpu else []), *(["--longest"] if given.get("longest") else [])]
        more += ["--row", str(given.get("first", 0) + 1)] if question == "rows" else []
        return {**found, "command": command(*QUESTIONS[question].split(), file, *changes, *more)}

    def start(self, given: questions.Start) -> dict[str, Any]:
        verb, path = given.get("verb", "train"), self.places.inside(given["file"])
        recipe = parse_recipe(recipes.load(self.places, given["file"])["text"], name=self.places.name(path))
        self.places.require_recipe_inside(recipe)
        folder, words, queued = self.places.inside(recipe.output), [self.places.word(path)], given.get("queue", False)
        if verb == "train" and not queued and (control.holder(folder) is not None or self._starting(self.places.name(folder))):
            raise RequestError(
                f"another run uses {self.places.name(folder)}; wait for it, or choose another output", status=409
            )
        if verb == "train" and given.get("fresh"):
            words.append("--fresh")
        if verb == "sweep":
            words += _swept(given.get("keys", ""))
        if kind := {"data audit": "audit", "sweep": "sweep"}.get(verb):
            folder = folder.with_name(f"{folder.name}-{kind}")
            words += ["-o", self.places.word(folder)]
        return (self.queue.add if queued else self.jobs.start)(verb, words, self.places.name(folder))

    def export(self, given: questions.Export) -> dict[str, Any]:
        folder, to = self.library.reader(given["run"]).folder, given["to"]
        if not talk.TARGET.fullmatch(to):
            raise RequestError("that is no format of an export")
        return self.jobs.start("export", [self.places.word(folder), "--to", to], self.places.name(folder))

    def sizes(self, given: questions.OfRun) -> dict[str, Any]:
        """The command that tells how large each export would be; it writes nothing."""
        return self.jobs.start("export", [self.places.word(self.library.reader(given["run"]).folder), "--sizes", "--json"])

    async def upload(self, request: Request) -> Response:
        """A file of data that was dropped on the page: written whole, beside no other of its name."""
        try:
            name = Path(request.query_params.get("name", "")).name
            path = self.places.inside(f"data/{name}")
            if not name or name.startswith(".") or not path.name.endswith(DATA) or path.parent.name != "data":
                raise RequestError(f"a file of data ends with one of {', '.join(DATA)}")
            path.parent.mkdir(exist_ok=True)
            content = bytearray()
            async for chunk in request.stream():
                content += chunk
                if len(content) > LARGEST_FILE:
                    raise RequestError("the file is too large", status=413)
            await run_in_threadpool(_write_new, path, bytes(content))
        except RequestError as error:
            return refused(error)
        return as_json({"file": self.places.name(path), "bytes": len(content)})

    # ---- talk ------------------------------------------------------------------------------------------------------------

    def open_talk(self, given: questions.OfRun) -> dict[str, Any]:
        folder = self.library.reader(given["run"]).folder
        return self.talks.open(self.places.word(folder), self.places.name(folder))

    def prefer(self, given: questions.Prefer) -> dict[str, Any]:
        return preferences.prefer(self.places, given["prompt"], given["chosen"], given["rejected"])

    async def say(self, request: Request) -> ASGIApp:
        try:
            words = await run_in_threadpool(self.talks.say, questions.checked(SAID, _body(await request.body())))
        except RequestError as error:
            return refused(error)
        return self._stream(words)

    def _stream(self, events: AsyncIterator[str]) -> ASGIApp:
        if not self._streams.acquire(blocking=False):
            return refused(RequestError(f"{MOST_STREAMS} streams are open already; close some tabs", status=429))
        return _Stream(events, self._streams.release)


class _Stream:
    """An answer that gives its place back however it ends."""

    def __init__(self, events: AsyncIterator[str], done: Callable[[], None]) -> None:
        self._answer, self._done = StreamingResponse(events, media_type="text/event-stream"), done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            self._done()


def _reading(function: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return await _answered(function, request)

    return answer


def _writing(function: Callable[[Any], Any], kind: TypeAdapter[Any]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        body = await request.body()
        return await _answered(lambda text: function(questions.checked(kind, _body(text))), body)

    return answer


async def _answered(function: Callable[[Any], Any], given: Any) -> Response:
    """In a thread, with the errors that a person can cause as answers."""
    try:
        return as_json(await run_in_threadpool(function, given))
    except RequestError as error:
        return refused(error)
    except PronghornError as error:
        told = recipes.problems(error)
        return as_json({"error": told[0], "problems": told}, 422)
    except OSError as error:  # a folder that has just gone, for example
        return refused(RequestError(error.strerror or str(error), status=409))


def _body(text: bytes) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    if not isinstance(given, dict):
        raise RequestError("the body is not a JSON object")
    if "\\ud" in json.dumps(given) and any(0xD800 <= ord(one) < 0xE000 for one in json.dumps(given, ensure_ascii=False)):
        raise RequestError("the body has half a surrogate pair, which is no text")
    return given


def _swept(text: str) -> list[str]:
    """`train.lr=1e-4,1e-3 lora.r=8,16`. Other keys may name files."""
    words = text.split()
    if wrong := [word for word in words if not SWEPT.fullmatch(word)]:
        raise RequestError(f"`{wrong[0][:SHOWN]}` is not a key with values to try, such as train.lr=1e-4,1e-3 or lora.r=8,16")
    return words


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nothing(one) for key, one in value.items() if one is not None}
    return [_without_nothing(one) for one in value] if isinstance(value, list) else value


def _write_new(path: Path, content: bytes) -> None:
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        raise RequestError(f"{path.name} is in data/ already; give the new file another name", status=409) from None
    except OSError as error:
        raise RequestError(f"cannot write {path.name}: {error.strerror}", status=409) from None


def _static_files() -> dict[str, tuple[bytes, str]]:
    """Path -> content and its kind. Nothing else is ever read for a path."""
    top = files("pronghorn.studio") / "static"
    found = {"/static/report.css": (STYLE.encode(), "text/css")}
    for folder, prefix in ((top, "/static/"), (top / "vendor", "/static/vendor/")):
        for one in folder.iterdir():
            if one.is_file():
                kind = "text/javascript" if one.name.endswith(".js") else mimetypes.guess_type(one.name)[0] or "text/plain"
                found[prefix + one.name] = (one.read_bytes(), kind)
    found["/"] = found["/static/index.html"]
    return found
