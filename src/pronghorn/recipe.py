"""A run, as one frozen value: what to train, on which data, how, and where the result goes.

The same `Recipe` comes from a YAML file, from the command line (`train.lr=1e-4`) and from Python (`Recipe(...)`).
Reading YAML, with lines and did-you-mean, is in `recipe_file.py`; this file holds the fields and what they mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, NonNegativeInt, PositiveInt, Tag, field_validator, model_validator

from pronghorn.recipe_objective import KINDS, Objective, data_misfits
from pronghorn.recipe_rollouts import Reward, Rollouts, rollout_misfits
from pronghorn.recipe_section import Fraction, NonNegative, Positive, Section


def _one_or_many(value: object) -> Any:
    return (value,) if isinstance(value, (str, dict, Section)) else value


Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_one_or_many), Field(min_length=1)]
Every = PositiveInt | Annotated[float, Field(gt=0.0, lt=1.0)]  # steps, or a fraction of all steps


class Lora(Section):
    r: PositiveInt = 16
    alpha: Positive = 16
    targets: Literal["all-linear"] | Names = "all-linear"
    dropout: Fraction = 0.0
    rslora: bool = False  # scale by alpha / sqrt(r) instead of alpha / r
    dora: bool = False  # learn the weight's magnitude separately from its direction
    plus_ratio: Annotated[float, Field(ge=1.0)] = 1.0  # LoRA+: learning rate of B divided by that of A


class Fields(Section):
    """Names of the data's columns: `messages: dialogue`."""

    messages: Name | None = None
    tools: Name | None = None
    prompt: Name | None = None
    completion: Name | None = None
    instruction: Name | None = None
    input: Name | None = None
    output: Name | None = None
    history: Name | None = None
    system: Name | None = None
    text: Name | None = None
    choices: Name | None = None  # of the metric multiple_choice
    chosen: Name | None = None  # of preference data: the better answer
    rejected: Name | None = None  # and the worse one, or a list of them
    label: Name | None = None  # of KTO: whether the answer is a good one
    margin: Name | None = None  # by how much the chosen answer is better


Roles = dict[Literal["system", "user", "assistant", "tool"], Names]
RowFormat = Literal["auto", "messages", "completion", "text", "alpaca", "sharegpt"]


class DataSource(Section):
    """A file, a folder or a Hub dataset with its own options; unset options are inherited from `data`."""

    path: Name
    name: Name | None = None  # configuration of a Hub dataset, as in load_dataset(path, name, split)
    split: Name | None = None  # split of a Hub dataset; in a folder, the subfolder or files of this name
    # how often each row occurs per epoch: 2 twice, 0.5 every second row (the same rows in every epoch)
    weight: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    max_rows: PositiveInt | None = None  # use at most the first N rows of all its files together
    text_by: Literal["file", "line"] = "file"  # one document per .txt file or per line
    stream: bool = False  # stream a Hub dataset instead of downloading it
    format: RowFormat | None = None
    columns: Fields | None = None  # like `data.fields`
    message_fields: dict[Name, Name] | None = None
    roles: Roles | None = None


def named(source: str | DataSource) -> str:
    return source if isinstance(source, str) else source.path


# Told apart by what they are, so that an error in a source is told of the source.
Source = Annotated[
    Annotated[Name, Tag("Name")] | Annotated[DataSource, Tag("Source")],
    Discriminator(lambda value: "Source" if isinstance(value, (dict, DataSource)) else "Name"),
]
Sources = Annotated[tuple[Source, ...], BeforeValidator(_one_or_many), Field(min_length=1)]


class SpecialTokens(Section):
    """Tokens of the vocabulary that replace the tokenizer's own special tokens."""

    bos_token: Name | None = None
    eos_token: Name | None = None
    pad_token: Name | None = None
    unk_token: Name | None = None


class Data(Section):
    train: Sources  # files, folders or Hub datasets
    eval: str | Annotated[float, Field(gt=0.0, lt=1.0)] | None = None  # a file, or the fraction of train to hold out
    format: RowFormat = "auto"
    fields: Fields = Fields()  # column names
    message_fields: dict[Name, Name] = Field(default_factory=dict)  # key names inside a message: {role: from, content: value}
    roles: Roles = Field(default_factory=dict)  # role names: {assistant: [bot]}
    max_rows: PositiveInt | None = None  # use at most the first N rows of each file or dataset
    max_length: Annotated[int, Field(ge=8)] = 2048
    long: Literal["drop", "truncate", "split"] | None = None  # None: drop up to 1 % of rows, refuse more
    chat_template: str | None = None  # a Jinja file, for tokenizers without a template or with a wrong one
    template: Name | None = None  # a named template: chatml, llama-3.1, gemma-3, ...
    special_tokens: SpecialTokens = SpecialTokens()
    eot_tokens: Annotated[tuple[Name, ...], BeforeValidator(_one_or_many)] = ()  # additional end-of-turn tokens
    loss_on: Literal["auto", "assistant", "completion", "all"] = "auto"  # auto: chosen by the format
    bad_rows: Literal["stop", "skip"] = "stop"
    lost: Literal["refuse", "allow"] = "refuse"  # rows whose content the template partly drops
    # control tokens (<|im_end|>) inside a message: escaped as text, a bad row, or kept as control tokens
    control_tokens: Literal["escape", "refuse", "keep"] = "escape"
    duplicates: Literal["keep", "drop-exact", "drop-near"] = "keep"
    junk: Literal["keep", "drop"] = "keep"
    leaks: Literal["warn", "drop", "refuse"] = "warn"  # training rows that are copies, or near copies, of held-out rows
    workers: NonNegativeInt = 2  # threads that build packed batches ahead of the step


class Train(Section):
    epochs: PositiveInt = 1
    steps: PositiveInt | None = None  # number of optimizer steps; overrides `epochs`
    batch_tokens: PositiveInt = 65536  # tokens per optimizer step
    batch_rows: PositiveInt | None = None  # rows (preference data: pairs) per optimizer step, in place of batch_tokens
    capacity: Annotated[int, Field(gt=0, le=2**24)] = 16384  # tokens per micro-batch; batch_tokens is a multiple of it
    lr: Positive = 2e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Fraction | Annotated[int, Field(gt=0, strict=True)] = 0.03  # fraction of all steps, or number of steps
    # moments in 32 or 8 bits (a quarter of the memory), on the GPU or paged (in host RAM, copied at each step)
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"] = "adamw"
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    clip: Positive = 1.0
    # CUDA graphs for steps: if possible, required (else an error), or never; also used for answers to held-out rows
    graph: Literal["auto", "on", "off"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 3407


class Memory(Section):
    budget: str = "auto"  # auto | 24GB | 80%

    @field_validator("budget")
    @classmethod
    def _readable(cls, budget: str) -> str:
        if budget != "auto" and not re.fullmatch(r"\d+(\.\d+)?\s*(GB|GiB|MB|MiB|%)", budget):
            raise ValueError(f"{budget!r} is not a budget; write auto, an amount such as 24GB, or a percentage such as 80%")
        return budget


def steps_between(every: float, total: int) -> int:
    """200: 200 steps; 0.1: a tenth of all steps, rounded up."""
    return int(every) if every >= 1 else max(1, math.ceil(round(every * total, 6)))


class Checkpoint(Section):
    every: Every = 200
    keep: PositiveInt = 3


class Stop(Section):
    patience: PositiveInt = 3
    min_delta: NonNegative = 0.002


# What they measure: evaluation/metrics.py
MetricName = Literal["exact_match", "json_valid", "json_match", "json_fields", "regex", "rouge_l", "multiple_choice"]
METRICS: tuple[str, ...] = get_args(MetricName)
ON_THE_COMMAND_LINE = "Pronghorn runs code only if it is named on the command line"


def figures_of(metrics: Sequence[str]) -> list[str]:
    """What these metrics measure, by name."""
    return [figure for name in metrics for figure in ((name, f"{name}_norm") if name == "multiple_choice" else (name,))]


def _known_metric(name: object) -> Any:
    if isinstance(name, str) and (name.endswith(".py") or "/" in name):
        raise ValueError(f"{name} is a file, and {ON_THE_COMMAND_LINE}; remove it here and add: --metric-file {name}")
    return name


Metric = Annotated[MetricName, BeforeValidator(_known_metric)]


class Eval(Section):
    every: Every = 200
    stop: Stop | None = None  # early stopping on the metric in `best`
    generations: NonNegativeInt = 3  # held-out prompts answered and shown at each evaluation
    metrics: Annotated[tuple[Metric, ...], BeforeValidator(_one_or_many)] = ()  # metrics of the answers to held-out rows
    samples: PositiveInt = 100  # held-out rows answered for the metrics
    max_new_tokens: PositiveInt | None = None  # per answer; None: 16 more than the longest expected answer
    system: Name | None = None  # replaces the system message of the rows
    regex: Name | None = None  # pattern of the metric `regex`
    best: Name = "loss"  # selects the best checkpoint: loss, or one of the metrics

    @model_validator(mode="before")
    @classmethod
    def _names_no_code(cls, values: object) -> Any:
        if isinstance(values, dict) and (key := next((k for k in ("metric_file", "metric-file") if k in values), "")):
            raise ValueError(f"names code ({key}), and {ON_THE_COMMAND_LINE}; remove the key and add: --metric-file FILE")
        return values

    @field_validator("regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r} is not a valid regular expression: {error}; fix the pattern") from None
        return pattern

    @property
    def misfits(self) -> list[str]:
        problems = []
        if ("regex" in self.metrics) != (self.regex is not None):
            problems.append(
                "eval.regex: the metric `regex` needs a pattern; set eval.regex"
                if self.regex is None
                else "eval.regex: no metric uses the pattern; add regex to eval.metrics"
            )
        if self.best in figures_of(METRICS) and self.best not in figures_of(self.metrics):
            problems.append(f"eval.best: {self.best} is not measured; add {self.best.removesuffix('_norm')} to eval.metrics")
        return problems


class Health(Section):
    # on a loss spike: warn; skip the update; or rewind to the last checkpoint and skip these rows (spikes.py)
    spike: Literal["warn", "skip", "rewind"] = "warn"


# What they are: report/loggers/table.py
LoggerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class Report(Section):
    to: Annotated[tuple[LoggerName, ...], BeforeValidator(_one_or_many)] = ()  # loggers, beside run.jsonl and report.html
    project: Name | None = None  # of W&B and Trackio, experiment of MLflow; None: as their variables say, or pronghorn


class World(Section):
    # what is spread over the ranks of a run instead of copied to each (docs/scale.md). base: the frozen weights; full: with
    # method full, the weights, their gradients and the optimizer's moments; experts: frozen experts, with their adapters, to
    # which tokens are sent; none: nothing. auto: none where it fits, else base or full
    shard: Literal["auto", "none", "base", "full", "experts"] = "auto"


class Recipe(Section):
    model: Annotated[str, Field(min_length=1)]  # Hub name or local folder
    # lora: adapters on a frozen model; qlora: frozen linears in 4 bits (4-bit checkpoints are supported); fp8: frozen linears
    # in 8 bits (e4m3), multiplied in FP8; full: all weights are trained
    method: Literal["lora", "qlora", "fp8", "full"] = "lora"
    # format of the frozen weights with method qlora (model/formats/table.py). auto: nf4
    storage: Literal["auto", "nf4", "nvfp4"] = "auto"
    # GEMM precision of the linears: fp8 (with method qlora, or with full, whose trained weights are quantized for each GEMM),
    # bf16: the precision in `precision`. auto: fp8 with method fp8, else bf16
    compute: Literal["auto", "bf16", "fp8"] = "auto"
    lora: Lora = Lora()
    objective: Objective = Objective()  # what is minimized: a name, or a name with its parameters
    rollouts: Rollouts | None = None  # of grpo, gspo, rloo: the answers that the model gives in a step
    rewards: Annotated[tuple[Reward, ...], BeforeValidator(_one_or_many)] = ()  # what they are worth; and --reward-file
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # auto: bf16 if the GPU supports it, else fp32
    layers: Literal["fast", "own"] = "fast"  # fast: Pronghorn's, for supported families; own: transformers' layers
    data: Data
    train: Train = Train()
    memory: Memory = Memory()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    health: Health = Health()
    report: Report = Report()
    world: World = World()
    output: Annotated[str, Field(min_length=1)] = "runs/default"

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_eval(cls, values: object) -> Any:
        """Without a word of it in the recipe, `eval.generations` is 0 where the model writes no text, and `eval.best` is the
        reward where there is one."""
        if not isinstance(values, dict):
            return values
        objective, evaluated = values.get("objective"), values.get("eval", {})
        name = objective.get("name") if isinstance(objective, dict) else getattr(objective, "name", objective)
        kind = KINDS.get(name) if isinstance(name, str) else None
        if kind is None or not isinstance(evaluated, dict):
            return values
        if kind.reads == "prompts":
            return values | {"eval": {"best": "reward", **evaluated}, "rollouts": values.get("rollouts") or {}}
        return values if kind.answers else values | {"eval": {"generations": 0, **evaluated}}

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Recipe:
        problems = []
        default = Train.model_fields["batch_tokens"].default
        if self.train.batch_rows is not None and self.train.batch_tokens != default:
            problems.append("train.batch_rows: train.batch_tokens is set as well; remove one of them")
        by_tokens = self.train.batch_rows is None and self.objective.kind.reads != "prompts"
        if by_tokens and self.train.batch_tokens % self.train.capacity:
            problems.append(
                f"train.batch_tokens: {self.train.batch_tokens} is not a multiple of train.capacity {self.train.capacity};"
                f" set train.batch_tokens: {max(1, self.train.batch_tokens // self.train.capacity) * self.train.capacity}"
            )
        if self.data.max_length > self.train.capacity:
            problems.append(
                f"data.max_length: {self.data.max_length} exceeds train.capacity {self.train.capacity};"
                f" set train.capacity: {self.data.max_length} or more"
            )
        if self.data.template and self.data.chat_template:
            problems.append("data.template: data.chat_template is set as well; remove one of them")
        if self.eval.metrics and self.data.eval is None:
            problems.append("eval.metrics: metrics need held-out data; set data.eval: 0.05, or a file")
        if not self.objective.kind.answers and (self.eval.metrics or self.eval.generations):
            key = "metrics" if self.eval.metrics else "generations"
            problems.append(f"eval.{key}: objective {self.objective} trains a model that writes no answers; remove eval.{key}")
        problems += [*self.eval.misfits, *self.objective.misfits, *data_misfits(self), *rollout_misfits(self)]
        problems += self._compute_misfits()
        problems += self._shard_misfits()
        if self.storage != "auto" and self.method != "qlora":
            problems.append(
                f"storage: {self.storage} cannot be combined with method: {self.method}; set method: qlora, whose"
                " frozen weights are in 4 bits, or remove storage"
            )
        if problems:
            raise ValueError("\n".join(problems))  # a line each: `key: what; fix`
        return self

    def _compute_misfits(self) -> list[str]:
        fp8, bf16 = self.compute == "fp8", self.compute == "bf16"
        wrong = {
            "compute: fp8 cannot be combined with method: lora, whose frozen weights are 16-bit;"
            " set method: fp8, which also stores them in FP8, or method: qlora for 4 bits": fp8 and self.method == "lora",
            "compute: bf16 cannot be combined with method: fp8, whose weights are multiplied in FP8;"
            " remove compute, or set method: lora or qlora": bf16 and self.method == "fp8",
            f"compute: bf16 cannot be combined with precision: {self.precision}, which sets the GEMM precision;"
            " remove compute, or set precision: bf16": bf16 and self.precision in ("fp16", "fp32"),
            "compute: fp8 cannot be combined with layers: own, which multiply in 16 bits;"
            " set layers: fast, or remove compute": fp8 and self.layers == "own",
            "compute: fp8 cannot be combined with lora.dropout or lora.dora, which run in PEFT, in 16 bits;"
            " remove compute, or remove them": fp8 and self.method == "qlora" and (self.lora.dropout or self.lora.dora),
            "compute: fp8 cannot be combined with storage: nvfp4, which is dequantized to 16 bits for GEMMs;"
            " remove compute, or set storage: nf4": fp8 and self.storage == "nvfp4",
        }
        return [text for text, applies in wrong.items() if applies]

    def _shard_misfits(self) -> list[str]:
        shard, problems = self.world.shard, []
        if shard == "experts" and self.method == "full":
            problems.append("world.shard: experts shards frozen experts, but method: full trains them; set world.shard: full")
        if shard == "experts" and self.data.eval is not None and (self.eval.generations or self.eval.metrics):
            problems.append(
                "world.shard: experts cannot generate held-out answers, because no rank has all experts;"
                " set eval.generations: 0 and remove eval.metrics, or set world.shard: base"
            )
        if shard == "base" and self.method == "full":
            problems.append("world.shard: base shards frozen weights, but method: full has none; set world.shard: full")
        if shard == "full" and self.method != "full":
            problems.append(
                f"world.shard: full shards trained weights, but method: {self.method} freezes the weights;"
                " set world.shard: base"
            )
        if shard in ("base", "full", "experts") and (why := self.why_not_sharded):
            problems.append(f"world.shard: {shard} cannot be combined with {why}; change that, or set world.shard: none")
        return problems

    @property
    def why_not_sharded(self) -> str:
        """What of the recipe needs whole weights on each rank; empty if nothing."""
        if self.layers == "own":
            return "layers: own, which keeps whole weights for backward"
        if why := self.objective.kind.whole_weights:
            return f"objective: {self.objective}, {why}"
        if self.method != "full" and (self.lora.dropout or self.lora.dora):
            return "lora.dropout or lora.dora, whose layers keep whole weights for backward"
        parts = self.method == "full" or self.world.shard == "experts"  # ranks train what others have not
        if parts and self.precision == "fp16":
            return "precision: fp16, whose loss scale would differ between ranks"
        if parts and self.train.optimizer != "adamw":
            return f"train.optimizer: {self.train.optimizer}, which cannot be sharded yet (adamw can)"
        if self.method == "full" and self.compute == "fp8":
            return "compute: fp8, which keeps a copy of trained weights in FP8"
        return ""

    def step_tokens(self, row_tokens: float | None = None) -> int:
        """Tokens of a step on all ranks together. `row_tokens`: mean tokens of a row or pair; default: the maximum."""
        if self.objective.kind.reads == "prompts":
            spec = self.answering
            prompt = self.data.max_length - spec.max_new_tokens
            return spec.prompts * (round(row_tokens or prompt) + spec.answers * spec.max_new_tokens)
        if self.train.batch_rows is None:
            return self.train.batch_tokens
        longest = self.data.max_length * (2 if self.objective.kind.reads == "pairs" else 1)
        return max(1, round(self.train.batch_rows * (row_tokens or longest)))

    def step_packs(self, row_tokens: float | None = None) -> int:
        """Micro-batches of a step, on all ranks together; with batch_rows, about so many."""
        return math.ceil(self.step_tokens(row_tokens) / self.train.capacity)

    @property
    def answering(self) -> Rollouts:
        """How the model answers in a step of grpo, gspo or rloo."""
        assert self.rollouts is not None
        return self.rollouts

    @property
    def answer_tokens(self) -> int:
        """What rows of prompts leave of `data.max_length` to an answer; of other rows 0."""
        return 0 if self.rollouts is None else self.rollouts.max_new_tokens

    @property
    def stored_as(self) -> str:
        """The storage format of the frozen weights (model/formats/table.py); bf16: as they are."""
        if self.method == "qlora":
            return "nf4" if self.storage == "auto" else self.storage
        return "fp8" if self.method == "fp8" else "bf16"

    @property
    def fp8(self) -> bool:
        """Whether the linears' products are in FP8."""
        return self.method == "fp8" or self.compute == "fp8"

    def differences(self, other: Recipe) -> dict[str, str]:
        """Keys whose change would make a resumed run another run, each with what changed: `0.0002 -> 0.0001`."""
        old, new = flat(self.model_dump()), flat(other.model_dump())
        for values, recipe in ((old, self), (new, other)):
            values["train.optimizer"] = values["train.optimizer"].removeprefix("paged_")  # where moments lie changes nothing
            values["storage"] = recipe.stored_as if self.method == other.method else ""  # another method says enough
        return {
            key: f"{old.get(key)} -> {new.get(key)}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and not key.startswith(MAY_CHANGE_ON_RESUME)
        }

    @property
    def keys(self) -> list[str]:
        """All of them, as `train.lr`."""
        return sorted(flat(self.model_dump()))


# What does not touch the numbers of the run may change between two starts of it.
MAY_CHANGE_ON_RESUME = (
    *("checkpoint.", "eval.", "memory.", "output", "data.workers", "train.graph", "report.", "world."),
    "rollouts.engine_seconds",
)
# Of the rest, what cannot change in the middle of a run even where --allow-change asks for it: a key or a section, and why.
_ADAPTER, _PLACE = "the trained adapter has this shape and scale", "the run's position in the data would mean different rows"
FIXED_ON_RESUME = {
    "model": "the trained weights belong to this model",
    "method": "the trained weights belong to this method",
    "objective.share_prompt": _PLACE,
    "objective.name": "the weights were trained for it, and it reads the data its own way",
    "storage": "the adapter was trained on weights in this format",
    "lora.r": _ADAPTER,
    "lora.alpha": _ADAPTER,
    "lora.targets": _ADAPTER,
    "lora.rslora": _ADAPTER,
    "lora.dora": _ADAPTER,
    "data.": _PLACE,
    "train.batch_tokens": _PLACE,
    "train.batch_rows": _PLACE,
    "train.capacity": _PLACE,
    "train.seed": _PLACE,
    "rollouts.prompts": _PLACE,
    "rollouts.answers": _PLACE,
    "objective.updates": _PLACE,
    "train.optimizer": "its moments are stored in a different format",
}


def why_fixed(key: str) -> str:
    """Why this key cannot change when a run is resumed; empty where it can."""
    if key.startswith(MAY_CHANGE_ON_RESUME):
        return ""
    whole_section = f"{key.split('.', 1)[0]}."
    return FIXED_ON_RESUME.get(key) or FIXED_ON_RESUME.get(whole_section, "")


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} as {"train.lr": 1}"""
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found |= flat(item, f"{prefix}{key}.")
        else:
            found[prefix + key] = item
    return found
