"""Everything before the first step: checks, data, model, optimizer, and what a checkpoint puts back.

The order is by cost: what can be refused in a second is refused before data is tokenized, and that before weights load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.data.pack.loader import State
from pronghorn.errors import ModelError, RecipeError
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.config import read_config
from pronghorn.model.families import ties_embeddings, why_not_fast
from pronghorn.model.fingerprint import base_of, require_same_base
from pronghorn.model.heads import HEADS
from pronghorn.model.isolated_documents import require_isolated_documents
from pronghorn.model.layers.types import Shards
from pronghorn.model.load import (
    DTYPES,
    ModelFacts,
    Precision,
    inspect_model,
    load_base,
    load_model,
    pick_device,
    require_fp8_precision,
    require_fp8_products,
    require_tokenizer_fits,
    resolve_precision,
)
from pronghorn.model.lora import add_adapter, restore_adapter
from pronghorn.model.text_stack import freeze_beside_text
from pronghorn.model.weight_files import require_whole_weights
from pronghorn.recipe import Recipe
from pronghorn.train.checkpoint.checkpoint import TrainState, restore_rng
from pronghorn.train.checkpoint.longer import warm_up_of_longer
from pronghorn.train.checkpoint.resume import find_checkpoint, found_intact, require_allowable, settled
from pronghorn.train.dist.context import require_context, share_packs
from pronghorn.train.dist.expert_shards import shares_of, spread, trained_shards_of
from pronghorn.train.dist.shards import Shares, shard_of, shards_of, told_of
from pronghorn.train.dist.world import World
from pronghorn.train.objectives import Objective, objective_of
from pronghorn.train.run.average import Average, window
from pronghorn.train.run.evaluate import Progress
from pronghorn.train.run.reward_models import reward_models
from pronghorn.train.run.run_identity import in_background, require_same_data, run_facts, weights_key
from pronghorn.train.setup.preference_data import reference_store
from pronghorn.train.source import Source, source_of
from pronghorn.train.source.sizes import notices
from pronghorn.train.source.source import Report
from pronghorn.train.step.graphed_step import make_step
from pronghorn.train.step.health import refuse_broken_weights, require_trainable
from pronghorn.train.step.memory import RunMemory, plan_memory
from pronghorn.train.step.optim import make_optimizer, restore_optimizer
from pronghorn.train.step.spikes import Spikes, losses_of
from pronghorn.train.step.step import StageTimer, Step, autocast, no_graph

T = TypeVar("T")


@dataclass
class Session:
    """A run that stands ready before step `step` + 1."""

    recipe: Recipe
    source: Source
    tokenizer: Tokenizer
    model: HFModel
    optimizer: torch.optim.Optimizer
    take_step: Step
    device: torch.device
    precision: Precision
    notices: list[str]  # to be told: the run empties it into its log
    keys: dict[str, str]  # of the data
    base: Future[dict[str, Any]]  # of the frozen model
    objective: Objective
    world: World
    memory: RunMemory | None = None  # the plan that the layers follow
    step: int = 0
    cursor: State | None = None  # where the source stands after this step
    seen_tokens: int = 0
    progress: Progress = field(default_factory=Progress)  # by eval.best
    resumed_from: int | None = None
    spikes: Spikes = field(default_factory=Spikes)
    average: Average = field(default_factory=Average)  # train.average

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must find unchanged."""
        return {**self.keys, **self.base.result()}

    @property
    def total(self) -> int:
        """Optimizer steps: fewer than the source has, where an early stop began the decay."""
        return self.recipe.train.decays(self.source.total, self.progress.decay_from).stop

    @property
    def stable_step(self) -> int | None:
        """After which the rate decays, where it was constant before (wsd): a longer run goes on from there."""
        decays = self.recipe.train.decays(self.source.total, self.progress.decay_from)
        return decays.start if decays else None

    @property
    def averaged(self) -> range:
        """Steps after which weights are averaged."""
        return window(self.recipe.train, self.total, self.recipe.train.decays(self.source.total, self.progress.decay_from))

    @property
    def autocast(self) -> Callable[[], Any]:
        return self.take_step.autocast

    @property
    def shards(self) -> Shards | None:
        """Weights that are spread over ranks."""
        return shards_of(self.model)

    def on_writer(self, work: Callable[[], T]) -> T:
        """What the writer does with the model. Where its weights are sharded all ranks do it, and get the writer's result."""
        if self.shards is None:
            return self.world.on_writer(work)
        with torch.no_grad():
            result = self.shards.around(work)
        return self.world.on_writer(lambda: result)

    def lower_memory(self, memory: RunMemory) -> None:
        """After a step that was given up for want of memory: the same step again will take less."""
        self.take_step.abandon()
        scale = self.take_step.scaler.state_dict()
        memory.lower(self.model)
        self.take_step = _step(
            self.recipe, self.model, self.optimizer, self.device, self.precision, self.notices, self.objective, self.world
        )
        if scale:
            self.take_step.scaler.load_state_dict(scale)


def look_ahead(recipe: Recipe) -> tuple[torch.device, Precision, ModelFacts, Any]:
    """Refuses what can be refused before data is read and weights are loaded, for `train` and `check` alike. Returns device,
    precision, what is known of the model, and the tokenizer."""
    device = pick_device()
    precision = resolve_precision(recipe.precision, device)
    if recipe.train.graph == "on" and device.type != "cuda":
        raise no_graph("no NVIDIA GPU found")
    if recipe.fp8:
        require_fp8_precision(device, precision)
    _refuse_adapted_head(recipe)
    lora = None if recipe.method == "full" else recipe.lora
    facts = inspect_model(recipe.model, lora, storage=recipe.stored_as, head=recipe.objective.kind.head)
    require_context(recipe, read_config(recipe.model))
    require_fp8_products(recipe, facts)
    require_whole_weights(recipe.model, any_name=recipe.stored_as != "bf16")
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    require_tokenizer_fits(tokenizer, facts.vocabulary, recipe.model)
    return device, precision, facts, tokenizer


def _refuse_adapted_head(recipe: Recipe) -> None:
    """Our layers' loss multiplies by the head's weight itself, and would find that out in the first step only. A head that is
    the embeddings, too, cannot be merged: they would become what only the head should."""
    named = [] if isinstance(recipe.lora.targets, str) else [name.rsplit(".", 1)[-1] for name in recipe.lora.targets]
    if recipe.method == "full" or "lm_head" not in named:
        return
    config = read_config(recipe.model)
    if ties_embeddings(config):
        why, fix = "it is tied to the embeddings, so merging would change both", "remove lm_head from lora.targets"
    elif recipe.layers == "fast" and not why_not_fast(config):
        why, fix = (
            "the fast layers read the LM head's weight inside the fused loss",
            "remove lm_head from lora.targets, or set layers: own",
        )
    else:
        return
    raise RecipeError(what="lora.targets: lm_head cannot have an adapter", why=why, fix=fix)


def set_up(
    recipe: Recipe,
    run: Path | None,
    *,
    report: Report,
    stage: StageTimer,
    allow: Collection[str] = (),
    before_loading: Callable[[ModelFacts, Any], None] = lambda facts, tokenizer: None,
    world: World | None = None,
    **files: Path | None,
) -> Session:
    """`run`: where checkpoints are looked for; None: nowhere. `allow`: keys that may differ from those of the checkpoint
    (--allow-change). `before_loading`: refuses, perhaps, what facts and tokenizer tell; on the rank that writes. `world`:
    without one, of one rank. `files`: code of the user's, which runs."""
    said, world = list[str](), world or World()
    require_allowable(allow, recipe)
    with stage("checkpoint"):
        found = _found(recipe, run, allow, said, world)
    with stage("load"):
        device, precision, facts, tokenizer = look_ahead(recipe)
        shard, context = shard_of(recipe, world, device, facts), recipe.world.context
        world.on_writer(lambda: before_loading(facts, tokenizer))
    with stage("read"), world.writer_first():  # it fills the cache of tokens
        asked, models = settled(recipe, found), reward_models(recipe)
        source = source_of(asked, tokenizer, report=report, stage=stage, models=models, ranks=world.size // context, **files)
    recipe, keys = source.recipe, source.keys
    world.require_same(lambda: run_facts(recipe, keys))
    told = [*source.dealt(world.size), *told_of(shard, world, recipe), *warm_up_of_longer(found, recipe, source.total)]
    if found:
        require_same_data(found[1].values, keys, found[0].name, str(run))
    memory = plan_memory(
        recipe, read_config(recipe.model), source.shapes, device, precision, evaluates=source.held_out is not None,
        ranks=1 if shard == "none" else world.size // recipe.world.replicate, packs=source.packs_per_step,
        beside=source.device_bytes(DTYPES[precision].itemsize),
    )  # fmt: skip
    with stage("load"):
        if found and recipe.method != "full":  # there, the checkpoint has all of the weights itself
            told += require_same_base(recipe.model, found[1].values, found[0].name)
        report("loading the model", 0, 0)
        shares = shares_of(shard, world, device, DTYPES[precision], recipe.world.replicate, memory and memory.plan.counts())
        model = _build_model(recipe, precision, device, found[0] if found else None, report, shares, source.pad_id)
        # Every byte of the weights is read once more (what the hub has is here by now), beside all that follows.
        # For checkpoints, so the writer alone does it.
        base = in_background(lambda: base_of(recipe.model) if recipe.method != "full" and world.writes else {})
        require_trainable(model)
        why_own_layers, shards = _installed(recipe, model, shares, world, memory)
        _require_isolated(model, recipe, device, precision, facts, whole=shards is None)
        torch.manual_seed(recipe.train.seed)
        optimizer = make_optimizer(model, recipe)
    said += told + notices(recipe, source, device, precision, facts)
    if why_own_layers:
        said.append(f"training uses the transformers layers (slower): {why_own_layers}")
    with stage("load"):
        planned = memory is not None and memory.apply(
            model,
            source.example,
            DTYPES[precision],
            said.append,
            timed=shards is None and context == 1,  # ranks would run a layer, which gathers, as often as each likes
        )
    with stage("reference"):
        objective = _objective(recipe, source, model, device, precision, report, said, world, resumed=found is not None)
    step = _step(recipe, model, optimizer, device, precision, said, objective, world)
    cursor = found[1].values["cursor"] if found else None
    with stage("pack"):
        source.start(cursor, objective=objective, world=world, device=device, autocast=step.autocast, even=bool(shards))
    session = Session(
        recipe, source, tokenizer, model, optimizer, step, device, precision, notices=said, keys=keys, base=base,
        objective=objective, world=world, memory=memory if planned else None, cursor=cursor,
        spikes=Spikes(recipe.health.spike), progress=Progress(recipe.eval.best),
    )  # fmt: skip
    if found:
        put_back(session, found[1])
    world.require_same(lambda: {"weights": weights_key(model, shards)})
    return session


def _found(
    recipe: Recipe, run: Path | None, allow: Collection[str], said: list[str], world: World
) -> tuple[Path, TrainState] | None:
    if run is None:
        return None
    intact = found_intact(run, world)
    with world.writer_first():  # it sets a damaged one aside
        return find_checkpoint(recipe, run, allow=allow, say=said.append, content=world.writes, intact=intact)


def _objective(
    recipe: Recipe,
    source: Source,
    model: HFModel,
    device: torch.device,
    precision: Precision,
    report: Report,
    said: list[str],
    world: World,
    *,
    resumed: bool,
) -> Objective:
    """A reference is asked before the first step, about held-out rows, too: where all weights train it is gone after it, and
    switching adapters off during the run costs new CUDA graphs."""
    objective = objective_of(recipe, reference_store(recipe, said.append, writes=world.writes), source.pad_id)
    full = recipe.method == "full"
    objective.trained, objective.progress = full and resumed, report
    for table in source.known:
        objective.prepare(model, table, device, lambda: autocast(precision, device))
    objective.trained = full
    return objective


def _step(
    recipe: Recipe,
    model: HFModel,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    precision: Precision,
    said: list[str],
    objective: Objective,
    world: World,
) -> Step:
    step = make_step(
        model,
        optimizer,
        device=device,
        precision=precision,
        clip=recipe.train.clip,
        graph=recipe.train.graph,
        say=said.append,
        objective=objective,
        world=world,
    )
    step.guards_loss = recipe.health.spike != "warn"
    return step


def _build_model(
    recipe: Recipe,
    precision: Precision,
    device: torch.device,
    checkpoint: Path | None,
    report: Report,
    shares: Shares | None = None,
    pad_id: int = 0,
) -> Any:
    keep = shares.keep if shares else None
    if recipe.method == "full":
        # float32 master weights under autocast: an update of 1e-5 of a weight is lost in bf16's 8 bits.
        name, head = str(checkpoint or recipe.model), recipe.objective.kind.head
        model = load_model(name, torch.float32, device, progress=report, keep=keep, head=head, seed=recipe.train.seed)
        freeze_beside_text(model)
        if shares:
            shares.keep_ends(model)
        HEADS[head].set_padding(model, pad_id)  # its config is saved
        return model
    experts = shares.experts if shares else None
    base = load_base(recipe, DTYPES[precision], device, progress=report, keep=keep, experts=experts)
    if shares:
        shares.keep_ends(base)
    model = add_adapter(base, recipe.lora, recipe.train.seed)
    if checkpoint:
        restore_adapter(model, checkpoint)
    return model


def _installed(
    recipe: Recipe, model: HFModel, shares: Shares | None, world: World, memory: RunMemory | None
) -> tuple[str, Shards | None]:
    """(why the model uses transformers' layers, or nothing; its weights, where they are spread)"""
    why_own_layers = "the recipe sets layers: own" if recipe.layers == "own" else install(model, fp8=recipe.fp8)
    if recipe.compute == "fp8":
        _require_fp8_layers(model, why_own_layers)
    if recipe.world.context > 1:
        share_packs(model, world, recipe.world.context, str(memory and memory.plan.counts()))
    return why_own_layers, None if shares is None else spread(shares, model)


def _require_isolated(
    model: HFModel, recipe: Recipe, device: torch.device, precision: Precision, facts: ModelFacts, *, whole: bool
) -> None:
    """`whole`: all weights are here."""
    try:
        with autocast(precision, device):  # as the step will be: FP8 layers of trained fp32 weights know no other
            require_isolated_documents(model, device, facts.vocabulary)
    except ModelError:
        if whole:
            refuse_broken_weights(model, recipe.model)  # with NaN nothing equals itself; then that is what to say
        raise


def _require_fp8_layers(model: HFModel, why_own_layers: str) -> None:
    """Weights that are not stored in FP8 are multiplied so by our layers alone; elsewhere the recipe would be ignored."""
    engine = engine_of(model)
    layers = [] if engine is None else engine.layers
    if why := why_own_layers or next((why for layer in layers if (why := layer.why_not_fused())), ""):
        raise RecipeError(
            what="compute: fp8 is not supported for this model", why=why, fix="remove compute to multiply in 16 bits"
        )


def put_back(session: Session, state: TrainState) -> None:
    """Everything of a checkpoint but the model's weights."""
    values = state.values
    spread = trained_shards_of(session.model)
    restore_optimizer(session.optimizer, session.model, state.tensors if spread is None else spread.cut(state.tensors))
    if session.take_step.scaler.is_enabled() and values["scaler"]:  # none, where the run was not in fp16 until now
        session.take_step.scaler.load_state_dict(values["scaler"])
    session.step = session.resumed_from = state.step
    session.seen_tokens = values["seen_tokens"]
    before = Progress.of(values["progress"])
    session.progress = before.by(session.recipe.eval.best)
    if session.progress != before:
        session.notices.append(
            f"eval.best: {session.recipe.eval.best} replaces {before.metric}; the best checkpoint and "
            "patience restart from here"
        )
    session.spikes = Spikes(session.recipe.health.spike, losses_of(values))
    session.average = Average.of(values, state.tensors)
    restore_rng(state.rng)
