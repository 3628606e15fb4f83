"""`pronghorn plan`: what a run would take and cost on a GPU that need not be there. Imports nothing that loads a model."""

from __future__ import annotations

from typing import Any

import torch

from pronghorn.errors import CommandError, PronghornError, RecipeError
from pronghorn.hf_types import HFConfig
from pronghorn.memory.forecast import HOST_BYTES, Forecast, comparison, max_context_report, plan_report
from pronghorn.memory.gpus import GPUS, find_gpu
from pronghorn.memory.plan import host_room, parse_host
from pronghorn.memory.scaling import Scaling, parse_gpus, scaling
from pronghorn.model.config import read_config
from pronghorn.model.families import num_experts, why_not_fast
from pronghorn.recipe import Recipe
from pronghorn.train.source import kind_of
from pronghorn.train.source.source import Foreseen

__all__ = ["comparison", "forecast", "forecast_of_many"]


def why_no_plan(recipe: Recipe, config: HFConfig) -> str:
    if recipe.layers == "own":
        return "layers: own uses the transformers layers, whose memory is not planned"
    text = config.get_text_config()
    if why := why_not_fast(config):
        return why
    if recipe.fp8 and recipe.method != "fp8" and num_experts(text):
        return (
            f"compute: fp8 cannot be combined with method: {recipe.method} for experts, which compute in FP8 "
            "only if they are stored in FP8"
        )
    if recipe.method == "fp8" and getattr(config, "quantization_config", None):
        return "the checkpoint is stored in 4 bits, and method: fp8 needs 16-bit weights"
    if recipe.method != "full" and (recipe.lora.dropout or recipe.lora.dora):
        return "lora.dropout and lora.dora run layers as separate operations, whose memory is not planned"
    return ""


def forecast(
    recipe: Recipe,
    *,
    gpu: str | None,
    price: float | None = None,
    tokens: int | None = None,
    longest: bool = False,
    host: str | None = None,
) -> list[Forecast]:
    """On the GPU that is named, on this machine's, or, where there is none, on each of the table that the run fits into.
    `longest`: of the same run on the longest document that fits. `host`: the RAM of that machine, such as 32GB."""
    if price is not None and price < 0:
        raise CommandError(what=f"--price {price:g} is negative", fix="set the price per GPU hour in USD")
    if tokens is not None and tokens < 1:
        raise CommandError(
            what=f"--tokens {tokens} is not a valid token count", fix="set the total tokens of the run, over all epochs"
        )
    chosen = find_gpu(gpu) if gpu else None  # refused before anything is read
    room = None if host is None else parse_host(host)
    if chosen is None and torch.cuda.is_available():
        chosen = find_gpu(torch.cuda.get_device_name())
        room = host_room() if host is None else room  # as a run here would
    config, data = _planned(recipe), kind_of(recipe).foreseen(recipe)
    recipe = recipe if longest else _sized(recipe, data)
    known = None if recipe.train.steps else data.tokens
    if longest:
        if chosen is None:
            raise CommandError(
                what="--longest needs a GPU to plan for",
                fix="name one with --gpu; set memory.budget to use only part of its memory",
            )
        return [
            max_context_report(recipe, config, gpu=chosen, price=price, host=room, loss_share=data.rows.get("loss_share", 1.0))
        ]
    guessed = tokens is None and known is not None and data.estimated
    options: dict[str, Any] = {"tokens": tokens or known, "price": price, "host": room, "estimated": guessed, **data.rows}
    if chosen is not None:
        return [plan_report(recipe, config, gpu=chosen, **options)]
    found: list[Forecast] = []
    problem: PronghornError | None = None
    for one in GPUS.values():
        try:
            found.append(plan_report(recipe, config, gpu=one, **options))
        except (RecipeError, CommandError) as error:
            problem = error
    if not found and problem is not None:
        raise problem
    return found


def forecast_of_many(recipe: Recipe, gpus: str, *, machines: int = 1, link: str = "", host: str | None = None) -> Scaling:
    """On several GPUs of several machines, for each way to spread the run over them."""
    parse_gpus(gpus)  # refused before anything is read
    room = HOST_BYTES if host is None else parse_host(host)
    config, data = _planned(recipe), kind_of(recipe).foreseen(recipe)
    recipe, facts = _sized(recipe, data), {name: data.rows[name] for name in ("attended", "loss_share") if name in data.rows}
    return scaling(recipe, config, gpus=gpus, machines=machines, link=link, host=room, **facts)


def _sized(recipe: Recipe, data: Foreseen) -> Recipe:
    """With `batch_tokens: auto` as it will be, if the amount of data is known."""
    return recipe if data.tokens is None else recipe.sized(data.tokens, 1)


def _planned(recipe: Recipe) -> Any:
    """The model's config, if there can be a plan for it."""
    config = read_config(recipe.model)
    if why := why_no_plan(recipe, config):
        raise RecipeError(what="this run cannot be planned", why=why, fix="remove the cause named above")
    return config
