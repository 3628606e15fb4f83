"""The studio's API, described as OpenAPI 3.1: paths from the table of routes, bodies from `questions.py`, recipes from the
recipe's own models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter
from starlette.routing import Route

from pronghorn import __version__
from pronghorn.recipe import Recipe
from pronghorn.studio.log_reader import AXES
from pronghorn.studio.rollouts import SORTS

TEXT: dict[str, Any] = {"type": "string"}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}
# What a GET, and the one POST whose body is a file, read from the address.
QUERIES: dict[str, dict[str, dict[str, Any]]] = {
    "/api/overlay": {
        "run": TEXTS,
        "y": TEXT | {"default": "loss"},
        "x": {"enum": [*AXES], "default": AXES[0]},
        "smooth": {"type": "number", "minimum": 0, "maximum": 0.5, "default": 0},
    },
    "/api/differences": {"run": TEXTS},
    "/api/answers": {"run": TEXT},
    "/api/rollouts": {
        "run": TEXT,
        "text": TEXT,
        "low": {"type": "number"},
        "high": {"type": "number"},
        "sort": {"enum": [*SORTS], "default": next(iter(SORTS))},
    },
    "/api/live": {"run": TEXT},
    "/api/recipe": {"file": TEXT},
    "/api/job": {"id": TEXT},
    "/api/data": {"name": TEXT},
    "/page": {"file": TEXT},
}
KINDS = {"/api/live": "text/event-stream", "/api/talk/say": "text/event-stream", "/page": "text/html"}
PROBLEM = {"type": "object", "properties": dict.fromkeys(("what", "where", "why", "fix"), TEXT), "required": ["what"]}
REFUSED = {"type": "object", "properties": {"error": PROBLEM, "problems": {"type": "array", "items": PROBLEM}}}


def described(
    routes: Iterable[Route], bodies: Mapping[str, TypeAdapter[Any]], functions: Mapping[str, Callable[..., Any]], cookie: str
) -> dict[str, Any]:
    """`bodies`: of POST routes; `functions`: what answers a path, for what it says of itself."""
    kinds = [(path, "validation", kind) for path, kind in bodies.items()] + [("", "validation", TypeAdapter(Recipe))]
    found, schemas = TypeAdapter.json_schemas(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for route in routes:
        if ":path" in route.path:  # files of the page
            continue
        for method in sorted((route.methods or set()) - {"HEAD"}):
            about = inspect.getdoc(functions.get(route.path, route.endpoint)) or ""
            body = found[route.path, "validation"] if route.path in bodies else None  # type: ignore[index]
            paths.setdefault(route.path, {})[method.lower()] = _operation(route.path, method, about, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pronghorn studio", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Refused": REFUSED},
            "securitySchemes": {"cookie": {"type": "apiKey", "in": "cookie", "name": cookie}},
        },
        "security": [{"cookie": []}],
    }


def _operation(path: str, method: str, about: str, body: Any) -> dict[str, Any]:
    kind = KINDS.get(path, "application/json")
    told: dict[str, Any] = {"operationId": "_".join((method.lower(), *path.strip("/").removeprefix("api/").split("/")))}
    if about:
        told["description"] = about
    if queries := QUERIES.get(path):
        told["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in queries.items()]
    if body is not None:
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    elif method == "POST":
        told["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    refused = {"description": "refused", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Refused"}}}}
    told["responses"] = {"200": {"description": "answered", "content": {kind: {}}}, "4XX": refused}
    return told
