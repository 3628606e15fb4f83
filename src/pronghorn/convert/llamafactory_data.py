"""LLaMA-Factory's data sets: names that its dataset_info.json explains, with `formatting`, `columns` and `tags`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pronghorn.convert.data_sets import LATER, WHOLE_FILE, DataSet, chat_fields, first_rows, set_sources, source_name
from pronghorn.convert.draft import Draft
from pronghorn.convert.values import UnfitError, plain, printed, text, whole, words, written
from pronghorn.data.template.chat_messages import ROLES, SPEAKERS
from pronghorn.errors import CommandError, PronghornError, raise_all
from pronghorn.small_files import read_small_text
from pronghorn.yaml_file import LARGEST, read_yaml

FILE = "dataset_info.json"
USUAL = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "system_tag": "system",
    "function_tag": "function_call",
}
WHOSE = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
ALPACA_NOTE = "instruction and input are joined by an empty line; LLaMA-Factory joins them by a line break"


class DataSets:
    """What dataset_info.json says; None where there is none."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.entries = file, dict[str, Any]()
        if file is None:
            return
        try:
            found = json.loads(read_small_text(file))
        except (OSError, ValueError, RecursionError) as error:
            raise CommandError(
                what=f"cannot read {FILE}",
                where=str(file),
                why=str(error).split("\n")[0],
                fix="fix it, or name another one: --dataset-info FILE",
            ) from error
        if not isinstance(found, dict):
            raise CommandError(
                what=f"{FILE} is not an object with a key per dataset",
                where=str(file),
                fix="name another one: --dataset-info FILE",
            )
        self.entries = found

    def one(self, name: str, key: str, *, as_text: bool, objective: str = "") -> tuple[DataSet, list[str]]:
        """A data set, and what is to be said of it. Raises UnfitError where it cannot be used."""
        if self.file is None:
            raise UnfitError(f"no {FILE} describes `{name}`; pass it with --dataset-info FILE")
        entry = self.entries.get(name)
        if not isinstance(entry, dict):
            raise UnfitError(f"{self.file} has no dataset `{name}`")
        columns, tags = (entry.get(part) or {} for part in ("columns", "tags"))
        if not isinstance(columns, dict) or not isinstance(tags, dict):
            raise UnfitError(f"`columns` or `tags` of `{name}` in {self.file} are not names")
        _refuse_others(name, entry, columns, objective)
        one = DataSet(key, self._place(name, entry))
        form = str(entry.get("formatting") or "alpaca")
        notes = [] if plain(entry.get("hf_hub_url")) else _sliced(one, str(plain(entry.get("split")) or ""), name)
        if entry.get("num_samples"):
            notes.append(f"`{name}`: num_samples is not supported (max_rows uses the first rows)")
        usual = {} if columns else USUAL  # with some named, the others are not read
        if as_text:
            column = text(plain(columns.get("prompt")) or usual.get("prompt", "instruction"))
            one.format, one.fields = "text", {} if column == "text" else {"text": column}
        elif form == "alpaca":
            one.format = "alpaca"
            pairs = [("instruction", "prompt"), ("input", "query"), ("output", "response"), ("history", "history")]
            if objective not in ("", "kto"):
                one.format = "auto"  # the answers are in columns of their own
                pairs.remove(("output", "response"))
            for ours, theirs in pairs:
                named = plain(columns.get(theirs)) or usual.get(theirs)
                if named and named != ours:
                    one.fields[ours] = text(named)
            notes.append(f"`{name}`: {ALPACA_NOTE}")
        else:
            self._chat(one, columns, tags)
        beside = (("chosen", "chosen"), ("rejected", "rejected"), ("label", "kto_tag")) if objective else ()
        for ours, theirs in (("system", "system"), ("tools", "tools"), *beside):
            named = plain(columns.get(theirs))
            if named and named != ours and not as_text:
                one.fields[ours] = text(named)
        return one, notes

    def _chat(self, one: DataSet, columns: dict[str, Any], tags: dict[str, Any]) -> None:
        named = {tag: text(plain(tags.get(tag)) or usual) for tag, usual in TAGS.items()}
        column = text(plain(columns.get("messages")) or USUAL["messages"])
        one.fields, one.message_fields = chat_fields(column, named["role_tag"], named["content_tag"])
        known = {} if one.message_fields else SPEAKERS
        for tag, ours in WHOSE.items():
            who = named[tag] if not tags or plain(tags.get(tag)) else ours  # with some named, the others do not count
            if who != ours and known.get(who) != ours and who not in ROLES:
                one.roles[ours] = [who]

    def _place(self, name: str, entry: dict[str, Any]) -> str:
        split, config = str(plain(entry.get("split")) or ""), str(plain(entry.get("subset")) or "")
        if url := plain(entry.get("hf_hub_url")):
            return source_name(text(url), config, split)
        if file := plain(entry.get("file_name")):
            assert self.file is not None
            return _from_here(self.file.parent / text(file))
        raise UnfitError(f"`{name}` is neither a file nor on the Hugging Face Hub; download it and name the file")


def _sliced(one: DataSet, split: str, name: str) -> list[str]:
    """A file's `split: train[:20%]`, as max_rows; or what is to be said of it."""
    if "[" not in split:
        return []
    _, rows = first_rows(split, one.name)
    one.max_rows = min((count for count in (rows, one.max_rows) if count), default=None)
    return [] if rows else [f"`{name}`: split {split} is not supported ({WHOLE_FILE})"]


def _from_here(place: Path) -> str:
    here = Path.cwd()
    return str(place.relative_to(here) if place.is_relative_to(here) else place)


def _refuse_others(name: str, entry: dict[str, Any], columns: dict[str, Any], objective: str) -> None:
    media = [kind for kind in ("images", "videos", "audios") if plain(columns.get(kind))]
    if media:
        raise UnfitError(f"`{name}` contains {media[0]}; Pronghorn trains on text only")
    ranked, marked = bool(entry.get("ranking")), bool(plain(columns.get("kto_tag")))
    if (ranked or marked) and not objective:
        raise UnfitError(f"`{name}` is for preference tuning (stage: dpo, kto or rm), and this config is supervised")
    if objective and not (ranked or (objective == "kto" and marked)):
        needed = "kto_tag" if objective == "kto" else "ranking: true"
        raise UnfitError(f"`{name}` has no answers to compare: its entry in {FILE} has no `{needed}`")
    if plain(entry.get("folder")):
        raise UnfitError(f"`{name}` is a folder of a Hub dataset; download it and name the folder")


def find_info(draft: Draft, folder: Path, given: Path | None) -> Path | None:
    """Beside the config, or in its `dataset_dir`, which counts from where the tool is run: here, or above the config."""
    if given is not None:
        return given
    where = str(draft.get("dataset_dir", "data"))
    if where.startswith("REMOTE:") or where == "ONLINE":
        return None
    return _found(f"{where}/{FILE}", folder) or _found(FILE, folder, above=0)


def _found(name: str, folder: Path, above: int = 4) -> Path | None:
    """A file whose name counts from where the tool was run: here, the config's folder, or some folder above that."""
    bases = [Path(), folder, *list(folder.resolve().parents)[:above]] if above else [folder]
    for base in bases:
        try:
            if (base / name).is_file():
                return base / name
        except OSError:  # a name that is too long for one
            return None
    return None


def convert_data(draft: Draft, folder: Path, given: Path | None, *, as_text: bool, objective: str = "") -> None:
    info = find_info(draft, folder, given)
    listed = DataSets(info)
    if draft.get("dataset_dir") is not None:
        if info is None:
            draft.not_honoured("dataset_dir", f"cannot read a {FILE} for it; pass one with --dataset-info FILE")
        else:
            draft.no_effect("dataset_dir", f"{info} describes the datasets")
    sets, notes, lost = _sets(draft, listed, "dataset", as_text, objective)
    set_sources(draft, sets)
    named = [source if isinstance(source, str) else source["path"] for source in draft.targets.get("data.train", [])]
    mixed = [one.name for one in sets if one.name not in named]
    if draft.get("dataset") is not None:
        told = [f"data.train: {written(draft.targets['data.train'])}"] if sets else []
        lost += [f"{name}: {LATER}" for name in mixed]
        draft.fates["dataset"] = ("not honoured" if lost else "mapped", "; ".join([*told, *lost, *dict.fromkeys(notes)]))
    if draft.get("eval_dataset") is not None:
        sets, _, lost = _sets(draft, listed, "eval_dataset", as_text, objective)
        if len(sets) == 1 and not lost:
            draft.set("data.eval", sets[0].name, "eval_dataset", note="read with the format and the column names of data.train")
        else:
            draft.not_honoured("eval_dataset", "; ".join(lost) or "only one held-out source is supported: set data.eval")


def newer_data(draft: Draft, folder: Path) -> None:
    """`train_dataset` of the newer form of a config: a YAML file with path and converter of each data set, or one source."""
    key = "train_dataset"
    if draft.get(key) is None:
        return
    try:
        name = text(draft.get(key))
        listed = name.endswith((".yaml", ".yml"))
        sets = _newer_list(name, key, folder) if listed else [DataSet(key, source_name(name, "", ""))]
    except UnfitError as error:
        draft.not_honoured(key, f"{error}; set data.train yourself")
        return
    set_sources(draft, sets)


def _newer_list(name: str, key: str, folder: Path) -> list[DataSet]:
    place = _found(name, folder)
    if place is None:
        raise UnfitError(f"dataset list {name} not found")
    problems: list[PronghornError] = []
    try:
        listed, _ = read_yaml(read_small_text(place, LARGEST), str(place), problems, kind="list of datasets", start="")
        raise_all(problems)
    except (OSError, UnicodeDecodeError, PronghornError) as error:
        raise UnfitError(f"cannot read dataset list {name}: {str(error).splitlines()[0]}") from error
    sets = []
    for entry in listed.values():
        if not isinstance(entry, dict) or entry.get("converter") not in ("alpaca", "sharegpt"):
            raise UnfitError(f"{name}: only the formats alpaca and sharegpt are supported; {printed(entry)} has neither")
        path = text(entry.get("path"))
        local = _found(path, folder)
        one = DataSet(key, _from_here(local) if local else source_name(path, "", str(entry.get("split") or "")))
        one.format = "alpaca" if entry["converter"] == "alpaca" else "auto"
        one.max_rows = whole(entry["size"]) if entry.get("size") is not None else None
        if local and (lost := _sliced(one, str(entry.get("split") or ""), name)):
            raise UnfitError(lost[0])
        sets.append(one)
    return sets


def _sets(
    draft: Draft, listed: DataSets, key: str, as_text: bool, objective: str
) -> tuple[list[DataSet], list[str], list[str]]:
    sets: list[DataSet] = []
    notes: list[str] = []
    lost: list[str] = []
    try:
        names = words(draft.get(key, []))
    except UnfitError as error:
        return [], [], [str(error)]
    for name in names:
        try:
            one, said = listed.one(name, key, as_text=as_text, objective=objective)
        except UnfitError as error:
            lost.append(str(error))
            continue
        sets.append(one)
        notes += said
    if not names and draft.get(key) is not None:
        lost.append(f"{printed(draft.get(key))} names no dataset")
    return sets, notes, lost
