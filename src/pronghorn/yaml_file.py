"""YAML 1.2 as plain values, within limits, with the place of each key.

The file is read as a graph of nodes rather than as a dictionary, because nodes know their lines and still hold
both of two equal keys. YAML 1.2 makes `1e-4` a number and `no` a string. Limits are checked before or while the text is read:
ruamel.yaml needs 14 s for brackets that are 5,000 deep, and 40 s for a line of 5 MB.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.scanner import Scanner

from pronghorn.errors import PronghornError, RecipeError

KeyPath = tuple[str | int, ...]
ROOT: KeyPath = ()
LARGEST = 100_000  # bytes, and letters; the recipe with all keys has 6,000. They are read in 0.3 s
MOST_VALUES = 5_000  # far more than there are keys; ten lines of aliases to aliases can make billions
DEEPEST = 40  # lists and sections within each other; recipes have 4


def read_yaml(
    text: str,
    name: str,
    problems: list[PronghornError],
    *,
    kind: str = "recipe",
    start: str = "write one with `pronghorn new FILE`",
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Plain values, and the place of each key: `file:line`. `kind` is what to call the file, `start` how to come by one."""
    yaml = _yaml()
    try:
        node = _composed(text, yaml, name, kind)
    except RecursionError as error:
        raise RecipeError(what=f"the {kind} is nested too deeply", where=name, fix="use a few levels only") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        if mark and _indented_by_tab(text, mark.line):
            raise RecipeError(
                what="a tab in the indentation",
                where=where,
                why="YAML indents with spaces only",
                fix="replace the tab with spaces",
            ) from error
        raise RecipeError(
            what=f"not YAML: {error.problem or error.context}", where=where, fix="check indentation, quotes and brackets"
        ) from error
    except YAMLError as error:
        raise RecipeError(what=f"not YAML: {error}", where=name, fix="save the file as UTF-8 text") from error
    if node is None:
        raise RecipeError(what=f"the {kind} is empty", where=name, fix=start)
    if not isinstance(node, MappingNode):
        raise RecipeError(what=f"the {kind} does not consist of `key: value` lines", where=name, fix=start)
    places: dict[KeyPath, str] = {}
    return _plain(node, yaml, ROOT, name, places, problems), places


def read_value(text: str, where: str) -> Any:
    """The value of a `key=value` word. What is no YAML, or no value (30 February, a number of 5,000 digits), is the text."""
    try:
        _composed(text, _yaml(), where, "value")
        return _yaml().load(text)
    except (YAMLError, ValueError, RecursionError):
        return text


def _composed(text: str, yaml: YAML, name: str, kind: str) -> Node | None:
    """The graph, within limits."""
    try:
        if len(text) > LARGEST:
            shorter = "shorten it; data belongs into files of its own"
            raise _TooMuchError(f"has {len(text):,} letters", shorter, why=f"the limit is {LARGEST:,}")
        node: Node | None = yaml.compose(io.StringIO(text))
        if node is not None and _values_in(node, {}, name) > MOST_VALUES:
            raise _TooMuchError(TOO_MANY, "write the values without aliases", why="aliases (*name) repeat lists")
    except _TooMuchError as error:
        where = f"{name}:{error.line}" if error.line else name
        raise RecipeError(f"the {kind} {error}", where=where, why=error.why, fix=error.fix) from error
    return node


class _TooMuchError(Exception):
    """What is beyond a limit, as it goes on after `the recipe`."""

    def __init__(self, what: str, fix: str, *, why: str = "", line: int = 0) -> None:
        super().__init__(what)
        self.fix, self.why, self.line = fix, why, line


TOO_MANY = f"has over {MOST_VALUES:,} values"


def _too_deep(line: int) -> _TooMuchError:
    return _TooMuchError("is nested too deeply", "use a few levels only", why=f"the limit is {DEEPEST} levels", line=line)


class _Shallow(Scanner):
    """Reads up to 1,024 brackets ahead of the composer, in 0.3 s."""

    def fetch_flow_collection_start(self, *given: Any, **named: Any) -> None:
        super().fetch_flow_collection_start(*given, **named)
        if self.flow_level > DEEPEST:
            raise _too_deep(self.reader.line + 1)


class _Bounded(Composer):
    """Stops at the first node too many: ruamel.yaml needs 0.1 ms for each."""

    def __init__(self, loader: object = None) -> None:
        super().__init__(loader=loader)
        self._nodes = self._levels = 0

    def compose_node(self, parent: object, index: object) -> Any:
        self._nodes += 1
        self._levels += 1
        if self._nodes > MOST_VALUES or self._levels > DEEPEST:
            line = self.parser.peek_event().start_mark.line + 1
            many = _TooMuchError(TOO_MANY, "name folders instead of files", line=line)
            raise _too_deep(line) if self._levels > DEEPEST else many
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.Scanner = _Bounded, _Shallow
    return yaml


def _indented_by_tab(text: str, line: int) -> bool:
    lines = text.splitlines()
    return line < len(lines) and "\t" in lines[line][: len(lines[line]) - len(lines[line].lstrip())]


def _values_in(node: Node, known: dict[int, int], name: str) -> int:
    """Once every alias is written out; a node that is not counted yet (0) and comes again holds itself."""
    if id(node) not in known:
        known[id(node)] = 0
        inside = [pair[1] for pair in node.value] if isinstance(node, MappingNode) else node.value
        known[id(node)] = 1 + sum(_values_in(one, known, name) for one in inside if isinstance(one, Node))
    elif not known[id(node)]:
        raise RecipeError(
            what="a YAML alias refers to itself",
            where=f"{name}:{node.start_mark.line + 1}",
            fix="write the value without an alias",
        )
    return known[id(node)]


def _plain(node: Node, yaml: YAML, path: KeyPath, name: str, places: dict[KeyPath, str], problems: list[PronghornError]) -> Any:
    """Nodes to plain values, noting each key's line and every key that stands twice."""
    if isinstance(node, MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            where = f"{name}:{key_node.start_mark.line + 1}"
            if key in result:
                first = places[(*path, key)]
                problems.append(
                    RecipeError(
                        what=f"{dotted((*path, key))}: this key appears twice",
                        where=where,
                        why=f"it is already set at {first}",
                        fix="remove one of the two",
                    )
                )
                continue
            places[(*path, key)] = where
            result[key] = _plain(value_node, yaml, (*path, key), name, places, problems)
        return result
    if isinstance(node, SequenceNode):
        return [_plain(item, yaml, (*path, i), name, places, problems) for i, item in enumerate(node.value)]
    try:
        return yaml.constructor.construct_object(node, deep=True)
    except (YAMLError, ValueError):  # a tag that YAML does not know, or one that the value does not fit
        where = f"{name}:{node.start_mark.line + 1}"
        problems.append(
            RecipeError(
                what=f"{dotted(path)}: {node.tag} {node.value!r} is not a value",
                where=where,
                fix="remove the `!` tag, or put the value in quotes",
            )
        )
        return None


def dotted(path: Iterable[str | int]) -> str:
    return ".".join(str(part) for part in path)
