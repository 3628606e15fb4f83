"""The API as it is described: every route is there, and whatever body comes, the answer is JSON and never a 500."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.datastructures import QueryParams
from starlette.routing import Route

from pronghorn.recipe import Recipe
from pronghorn.recipe_file import parse_recipe
from pronghorn.studio import openapi
from pronghorn.studio.app import Studio
from pronghorn.studio.jobs import Worker
from studio_parts import Browser, make_run, start, step, studio

RECIPE = "model: m\ndata: {train: data/a.jsonl}\noutput: runs/new\ntrain:\n  lr: 2e-4\n"
STREAMS = ("/api/live", "/page")  # what they answer is no JSON
EACH = 60  # bodies of a route


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Browser]:
    """Commands end at once, and no second process plans."""
    monkeypatch.setattr("sys.executable", str(shutil.which("true")))
    monkeypatch.setattr(Worker, "ask", lambda self, asked: json.loads(json.dumps({"asked": asked})))
    recipe = parse_recipe(RECIPE.replace("runs/new", "runs/one")).model_dump(mode="json")
    make_run(tmp_path / "runs" / "one", [start() | {"recipe": recipe}, step(1)])
    (tmp_path / "my.yaml").write_text(RECIPE)
    with studio(tmp_path) as one:
        yield one.open()


def routes(page: Browser) -> list[Route]:
    return list(page.served.studio.app._app.routes)  # type: ignore[attr-defined]


def test_every_route_is_described(page: Browser) -> None:
    told = page.get("/api/openapi.json")
    assert told["openapi"] == "3.1.0"
    there = {(route.path, method) for route in routes(page) for method in route.methods or () if method != "HEAD"}
    described = {(path, method.upper()) for path, methods in told["paths"].items() for method in methods}
    assert described == there - {("/{path:path}", "GET")}
    names = [one["operationId"] for methods in told["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names))
    text = json.dumps(told)
    schemas = told["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= schemas.keys()
    assert set(schemas["Recipe"]["properties"]) == set(Recipe.model_fields)
    assert schemas["Train"]["properties"].keys() >= {"lr", "steps"}
    asked = told["paths"]["/api/ask"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert asked == {"$ref": "#/components/schemas/Ask"}
    assert schemas["Ask"]["properties"]["text"]["contentSchema"] == {"$ref": "#/components/schemas/Recipe"}
    assert page.raw("GET", "/api/openapi.json", Cookie="")[0] == 401


def test_what_is_read_from_the_address_is_described(page: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Route by route; every axis and order that is described is another one."""
    read = set[str]()

    def noting(name: str) -> Callable[..., Any]:
        inner = getattr(QueryParams, name)
        return lambda self, key, *more: read.add(key) or inner(self, key, *more)

    for name in ("get", "getlist"):
        monkeypatch.setattr(QueryParams, name, noting(name))
    for path, method in {(route.path, method) for route in routes(page) for method in route.methods or () if method != "HEAD"}:
        if path.startswith("/{"):
            continue
        read.clear()
        page.raw(method, f"{path}?run=runs/none", b"{}" if method == "POST" else None)
        assert read == openapi.QUERIES.get(path, {}).keys(), path
    for one in openapi.QUERIES["/api/rollouts"]["sort"]["enum"]:
        page.get(f"/api/rollouts?run=runs/one&sort={one}")
    drawn = [page.get(f"/api/overlay?run=runs/one&x={one}")[0]["x"] for one in openapi.QUERIES["/api/overlay"]["x"]["enum"]]
    assert len({tuple(xs) for xs in drawn}) == len(drawn)


# Bodies at random --------------------------------------------------------------------------------------------------------


FITTING = {
    "run": "runs/one", "file": "my.yaml", "text": RECIPE, "key": "train.lr", "value": "1e-3", "to": "merged", "gpu": "h100",
    "method": "lora", "keys": "train.lr=1e-3,1e-4",
}  # fmt: skip


class Draw:
    """Bodies that the schema allows, and such as it does not."""

    KNOWN = (*FITTING.values(), "runs", "", ".", "..", "m", "a.jsonl", "new.yaml")
    ODD = (
        "\0", "\ud800", "é\u202e", "x" * 200_000, "[" * 5000, "{a: " * 3000, "&a [*a, *a]", "- " * 4000, "../../etc/passwd",
        "a\nb: c", "!!python/object:os.system x", "1" * 5000, "<<: *x", "~nobody/x", "model: &m [*m]", "a: 1\na: 2", "\ufeff",
        "model: 0o7\noutput: 2001-01-01\ndata: 1", "%TAG ! x", "--- a\n--- b", "? [a]\n: b",
    )  # fmt: skip

    def __init__(self, seed: int, schemas: dict[str, Any]) -> None:
        self.random, self.schemas = random.Random(seed), schemas

    def text(self) -> str:
        return self.random.choice(self.KNOWN if self.random.random() < 0.6 else self.ODD)

    def anything(self, deep: int = 0) -> Any:
        """Of any type."""
        kinds: list[Any] = [None, True, 0, -1, 10**30, 1e308, -0.0, float("nan"), float("inf"), self.text()]
        if deep < 3:
            kinds += [[self.anything(deep + 1)], {self.text()[:50]: self.anything(deep + 1)}, [], {}]
        return self.random.choice(kinds)

    def of(self, schema: dict[str, Any]) -> Any:
        if "$ref" in schema:
            return self.of(self.schemas[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return self.of(self.random.choice(schema["anyOf"]))
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        match schema.get("type"):
            case "object" if "properties" in schema:
                needed = schema.get("required", [])
                chosen = [name for name in schema["properties"] if name in needed or self.random.random() < 0.5]
                return {name: self.property(name, schema["properties"][name]) for name in chosen}
            case "object":
                return {"role": "user", "content": self.text()}
            case "array":
                return [self.of(schema["items"]) for _ in range(self.random.randrange(3))]
            case "integer":
                return self.random.choice([schema.get("minimum", -1), schema.get("maximum", 10**12), 1])
            case "number":
                return self.random.choice([0, 0.7, -1.5, 1e308])
            case "boolean":
                return self.random.random() < 0.5
            case "null":
                return None
            case "string":
                return self.text()
        raise AssertionError(f"what is {schema}?")

    def property(self, name: str, schema: dict[str, Any]) -> Any:
        return FITTING[name] if name in FITTING and self.random.random() < 0.7 else self.of(schema)

    def spoilt(self, body: dict[str, Any]) -> Any:
        match self.random.randrange(6):
            case 0:
                return {**body, self.random.choice([*body, "x"]): self.anything()}
            case 1:
                return {**body, "\ud800" if self.random.random() < 0.5 else "__class__": 1}
            case 2:
                return {name: value for name, value in body.items() if self.random.random() < 0.5}
            case 3:
                return dict.fromkeys(body)
            case 4:
                return self.anything()
            case _:
                return {name: [value] for name, value in body.items()}


RAW = (
    b"", b"null", b"[]", b'"text"', b"{", b'{"run":', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b'{"run":1e999}', b"NaN",
    b'{"run":"runs/one","run":7}', b"\x00", b'{"run": "\\ud800"}', b"9" * 100_000,
)  # fmt: skip


def sound(page: Browser, method: str, path: str, body: bytes | None) -> int:
    status, headers, text = page.raw(method, path, body)
    told = f"{method} {path[:300]} {(body or b'')[:300]!r}: {status} {text[:300]!r}"
    assert 200 <= status < 500, told
    assert headers["content-type"].split(";")[0] == "application/json", told
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON: {told}"))
    return status


def test_bodies_at_random_never_give_a_500(page: Browser) -> None:
    told = page.get("/api/openapi.json")
    answered: dict[str, set[int]] = {}
    for number, (path, methods) in enumerate(told["paths"].items()):
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if not (schema := content.get("application/json", {}).get("schema")):
            continue
        draw = Draw(number, told["components"]["schemas"])
        for _ in range(EACH):
            body = draw.of(schema)
            sent = body if draw.random.random() < 0.5 else draw.spoilt(body)
            answered.setdefault(path, set()).add(sound(page, "POST", path, json.dumps(sent).encode()))
        for raw in RAW:
            assert sound(page, "POST", path, raw) >= 400
    assert len(answered) >= 13
    assert {path for path, statuses in answered.items() if 400 not in statuses} == set()  # what is wrong is refused
    assert len([path for path, statuses in answered.items() if 200 in statuses]) >= 9  # and what is right gets further


def test_bodies_that_once_gave_a_500(page: Browser) -> None:
    page.post("/api/recipe/edit", 400, text="a: 1\na: 2\n", key="train.lr", value="1e-3")
    page.post("/api/export", 400, run="runs/one", to="x" * 200_000)  # more than a command may have
    page.post("/api/start", 400, file="my.yaml", verb="sweep", keys=f"train.lr={'1' * 200_000}")


def test_addresses_at_random_never_give_a_500(page: Browser) -> None:
    told = page.get("/api/openapi.json")
    draw = Draw(1, {})
    for path, methods in told["paths"].items():
        if "get" not in methods or path in STREAMS:
            continue
        for _ in range(20):
            queries = {
                one["name"]: draw.random.choice([draw.text(), "nan", "1e999", "-1"]).encode("utf-8", "surrogatepass")[:2000]
                for one in methods["get"].get("parameters", [])
            }
            sound(page, "GET", f"{path}?{urlencode(queries)}", None)
    for path in STREAMS:
        for name in ("", "%00", "%ff", "x" * 3000, "my.yaml"):
            sound(page, "GET", f"{path}?run={name}&file={name}", None)
    for path in ("/api/none", "/api/runs/", "/api"):
        assert sound(page, "GET", path, None) == 404


def test_a_body_that_breaks_off_is_no_error(page: Browser, capfd: pytest.CaptureFixture[str]) -> None:
    for path in ("/api/recipe/read", "/api/data?name=a.jsonl"):
        line = page.line()
        line.putrequest("POST", path)
        line.putheader("Cookie", page.cookie)
        line.putheader("Content-Length", "100")
        line.endheaders(b'{"text"')
        line.close()
        line.sock = None
    for _ in range(3):
        page.get("/api/about")
    assert "Traceback" not in capfd.readouterr().err


def test_methods_that_are_not_there(page: Browser) -> None:
    assert isinstance(page.served.studio, Studio)
    for method in ("PUT", "DELETE", "PATCH"):
        assert page.raw(method, "/api/runs", b"{}")[0] == 405
