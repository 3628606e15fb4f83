"""What a config of preference tuning or of a reward model minimizes, as the recipe's `objective`. Both tools train with TRL's
losses, so a parameter that neither sets has TRL's default."""

from __future__ import annotations

from collections.abc import Mapping

from pronghorn.convert.draft import Draft, apply, to
from pronghorn.convert.shared import unused
from pronghorn.convert.values import is_on, number, printed, words
from pronghorn.recipe_objective import KINDS, LOSSES_OF_DPO

ONLINE = "a config of reinforcement learning is not converted, because rewards are code"
ONLINE_FIX = "write a recipe with objective: grpo, rollouts and rewards (docs/rollouts.md)"
SUPERVISED = "it belongs to preference tuning, and this config is supervised"
REFERENCE = "the reference is the model before training, computed once"
# Of TRL, where ours is another.
TRLS = {"simpo": {"beta": 0.1, "gamma": 0.5}}
SWITCHES = ("length_normalized",)
AXOLOTL = {  # its keys: ours
    "rl_beta": "beta", "orpo_alpha": "beta", "dpo_label_smoothing": "label_smoothing", "rpo_alpha": "sft_weight",
    "cpo_alpha": "sft_weight", "dpo_norm_loss": "length_normalized", "simpo_gamma": "gamma",
    "kto_desirable_weight": "desirable_weight", "kto_undesirable_weight": "undesirable_weight",
    "center_rewards_coefficient": "center_weight",
}  # fmt: skip
LLAMAFACTORY = {
    "pref_beta": "beta", "pref_ftx": "sft_weight", "dpo_label_smoothing": "label_smoothing", "simpo_gamma": "gamma",
    "kto_chosen_weight": "desirable_weight", "kto_rejected_weight": "undesirable_weight",
}  # fmt: skip
PREF_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}


def axolotl_objective(draft: Draft) -> str:
    """Sets the recipe's objective, and returns its name; empty: supervised."""
    asked, reward = draft.get("rl"), is_on(draft.get("reward_model"))
    if is_on(draft.get("process_reward_model")):
        draft.refuse("process_reward_model", "process reward models are not supported", "convert a config with reward_model")
    if reward:
        name, key = "reward", "reward_model"
        draft.no_effect("num_labels", "a reward model has one output")
    elif asked is None:
        unused(draft, AXOLOTL, SUPERVISED)
        return ""
    else:
        name, key = str(asked).strip().lower(), "rl"
        if name not in LOSSES_OF_DPO and not (
            name in KINDS and KINDS[name].reads in ("pairs", "marked") and KINDS[name].answers
        ):
            draft.refuse("rl", ONLINE if "po" in name else f"unknown objective `{printed(name)}`", ONLINE_FIX)
    draft.set("objective.name", name, key)
    _nested_beta(draft)
    _dpo_loss(draft, name)
    _parameters(draft, name, AXOLOTL)
    if name == "simpo":
        draft.default("objective.sft_weight", 1.0, "cpo_alpha")
    return name


def llamafactory_objective(draft: Draft) -> str:
    stage = draft.get("stage")
    if stage in (None, "sft", "pt"):
        unused(draft, (*LLAMAFACTORY, "pref_loss"), SUPERVISED)
        return ""
    if stage == "ppo" or stage not in ("dpo", "kto", "rm"):
        draft.refuse("stage", ONLINE if stage == "ppo" else "unknown stage", ONLINE_FIX)
    name, loss = {"dpo": "dpo", "kto": "kto", "rm": "reward"}[str(stage)], draft.get("pref_loss")
    if stage == "dpo" and loss is not None:
        name = PREF_LOSSES.get(str(loss).strip().lower(), "dpo")
        if str(loss).strip().lower() in PREF_LOSSES:
            draft.set("objective.name", name, "pref_loss")
        else:
            draft.nearest("objective.name", name, "pref_loss", f"the losses are {', '.join(PREF_LOSSES)}")
    elif loss is not None:
        draft.no_effect("pref_loss", f"stage: {stage} does not use it")
    draft.set("objective.name", name, "stage")
    _parameters(draft, name, LLAMAFACTORY)
    if draft.get("pref_ftx") is not None and "objective.sft_weight" in draft.targets:
        draft.set(
            "objective.sft_weight",
            draft.targets["objective.sft_weight"],
            "pref_ftx",
            note="weights the mean loss over chosen tokens",
        )
    return name


def _nested_beta(draft: Draft) -> None:
    """Axolotl's `trl` section, of which offline objectives read beta alone."""
    section = draft.get("trl")
    if not isinstance(section, dict):
        return
    apply(draft, {"beta": to("objective.beta", number)}, {}, "trl", unknown=ONLINE)
    draft.no_effect("trl", "its beta becomes objective.beta" if "beta" in section else "none of its values is used")


def _dpo_loss(draft: Draft, name: str) -> None:
    key = "dpo_loss_type"
    losses, known = draft.read(key, words), ("sigmoid", *LOSSES_OF_DPO)
    if losses and name == "dpo" and len(losses) == 1 and losses[0] in known:
        draft.set("objective.loss", losses[0], key)
    elif losses is not None:
        draft.not_honoured(key, f"it is converted only with rl: dpo, as one of {', '.join(known)}")


def _parameters(draft: Draft, name: str, keys: Mapping[str, str]) -> None:
    own = KINDS["dpo" if name in LOSSES_OF_DPO else name].parameters
    for key in draft.unsaid(keys):
        parameter = keys[key]
        target = f"objective.{parameter}"
        if parameter not in own:
            draft.not_honoured(key, f"objective {name} has no such parameter; it has {', '.join(own)}")
        elif target in draft.targets:
            draft.no_effect(key, f"{draft.origins[target][0]} takes precedence")
        else:
            with draft.reading(key):
                draft.set(target, (is_on if parameter in SWITCHES else number)(draft.get(key)), key)
    for parameter, default in TRLS.get(name, {}).items():
        draft.default(f"objective.{parameter}", default)
