"""Talking to a run's model and its base: `pronghorn serve` in a process of its own, whose words are passed on as they come."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

from starlette.concurrency import iterate_in_threadpool

from pronghorn.serve.asked import RequestError
from pronghorn.serve.gate import is_loopback
from pronghorn.studio.jobs import Jobs
from pronghorn.studio.questions import Say

TARGET = re.compile(r"[a-z0-9]{1,40}(:[a-z0-9_]{1,40})?")  # of an export
PATIENCE = 300.0  # seconds for the next word


class Talks:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def open(self, folder: str, about: str) -> dict[str, Any]:
        """The server of this run, which is started where there is none; `url` and `models`, once the model is loaded."""
        running = (one for one in self._jobs.all() if one["verb"] == "serve" and one["running"] and one["about"] == about)
        job = next(running, None) or self._jobs.start("serve", [folder, "--port", "0", "--json"], about)
        return {**job, **self._ready(job["id"]), "output": self._jobs.output(job["id"])}

    def say(self, given: Say) -> AsyncIterator[str]:
        """The words of one model's answer, as server-sent events."""
        job = self._jobs.one(given["job"])
        ready = self._ready(job["id"])
        if not job["running"] or not ready:
            raise RequestError("the model is not loaded", status=409)
        asked = {name: value for name, value in given.items() if name != "job" and value is not None} | {"stream": True}
        place = urlsplit(ready["url"])
        line = http.client.HTTPConnection(place.hostname or "127.0.0.1", place.port, timeout=PATIENCE)
        try:
            line.request("POST", f"{place.path}/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
            answer = line.getresponse()
            if answer.status != 200:
                told = json.loads(answer.read(1 << 16))
                raise RequestError(str(told["error"]["message"]), status=answer.status)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            line.close()
            raise RequestError(f"the model does not answer: {error}", status=502) from None
        words: AsyncIterator[str] = iterate_in_threadpool(_words(line, answer))
        return words

    def _ready(self, name: str) -> dict[str, Any]:
        """What `pronghorn serve --json` printed when it began to listen."""
        for text in self._jobs.output(name).splitlines():
            if text.startswith('{"url"'):
                try:
                    told = json.loads(text)
                    if is_loopback(urlsplit(told["url"]).hostname or ""):
                        return {"url": told["url"], "models": told["models"]}
                except (ValueError, KeyError, TypeError):
                    continue
        return {}


def _words(line: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> Iterator[str]:
    """Closing the connection ends the answer there, too."""
    try:
        while text := answer.readline(1 << 20):
            yield text.decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        yield 'data: {"error": {"message": "the model stopped answering"}}\n\n'
    finally:
        line.close()
