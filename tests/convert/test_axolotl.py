"""Six configs after Axolotl's own examples: what becomes of them, and that `check` takes the recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import check_converted

from pronghorn.convert.converting import Conversion, convert_file, convert_text
from pronghorn.data.read.sources import resolve
from pronghorn.errors import CommandError
from pronghorn.recipe import Recipe
from pronghorn.recipe_file import parse_recipe
from pronghorn.recipe_parts import named
from pronghorn.yaml_file import read_yaml
from tables import table

CONFIGS = Path(__file__).parent / "axolotl"
BASE = "base_model: a/b\nsequence_len: 64\nmicro_batch_size: 1\n"
CHAT = f"{BASE}sample_packing: true\nadapter: lora\ndatasets:\n  - path: a.jsonl\n"


def converted(text: str) -> tuple[Recipe, dict[str, tuple[str, str]]]:
    found = convert_text(text, "c.yml")
    return parse_recipe(found.recipe), {fate.key: (fate.kind, fate.text) for fate in found.fates}


def not_honoured(found: Conversion) -> list[str]:
    return [fate.key for fate in found.fates if fate.kind == "not honoured"]


def flat(recipe: Recipe, *keys: str) -> list[Any]:
    values = []
    for key in keys:
        value: Any = recipe
        for part in key.split("."):
            value = getattr(value, part)
        values.append(value)
    return values


EXPECTED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "dpo-qlora.yml": (
        "intel",
        {
            "method": "qlora",
            "objective.name": "dpo",
            "objective.loss": "sigmoid",
            "objective.beta": 0.05,
            "objective.label_smoothing": 0.1,
            "objective.sft_weight": 0.5,
            "data.train": ("Intel/orca_dpo_pairs",),
            "data.fields.instruction": "question",
            "data.template": "llama-3",
            "data.max_length": 1024,
            "train.batch_rows": 8,  # pairs, of two answers each
            "train.capacity": 4096,
        },
        ["chat_template"],
    ),
    "reward-model.yml": (
        "pairs",
        {
            "objective.name": "reward",
            "objective.center_weight": 0.01,
            "data.template": "chatml",
            "data.train": ("pairs.jsonl",),
            "eval.generations": 0,
            "train.batch_rows": 8,
        },
        [],
    ),
    "lora-alpaca.yml": (
        "alpaca",
        {
            "model": "NousResearch/Llama-3.2-1B",
            "method": "lora",
            "lora.targets": ("gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"),
            "data.train": ("teknium/GPT4-LLM-Cleaned",),
            "data.eval": 0.1,
            "data.format": "alpaca",
            "data.template": "alpaca",
            "data.max_length": 2048,
            "data.long": "drop",
            "data.special_tokens.pad_token": "<|end_of_text|>",
            "eval.every": 0.25,
            "checkpoint.every": 0.999999,
            "output": "./outputs/lora-out",
        },
        ["datasets[0].type", "loss_watchdog_threshold", "loss_watchdog_patience"],
    ),
    "qlora-chat.yml": (
        "sharegpt",
        {
            "report.to": ("wandb",),
            "report.project": "chats",
            "method": "qlora",
            "lora.targets": "all-linear",
            "data.template": "gemma-3",
            "data.eot_tokens": ("<end_of_turn>",),
            "data.train": ("cgato/SlimOrcaDedupCleaned:train[:1%]",),
            "checkpoint.every": 0.25,
        },
        [],
    ),
    "full-sharded.yml": (
        "talks",
        {
            "method": "full",
            "data.fields.messages": "dialogue",
            "data.message_fields": {"role": "speaker", "content": "words"},
            "data.roles": {"user": ("human", "customer"), "assistant": ("gpt", "agent")},
            "train.steps": 1000,
            "train.schedule": "constant",
            "train.warmup": 100,
            "train.betas": (0.9, 0.95),
            "train.eps": 1e-5,
        },
        ["fsdp_version", "fsdp_config", "deepspeed"],
    ),
    "lora-text.yml": (
        "text",
        {
            "data.format": "text",
            "data.fields.text": "body",
            "data.max_rows": 500,
            "data.long": "split",
            "lora.rslora": True,
            "data.duplicates": "drop-exact",
            "checkpoint.every": 0.5,
            "train.weight_decay": 0.1,
        },
        ["lora_modules_to_save", "optimizer", "hub_model_id"],
    ),
}


@table("name", sorted(EXPECTED))
def test_an_example_becomes_a_recipe(name: str) -> None:
    _, expected, missing = EXPECTED[name]
    found = convert_file(CONFIGS / name)
    assert found.tool == "Axolotl"
    assert dict(zip(expected, flat(parse_recipe(found.recipe), *expected), strict=True)) == expected
    assert not_honoured(found) == missing


@table("name", sorted(EXPECTED))
def test_nothing_is_said_of_no_key_and_every_line_is_right(name: str) -> None:
    text = (CONFIGS / name).read_text()
    values, _ = read_yaml(text, name, [])
    fates = convert_file(CONFIGS / name).fates
    keys = {fate.key for fate in fates}
    assert keys >= set(values)
    for i, one in enumerate(values["datasets"]):
        assert keys >= {f"datasets[{i}].{key}" for key in one}
    lines = text.splitlines()
    for fate in fates:
        assert fate.key.rsplit(".", 1)[-1] in lines[fate.line - 1], fate
        assert fate.text


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_check_takes_the_recipe(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    assert check_converted(CONFIGS / name, EXPECTED[name][0], model, tmp_path) == 0, capsys.readouterr().err


# Data sets of every type ------------------------------------------------------------------------------------------------


@table(
    ("lines", "expected"),
    [
        ("type: sharegpt", {"data.format": "auto"}),
        ("type: alpaca:chatml", {"data.format": "alpaca", "data.template": "chatml"}),
        (
            "type: alpaca_w_system.load_open_orca",
            {"data.fields.instruction": "question", "data.fields.system": "system_prompt"},
        ),
        ("type: gpteacher", {"data.fields.output": "response"}),
        ("type: completion", {"data.format": "text", "data.long": "split"}),
        (
            "type: {field_instruction: q, field_output: a, format: '{instruction}', no_input_format: '{instruction}'}",
            {"data.format": "completion", "data.fields.prompt": "q", "data.fields.completion": "a"},
        ),
        (
            "type: {field_instruction: q, field_output: a, format: '[INST] {instruction} [/INST]'}",
            {"data.format": "alpaca", "data.fields.instruction": "q", "data.fields.output": "a", "data.fields.input": None},
        ),
        (
            "type: chat_template\n    message_field_role: who\n    message_field_content: says",
            {
                "data.message_fields": {"role": "who", "content": "says"},
                "data.roles": {"user": ("human",), "assistant": ("gpt",)},
            },
        ),
        (
            "type: chat_template\n    field_thinking: thoughts\n    template_thinking_key: reasoning_content",
            {"data.message_fields": {"reasoning_content": "thoughts"}},
        ),
        (
            "type: chat_template\n    field_tools: functions\n    message_field_training: learn",
            {"data.fields.tools": "functions", "data.message_fields": {"train": "learn"}},
        ),
        ("type: chat_template\n    chat_template: chatml", {"data.template": "chatml"}),
    ],
)
def test_a_type_has_its_format_and_columns(lines: str, expected: dict[str, Any]) -> None:
    recipe, _ = converted(f"{CHAT}    {lines}\n")
    assert dict(zip(expected, flat(recipe, *expected), strict=True)) == expected


@table(
    ("lines", "key"),
    [
        ("type: input_output", "datasets[0].type"),
        ("type: pygmalion", "datasets[0].type"),
        ("type: alpaca:chat", "datasets[0].type"),
        ("type: chat_template\n    train_on_eos: all", "datasets[0].train_on_eos"),
        ("type: chat_template\n    roles_to_train: [user, assistant]", "datasets[0].roles_to_train"),
        ("type: chat_template\n    drop_system_message: true", "datasets[0].drop_system_message"),
        ("type: {format: 'Q: {instruction}'}", "datasets[0].type.format"),
        ("new_key: 1", "datasets[0].new_key"),
        ("new.key: 1", "datasets[0].new.key"),  # not empty: a name may have a dot
        ("split: 'train[:5%]'", "datasets[0].split"),
        ("trust_remote_code: true", "datasets[0].trust_remote_code"),
    ],
)
def test_what_a_data_set_asks_for_in_vain_is_told(lines: str, key: str) -> None:
    _, fates = converted(f"{CHAT}    {lines}\n")
    assert fates[key][0] == "not honoured"


def test_8_bits_are_told() -> None:
    _, fates = converted(f"{CHAT}    type: chat_template\nload_in_8bit: true\n")
    assert fates["load_in_8bit"][0] == "not honoured"


def test_slices_of_a_split(tmp_path: Path) -> None:
    """Of a file the first rows, counted now; of a Hub data set the hub's library reads any slice."""
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 10)
    for split, rows in (("train[:20%]", 2), ("train[:3]", 3), ("train[:100%]", 10), ("train[10%:20%]", None)):
        recipe, fates = converted(
            BASE + f"datasets:\n  - path: {tmp_path / 'a.jsonl'}\n    type: completion\n    split: '{split}'\n"
        )
        assert recipe.data.max_rows == rows
        assert fates["datasets[0].split"][0] == ("mapped" if rows else "not honoured")
    recipe, _ = converted(BASE + "datasets:\n  - path: a/b\n    type: completion\n    split: 'train[10%:20%]'\n")
    assert recipe.data.train == ("a/b:train[10%:20%]",)
    assert resolve("a/b:train[10%:20%]")[0].hub == ("a/b", None, "train[10%:20%]")


def test_sources_that_need_other_names_are_entries_of_their_own() -> None:
    second = "    type: chat_template\n  - path: b.jsonl\n    type: chat_template\n    field_messages: talk\n"
    recipe, fates = converted(CHAT + second)
    first, other = recipe.data.train
    assert (first, named(other), fates["datasets[1].path"][0]) == ("a.jsonl", "b.jsonl", "mapped")
    assert other.columns.messages == "talk"
    assert recipe.data.fields.messages is None
    recipe, _ = converted(CHAT + second.replace("talk", "conversations"))
    assert recipe.data.train == ("a.jsonl", "b.jsonl")


@table(("first", "second"), [("alpaca", "chat_template"), ("chat_template", "alpaca"), ("completion", "alpaca")])
def test_sources_that_need_another_template_are_told(first: str, second: str) -> None:
    recipe, fates = converted(f"{CHAT}    type: {first}\n  - path: b.jsonl\n    type: {second}\n")
    assert recipe.data.train == ("a.jsonl",)
    assert recipe.data.template == ("alpaca" if first == "alpaca" else None)
    assert recipe.data.long == ("split" if first == "completion" else "drop")
    assert fates["datasets[1].path"][0] == "not honoured"


# Values with their meaning ----------------------------------------------------------------------------------------------


@table(
    ("lines", "expected"),
    [
        (
            "micro_batch_size: 3\ngradient_accumulation_steps: 5\nsequence_len: 4096",
            {"train.batch_rows": 15, "train.capacity": 4096},
        ),
        ("micro_batch_size: 2\nbatch_size: 8\nsequence_len: 32768", {"train.batch_rows": 8, "train.capacity": 32768}),
        ("micro_batch_size: 2\nsequence_len: 100", {"train.batch_rows": 2, "train.capacity": 200}),
        (
            "micro_batch_size: 3\ngradient_accumulation_steps: 5\nsequence_len: 4096\nsample_packing: true",
            {"train.batch_tokens": 61440, "train.batch_rows": None, "train.capacity": 12288},
        ),
        ("bf16: false\nfp16: true", {"precision": "fp16"}),
        ("bf16: false\nfp16: false", {"precision": "fp32"}),
        ("adapter: lora\nload_in_4bit: true", {"method": "qlora"}),
        ("lr_scheduler: constant\nwarmup_steps: 5", {"train.schedule": "constant", "train.warmup": 0}),
        ("lr_scheduler: rex", {"train.schedule": "cosine"}),
        ("lr_scheduler: warmup_stable_decay", {"train.schedule": "wsd"}),
        ("warmup_steps: 7\nwarmup_ratio: 0.2", {"train.warmup": 7}),
        ("optimizer: adamw_torch_4bit", {"train.optimizer": "adamw_8bit"}),
        ("optimizer: muon", {"train.optimizer": "adamw"}),
        ("max_grad_norm: 0", {"train.clip": 1e9}),
        ("max_steps: -1\nnum_epochs: 2.5", {"train.steps": None, "train.epochs": 3}),
        ("train_on_inputs: true", {"data.loss_on": "all"}),
        ("save_strategy: 'no'", {"checkpoint.every": 0.999999}),
        ("val_set_size: 500", {"data.eval": None}),
        ("excess_length_strategy: truncate", {"data.long": "truncate"}),
        (
            "num_epochs: 4\nevals_per_epoch: 4\nsaves_per_epoch: 2\nsave_total_limit: 2\nearly_stopping_patience: 3\n"
            "val_set_size: 0.05",
            {"eval.every": 0.0625, "eval.stop.patience": 3, "checkpoint.every": 0.125, "checkpoint.keep": 2},
        ),
        ("adapter: lora\nlora_target_modules: 'model.layers.[0-9]+.mlp'", {"lora.targets": "all-linear"}),
        ("fp8: true", {"compute": "fp8"}),
        ("use_wandb: true\nuse_mlflow: false\nuse_tensorboard: true", {"report.to": ("wandb", "tensorboard")}),
        ("wandb_project: a\nwandb_mode: disabled", {"report.to": (), "report.project": None}),
        ("mlflow_experiment_name: a\nmlflow_tracking_uri: b", {"report.to": ("mlflow",), "report.project": "a"}),
        ("lora_r: 0\nadapter: lora", {"lora.r": 16}),
        ("chat_template_jinja: t.jinja", {"data.chat_template": "t.jinja"}),
        ("test_datasets: [{path: held.jsonl, type: chat_template}]", {"data.eval": "held.jsonl"}),
    ],
)
def test_values_keep_their_meaning(lines: str, expected: dict[str, Any]) -> None:
    own = [line.split(":")[0] for line in lines.splitlines()]
    base = "".join(f"{line}\n" for line in (BASE + "datasets: [{path: a.jsonl}]").splitlines() if line.split(":")[0] not in own)
    recipe, _ = converted(f"{base}{lines}\n")
    assert dict(zip(expected, flat(recipe, *expected), strict=True)) == expected


@table(
    ("lines", "expected"),
    [
        ("rl: ipo", {"name": "dpo", "loss": "ipo", "beta": 0.1}),
        ("rl: dpo\ndpo_loss_type: [hinge]", {"name": "dpo", "loss": "hinge"}),
        ("rl: dpo\ndpo_norm_loss: true", {"length_normalized": True}),
        ("rl: simpo\nrl_beta: 2.0\nsimpo_gamma: 0.7\ncpo_alpha: 0.0", {"beta": 2.0, "gamma": 0.7, "sft_weight": 0.0}),
        ("rl: simpo", {"beta": 0.1, "gamma": 0.5, "sft_weight": 1.0}),  # TRL's
        ("rl: orpo\norpo_alpha: 0.3", {"name": "orpo", "beta": 0.3}),
        ("rl: orpo\nrl_beta: 0.2\norpo_alpha: 0.3", {"beta": 0.2}),
        ("rl: kto\nkto_undesirable_weight: 0.2\ntrl: {beta: 0.3}", {"name": "kto", "undesirable_weight": 0.2, "beta": 0.3}),
        ("rl_beta: 0.3", {"name": "supervised"}),
    ],
)
def test_objectives_keep_their_parameters(lines: str, expected: dict[str, Any]) -> None:
    recipe, _ = converted(f"{BASE}adapter: lora\ndatasets: [{{path: a.jsonl, type: chat_template.argilla}}]\n{lines}\n")
    assert {name: getattr(recipe.objective, name) for name in expected} == expected


@table(
    ("kind", "rl", "fields", "template"),
    [
        ("chatml.argilla", "dpo", {}, "chatml"),
        ("chatml.prompt_pairs", "dpo", {"instruction": "prompt"}, "chatml"),
        ("llama3.icr", "ipo", {"instruction": "input"}, "llama-3"),
        ("bradley_terry.chat_template", "dpo", {"instruction": "input"}, None),
        ("chatml.intel", "kto", {"instruction": "question", "output": "completion"}, "chatml"),
        ("{field_prompt: q, field_chosen: good, field_rejected: bad, prompt_format: '{prompt}'}", "dpo",
         {"prompt": "q", "chosen": "good", "rejected": "bad"}, None),
        ("{field_prompt: q, field_completion: a, field_label: ok}", "kto",
         {"prompt": "q", "completion": "a", "label": "ok"}, None),
    ],
)  # fmt: skip
def test_types_of_preference_data_keep_their_columns(kind: str, rl: str, fields: dict[str, str], template: str | None) -> None:
    recipe, fates = converted(f"{BASE}adapter: lora\nrl: {rl}\ndatasets: [{{path: a.jsonl, type: {kind}}}]\n")
    assert recipe.data.fields.model_dump(exclude_none=True) == fields
    assert recipe.data.template == template
    assert fates["datasets[0].type"][0] == "mapped"


@table("line", ["rl: grpo", "process_reward_model: true", "num_labels: 2", "diffusion: {eps: 1}"])
def test_what_cannot_be_trained_is_refused_as_a_whole(line: str) -> None:
    with pytest.raises(CommandError, match="cannot be converted") as caught:
        convert_text(f"{CHAT}{line}\n", "c.yml")
    assert caught.value.where == "c.yml:8"
    assert caught.value.exit_code == 2
    assert caught.value.fix
