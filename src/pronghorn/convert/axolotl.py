"""Axolotl's config: what several keys say together. Keys that stand alone are rows of axolotl_keys.py."""

from __future__ import annotations

from pronghorn.convert import shared, values
from pronghorn.convert.axolotl_data import TEMPLATES, convert_data
from pronghorn.convert.axolotl_keys import PREFIXES, ROWS
from pronghorn.convert.data_sets import set_template
from pronghorn.convert.draft import Draft
from pronghorn.convert.objectives import axolotl_objective

__all__ = ["PREFIXES", "ROWS", "convert"]

NAME = "Axolotl"
MARKS = ("base_model", "datasets", "pretraining_dataset", "sequence_len", "micro_batch_size", "adapter", "sample_packing")
LORA_KEYS = [
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "peft_use_dora", "peft_use_rslora",
    "loraplus_lr_ratio",
]  # fmt: skip


def convert(draft: Draft) -> None:
    objective = axolotl_objective(draft)
    _method(draft)
    shared.batch(
        draft,
        micro="micro_batch_size",
        accumulation="gradient_accumulation_steps",
        length="sequence_len",
        packing=("sample_packing", "batch_flattening"),
        defaults=(1, 1, 512),
        total="batch_size",
        packed=draft.get("pretraining_dataset") is not None,
        answers=2 if objective not in ("", "kto") else 1,
    )
    epochs = shared.duration(draft, epochs="num_epochs", steps="max_steps", default=1)
    shared.warmup(draft, scheduler="lr_scheduler", steps="warmup_steps", ratio="warmup_ratio", default=0.03)
    shared.precision(draft, bf16=("bf16", "bfloat16"), fp16=("fp16", "float16"))
    convert_data(draft)
    _long(draft)
    _template(draft)
    _tokens(draft)
    shared.fraction_held_out(draft, "val_set_size")
    shared.held_out_first(draft, patience="early_stopping_patience")
    shared.how_often(draft, epochs, evals="evals_per_epoch", saves="saves_per_epoch")
    shared.betas(draft)
    draft.default("train.seed", 42)


def _method(draft: Draft) -> None:
    adapter, four, eight = (draft.get(key) for key in ("adapter", "load_in_4bit", "load_in_8bit"))
    if adapter is None:
        draft.targets["method"], draft.defaults["method"] = "full", "no adapter"
        for key in ("load_in_4bit", "load_in_8bit"):
            if values.is_on(draft.get(key)):
                draft.not_honoured(key, "method: full does not quantize trained weights; set method: qlora to train an adapter")
        shared.unused(draft, ["load_in_4bit", "load_in_8bit"], "set by method: full")
        shared.unused(draft, LORA_KEYS, "no adapter: all weights are trained (method: full)")
        return
    if adapter not in ("lora", "qlora"):
        draft.nearest("method", "lora", "adapter", "the supported adapter methods are lora, qlora and fp8")
    elif adapter == "qlora" or values.is_on(four):
        draft.set("method", "qlora", *(key for key in ("adapter", "load_in_4bit") if values.is_on(draft.get(key))))
    else:
        draft.set("method", "lora", "adapter")
    if values.is_on(eight):
        draft.not_honoured("load_in_8bit", f"{shared.BITS}; the recipe has method: {draft.targets['method']}")
    shared.unused(draft, ["load_in_4bit", "load_in_8bit"], f"set by method: {draft.targets['method']}")
    _targets(draft)


def _targets(draft: Draft) -> None:
    linear, modules = values.is_on(draft.get("lora_target_linear")), draft.get("lora_target_modules")
    if linear:
        draft.set("lora.targets", "all-linear", "lora_target_linear")
    elif draft.get("lora_target_linear") is not None:
        draft.no_effect("lora_target_linear", "lora_target_modules takes precedence")
    if isinstance(modules, str) and modules != "all-linear":
        draft.not_honoured(
            "lora_target_modules", "lora.targets takes module names, not a pattern; the recipe uses lora.targets: all-linear"
        )
        return
    names = draft.read("lora_target_modules", values.words)
    if names is not None and linear:
        draft.no_effect("lora_target_modules", "lora.targets: all-linear covers every linear layer of the decoder")
    elif names is not None:
        draft.set("lora.targets", "all-linear" if names == ["all-linear"] else names, "lora_target_modules")


def _long(draft: Draft) -> None:
    key, how = "excess_length_strategy", str(draft.get("excess_length_strategy", "")).lower()
    if how and draft.targets.get("data.long") == "split":
        draft.no_effect(key, "long texts are split into pieces, as in Axolotl")
    elif how in ("drop", "truncate"):
        draft.set("data.long", how, key)
    elif how == "raise":
        draft.no_effect(key, "Pronghorn also stops with an error when more than 1 % of the rows are too long")
    elif how:
        draft.not_honoured(key, "rows that are too long are dropped, truncated or split (data.long)")
    draft.default("data.long", "drop")


def _template(draft: Draft) -> None:
    key, name = "chat_template", str(draft.get("chat_template", ""))
    own = draft.get("chat_template_jinja")
    if own is not None:
        if isinstance(own, str) and "{" not in own and len(own) < 500:
            draft.set("data.chat_template", own, "chat_template_jinja")
        else:
            draft.not_honoured("chat_template_jinja", "save it to a file and set data.chat_template: FILE.jinja")
    if not name:
        return
    if name == "jinja":
        draft.no_effect(key, "chat_template_jinja sets the template")
    elif name.startswith("tokenizer_default"):
        draft.no_effect(key, "same as Pronghorn: the tokenizer's template is used")
    elif "data.template" in draft.targets:
        draft.not_honoured(key, f"data.template: {draft.targets['data.template']} takes precedence")
    elif draft.targets.get("data.format") == "text":
        draft.no_effect(key, "plain text has no template")
    else:
        set_template(draft, key, name, TEMPLATES.get(name, ""))


def _tokens(draft: Draft) -> None:
    for key in ("special_tokens", "tokens"):
        value = draft.get(key)
        if isinstance(value, dict):
            found = {}
            for name, token in value.items():
                at = f"{key}.{name}"
                if values.plain(token) is None:
                    draft.no_effect(at, "the value is empty")
                elif name not in ("bos_token", "eos_token", "pad_token", "unk_token") or not isinstance(token, str):
                    draft.not_honoured(at, shared.NEW_TOKENS)
                else:
                    found[name] = token
                    draft.fates[at] = ("mapped", f"data.special_tokens.{name}: {token}")
            if found:
                draft.set("data.special_tokens", found, key, note="use tokens of the existing vocabulary")
            else:
                draft.no_effect(key, "none of its values is used")
        elif value is not None:
            draft.not_honoured(key, shared.NEW_TOKENS)
