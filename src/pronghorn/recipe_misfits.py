"""What does not fit together in a recipe."""

from __future__ import annotations

from pronghorn.recipe_parts import MOST, Parts, Train
from pronghorn.recipe_rollouts import OWN, Rollouts

NO_SIZE = ("auto", MOST)  # train.batch_tokens where nobody sets it, now and in older checkpoints


def misfits(recipe: Parts) -> list[str]:
    """A line each: `key: what; fix`."""
    train, data, evaluated, kind = recipe.train, recipe.data, recipe.eval, recipe.objective.kind
    problems = []
    if train.batch_rows is not None and train.batch_tokens not in NO_SIZE:
        problems.append("train.batch_rows: train.batch_tokens is set as well; remove one of them")
    by_tokens = train.batch_rows is None and kind.reads != "prompts"
    if by_tokens and train.batch_tokens != "auto" and train.batch_tokens % train.capacity:
        problems.append(
            f"train.batch_tokens: {train.batch_tokens} is not a multiple of train.capacity {train.capacity};"
            f" set train.batch_tokens: {max(1, train.batch_tokens // train.capacity) * train.capacity}"
        )
    if train.schedule != "wsd" and train.decay != Train.model_fields["decay"].default:
        problems.append(f"train.decay: schedule {train.schedule} has no decay phase; set train.schedule: wsd, or remove it")
    if data.max_length > train.capacity:
        problems.append(
            f"data.max_length: {data.max_length} exceeds train.capacity {train.capacity};"
            f" set train.capacity: {data.max_length} or more"
        )
    if data.template and data.chat_template:
        problems.append("data.template: data.chat_template is set as well; remove one of them")
    columns = (data.fields, *(one.columns for one in data.train if not isinstance(one, str)))
    if kind.reads != "prompts" and any(one is not None and one.expected for one in columns):
        problems.append("data.fields.expected: only rows of prompts (objective: grpo) have it; name the column as completion")
    if evaluated.metrics and data.eval is None:
        problems.append("eval.metrics: metrics need held-out data; set data.eval: 0.05, or a file")
    if not kind.answers and (evaluated.metrics or evaluated.generations):
        key = "metrics" if evaluated.metrics else "generations"
        problems.append(f"eval.{key}: objective {recipe.objective} trains a model that writes no answers; remove eval.{key}")
    problems += [*evaluated.misfits, *recipe.objective.misfits, *_of_compared(recipe), *_of_rollouts(recipe)]
    problems += [*_of_compute(recipe), *_of_shards(recipe), *_of_context(recipe)]
    if recipe.storage != "auto" and recipe.method != "qlora":
        problems.append(
            f"storage: {recipe.storage} cannot be combined with method: {recipe.method}; set method: qlora, whose"
            " frozen weights are in 4 bits, or remove storage"
        )
    return [*problems, *_of_stop(recipe), *_of_average(recipe)]


def _of_average(recipe: Parts) -> list[str]:
    """Where the mean of the last adapters cannot be made, or not be compared with the last one."""
    if recipe.train.average is None:
        return []
    wrong = {
        "it averages adapters; of all weights, the host would need a second copy; set method: lora": recipe.method == "full",
        "each rank has adapters of other experts; set world.shard: none": recipe.world.shard == "experts",
        "held-out rows decide between the mean and the last weights; set data.eval: 0.05": recipe.data.eval is None,
        f"objective {recipe.objective} has no loss of each row to compare them by": recipe.objective.kind.reads != "documents",
    }
    return [f"train.average: {text}" for text, applies in wrong.items() if applies]


def _of_stop(recipe: Parts) -> list[str]:
    """What the rule of eval.stop.gain cannot predict."""
    schedule, best = recipe.train.schedule, recipe.eval.best
    if recipe.eval.stop is None or recipe.eval.stop.gain is None:
        return []
    wrong = {
        f"schedule {schedule} lowers the rate all the time, and the loss falls with it; set train.schedule: wsd": schedule
        not in ("wsd", "constant"),
        f"it compares losses, and eval.best is {best}; remove eval.best, or set patience": best != "loss",
        f"objective {recipe.objective} has no loss of each row; set patience": recipe.objective.kind.reads != "documents",
    }
    return [f"eval.stop.gain: {text}" for text, applies in wrong.items() if applies]


def _of_compared(recipe: Parts) -> list[str]:
    """What cannot be done to answers that are compared."""
    if recipe.objective.kind.reads not in ("pairs", "marked"):
        return []
    wrong = []
    if recipe.data.long == "split":
        wrong.append("long: split would separate answers from their prompts; set data.long: drop or truncate")
    if recipe.data.duplicates == "drop-near":
        wrong.append(
            "duplicates: drop-near would drop compared answers, which resemble each other; set data.duplicates: drop-exact"
        )
    if recipe.data.loss_on == "all":
        wrong.append(f"loss_on: objective {recipe.objective} compares answers, not prompts; remove data.loss_on")
    return [f"data.{one}" for one in wrong]


def _of_compute(recipe: Parts) -> list[str]:
    fp8, bf16 = recipe.compute == "fp8", recipe.compute == "bf16"
    wrong = {
        "compute: fp8 cannot be combined with method: lora, whose frozen weights are 16-bit;"
        " set method: fp8, which also stores them in FP8, or method: qlora for 4 bits": fp8 and recipe.method == "lora",
        "compute: bf16 cannot be combined with method: fp8, whose weights are multiplied in FP8;"
        " remove compute, or set method: lora or qlora": bf16 and recipe.method == "fp8",
        f"compute: bf16 cannot be combined with precision: {recipe.precision}, which sets the GEMM precision;"
        " remove compute, or set precision: bf16": bf16 and recipe.precision in ("fp16", "fp32"),
        "compute: fp8 cannot be combined with layers: own, which multiply in 16 bits; set layers: fast, or remove compute": fp8
        and recipe.layers == "own",
        "compute: fp8 cannot be combined with lora.dropout or lora.dora, which run in PEFT, in 16 bits;"
        " remove compute, or remove them": fp8 and recipe.method == "qlora" and (recipe.lora.dropout or recipe.lora.dora),
        "compute: fp8 cannot be combined with storage: nvfp4, which is dequantized to 16 bits for GEMMs;"
        " remove compute, or set storage: nf4": fp8 and recipe.storage == "nvfp4",
    }
    return [text for text, applies in wrong.items() if applies]


def _of_shards(recipe: Parts) -> list[str]:
    shard, problems = recipe.world.shard, []
    if shard == "experts" and recipe.method == "full":
        problems.append("world.shard: experts shards frozen experts, but method: full trains them; set world.shard: full")
    if shard == "experts" and recipe.data.eval is not None and (recipe.eval.generations or recipe.eval.metrics):
        problems.append(
            "world.shard: experts cannot generate held-out answers, because no rank has all experts;"
            " set eval.generations: 0 and remove eval.metrics, or set world.shard: base"
        )
    if shard == "base" and recipe.method == "full":
        problems.append("world.shard: base shards frozen weights, but method: full has none; set world.shard: full")
    if shard == "full" and recipe.method != "full":
        problems.append(
            f"world.shard: full shards trained weights, but method: {recipe.method} freezes the weights; set world.shard: base"
        )
    if recipe.world.replicate > 1 and shard in ("none", "experts"):
        why = "which shards nothing" if shard == "none" else "whose adapters are trained on one rank"
        problems.append(f"world.replicate cannot be combined with world.shard: {shard}, {why}; set world.replicate: 1")
    if shard in ("base", "full", "experts") and (why := recipe.why_not_sharded):
        problems.append(f"world.shard: {shard} cannot be combined with {why}; change that, or set world.shard: none")
    return problems


def _of_context(recipe: Parts) -> list[str]:
    """Where ranks cannot share packs."""
    context, unit, capacity = recipe.world.context, recipe.world.piece_unit, recipe.train.capacity
    if context == 1:
        return []
    whole = (
        "answers prompts of its own on each rank" if recipe.rollouts else "compares answers, of which ranks would have parts"
    )
    wrong = {
        f"a pack is cut into {2 * context} pieces, so train.capacity {capacity} must be a multiple of {unit};"
        f" set train.capacity: {-(-capacity // unit) * unit}": capacity % unit > 0,
        f"objective {recipe.objective} {whole}; set world.context: 1": recipe.objective.kind.reads != "documents",
        "world.shard: experts sends rows to other ranks; set world.shard: base": recipe.world.shard == "experts",
        "layers: own attend to their own rank's rows; set layers: fast": recipe.layers == "own",
    }
    return [f"world.context: {text}" for text, applies in wrong.items() if applies]


def _of_rollouts(recipe: Parts) -> list[str]:
    """What does not fit together in a recipe of reinforcement learning, or does not belong to another."""
    if recipe.objective.kind.reads != "prompts":
        found = [key for key, given in (("rewards", recipe.rewards), ("rollouts", recipe.rollouts)) if given]
        return [
            f"{key}: objective {recipe.objective} generates no answers; set objective: grpo, or remove {key}" for key in found
        ]
    return [*_rewards(recipe), *_sizes(recipe), *_others(recipe), *_engine(recipe)]


def _rewards(recipe: Parts) -> list[str]:
    problems, names = [], [reward.called for reward in recipe.rewards]
    functions = [reward.function for reward in recipe.rewards if reward.function]
    for i, reward in enumerate(recipe.rewards):
        if [reward.metric, reward.function, reward.model].count(None) != 2:
            problems.append(
                f"rewards.{i}: name one metric, one function, or one model; write {{metric: exact_match}}, {{function: NAME}} "
                "or {model: FOLDER}"
            )
        elif (reward.metric == "regex") != (reward.regex is not None):
            fix = "remove regex" if reward.regex else "add the pattern: {metric: regex, regex: ...}"
            problems.append(f"rewards.{i}: the metric `regex`, and no other reward, has a pattern; {fix}")
    if twice := next((name for name in functions if functions.count(name) > 1), None):
        problems.append(f"rewards: the function {twice} is there twice; add up its weights")
    elif twice := next((name for name in names if names.count(name) > 1), None):
        problems.append(f"rewards: two are called {twice}; give each its own name: {{metric: ..., name: ...}}")
    if recipe.rewards and not any(reward.weight for reward in recipe.rewards):
        problems.append("rewards: every weight is 0; set one of them")
    return problems


def _sizes(recipe: Parts) -> list[str]:
    problems, spec, objective = [], recipe.answering, recipe.objective
    if spec.answers < 2 and (objective.name == "rloo" or objective.scale in ("group", "none")):
        problems.append(
            f"rollouts.answers: {spec.answers} is no group, whose answers objective {objective} compares; set 2 or more"
        )
    if spec.max_new_tokens >= recipe.data.max_length:
        problems.append(
            f"rollouts.max_new_tokens: {spec.max_new_tokens} leaves no room for a prompt in data.max_length "
            f"{recipe.data.max_length}; set data.max_length to the tokens of prompt and answer together"
        )
    for key in ("batch_rows", "batch_tokens"):
        if getattr(recipe.train, key) not in (None, *NO_SIZE):
            problems.append(
                f"train.{key}: a step has rollouts.prompts x rollouts.answers; remove train.{key}, and set rollouts.prompts"
            )
    return problems


def _others(recipe: Parts) -> list[str]:
    objective, problems = recipe.objective, []
    if recipe.layers == "own":
        problems.append("layers: own cannot generate answers in a step; set layers: fast")
    if recipe.method != "full" and recipe.lora.dropout:
        problems.append(
            "lora.dropout: answers are sampled without dropout, so a step with it would learn from another model's; set 0"
        )
    if recipe.method == "full" and objective.beta:
        problems.append(
            f"objective.beta: {objective.beta:g} needs the model before training, which method: full overwrites;"
            " set objective.beta: 0, or method: lora"
        )
    if recipe.data.long in ("truncate", "split"):
        problems.append(f"data.long: {recipe.data.long} would ask a part of a question; set data.long: drop")
    if recipe.data.loss_on != "auto":
        problems.append("data.loss_on: the model's own answers carry the loss; remove data.loss_on")
    if recipe.eval.best == "loss":
        problems.append("eval.best: the loss says nothing of answers; set eval.best: reward, or remove it")
    if recipe.health.spike != "warn":
        problems.append("health.spike: a spike of this loss says nothing of the run; set health.spike: warn")
    return problems


def _engine(recipe: Parts) -> list[str]:
    spec, problems = recipe.answering, []
    if spec.engine == OWN:
        given = spec.engine_seconds != Rollouts.model_fields["engine_seconds"].default
        return ["rollouts.engine_seconds: engine: own has no time limit; remove it"] if given else []
    if recipe.method == "full":
        problems.append("rollouts.engine: a server gets adapters, and method: full has none; set method: lora, or engine: own")
    elif recipe.lora.dora or "experts" in recipe.lora.targets:
        what = "DoRA" if recipe.lora.dora else "adapters of experts in PEFT's layout"
        problems.append(f"rollouts.engine: vLLM and SGLang do not serve {what}; set engine: own")
    if spec.temperature != 1.0 and (spec.top_k or spec.top_p < 1.0 or spec.min_p):
        problems.append(
            "rollouts.engine: no server gives the log-probability of a token in the whole vocabulary at its temperature; set "
            "temperature: 1.0, or remove top_k, top_p and min_p"
        )
    return problems
