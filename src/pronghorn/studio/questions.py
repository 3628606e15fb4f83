"""What the page may ask: the body of each POST, as a type. A handler names the type of its `given`; the body is checked against
it before the handler sees it, and the API's description is made of the same types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # typing's own is refused by pydantic before Python 3.12

from pronghorn.serve.asked import SHOWN, RequestError

closed = with_config(ConfigDict(extra="forbid", strict=True))  # no other keys, and no number where a text belongs
# In the API's description, the text of a recipe is known by the recipe's own models.
OF_RECIPE = {"contentMediaType": "application/yaml", "contentSchema": {"$ref": "#/components/schemas/Recipe"}}
RecipeText = Annotated[str, Field(json_schema_extra=OF_RECIPE)]  # type: ignore[arg-type]
Row = Annotated[int, Field(ge=0, le=10**12)]


@closed
class OfRun(TypedDict):
    run: str  # the run's folder


@closed
class OfJob(TypedDict):
    id: str


@closed
class Move(TypedDict):
    id: str
    to: Annotated[int, Field(ge=1, le=10**6)]  # its place among the commands that wait


@closed
class Notes(TypedDict):
    run: str
    note: NotRequired[str]
    tags: NotRequired[list[str]]


@closed
class Start(TypedDict):
    file: str  # the recipe's
    verb: NotRequired[Literal["train", "check", "data audit", "sweep"]]
    fresh: NotRequired[bool]
    keys: NotRequired[Annotated[str, Field(max_length=4096)]]  # of a sweep: train.lr=1e-4,1e-3 lora.r=8,16
    queue: NotRequired[bool]  # it waits for the GPU


@closed
class Export(TypedDict):
    run: str
    to: str


@closed
class Fork(TypedDict):
    run: str
    step: Row  # of its checkpoint
    output: str  # the new run's folder
    keys: NotRequired[str]  # that change: train.lr=1e-4 train.steps=2000


@closed
class Prefer(TypedDict):
    prompt: list[dict[str, Any]]  # messages, up to the question
    chosen: str
    rejected: str


@closed
class Compare(TypedDict):
    run: str
    text: str  # of a recipe


@closed
class Ask(TypedDict):
    question: Literal["plan", "rows", "stats", "ready"]
    text: RecipeText
    name: NotRequired[str | None]
    file: NotRequired[str | None]
    set: NotRequired[list[str]]
    gpu: NotRequired[str | None]
    longest: NotRequired[bool]
    first: NotRequired[Row]  # row of the data
    search: NotRequired[str | None]


@closed
class Read(TypedDict):
    text: RecipeText
    name: NotRequired[str | None]


@closed
class Edit(TypedDict):
    text: RecipeText
    key: str
    value: str
    name: NotRequired[str | None]


@closed
class New(TypedDict):
    model: NotRequired[str | None]
    data: NotRequired[list[str] | None]
    method: NotRequired[str | None]
    output: NotRequired[str | None]


@closed
class Save(TypedDict):
    file: str
    text: RecipeText
    version: NotRequired[str | None]  # that was loaded; nothing for a new file


@closed
class Say(TypedDict):
    job: str  # of the loaded model
    model: str
    messages: list[dict[str, Any]]
    temperature: NotRequired[float | None]
    top_p: NotRequired[float | None]
    max_tokens: NotRequired[int | None]
    seed: NotRequired[int | None]


def question_of(function: Callable[[Any], Any]) -> TypeAdapter[Any]:
    """The type of the body that a handler reads."""
    return TypeAdapter(get_type_hints(function)["given"])


def checked(kind: TypeAdapter[Any], body: dict[str, Any]) -> Any:
    try:
        return kind.validate_python(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(one) for one in first["loc"])[:SHOWN]
        raise RequestError(f"`{place}` of the body: {first['msg'].lower()}") from None
