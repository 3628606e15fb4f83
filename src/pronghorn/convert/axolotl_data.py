"""Axolotl's `datasets`: what each `type` becomes, with its columns, message keys and roles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pronghorn.convert.data_sets import (
    OWN_TEMPLATE,
    WHOLE_FILE,
    DataSet,
    chat_fields,
    first_rows,
    is_local,
    set_sources,
    set_template,
    source_name,
)
from pronghorn.convert.draft import Draft, Row, apply, not_here, nothing, rows
from pronghorn.convert.values import UnfitError, is_on, plain, printed, text, words
from pronghorn.data.template.chat_messages import ROLES, SPEAKERS

TEMPLATES = {  # Axolotl's names: ours
    "chatml": "chatml", "llama3": "llama-3", "gemma": "gemma", "gemma3": "gemma-3", "gemma3n": "gemma-3", "gemma4": "gemma-4",
    "phi_3": "phi-3", "phi_35": "phi-3", "phi_4": "phi-4", "qwen_25": "qwen-2.5", "qwen2_vl": "qwen-2.5", "qwen3": "qwen3",
    "alpaca": "alpaca", "mistral_v1": "mistral",
}  # fmt: skip
STYLES = {"": "alpaca", "instruct": "alpaca", "chatml": "chatml", "phi": "phi-3"}  # of `alpaca:style`
ALPACA_LIKE: dict[str, dict[str, str]] = {  # types with Alpaca's form: columns that have other names
    "alpaca": {},
    "alpaca_chat": {},
    "alpaca_instruct": {},
    "alpaca_w_system": {},
    "gpteacher": {"output": "response"},
    "alpaca_chat.load_qa": {"instruction": "question", "output": "answer"},
    "alpaca_w_system.load_open_orca": {"instruction": "question", "output": "response", "system": "system_prompt"},
}
ALPACA_NOTE = (
    "the recipe uses data.format: alpaca and data.template: alpaca (`### Instruction:`, `### Response:`), without "
    "the introductory sentence and the line `### Input:`"
)
UNKNOWN_TYPE = "an Axolotl-specific prompt format; Pronghorn detects the format from the columns instead"
UNKNOWN_KEY = "unknown dataset key"
PLAIN_FORMAT = ("{instruction}", "")

# Of preference tuning: `type` is STYLE.COLUMNS, a chat template and the columns it reads; or columns of the user's own.
PAIR_STYLES = {"chatml": "chatml", "llama3": "llama-3", "gemma": "gemma", "phi_3": "phi-3", "zephyr": "zephyr"}  # ours
TOKENIZERS = ("chat_template", "bradley_terry", "passthrough", "user_defined")  # styles without a template of their own
# Columns of a pair, where ours have other names. A question as text becomes a user's message, as in Axolotl.
PAIRS: dict[str, dict[str, str]] = {
    "argilla": {},
    "argilla_chat": {},
    "ultra": {},
    "icr": {"instruction": "input"},
    "intel": {"instruction": "question"},
    "prompt_pairs": {"instruction": "prompt"},
}
MARKED: dict[str, dict[str, str]] = {  # of a single answer
    "argilla": {"output": "completion"},
    "intel": {"instruction": "question", "output": "completion"},
    "prompt_pairs": {"instruction": "prompt", "output": "completion"},
    "ultra": {"instruction": "prompt", "output": "completion"},
}
PAIR_KEYS, MARKED_KEYS = ("prompt", "system", "chosen", "rejected"), ("prompt", "system", "completion", "label")


def data_sets(draft: Draft, key: str) -> list[DataSet]:
    """The data sets under `datasets`, `test_datasets` or `pretraining_dataset`; every key in them gets its fate."""
    value = draft.get(key)
    items = value if isinstance(value, list) else [value]
    found = []
    for i, item in enumerate(items):
        at = f"{key}[{i}]" if isinstance(value, list) else key
        if isinstance(item, str) and item:
            found.append(DataSet(key, item))
        elif isinstance(item, dict):
            one = _Item(draft, at, item, key).read()
            found += [one] if one else []
        else:
            draft.not_honoured(key, f"{printed(item)} is not a dataset")
    return found


class _Item:
    """One entry of a list of data sets."""

    def __init__(self, draft: Draft, at: str, item: dict[str, Any], key: str) -> None:
        self.draft, self.at, self.item, self.key = draft, at, item, key
        self.one = DataSet(f"{at}.path", "")

    def get(self, name: str) -> Any:
        return plain(self.item.get(name))

    def say(self, name: str, mapped: str) -> None:
        self.draft.fates[f"{self.at}.{name}"] = ("mapped", mapped)

    def no(self, name: str, why: str) -> None:
        self.draft.not_honoured(f"{self.at}.{name}", why)

    def quiet(self, name: str, why: str) -> None:
        self.draft.no_effect(f"{self.at}.{name}", why)

    def read(self) -> DataSet | None:
        try:
            self._name()
        except UnfitError as error:
            self.no("path", str(error))
            self._rest("its dataset is not in the recipe")
            return None
        with self.draft.reading(f"{self.at}.type"):
            self._type()
        apply(self.draft, ROWS | {name: partial(self._field, read) for name, read in FIELDS.items()}, {}, self.at, UNKNOWN_KEY)
        return self.one

    def _rest(self, why: str) -> None:
        for name in self.item:
            if f"{self.at}.{name}" not in self.draft.fates:
                self.quiet(name, why)

    def _name(self) -> None:
        path, split = text(self.get("path")), str(self.get("split") or "")
        files = self.get("data_files")
        if files is not None and path in ("json", "csv", "parquet", "text"):
            names = words(files)
            if len(names) != 1:
                raise UnfitError("several files of one dataset: list them in data.train yourself")
            path = names[0]
            self.say("data_files", f"data.train: {path}")
        elif files is not None:
            self.no(
                "data_files", "all files of the dataset are read; to select files, download them and list them in data.train"
            )
        local = is_local(path) or self.get("ds_type") is not None
        if local and split:
            split, self.one.max_rows = first_rows(split, path)
            if self.one.max_rows:
                self.say("split", f"data.max_rows: {self.one.max_rows}")
            elif "[" in split:
                self.no("split", WHOLE_FILE)
            else:
                self.quiet("split", "a file has one split")
        elif split:
            self.say("split", f"data.train: {source_name(path, str(self.get('name') or ''), split)}")
        self.one.name = path if local and "://" not in path else source_name(path, str(self.get("name") or ""), split)
        if self.get("name") is not None:
            self.say("name", f"data.train: {self.one.name}")

    def _type(self) -> None:
        kind = self.get("type")
        if (objective := self.draft.targets.get("objective.name")) is not None:
            compared(self, objective)
            return
        if isinstance(kind, dict):
            self._own_form(kind)
            return
        base, _, style = str(kind or "").partition(":")
        if base in ("chat_template", "chat_template.default") or base.startswith("sharegpt"):
            self.chat(sharegpt=base.startswith("sharegpt"))
        elif base in ALPACA_LIKE:
            self.one.format, self.one.fields = "alpaca", dict(ALPACA_LIKE[base])
            template = STYLES.get(style)
            if template is None:
                self.no("type", f"the format `{style}` is not supported; data.format: alpaca, and {OWN_TEMPLATE}")
            else:
                self.one.template = template
                self.say("type", f"data.format: alpaca, data.template: {template}")
                if template == "alpaca":
                    self.no("type", ALPACA_NOTE)
        elif base in ("completion", "pretrain") or self.key == "pretraining_dataset":
            self.one.format = "text"
            column = str(self.get("field") or self.get("text_column") or "text")
            self.one.fields = {} if column == "text" else {"text": column}
            self.one.long = "split"
            self.say("type", "data.format: text, data.long: split; long texts are split into pieces, as in Axolotl")
        elif base == "input_output":
            raise UnfitError(
                "text segments with labels are not supported; write prompt and completion, or messages with a `train` flag"
            )
        elif kind is not None:
            raise UnfitError(UNKNOWN_TYPE)

    def _own_form(self, kind: dict[str, Any]) -> None:
        """A form of the user's own: which columns, and a text around them."""
        names = {ours: plain(kind.get(f"field_{ours}")) or ours for ours in ("instruction", "input", "output", "system")}
        forms = [str(kind.get(name) or "") for name in ("format", "no_input_format")]
        bare = all(form in PLAIN_FORMAT for form in forms) and not is_on(kind.get("system_prompt"))
        if bare:
            self.one.format = "completion"
            self.one.fields = {"prompt": text(names["instruction"]), "completion": text(names["output"])}
        else:
            self.one.format = "alpaca"
            self.one.fields = {ours: text(theirs) for ours, theirs in names.items() if theirs != ours}
        for name, value in kind.items():
            at = f"type.{name}"
            if plain(value) is None:
                self.quiet(at, "the value is empty")
            elif name.startswith("field_") and name[6:] in names:
                ours = {"instruction": "prompt", "output": "completion"}.get(name[6:], name[6:]) if bare else name[6:]
                if bare and ours in ("input", "system"):
                    self.quiet(at, "the format does not use it")
                else:
                    self.say(at, f"data.fields.{ours}: {value}")
            elif bare and name in ("format", "no_input_format"):
                self.say(at, "data.format: completion")
            elif name in ("format", "no_input_format", "system_format", "system_prompt"):
                self.no(
                    at, f"custom text around the columns is not supported; {OWN_TEMPLATE}, or data.chat_template: FILE.jinja"
                )
            else:
                self.no(at, "unknown key")
        self.say("type", f"data.format: {self.one.format}")

    def chat(self, *, sharegpt: bool) -> None:
        mappings = self.get("message_property_mappings")
        mappings = mappings if isinstance(mappings, dict) else {}
        usual = ("from", "value") if sharegpt else ("role", "content")
        role, content = (
            text(plain(mappings.get(ours)) or self.get(f"message_field_{ours}") or name)
            for ours, name in zip(("role", "content"), usual, strict=True)
        )
        column = text(self.get("field_messages") or ("conversations" if sharegpt else "messages"))
        self.one.fields, self.one.message_fields = chat_fields(column, role, content)
        others = {
            str(ours): text(theirs)
            for ours, theirs in mappings.items()
            if ours not in ("role", "content") and theirs not in (None, ours)
        }
        self.one.message_fields |= others
        if self.one.message_fields.get("role") and not isinstance(self.get("roles"), dict):
            self.one.roles = {"user": ["human"], "assistant": ["gpt"]}  # what Axolotl takes them for
        self.say("type", "data.format: auto, which detects conversations")

    def _field(self, read: Callable[[_Item, str, Any], None], draft: Draft, key: str) -> None:
        """A row: one of FIELDS."""
        read(self, key.removeprefix(f"{self.at}."), draft.get(key))

    def _messages_column(self, name: str, value: object) -> None:
        self.say(name, f"data.fields.messages: {value}" if self.one.fields.get("messages") else f"detected: column {value}")

    def _mappings(self, name: str, value: object) -> None:
        shown = f"data.message_fields: {printed(self.one.message_fields)}" if self.one.message_fields else "detected"
        self.say(name, shown)

    def _roles(self, name: str, value: object) -> None:
        if not isinstance(value, dict):
            raise UnfitError(f"{printed(value)} does not map roles to names")
        strange = [str(ours) for ours in value if ours not in ("system", "user", "assistant", "tool")]
        if strange:
            raise UnfitError(f"unknown role `{strange[0]}`; the roles are system, user, assistant and tool")
        listed = {ours: [who for who in words(theirs) if who != ours] for ours, theirs in value.items()}
        known = {} if self.one.message_fields.get("role") else SPEAKERS
        self.one.roles = {
            ours: theirs
            for ours, names in listed.items()
            if (theirs := [who for who in names if known.get(who) != ours and who not in ROLES])
        }
        self.say(name, f"data.roles: {printed(self.one.roles)}" if self.one.roles else "these role names are detected")

    def _tools(self, name: str, value: object) -> None:
        if value != "tools":
            self.one.fields["tools"] = text(value)
        self.say(name, f"data.fields.tools: {value}")

    def _training(self, name: str, value: object) -> None:
        if value not in ("train", "training"):
            self.one.message_fields["train"] = text(value)
        self.say(name, f"data.message_fields.train: {value}")

    def _thinking(self, name: str, value: object) -> None:
        theirs, ours = (self.get(key) or "reasoning_content" for key in ("field_thinking", "template_thinking_key"))
        if theirs != ours:
            self.one.message_fields[text(ours)] = text(theirs)
        self.say(name, f"data.message_fields.{ours}: {theirs}")

    def _trained_roles(self, name: str, value: object) -> None:
        names = set(words(value))
        if names and names <= {"assistant", "gpt"}:
            self.say(name, "data.loss_on: auto, which trains on assistant turns")
        else:
            raise UnfitError("either assistant turns carry loss, or everything (data.loss_on: all)")

    def _end_of_turn(self, name: str, value: object) -> None:
        if value == "turn":
            self.say(name, "same as Pronghorn: the end token of each loss-carrying turn carries loss")
        else:
            raise UnfitError("only the end token of each loss-carrying turn carries loss")

    def _template(self, name: str, value: object) -> None:
        key = f"{self.at}.{name}"
        if str(value).startswith("tokenizer_default"):
            self.draft.no_effect(key, "same as Pronghorn: the tokenizer's template is used")
        else:
            self.one.template = set_template(self.draft, key, str(value), TEMPLATES.get(str(value), ""), for_all=False)


# Preference tuning ------------------------------------------------------------------------------------------------------


def compared(item: _Item, objective: str) -> None:
    """What the recipe says of a data set whose answers are compared, or marked."""
    kind, marked = item.get("type"), objective == "kto"
    if isinstance(kind, dict):
        _own_columns(item, kind, MARKED_KEYS if marked else PAIR_KEYS)
        return
    style, _, columns = str(kind or "chat_template.default").partition(".")
    if style == "bradley_terry":  # its own layer of names
        style, columns = (columns or "chat_template").partition(".")[::2]
        columns = columns or "icr"
    if style not in PAIR_STYLES and style not in TOKENIZERS:
        raise UnfitError(f"an Axolotl-specific format; the columns are detected, and {OWN_TEMPLATE}")
    known = MARKED if marked else PAIRS
    if columns in ("", "default"):
        item.chat(sharegpt=False)
        _named(item, ("label",) if marked else ("chosen", "rejected"))
    elif columns in known:
        item.one.fields = dict(known[columns])
        item.one.format = "alpaca" if marked else "auto"
    else:
        raise UnfitError(f"the columns of `{columns}` are unknown; name them in data.fields")
    item.one.template = PAIR_STYLES.get(style, "")
    shown = [f"data.template: {item.one.template}"] if item.one.template else []
    shown += [f"data.fields: {{{', '.join(f'{ours}: {theirs}' for ours, theirs in item.one.fields.items())}}}"]
    item.say("type", ", ".join(shown if item.one.fields else [*shown[:-1], "the columns are detected"]))


def _named(item: _Item, keys: tuple[str, ...]) -> None:
    for ours in keys:
        name = item.get(f"field_{ours}")
        if name is not None and name != ours:
            item.one.fields[ours] = text(name)
        if name is not None:
            item.say(f"field_{ours}", f"data.fields.{ours}: {name}" if name != ours else f"detected: column {name}")


def _own_columns(item: _Item, kind: dict[str, Any], keys: tuple[str, ...]) -> None:
    for name, value in kind.items():
        at, ours = f"type.{name}", name.removeprefix("field_")
        if plain(value) is None:
            item.quiet(at, "the value is empty")
        elif name.startswith("field_") and ours in keys:
            if value != ours:
                item.one.fields[ours] = text(value)
            item.say(at, f"data.fields.{ours}: {value}")
        elif name.endswith("_format") and str(value) == f"{{{name.removesuffix('_format')}}}":
            item.quiet(at, "same as Pronghorn: the column's text is used unchanged")
        elif name.endswith("_format"):
            item.no(at, "text around the columns is not supported; write it into the rows, or use messages and a template")
        else:
            item.no(at, "unknown key")
    item.say("type", "custom column names: see data.fields")


# Keys of a data set -----------------------------------------------------------------------------------------------------


FIELDS: dict[str, Callable[[_Item, str, Any], None]] = {
    "type": lambda item, name, value: item.say(name, "data.format: auto"),
    "field": lambda item, name, value: item.say(name, f"data.fields.text: {value}"),
    "text_column": lambda item, name, value: item.say(name, f"data.fields.text: {value}"),
    "field_messages": _Item._messages_column,
    "message_property_mappings": _Item._mappings,
    "message_field_role": _Item._mappings,
    "message_field_content": _Item._mappings,
    "roles": _Item._roles,
    "roles_to_train": _Item._trained_roles,
    "field_tools": _Item._tools,
    "field_thinking": _Item._thinking,
    "template_thinking_key": _Item._thinking,
    "message_field_training": _Item._training,
    "train_on_eos": _Item._end_of_turn,
    "train_on_eot": _Item._end_of_turn,
    "chat_template": _Item._template,
}
ROWS: dict[str, Row] = {
    "message_field_training_detail": not_here("Pronghorn masks whole turns, not parts of a turn"),
    "chat_template_jinja": not_here("save it to a file and set data.chat_template: FILE.jinja"),
    "ds_type": nothing("detected from the file extension"),
    "input_format": nothing("detected from the columns"),
    "conversation": not_here(f"a named conversation format; {OWN_TEMPLATE}"),
    "drop_system_message": not_here("system turns are kept; remove them from the rows"),
    "split_thinking": not_here("reasoning inside an answer stays as the template renders it"),
    "trust_remote_code": not_here("Pronghorn runs no dataset code"),
    "revision": not_here("the dataset's main revision is read; download the other one and name its folder"),
    **rows("shards shards_idx", not_here("the whole dataset is read; data.max_rows uses the first rows")),
    "preprocess_shards": nothing("streaming is not supported; rows are read once before training"),
    "skip": not_here("the whole dataset is read from its first row"),
    "path": lambda draft, key: None,  # the name of the data set, which `set_sources` tells
}


def convert_data(draft: Draft) -> None:
    for key in ("datasets", "pretraining_dataset"):
        if draft.get(key) is not None:
            sets = data_sets(draft, key)
            if draft.targets.get("data.train"):
                draft.not_honoured(key, "the recipe uses `datasets`; write a second recipe for this data")
                continue
            set_sources(draft, sets)
            if key not in draft.fates and sets:
                draft.set("data.train", draft.targets.get("data.train", []), key)
            elif not sets:
                draft.not_honoured(key, "none of its datasets can be used; set data.train yourself")
    held_out = "test_datasets"
    if draft.get(held_out) is not None:
        sets = data_sets(draft, held_out)
        if len(sets) == 1:
            draft.set("data.eval", sets[0].name, held_out, note="read with the format and the column names of data.train")
        else:
            draft.not_honoured(held_out, "only one held-out source is supported: set data.eval")
