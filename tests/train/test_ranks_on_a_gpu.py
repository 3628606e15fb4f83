"""Ranks on one GPU: NCCL at world size 1, and two ranks that share it over gloo. Skipped where there is none."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import LOOPBACK, count_collectives
from test_graphed_step import DEVICE, SMALL, graphed, losses, mixed_table, model_of, steps_of
from test_ranks import apart
from test_runs_on_a_gpu import RecipeFor, gpu_recipe  # noqa: F401  # a fixture
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from watching import Silent, losses_of, notices_of

from benchmarks.world import collectives
from pronghorn.model.causal_lm import install
from pronghorn.model.load import DTYPES, Precision
from pronghorn.model.lora import add_adapter
from pronghorn.model.rank_files import in_rank_files
from pronghorn.model.text_stack import decoder_layers
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Lora
from pronghorn.report.run_log import read_log
from pronghorn.train.checkpoint.checkpoint import verify_checkpoint
from pronghorn.train.dist.expert_shards import spread
from pronghorn.train.dist.fsdp import FsdpShares
from pronghorn.train.dist.launch import launch
from pronghorn.train.dist.ranks import NCCL_PATIENCE, Ranks, join
from pronghorn.train.dist.shards import Shares
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.optim import trainable
from pronghorn.train.step.step import EagerStep
from samples import chat_rows, make_tokenizer, write_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
ROUNDING = 2e-3  # of bf16, where gradients are summed in another order


def renamed(recipe: Recipe, name: str) -> Recipe:
    return recipe.model_copy(update={"output": f"{recipe.output}-{name}"})


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Ranks]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    return join


def test_one_rank_over_nccl_trains_as_none(gpu_recipe: RecipeFor, one_rank: Callable[[], Ranks]) -> None:  # noqa: F811
    """The captured step with NCCL's sums in the update's graph: as close as the same run repeated."""
    recipe = gpu_recipe(train={"graph": "on"})
    alone, again = (train(renamed(recipe, name), display=Silent()) for name in ("alone", "again"))
    with one_rank() as world:
        assert "nccl" in world.backend
        nccl: Any = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
        assert nccl.options._timeout == NCCL_PATIENCE
        ranks = train(renamed(recipe, "ranks"), display=Silent(), world=world)
    assert not any("sums over ranks" in event.get("text", "") for event in read_log(ranks.folder))
    expected = losses_of(alone.folder)
    assert len(expected) >= 8
    assert apart(losses_of(ranks.folder), expected) <= 2 * apart(losses_of(again.folder), expected) + 1e-6


def test_sums_over_nccl_are_part_of_the_update_graph(one_rank: Callable[[], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain sum over one rank changes nothing, so this one doubles: every replay reports twice the loss and the gradient,
    though the host calls NCCL no more after the capture. The ranks part while the step is still there."""
    batches, calls = steps_of(mixed_table(60), 4), list[bool]()

    def doubled(self: Ranks, tensor: torch.Tensor, how: Any = dist.ReduceOp.SUM) -> None:
        if tensor.is_cuda:
            calls.append(torch.cuda.is_current_stream_capturing())
            how = dist._make_nccl_premul_sum(2.0)
        dist.all_reduce(tensor, how)

    expected = losses(graphed(model_of()), batches)
    with one_rank() as world, monkeypatch.context() as patched:
        patched.setattr(Ranks, "_sum", doubled)
        step = graphed(model_of())
        step.world = world
        found = losses(step, batches[:1])
        captured = len(calls)
        assert calls[0] is False  # NCCL connects ranks before the capture
        assert calls[-1] is True
        found += losses(step, batches[1:])
        assert len(calls) == captured
    for (loss, norm), (loss_alone, norm_alone) in zip(found, expected, strict=True):
        assert loss == pytest.approx(2 * loss_alone, rel=0.02)
        assert norm == pytest.approx(2 * norm_alone, rel=0.2)


SHARDED = ["base", "full", "full with collectives"]  # at one rank FSDP2 copies, unless it is made to gather and reduce


@pytest.mark.parametrize(("how", "precision"), [(how, precision) for how in SHARDED for precision in ("fp32", "bf16")])
def test_sharded_weights_at_one_rank_over_nccl_train_as_whole_ones(
    one_rank: Callable[[], Ranks], how: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, FSDP2 rounds vectors and gradients to it as well."""

    def losses_in(world: World) -> list[tuple[float, float]]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).to(DEVICE)
        model = model.to(DTYPES[precision]) if how == "base" else model
        if isinstance(world, Ranks):
            shares = Shares(world, DEVICE) if how == "base" else FsdpShares(world, DEVICE, 1, DTYPES[precision])
            for name, layer in decoder_layers(model).items():
                shares.keep(name, layer)
        if how == "base":
            model = add_adapter(model, Lora(r=4), seed=1).to(DEVICE)
        assert install(model.train()) == ""
        if isinstance(world, Ranks):
            shares.keep_ends(model)
            spread(shares, model)
        optimizer = FusedAdamW(list(trainable(model).values()), lr=5e-3, weight_decay=0.01)
        step = EagerStep(model, optimizer, device=DEVICE, precision=precision, clip=0.5, world=world)
        return losses(step, steps_of(mixed_table(60), 8))

    alone, calls = losses_in(World()), count_collectives(monkeypatch)
    with one_rank() as world, collectives() if how == SHARDED[2] else nullcontext():
        sharded = losses_in(world)
    assert all(norm > 0 for _, norm in alone)
    assert [calls[name] > 0 for name in ("_Gather", "_ReduceScatter")] == [how == SHARDED[2]] * 2
    close = 1e-5 if precision == "fp32" else ROUNDING
    assert [loss for loss, _ in sharded] == pytest.approx([loss for loss, _ in alone], rel=close)
    assert [norm for _, norm in sharded] == pytest.approx([norm for _, norm in alone], rel=10 * close)


JOINED = """import json, os, sys
sys.path.insert(0, {tests!r})
import torch
from rank_processes import listening
from pronghorn.train.dist.ranks import join
with join() as world:
    tensor = torch.ones(4, device="cuda" if torch.cuda.is_available() else "cpu")
    world.add_up([tensor])
    found = [world.backend, tensor.tolist(), [where for where, _ in listening([os.getpid()])]]
open({file!r}, "w").write(json.dumps(found))
"""


def test_nccl_listens_on_loopback_alone(tmp_path: Path) -> None:
    """In a process as launch.py starts it, after a sum: NCCL is connected then."""
    script = JOINED.format(tests=str(Path(__file__).parent), file=str(tmp_path / "found"))
    launch(1, [sys.executable, "-c", script])
    backend, total, addresses = json.loads((tmp_path / "found").read_text(encoding="utf-8"))
    assert "nccl" in backend
    assert total == [1.0] * 4
    assert set(addresses) <= set(LOOPBACK)


@pytest.fixture
def two_ranks(gpu_recipe: RecipeFor, tmp_path: Path) -> RecipeFor:  # noqa: F811
    """Four steps of several packs each, so that both ranks train on some; and documents longer than a piece of a pack."""
    rows = chat_rows(40)
    for row in rows[::4]:
        row["messages"][0]["content"] = "please " * 50 + row["messages"][0]["content"]
    data = {"train": [str(write_rows(tmp_path / "long.jsonl", rows))], "eval": None, "max_length": 512}

    def build(**changes: Any) -> Recipe:
        train = {"capacity": 512, "batch_tokens": 2048, "steps": 4} | changes.pop("train", {})
        return gpu_recipe(data=data, train=train, **changes)

    return build


def train_on_two(recipe: Recipe, folder: Path) -> list[float]:
    """Over gloo, by way of the host: NCCL needs a GPU for each rank."""
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
    command = [sys.executable, "-m", "pronghorn.cli", "train", str(file), "--ranks", "2"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 x " in (Path(recipe.output) / "run.jsonl").read_text(encoding="utf-8").split("\n", 1)[0]
    steps = [event["tokens"] for event in read_log(Path(recipe.output)) if event["event"] == "step"]
    assert min(steps) > 2 * recipe.train.capacity, "a step has three packs or more"
    return losses_of(recipe.output)


def test_two_ranks_that_share_a_gpu_have_half_of_the_experts_each(two_ranks: RecipeFor, tmp_path: Path) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "eos_token_id": 2}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **experts)).save_pretrained(tmp_path / "experts")
    make_tokenizer().save_pretrained(tmp_path / "experts")
    recipe = two_ranks(
        model=str(tmp_path / "experts"),
        precision="fp32",
        lora={"r": 4, "targets": ["all-linear", "experts"]},
        train={"graph": "off"},
    )
    spread = renamed(recipe, "two").model_copy(update={"world": recipe.world.model_copy(update={"shard": "experts"})})
    alone = losses_of(train(renamed(recipe, "one"), display=Silent()).folder)
    assert len(alone) == 4
    assert apart(train_on_two(spread, tmp_path), alone) < 1e-4


@pytest.mark.parametrize(("method", "shard"), [("lora", "none"), ("qlora", "base"), ("full", "full")])
def test_two_ranks_that_share_a_gpu_train_as_one(two_ranks: RecipeFor, tmp_path: Path, method: str, shard: str) -> None:
    """With the whole model on each and a captured step, and with the weights spread over both."""
    recipe = two_ranks(method=method, train={"graph": "on" if shard == "none" else "off"})
    spread = renamed(recipe, "two").model_copy(update={"world": recipe.world.model_copy(update={"shard": shard})})
    alone = losses_of(train(renamed(recipe, "one"), display=Silent()).folder)
    assert len(alone) == 4
    assert apart(train_on_two(spread, tmp_path), alone) < ROUNDING


@pytest.mark.parametrize(
    ("method", "shard", "precision"), [("lora", "none", "fp32"), ("lora", "none", "bf16"), ("qlora", "base", "bf16")]
)
def test_two_ranks_that_share_a_gpu_share_packs(
    two_ranks: RecipeFor, tmp_path: Path, method: str, shard: str, precision: str
) -> None:
    """Not captured: the run says so once. In bf16 the gradients of keys and values are summed in fp32."""
    recipe = two_ranks(method=method, precision=precision)
    world = recipe.world.model_copy(update={"shard": shard, "context": 2})
    shared = renamed(recipe, "two").model_copy(update={"world": world})
    alone = losses_of(train(renamed(recipe, "one"), display=Silent()).folder)
    assert len(alone) == 4
    assert apart(train_on_two(shared, tmp_path), alone) < (1e-4 if precision == "fp32" else ROUNDING)
    assert sum("steps run eagerly" in text for text in notices_of(shared.output)) == 1


def test_what_two_ranks_saved_resumes_on_one(two_ranks: RecipeFor, tmp_path: Path) -> None:
    """Rows of weights and moments that each wrote of a GPU's memory, by way of copies, while steps went on."""
    recipe = two_ranks(method="full", train={"graph": "off"}, checkpoint={"every": 2, "keep": 9})
    two = renamed(recipe, "two").model_copy(update={"world": recipe.world.model_copy(update={"shard": "full"})})
    expected = train_on_two(two, tmp_path)
    assert len(expected) > 2
    there = Path(two.output) / "checkpoint-2"
    assert len(in_rank_files(there)) == 2
    verify_checkpoint(there)
    one = renamed(two, "one")
    shutil.copytree(there, Path(one.output) / there.name)
    assert apart(losses_of(train(one, display=Silent()).folder), expected[2:]) < ROUNDING
