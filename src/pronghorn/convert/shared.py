"""What several keys of a config say together, alike in both tools: tokens in a step, length of a run, schedule, precision, how
often to evaluate and save. Each function takes the names that the tool has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from pronghorn.convert.draft import Draft, Row
from pronghorn.convert.values import UnfitError, decimal, is_on, number, printed, text, whole
from pronghorn.recipe_parts import LoggerName

CAPACITY = 16384  # tokens in a micro-batch that a GPU works well on
ROWS_CAPACITY = 4096  # the same where a step has so many rows: most are far below the maximum, and padding takes time
AT_THE_END = 0.999999  # of all steps: the last one, in any run of less than a million

_FEW = ("adamw_8bit", "AdamW's moments are stored in 32 or 8 bits")
NEAR_OPTIMIZERS = {"adamw_torch_4bit": _FEW, "ao_adamw_4bit": _FEW, "ao_adamw_fp8": _FEW}
OTHER_OPTIMIZER = ("adamw", "AdamW is the only optimizer, and the learning rate of another optimizer may not suit it")
OTHER_SCHEDULE = ("cosine", "the schedules are cosine, linear, constant and wsd")
NEAR_SCHEDULES = {"warmup_stable_decay": ("wsd", "its decay is the last fifth of the steps (train.decay)")}

PACKED = "Pronghorn always packs rows; attention does not cross rows"
PLAN = "the memory plan decides what is saved, recomputed or offloaded (memory.budget)"
KERNELS = "Pronghorn uses its own kernels"
NOTHING_SENT = "no telemetry; log and report are in the output folder (run.jsonl, report.html), and report.to adds loggers"
LOGGERS = get_args(LoggerName)
GPUS = "Pronghorn trains on all visible GPUs; world.shard sets what is sharded over them (docs/scale.md)"
CONTEXT = "add world.context, which shares each pack over so many GPUs and has conditions of its own (docs/scale.md)"
RANKS = "`pronghorn train` starts a process for each GPU itself"
IMAGES = "Pronghorn trains on text only; rows with images, video or sound are refused"
NEW_TOKENS = "Pronghorn does not resize the embeddings, so tokens outside the vocabulary cannot be added"
MODEL = "detected from the model's files"
NO_CODE = "Pronghorn runs no code from model repositories; most models need none"
BITS = "frozen weights are 16-bit (method: lora), FP8 (method: fp8, on GPUs with FP8) or 4-bit NF4 (method: qlora)"
FROZEN = "embeddings and LM head stay frozen next to an adapter; method: full trains them"
ADAPTERS = "adapters have r, alpha, targets, dropout, rslora, dora and plus_ratio only"
NEW_ADAPTER = "training starts from a new adapter; merge the old one into the model first"
CONFIG = "the model's config.json is used"
SYSTEM = "put the system message into the rows or into your own template"
TOWER = "the vision tower is always frozen and the text model is trained"
OBJECTIVE = "the supervised loss is the mean over tokens that carry loss; no variant of it is supported"
HUB = "training uploads nothing; `pronghorn export --push-to-hub` uploads an export"
REVISION = "Pronghorn loads the main revision; download the other one and name its folder"
RESUME = "the same command resumes automatically from the last checkpoint in the output folder"


def loggers(draft: Draft, key: str, names: Sequence[str]) -> None:
    """One more way to name loggers: they are all in report.to."""
    already = draft.targets.get("report.to", [])
    found = [*already, *(name for name in names if name in LOGGERS and name not in already)]
    if other := [name for name in names if name not in LOGGERS]:
        why = f"unknown logger {', '.join(other)}; the loggers are {', '.join(LOGGERS)}"
        if found == already:
            draft.not_honoured(key, why)
        else:
            draft.nearest("report.to", found, key, why)
    else:
        draft.set("report.to", found, key)


def use_logger(logger: str) -> Row:
    def row(draft: Draft, key: str) -> None:
        if is_on(draft.get(key)):
            loggers(draft, key, [logger])
        else:
            draft.no_effect(key, NOTHING_SENT)

    return row


def logger_project(logger: str) -> Row:
    """Names a project, and by that asks for the logger, unless that is switched off."""

    def row(draft: Draft, key: str) -> None:
        if draft.get(f"use_{logger}") is False or draft.get(f"{logger}_mode") == "disabled":
            draft.no_effect(key, NOTHING_SENT)
            return
        loggers(draft, key, [logger])
        draft.set("report.project", text(draft.get(key)), key, note=f"and report.to: {logger}")

    return row


def or_default(draft: Draft, key: str, read: Callable[[Any], float], default: float, least: float = 1) -> float:
    """The value of a key that is part of a sum; one that cannot be read is not honoured, and the default counts."""
    value = draft.get(key)
    if value is None:
        return default
    try:
        found = read(value)
    except UnfitError as error:
        draft.not_honoured(key, str(error).replace("the recipe's default is used", f"{default} is used"))
        return default
    if found < least:
        draft.not_honoured(key, f"{printed(value)} is less than {least}; {default} is used")
        return default
    return found


def batch(
    draft: Draft,
    *,
    micro: str,
    accumulation: str,
    length: str,
    packing: tuple[str, ...],
    defaults: tuple[int, int, int],
    total: str = "",
    packed: bool = False,
    answers: int = 1,
) -> None:
    """Rows or packs of so many tokens, times the micro-batches of a step. `total`: rows of a step in one number. `packing`:
    keys that switch it on; `packed`: it is on without them. `answers`: of a row, each as long as a row may be: a pair has two,
    and a micro-batch holds it whole."""
    packed = packed or any(is_on(draft.get(key)) for key in packing)
    rows = int(or_default(draft, micro, whole, defaults[0]))
    steps = int(or_default(draft, accumulation, whole, defaults[1]))
    longest = int(or_default(draft, length, whole, defaults[2]))
    tokens = answers * longest
    if total and draft.get(total) is not None and draft.get(accumulation) is None:
        steps = max(1, int(or_default(draft, total, whole, rows)) // rows)
    in_a_step = rows * steps
    parts: tuple[str, ...]
    if packed:
        fits = [n for n in range(1, min(in_a_step, CAPACITY // tokens) + 1) if in_a_step % n == 0] or [1]
        target, value, capacity = "train.batch_tokens", in_a_step * tokens, max(fits) * tokens
        shown, parts, same = f"{rows} x {steps} x {tokens}", (micro, accumulation, total, length), "tokens per step do"
    else:
        target, value, capacity = "train.batch_rows", in_a_step, min(in_a_step, max(1, ROWS_CAPACITY // tokens)) * tokens
        shown, parts, same = f"{rows} x {steps}", (micro, accumulation, total), "rows per step do"
    said = draft.unsaid(parts)
    what = target.rsplit("_", 1)[1]
    draft.set(target, value, *said, note=f"{shown} {what} per step, on one GPU; with more GPUs, multiply by their number")
    unused(draft, packing if not packed else (), f"a step has the same rows as in {draft.tool}; {PACKED}")
    if not draft.origins[target]:
        draft.defaults[target] = f"{draft.tool}'s defaults: {shown} {what} per step"
    draft.targets["train.capacity"] = capacity
    draft.defaults["train.capacity"] = f"tokens per micro-batch; the {same} not change"
    if draft.get(length) is not None and length not in draft.fates:
        note = f"also part of train.batch_tokens: {value}" if packed else ""
        draft.set("data.max_length", longest, length, note=note)
    draft.default("data.max_length", longest)


def duration(draft: Draft, *, epochs: str, steps: str, default: float) -> float:
    """Returns the epochs, for what is counted by them."""
    asked = or_default(draft, epochs, number, default, least=1e-9)
    if draft.get(epochs) is not None and epochs not in draft.fates:
        if asked == int(asked):
            draft.set("train.epochs", int(asked), epochs)
        else:
            draft.nearest(
                "train.epochs", int(asked) + 1, epochs, "epochs must be whole numbers (train.steps can end a run earlier)"
            )
    elif int(default) != 1:
        draft.default("train.epochs", int(default))
    limit = draft.read(steps, whole)
    if limit is not None and limit > 0:
        draft.set("train.steps", limit, steps, note="replaces epochs")
    elif limit is not None:
        draft.no_effect(steps, "no limit, same as Pronghorn")
    return asked


def warmup(draft: Draft, *, scheduler: str, steps: str, ratio: str, default: float) -> None:
    """HF's `constant` has no warm-up, whatever is asked for; a number of steps counts before a ratio."""
    keys = [key for key in (steps, ratio) if draft.get(key) is not None]
    if str(draft.get(scheduler, "")).strip().lower() == "constant":
        draft.targets["train.warmup"], draft.origins["train.warmup"] = 0, [scheduler]
        for key in keys:
            draft.no_effect(key, f"{scheduler}: constant has no warmup")
        return
    asked = {key: found for key in keys if (found := draft.read(key, number)) is not None}
    chosen = ratio if ratio in asked and not asked.get(steps) else steps
    for key, found in asked.items():
        if key == chosen:
            draft.set("train.warmup", found, key)
        else:
            draft.no_effect(key, f"{chosen} takes precedence")
    draft.default("train.warmup", default)


def how_often(draft: Draft, epochs: float, *, evals: str = "", saves: str = "", also: str = "") -> None:
    """Evaluations and checkpoints. `evals`, `saves`: keys that say how many there are in an epoch. `also`: a key that is about
    evaluations, too."""
    strategy = "eval_strategy" if draft.get("eval_strategy") is not None else "evaluation_strategy"
    if draft.targets.get("data.eval") is None:
        unused(draft, ("eval_steps", "eval_strategy", "evaluation_strategy", evals, also), "no held-out data")
    else:
        _every(draft, "eval.every", "eval_steps", strategy, evals, epochs)
    _every(draft, "checkpoint.every", "save_steps", "save_strategy", saves, epochs)


def _every(draft: Draft, target: str, steps: str, strategy: str, per_epoch: str, epochs: float) -> None:
    """By steps, by a share of the run (below 1), or so many times an epoch. The last step is always one of them."""

    def set_share(times: float, key: str, otherwise: str) -> None:
        """So many times an epoch; 0: once, at the end."""
        share = min(1 / (times * epochs), AT_THE_END) if times > 0 else AT_THE_END
        draft.set(target, round(share, 6), key, note="a fraction of all steps" if share < AT_THE_END else otherwise)

    if per_epoch and (times := draft.read(per_epoch, number)) is not None:
        set_share(times, per_epoch, "at the end")
    how = str(draft.get(strategy, "")).strip().lower() if not isinstance(draft.get(strategy), bool) else "no"
    if how in ("epoch", "no") and target not in draft.targets:
        set_share(1 if how == "epoch" else 0, strategy, "at the end only")
        unused(draft, [steps], f"{strategy}: {how} takes precedence")
    elif how:
        kept = how == "best" and target == "checkpoint.every"
        draft.no_effect(strategy, "the best checkpoint is always kept" if kept else "the step count takes precedence")
    if target in draft.targets:
        unused(draft, [steps], f"{per_epoch} takes precedence")
    elif (found := draft.read(steps, number)) is not None:
        draft.set(target, found, steps, note="a fraction of all steps" if found < 1 else "")


def precision(draft: Draft, *, bf16: tuple[str, ...], fp16: tuple[str, ...]) -> None:
    """bf16 by itself where the GPU has it; a precision that is asked for is the one there is."""
    halves = [key for key in fp16 if is_on(draft.get(key))]
    brains = [key for key in bf16 if is_on(draft.get(key)) and str(draft.get(key)).lower() != "auto"]
    autos = [key for key in bf16 if str(draft.get(key, "")).lower() == "auto"]
    offs = [key for key in (*bf16, *fp16) if draft.get(key) is not None and key not in (*halves, *brains, *autos)]
    if brains:
        draft.set("precision", "bf16", *brains)
    elif halves:
        draft.set("precision", "fp16", *halves)
    elif autos:
        draft.set("precision", "auto", *autos)
    elif set(offs) & set(bf16) and set(offs) & set(fp16):
        draft.set("precision", "fp32", *offs, note="neither bf16 nor fp16")
    left = dict.fromkeys(offs, "off; the recipe's precision applies")
    left |= dict.fromkeys((*halves, *autos), "bf16 takes precedence")
    for key in draft.unsaid(left):
        draft.no_effect(key, left[key])
    unused(draft, ["tf32"], "GEMMs run in the recipe's precision; fp32 never uses TF32")


def unused(draft: Draft, keys: Iterable[str], why: str) -> None:
    for key in draft.unsaid(keys):
        draft.no_effect(key, why)


def held_out_first(draft: Draft, *, patience: str) -> None:
    """Early stopping looks at the held-out loss; without any, the recipe would be refused."""
    if draft.get(patience) is None:
        return
    if draft.targets.get("data.eval") is None:
        draft.not_honoured(patience, "early stopping needs held-out data (data.eval), and the config has none")
        return
    if (times := draft.read(patience, whole)) is not None:
        draft.set("eval.stop", {"patience": times, "min_delta": 0.0}, patience)


def fraction_held_out(draft: Draft, key: str) -> None:
    found = draft.read(key, number) if key not in draft.fates else None
    if found is None:
        return
    if found == 0:
        draft.no_effect(key, "no held-out data, as by default in Pronghorn")
    elif 0 < found < 1:
        draft.set("data.eval", found, key)
    else:
        draft.not_honoured(key, "a row count; set the fraction of your data instead (data.eval: 0.02), or a file")


def betas(draft: Draft) -> None:
    both = [0.9, 0.999]
    for i, key in enumerate(("adam_beta1", "adam_beta2")):
        if (beta := draft.read(key, decimal)) is not None:
            both[i] = beta
            draft.set("train.betas", list(both), key)


def clip(draft: Draft, key: str) -> None:
    limit = number(draft.get(key))
    if limit > 0:
        draft.set("train.clip", limit, key)
    else:
        draft.set("train.clip", 1e9, key, note="gradient clipping off: the limit is never reached")


def fp8_products(draft: Draft, key: str) -> None:
    if not is_on(draft.get(key)):
        draft.no_effect(key, "off, as by default in Pronghorn")
    elif draft.targets.get("method") in ("full", "qlora"):
        draft.set("compute", "fp8", key)
    else:
        draft.not_honoured(key, "16-bit weights are multiplied in 16 bits; method: fp8 stores and multiplies in FP8")
