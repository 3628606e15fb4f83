"""YAML 1.2 and `key=value` words into a `Recipe`: every problem in one pass, each with its line and a fix."""

from __future__ import annotations

import copy
import errno
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from pronghorn.errors import PronghornError, RecipeError, raise_all
from pronghorn.recipe import Recipe
from pronghorn.recipe_keys import SECTIONS, advice, default_of, keys_in, value_like
from pronghorn.recipe_objective import KINDS as OBJECTIVES
from pronghorn.recipe_objective import LOSSES_OF_DPO, NAMES
from pronghorn.small_files import read_small_text
from pronghorn.yaml_file import LARGEST, KeyPath, read_value, read_yaml
from pronghorn.yaml_file import dotted as _dotted

EXAMPLE = """\
# A Pronghorn recipe with all keys. Only `model` and `data.train` are required. Values are the defaults, except data.eval;
# commented keys are unset by default. Any key can also be set on the command line: pronghorn train this.yaml train.lr=1e-4
model: HuggingFaceTB/SmolLM2-135M-Instruct   # Hub name or local folder
method: lora                                 # lora | qlora (4-bit frozen weights) | fp8 (8-bit frozen weights) | full
storage: auto                                # frozen weights with method qlora: auto (nf4) | nf4 | nvfp4
compute: auto                                # GEMMs: auto | bf16 | fp8 (with method qlora or full; method fp8 implies it)
lora:
  r: 16
  alpha: 16
  targets: all-linear                        # or a list: [q_proj, v_proj]
  dropout: 0.0
  rslora: false                              # scale by alpha / sqrt(r)
  dora: false
  plus_ratio: 1.0                            # LoRA+: learning rate of B divided by that of A
objective: {name: supervised}                # OBJECTIVES
# with all parameters: {name: dpo, beta: 0.1, loss: sigmoid, label_smoothing: 0.0, length_normalized: false, sft_weight: 0.0}
#   all objectives on pairs also have {share_prompt: auto}; simpo has {gamma: 1.0}, reward has {center_weight: 0.0},
#   kto has {desirable_weight: 1.0, undesirable_weight: 1.0}
#   grpo has {loss: dapo, clip: [0.2, 0.2], delta: 1.5, beta: 0.0, scale: group, updates: 1} (docs/rollouts.md), and with it:
# rollouts: {prompts: 8, answers: 8, max_new_tokens: 512, temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, truncated: keep}
#   also {slots: 256, on_reward_error: leave_out, reward_seconds: 30.0, reward_memory: 4.0, reward_workers: 2},
#   {patience: 20, eval_answers: 4, stop: ["\\n"], engine: own, engine_seconds: 600.0} (a server: docs/rollout-server.md)
# rewards: [{metric: exact_match, weight: 1.0}]
#   also {metric: regex, regex: "#### (.*)", name: number}, {function: reward_length} of --reward-file, {model: runs/reward}
layers: fast                                 # fast (Pronghorn's, for supported families) | own (the model's, from transformers)
precision: auto                              # auto (bf16 if the GPU supports it, else fp32) | bf16 | fp16 | fp32
data:
  train: [data/train.jsonl]                  # files, folders or Hub datasets; the format is detected
  # or sources with options: [{path: a.jsonl, weight: 2}, {path: b.parquet, max_rows: 1000, columns: {prompt: question}}]
  eval: 0.02                                 # a file, or the fraction of train to hold out (default: none)
  format: auto                               # auto | messages | completion | text | alpaca | sharegpt
  # max_rows: 1000                           # use at most the first N rows of each file or dataset
  # fields: {messages: dialogue}             # column names; also prompt, completion, instruction, text, ...
  # message_fields: {role: from, content: value}   # key names inside a message
  # roles: {assistant: [bot], user: [customer]}    # role names
  max_length: 2048
  # long: drop                               # drop | truncate | split; required if more than 1 % of the rows exceed max_length
  # template: chatml                         # a named chat template, instead of the model's own
  # chat_template: my.jinja                  # a Jinja file; set template or chat_template, not both
  # special_tokens: {pad_token: <|endoftext|>}     # also bos_token, eos_token, unk_token; must be in the vocabulary
  # eot_tokens: [<|im_end|>]                 # additional end-of-turn tokens, if the tokenizer does not mark them as special
  loss_on: auto                              # auto | assistant | completion | all
  bad_rows: stop                             # stop | skip
  lost: refuse                               # refuse | allow: rows whose content the chat template partly drops
  control_tokens: escape                     # escape | refuse | keep: control tokens such as <|im_end|> inside a message
  duplicates: keep                           # keep | drop-exact | drop-near
  junk: keep                                 # keep | drop
  leaks: warn                                # warn | drop (from train) | refuse: rows in train that are copies of held-out rows
  # select: audit/select.json                # leave out the rows in a file of `pronghorn data audit`; or {random: 0.5}: a share
  workers: 2                                 # threads that build packed batches ahead of the step
train:
  epochs: 1
  # steps: 1000                              # number of optimizer steps; overrides epochs
  batch_tokens: auto                         # tokens per optimizer step; auto: at most 65536, and fewer for 200 steps
  # batch_rows: 16                           # rows per optimizer step (preference data: pairs), in place of batch_tokens
  capacity: 16384                            # tokens per micro-batch; fewer where a step is sized by auto and has fewer
  lr: 2e-4
  schedule: cosine                           # cosine | linear | constant | wsd (constant, then a decay)
  warmup: 0.03                               # a fraction of all steps, or a number of steps
  decay: 0.2                                 # of schedule wsd: the last steps, as a fraction of all steps or a number
  # average: 0.05                            # mean adapter of the last steps, if better on held-out rows (fraction or number)
  optimizer: adamw                           # adamw | adamw_8bit | paged_adamw | paged_adamw_8bit (paged: in host RAM)
  betas: [0.9, 0.999]
  eps: 1e-8
  weight_decay: 0.0
  clip: 1.0
  graph: auto                                # auto | on | off: run steps as CUDA graphs
  seed: 3407
memory: {budget: auto}                       # auto (all free GPU memory) | 24GB | 80%; the fastest plan that fits is used
checkpoint: {every: 200, keep: 3}            # every: steps, or a fraction of all steps: 0.1
eval:
  every: 0.1                                 # steps, or a fraction of all steps
  generations: 3                             # held-out prompts whose answers are shown, next to the base model's
  # metrics: [exact_match, regex]            # json_valid | json_match | json_fields | rouge_l | multiple_choice
  samples: 100                               # held-out rows answered for the metrics
  # max_new_tokens: 256                      # per answer (default: 16 more than the longest expected answer)
  # system: Answer in JSON.                  # replaces the system message of the rows
  # regex: "#### ([0-9]+)"                   # for the metric regex: compares its matches in answer and expected answer
  best: loss                                 # selects the best checkpoint: loss, or one of the metrics
  # stop: {patience: 3, min_delta: 0.002}    # early stopping; with schedule wsd, the decay begins
  #   or, with schedule wsd or constant, {gain: 0.005, confidence: 0.9}: no gain of 0.005 is to be expected; both: patience,
  #   too. For metrics of answers, confidence is that of a paired test (docs/stopping.md)
health: {spike: warn}                        # on a loss spike: warn | skip (the update) | rewind (to the last checkpoint)
report:
  to: []                                     # loggers besides run.jsonl and report.html: tensorboard | wandb | trackio | mlflow
  # project: my-project                      # project in wandb and trackio, experiment in mlflow (default: pronghorn)
world:
  shard: auto                                # what is sharded over ranks: auto | none | base (frozen weights) | full | experts
  replicate: 1                               # groups of ranks that each hold a copy of what is sharded
  context: 1                                 # ranks that share each pack, for documents that one GPU cannot hold
output: runs/default
""".replace("OBJECTIVES", " | ".join(NAMES))

# What to write where a key takes one of several kinds; pydantic's own message tells of one kind only.
KINDS = {
    "data.eval": "write a file name, or a fraction between 0 and 1",
    "data.select": "write a file of `pronghorn data audit`, or {random: 0.5}, a share between 0 and 1",
    "lora.targets": "write all-linear, or a list of layer names such as [q_proj, v_proj]",
    "train.betas": "write two numbers, such as [0.9, 0.999]",
    "objective.clip": "write two numbers, such as [0.2, 0.28]",
    "train.batch_tokens": "write auto, or a number of tokens such as 65536",
    "train.warmup": "write a fraction of all steps below 1, or a number of steps",
    "train.average": "write a number of steps, or a fraction of all steps such as 0.05",
    "train.decay": "write a number of steps, or a fraction of all steps such as 0.2",
    "checkpoint.every": "write a number of steps, or a fraction of all steps such as 0.1",
    "eval.every": "write a number of steps, or a fraction of all steps such as 0.1",
}
# What to write where a value has the wrong type; pydantic names Python's types.
FIXES = {
    "data.train": "write a file, a folder or a Hub dataset, a list of them, or sources such as {path: a.jsonl, weight: 2}",
    "objective": "write a name such as dpo, or {name: dpo, beta: 0.1}",
    "rewards": "write a list such as [{metric: exact_match}, {function: reward_length, weight: 0.5}]",
    "memory.budget": "write auto, an amount such as 24GB, or a percentage such as 80%",
}
ROLLOUTS = re.compile(r"(?s)^.*?# (?=rollouts:)|# (?=rewards:)")  # what stands before these keys in the example
PYDANTIC_NAMES = {"str", "float", "int", "bool", "none"}


def example(
    *,
    model: str | None = None,
    data: Sequence[str] = (),
    method: str | None = None,
    objective: str | None = None,
    output: str | None = None,
    sizes: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> str:
    """EXAMPLE with these values in their lines. `sizes`: how a line begins, its value, and the comment behind it."""
    given = {
        "model: ": scalar(model) if model else None,
        "output: ": scalar(output) if output else None,
        "method: ": method,
        "  train: ": f"[{', '.join(map(scalar, data))}]" if data else None,
        **{key: value for key, (value, _) in sizes.items()},
    }
    lines = []
    for line in (_with_objective(objective) if objective else EXAMPLE).splitlines():
        key = next((key for key, value in given.items() if value and line.startswith(key)), None)
        if key is not None:
            _, mark, comment = line.partition("#")
            column = len(line) - len(comment) - 1
            filled, comment = f"{key}{given.pop(key)}", f" {sizes[key][1]}" if key in sizes else comment
            lines.append(filled.ljust(column - 1) + f" #{comment}" if mark else filled)
        else:
            lines.append(line)
    text = "\n".join(lines) + "\n"
    return text.replace("except data.eval;", "except data.eval and sizes;") if sizes else text


def _with_objective(name: str) -> str:
    """EXAMPLE with this objective, its parameters and sections, in place of the comments on all objectives."""
    loss = {"loss": name} if name in LOSSES_OF_DPO else {}
    kind = OBJECTIVES["dpo" if loss else name]
    given = {"name": "dpo" if loss else name, **kind.parameters, **loss}
    shown = json.dumps({key: value for key, value in given.items() if value not in (None, "auto")}).replace('"', "")
    own = EXAMPLE[EXAMPLE.index("objective: ") : EXAMPLE.index("layers: ")]
    text = EXAMPLE.replace(own, f"objective: {shown}\n" + (ROLLOUTS.sub("", own) if kind.reads == "prompts" else ""))
    if kind.reads == "prompts":
        text = text.replace("best: loss  ", "best: reward").replace("checkpoint: loss, or", "checkpoint: reward, or")
        text = re.sub(r"(?m)^  (# )?batch_(tokens|rows): .*\n", "", text)  # a step has rollouts.prompts
    return text if kind.answers else text.replace("generations: 3", "generations: 0")


def scalar(text: str) -> str:
    """As YAML writes it: in quotes where it would be read as something else."""
    plain = re.fullmatch(r"[\w./@~+-]+", text) and not re.fullmatch(r"(?i)null|true|false|~|[-+.\d].*", text)
    return text if plain or re.fullmatch(r"\.{0,2}/[\w./@~+-]+", text) else json.dumps(text, ensure_ascii=False)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override, validate. Raises RecipeError, or Problems with all of them."""
    path = Path(path)
    try:
        text = read_small_text(path, LARGEST)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        denied = isinstance(error, PermissionError)
        large = isinstance(error, OSError) and error.errno == errno.EFBIG
        fix = "change its permissions so that you can read it" if denied else "write one with `pronghorn new FILE`"
        fix = "shorten it; data belongs into files of its own" if large else fix
        raise RecipeError(what=f"cannot read the recipe: {reason}", where=str(path), fix=fix) from error
    return parse_recipe(text, overrides, name=str(path))


def parse_recipe(text: str, overrides: Sequence[str] = (), name: str = "recipe") -> Recipe:
    problems: list[PronghornError] = []
    values, places = read_yaml(text, name, problems)
    for key in [key for key, value in values.items() if value is None and key in SECTIONS]:
        values[key] = {}  # a section whose lines are all commented out
    if isinstance(values.get("objective"), str):
        values["objective"] = {"name": values["objective"]}  # so that objective.beta=0.3 fits beside it
    for word in overrides:
        try:
            _apply_override(values, places, word)
        except RecipeError as error:
            problems.append(error)
    _replace_batch(values, [word.partition("=")[0] for word in overrides])
    recipe = None
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        details = [*error.errors(), *_misfits_of_the_rest(values, error)]
        objective = values.get("objective")
        kind = OBJECTIVES.get(str(objective.get("name"))) if isinstance(objective, dict) else None
        answers = kind is not None and kind.reads == "prompts"
        problems += [_explain(one, places, name, answers=answers) for detail in details for one in _each(detail)]
    raise_all(_once(problems))
    assert recipe is not None  # raise_all left no problem, so validation went through
    return recipe


def _replace_batch(values: dict[str, Any], given: Sequence[str]) -> None:
    """A step's size on the command line takes the place of the file's, which may count it the other way."""
    train = values.get("train")
    for key, other in (("batch_rows", "batch_tokens"), ("batch_tokens", "batch_rows")):
        if f"train.{key}" in given and f"train.{other}" not in given and isinstance(train, dict):
            train.pop(other, None)


def _each(detail: Any) -> list[Any]:
    """How parts do not fit together comes from `Recipe` as one error with a line for each problem."""
    if detail["type"] != "value_error" or detail["loc"]:
        return [detail]
    return [{**detail, "ctx": {"error": line}} for line in str(detail["ctx"]["error"]).splitlines()]


def _misfits_of_the_rest(values: dict[str, Any], error: ValidationError) -> list[Any]:
    """pydantic looks at how the parts fit together only once each is sound; so ask again without what is not sound."""
    spoilt = [_path(detail) for detail in error.errors()]
    if any(path[:2] in (("objective",), ("objective", "name")) for path in spoilt):
        return []  # what fits together depends on the objective
    rest = copy.deepcopy(values)
    for path in spoilt:
        section: Any = rest
        for depth, part in enumerate(path):
            if not isinstance(section, dict) or part not in section:
                break
            if depth == len(path) - 1 or not isinstance(section[part], dict):
                del section[part]
                break
            section = section[part]
    rest.setdefault("model", "-")
    rest.setdefault("data", {}).setdefault("train", "-")
    try:
        Recipe.model_validate(rest)
    except ValidationError as again:
        found = [one for detail in again.errors() if not detail["loc"] for one in _each(detail)]
        return [one for one in found if not any(_dotted(path) in one["ctx"]["error"] for path in spoilt)]
    return []


def _once(problems: Iterable[PronghornError]) -> list[PronghornError]:
    """A field that fits neither side of a union is reported by pydantic once a side; keep the first."""
    seen: dict[tuple[str, str], PronghornError] = {}
    for problem in problems:
        seen.setdefault((problem.where, problem.what.split(":")[0]), problem)
    return list(seen.values())


def _apply_override(values: dict[str, Any], places: dict[KeyPath, str], word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise RecipeError(
            what=f"`{word}` is not of the form key=value", where="command line", fix="write for example train.lr=1e-4"
        )
    try:
        value = read_value(text, "command line")
    except RecipeError as error:
        raise RecipeError(what=f"{key}: {error.what}", where=error.where, why=error.why, fix=error.fix) from error
    *parents, last = key.split(".")
    section = values
    for depth, part in enumerate(parents):
        below = section.setdefault(part, {})
        if not isinstance(below, dict):
            raise RecipeError(
                what=f"{key}: `{'.'.join(parents[: depth + 1])}` is a value, not a section",
                where="command line",
                fix="check the key's name with `pronghorn new -`",
            )
        section = below
    section[last] = {"name": value} if key == "objective" and isinstance(value, str) else value
    path = tuple(key.split("."))
    for depth in range(1, len(path) + 1):
        places.setdefault(path[:depth], "command line")
    places |= dict.fromkeys([path, *(one for one in places if one[: len(path)] == path)], "command line")


def _explain(detail: Any, places: dict[KeyPath, str], name: str, *, answers: bool) -> RecipeError:
    path = _path(detail)
    where = next((places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places), name)
    dotted = _dotted(path)
    for key, fix in KINDS.items():
        if dotted == key or dotted.startswith(f"{key}."):
            return RecipeError(what=f"{key}: invalid value {detail['input']!r}", where=where, fix=fix)
    if detail["type"] == "value_error":  # ours: "key: what; fix"
        what, _, fix = str(detail["ctx"]["error"]).partition("; ")
        if not path:
            named: KeyPath = tuple(what.split(":")[0].split("."))
            where = places.get(named, places.get(named[:1], name))
        return RecipeError(what=f"{dotted} {what}".strip(), where=where, fix=fix)
    if detail["type"] == "extra_forbidden":
        why, fix = advice(path, detail["input"], answers=answers)
        return RecipeError(what=f"{dotted}: unknown key", where=where, why=why, fix=fix)
    what, why, fix = _told(detail, path, where)
    return RecipeError(what=f"{dotted}: {what}", where=where, why=why, fix=fix)


def _told(detail: Any, path: KeyPath, where: str) -> tuple[str, str, str]:
    """What, why and fix of an error of pydantic."""
    kind, given, dotted = detail["type"], detail["input"], _dotted(path)
    if kind == "missing":
        return "missing", "", f"add `{path[-1]}: ...`; `pronghorn new -` shows an example"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
        close = value_like(dotted, str(given), choices)
        fix = (f"did you mean `{close}`? " if close else "") + f"use one of: {', '.join(choices)}"
        fix += f"; a function of --reward-file is {{function: {given}}}" if path[0] == "rewards" else ""
        return f"invalid value {given!r}", "", fix
    invalid = f"invalid value {'nothing' if given is None else repr(given)}"
    if kind == "model_type" and dotted not in FIXES:
        return invalid, "it is a section", f"write its keys below it, any of: {', '.join(keys_in(path))}"
    of_list = _dotted(path[:-1]) if path and isinstance(path[-1], int) else dotted  # an item is told as its list is
    if of_list in FIXES and kind.endswith(("_type", "too_short")):
        return invalid, "", FIXES[of_list]
    if given is None:
        return "the value is missing", "", f"set {dotted}, or remove the key"
    if kind == "string_type" and isinstance(given, (bool, int, float)):
        quoted = f"""{dotted}='"{given}"'""" if where == "command line" else f'{path[-1]}: "{given}"'
        return f"{given!r} is not a string", "", f"put it in quotes: {quoted}"
    return _misfit(detail, path)


def _misfit(detail: Any, path: KeyPath) -> tuple[str, str, str]:
    """The same, of a value of the wrong kind or beyond its limits."""
    kind, given = detail["type"], detail["input"]
    shown = "a section" if isinstance(given, dict) else "a list" if isinstance(given, list) else repr(given)
    default = default_of(path)
    such_as = "" if default is None else f" such as {default}"
    if kind.startswith("int_"):
        return f"{shown} is not a whole number", "", f"write one{such_as}"
    if kind.startswith("float_"):
        return f"{shown} is not a number", "", f"write one{such_as}"
    if kind.startswith("bool_"):
        return f"{shown} is neither true nor false", "", "write true or false"
    limit = re.fullmatch(r"Input should be (.*)", detail["msg"])
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal") and limit:
        return f"{shown} is out of range", f"it must be {limit[1]}", f"write a number in range{such_as}"
    return f"invalid value {shown}", detail["msg"][:1].lower() + detail["msg"][1:], f"fix the value of {_dotted(path)}"


def _path(detail: Any) -> KeyPath:
    """Where in the recipe; an unknown key may be spelt in any way, also like one of pydantic's names."""
    *above, last = detail["loc"] or (None,)
    path = tuple(part for part in above if _is_key(part))
    return (*path, last) if last is not None and (detail["type"] == "extra_forbidden" or _is_key(last)) else path


def _is_key(part: str | int) -> bool:
    """pydantic puts names of union members, such as `constrained-str` or `literal['all-linear']`, among the keys."""
    return isinstance(part, int) or bool(re.fullmatch(r"[a-z][a-z0-9_]*", part) and part not in PYDANTIC_NAMES)
