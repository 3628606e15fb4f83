"""The keys of a recipe: its sections, all of them together (`Parts`), and what follows from them.

A new key is a line here, with its default and its meaning. The section `objective` is in recipe_objective.py, `rollouts` and
`rewards` are in recipe_rollouts.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from math import gcd
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, NonNegativeInt, PositiveInt, Tag, field_validator

from pronghorn.recipe_objective import Objective
from pronghorn.recipe_rollouts import Reward, Rollouts
from pronghorn.recipe_section import Fraction, Name, NonNegative, Pattern, Positive, Section, no_file, one_or_many

Names = Annotated[tuple[Name, ...], BeforeValidator(one_or_many), Field(min_length=1)]
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
    expected: Name | None = None  # of prompts (grpo, gspo, rloo): the expected answer
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
Sources = Annotated[tuple[Source, ...], BeforeValidator(one_or_many), Field(min_length=1)]


class SpecialTokens(Section):
    """Tokens of the vocabulary that replace the tokenizer's own special tokens."""

    bos_token: Name | None = None
    eos_token: Name | None = None
    pad_token: Name | None = None
    unk_token: Name | None = None


class Share(Section):
    random: Annotated[float, Field(gt=0.0, lt=1.0)]  # of the rows, by train.seed


def _no_share(name: str) -> str:
    """`random:0.5` without its space is a text: no file, but a share that is written wrong."""
    if name.startswith("random:"):
        raise ValueError("it is no file")
    return name


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
    eot_tokens: Annotated[tuple[Name, ...], BeforeValidator(one_or_many)] = ()  # additional end-of-turn tokens
    loss_on: Literal["auto", "assistant", "completion", "all"] = "auto"  # auto: chosen by the format
    bad_rows: Literal["stop", "skip"] = "stop"
    lost: Literal["refuse", "allow"] = "refuse"  # rows whose content the template partly drops
    # control tokens (<|im_end|>) inside a message: escaped as text, a bad row, or kept as control tokens
    control_tokens: Literal["escape", "refuse", "keep"] = "escape"
    duplicates: Literal["keep", "drop-exact", "drop-near"] = "keep"
    junk: Literal["keep", "drop"] = "keep"
    leaks: Literal["warn", "drop", "refuse"] = "warn"  # training rows that are copies, or near copies, of held-out rows
    # training rows that are left out: those that a file of `pronghorn data audit` names, or all but a random share
    select: Annotated[Name, AfterValidator(_no_share)] | Share | None = None
    workers: NonNegativeInt = 2  # threads that build packed batches ahead of the step


# Of train.batch_tokens: auto (docs/log/2026-11-19-defaults.md): steps that a run has at least, if its packs are small enough,
# and tokens that a step has at most.
STEPS, MOST = 200, 65536


class Train(Section):
    epochs: PositiveInt = 1
    steps: PositiveInt | None = None  # number of optimizer steps; overrides `epochs`
    # tokens per optimizer step. auto: as many as leave 200 steps, but a pack, and at most 65,536 (Parts.sized)
    batch_tokens: PositiveInt | Literal["auto"] = "auto"
    batch_rows: PositiveInt | None = None  # rows (preference data: pairs) per optimizer step, in place of batch_tokens
    capacity: Annotated[int, Field(gt=0, le=2**24)] = 16384  # tokens per micro-batch; batch_tokens is a multiple of it
    lr: Positive = 2e-4
    # wsd: constant, then a decay; eval.stop begins the decay, where it ends runs of other schedules
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: Fraction | Annotated[int, Field(gt=0, strict=True)] = 0.03  # fraction of all steps, or number of steps
    decay: Every = 0.2  # of wsd: the last steps, as a fraction of all steps or a number
    average: Every | None = None  # of adapters: the mean of the last steps, where held-out rows show it to be better
    # moments in 32 or 8 bits (a quarter of the memory), on the GPU or paged (in host RAM, copied at each step)
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"] = "adamw"
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    clip: Positive = 1.0
    # CUDA graphs for steps: if possible, required (else an error), or never; also used for answers to held-out rows
    graph: Literal["auto", "on", "off"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 3407

    @property
    def step_tokens(self) -> int:
        """What auto is at most, where nothing is known of the data."""
        return MOST if self.batch_tokens == "auto" else self.batch_tokens

    def warmup_steps(self, total: int) -> int:
        return self.warmup if isinstance(self.warmup, int) else math.ceil(self.warmup * total)

    def constant(self, total: int) -> range:
        """Steps after which evaluations compare like with like: the rate is what it was, and a decay is still to come."""
        return range(max(1, self.warmup_steps(total)), self.decays(total).start)

    def decays(self, total: int, early: int | None = None) -> range:
        """Steps of wsd's decay, from 0, of a run of `total`; other schedules have none. `early`: where it begins before its
        time; a fraction is then one of the fewer steps, as in a run that was planned for so many."""
        if self.schedule != "wsd":
            return range(total, total)
        first = max(self.warmup_steps(total), early or 0)
        if early is None:
            return range(max(first, total - steps_between(self.decay, total)), total)
        longer = self.decay if self.decay >= 1 else first * self.decay / (1 - self.decay)
        return range(first, min(total, first + max(1, math.ceil(round(longer, 6)))))


class Memory(Section):
    budget: str = "auto"  # auto | 24GB | 80%

    @field_validator("budget")
    @classmethod
    def _readable(cls, budget: str) -> str:
        if budget != "auto" and not re.fullmatch(r"\d+(\.\d+)?\s*(GB|GiB|MB|MiB|%)", budget):
            raise ValueError(f"{budget!r} is not a budget; write auto, an amount such as 24GB, or a percentage such as 80%")
        return budget


def _power(tokens: float) -> int:
    """The power of two that is no larger."""
    return int(2 ** math.floor(math.log2(max(tokens, 1))))


def steps_between(every: float, total: int) -> int:
    """200: 200 steps; 0.1: a tenth of all steps, rounded up."""
    return int(every) if every >= 1 else max(1, math.ceil(round(every * total, 6)))


class Checkpoint(Section):
    every: Every = 200
    keep: PositiveInt = 3


class Stop(Section):
    patience: PositiveInt | None = None  # evaluations in a row that gain less than min_delta; None: 3, or any with gain
    min_delta: NonNegative | None = None  # None: 0.002
    gain: Positive | None = None  # another rule: a gain of the held-out loss that is not to be expected any more,
    # with this probability; and that of the paired test of metrics of answers (train/run/paired.py)
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.9

    @property
    def evaluations(self) -> float:
        """The patience that counts. With a gain and without a patience, the gain alone decides."""
        return self.patience or (3 if self.gain is None else math.inf)

    @property
    def least(self) -> float:
        """What an evaluation has to gain."""
        return 0.002 if self.min_delta is None else self.min_delta

    def misfits(self, best: str) -> list[str]:
        """`best`: eval.best."""
        if self.evaluations == math.inf and self.min_delta is not None:
            return ["eval.stop.min_delta: it belongs to patience, which eval.stop.gain replaces; set patience, or remove it"]
        if self.gain is None and best == "loss" and self.confidence != Stop().confidence:
            return ["eval.stop.confidence: only eval.stop.gain and metrics of answers have one; set gain, or remove it"]
        return []


# What they measure: evaluation/metrics.py
MetricName = Literal["exact_match", "json_valid", "json_match", "json_fields", "regex", "rouge_l", "multiple_choice"]
METRICS: tuple[str, ...] = get_args(MetricName)


def figures_of(metrics: Sequence[str]) -> list[str]:
    """What these metrics measure, by name."""
    return [figure for name in metrics for figure in ((name, f"{name}_norm") if name == "multiple_choice" else (name,))]


Metric = Annotated[MetricName, no_file("--metric-file")]


class Eval(Section):
    every: Every = 0.1
    stop: Stop | None = None  # early stopping on the metric in `best`
    generations: NonNegativeInt = 3  # held-out prompts answered and shown at each evaluation
    metrics: Annotated[tuple[Metric, ...], BeforeValidator(one_or_many)] = ()  # metrics of the answers to held-out rows
    samples: PositiveInt = 100  # held-out rows answered for the metrics
    max_new_tokens: PositiveInt | None = None  # per answer; None: 16 more than the longest expected one, or that of rollouts
    system: Name | None = None  # replaces the system message of the rows
    regex: Pattern | None = None  # pattern of the metric `regex`
    best: Name = "loss"  # selects the best checkpoint: loss, or one of the metrics

    @property
    def misfits(self) -> list[str]:
        problems = self.stop.misfits(self.best) if self.stop else []
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
    to: Annotated[tuple[LoggerName, ...], BeforeValidator(one_or_many)] = ()  # loggers, beside run.jsonl and report.html
    project: Name | None = None  # of W&B and Trackio, experiment of MLflow; None: as their variables say, or pronghorn


class World(Section):
    # what is spread over the ranks of a run instead of copied to each (docs/scale.md). base: the frozen weights; full: with
    # method full, the weights, their gradients and the optimizer's moments; experts: frozen experts, with their adapters, to
    # which tokens are sent; none: nothing. auto: none where it fits, else base or full
    shard: Literal["auto", "none", "base", "full", "experts"] = "auto"
    # groups of ranks that each hold a whole copy of what is sharded (HSDP); a group's ranks are consecutive, as on one machine
    replicate: PositiveInt = 1
    context: PositiveInt = 1  # consecutive ranks that share each pack, for documents that one GPU cannot hold

    @property
    def piece_unit(self) -> int:
        """What a pack is a multiple of: it is cut into two pieces for each rank, of whole tiles of attention's."""
        return 1 if self.context == 1 else 2 * self.context * 64


class Parts(Section):
    model: Name  # Hub name or local folder
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
    rewards: Annotated[tuple[Reward, ...], BeforeValidator(one_or_many)] = ()  # what they are worth; and --reward-file
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
    output: Name = "runs/default"

    def wrong_ranks(self, ranks: int) -> tuple[str, str, str] | None:
        """What, why and the fix, where so many ranks make no whole groups."""
        context, copies = self.world.context, self.world.replicate
        if ranks % context:
            more = -(-ranks // context) * context
            return (
                f"world.context: {context} does not divide the {ranks} rank{'' if ranks == 1 else 's'} of this run",
                f"groups of {context} consecutive ranks share each pack",
                f"use {more} ranks (pronghorn train: --gpus {more}, or --ranks {more} on a CPU), or set world.context: "
                f"{gcd(ranks, context)}",
            )
        if copies > 1 and self.world.shard != "none" and ranks > 1 and (ranks % copies or ranks == copies):
            return (
                f"world.replicate: {copies} does not divide {ranks} ranks into groups that can shard weights",
                "all groups have the same number of ranks, at least two",
                f"use a multiple of {copies} ranks, at least {2 * copies}, or set world.replicate: 1",
            )
        return None

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
            return self.train.step_tokens
        longest = self.data.max_length * (2 if self.objective.kind.reads == "pairs" else 1)
        return max(1, round(self.train.batch_rows * (row_tokens or longest)))

    def sized(self, tokens: int, longest: int, ranks: int = 1) -> Self:
        """With a number in place of `batch_tokens: auto`: a power of two, by the `tokens` of all epochs. A pack holds the
        `longest` row, or group of rows, and each rank has one. `capacity` becomes smaller, where it has its default, so that a
        step can."""
        spec = self.train
        if spec.batch_tokens != "auto" or spec.batch_rows is not None or self.objective.kind.reads == "prompts":
            return self
        wanted, capacity = min(MOST, _power(tokens / STEPS)), spec.capacity
        if capacity == Train.model_fields["capacity"].default:
            holds = max(self.data.max_length, longest, 1)
            least = max(self.world.piece_unit, 2 * _power(holds - 1) if holds > 1 else 1)
            capacity = min(capacity, max(least, _power(wanted / ranks)))
        together = ranks * capacity
        batch = max(1, wanted // together) * together
        return self.model_copy(update={"train": spec.model_copy(update={"batch_tokens": batch, "capacity": capacity})})

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
