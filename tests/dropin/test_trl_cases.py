"""The kinds of case that TRL's own tests of its trainers have, with models of `FastLanguageModel`.

Each is run with a stock model first. What TRL asserts there is asserted here (every trained weight moves, and no other), and
more: whatever the trainer logs, every gradient and the weights at the end are those of the stock model, to 1e-5. The suite runs
a part of them, `make dropin-cases` all.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from transformers import AutoModelForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.trainer.utils import use_adapter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what is experimental may change
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from dropin.hf_trainer_uses import ARGUMENTS, Recorder, run
from dropin.same_numbers import compare, fast_model, runs, stock_model, with_captured_layers, written
from pronghorn import FastLanguageModel
from pronghorn.compat.outer_loop import loop_of
from pronghorn.kernels.runtime import dispatch
from pronghorn.model.causal_lm import FastCausalLM, base_of, engine_of
from samples import CHATML, chat_rows, make_tokenizer
from tables import first_of
from trl_on_a_cpu import TorchLogProbs

# Marks what the assistant says, which `assistant_only_loss` needs.
MARKED = CHATML.replace(
    "{{ message['content'] }}<|im_end|>\n",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}",
)
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
KINDS = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "reward": (RewardTrainer, RewardConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "cpo": (CPOTrainer, CPOConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
}
ONLINE = ("grpo", "rloo")  # which generate
ADDED = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


class Case(NamedTuple):
    rows: str
    options: Mapping[str, Any] = MappingProxyType({})  # of the trainer's config
    given: Mapping[str, Any] = MappingProxyType({})  # to the trainer
    whole: bool = False  # without an adapter, unless the trainer is given one
    family: str = "llama"
    own: bool = False  # on the model's own layers


# ---- data ------------------------------------------------------------------------------------------------------------


def table(kind: str, count: int = 6) -> Any:
    """Rows as TRL knows them."""
    found = []
    for number, row in enumerate(chat_rows(count)):
        asked, answered = row["messages"]
        worse = {"role": "assistant", "content": "no idea " + str(number)}
        texts = {"prompt": asked["content"], "chosen": " " + answered["content"], "rejected": " " + worse["content"]}
        found.append(
            {
                "text": {"text": asked["content"] + texts["chosen"]},
                "messages": {"messages": row["messages"]},
                "conversations": {"conversations": [{"from": m["role"], "value": m["content"]} for m in row["messages"]]},
                "prompt completion": {"prompt": texts["prompt"], "completion": texts["chosen"]},
                "messages completion": {"prompt": [asked], "completion": [answered, asked, answered]},
                "tokens": {"input_ids": make_tokenizer()(texts["prompt"])["input_ids"]},
                "own columns": {"question": texts["prompt"], "answer": answered["content"]},
                "pairs": texts,
                "messages pairs": {"prompt": [asked], "chosen": [answered], "rejected": [worse]},
                "implicit pairs": {
                    "chosen": texts["prompt"] + texts["chosen"],
                    "rejected": texts["prompt"] + texts["rejected"],
                },
                "margin": {"chosen": texts["prompt"] + texts["chosen"], "rejected": texts["prompt"], "margin": 0.1 * number},
                "unpaired": {
                    "prompt": texts["prompt"],
                    "completion": texts["chosen" if number % 2 else "rejected"],
                    "label": bool(number % 2),
                },
                "messages unpaired": {
                    "prompt": [asked],
                    "completion": [answered if number % 2 else worse],
                    "label": bool(number % 2),
                },
            }[kind.removesuffix(", streamed")]
        )
    data = datasets.Dataset.from_list(found)
    return data.to_iterable_dataset() if kind.endswith("streamed") else data


SFT = {
    "texts": Case("text"),
    "texts, a whole model": Case("text", whole=True, family="tied"),
    "conversations": Case("messages"),
    "conversations in other words": Case("conversations"),
    "prompts and completions": Case("prompt completion"),
    "prompts count, too": Case("prompt completion", {"completion_only_loss": False}),
    "conversations with completions": Case("messages completion", {"completion_only_loss": True}),
    "only what the assistant says": Case("messages", {"assistant_only_loss": True}, family="qwen3"),
    "only what the assistant says in completions": Case(
        "messages completion", {"assistant_only_loss": True, "completion_only_loss": True}
    ),
    "tokens": Case("tokens"),
    "a stream": Case("text, streamed"),
    "a stream of which the assistant counts": Case("messages, streamed", {"assistant_only_loss": True}),
    "a function that makes texts": Case("own columns", given={"formatting_func": lambda row: row["question"] + row["answer"]}),
    "packed": Case("text", {"packing": True, "max_length": 48, "eval_packing": False} | EVALUATED),
    "packed, split": Case("text", {"packing": True, "packing_strategy": "bfd_split", "max_length": 24}, family="gemma3"),
    "wrapped": Case("text", {"packing": True, "packing_strategy": "wrapped", "max_length": 24}, family="qwen3"),
    "without padding": Case("text", {"padding_free": True, "max_length": None}),
    "padded to a multiple": Case("text", {"pad_to_multiple_of": 32}),
    "cut": Case("text", {"max_length": 12}),
    "evaluated on two sets": Case("text", EVALUATED, {"eval_dataset": {"one": table("text", 2), "two": table("text", 3)}}),
    "dft": Case("text", {"loss_type": "dft"}),
    "chunked": Case("text", {"loss_type": "chunked_nll"}),
    "label smoothing": Case("text", {"loss_type": "nll", "label_smoothing_factor": 0.1}),
    "noise": Case("text", {"neftune_noise_alpha": 5.0}),
    "an adapter by the trainer": Case("text", given={"peft_config": ADDED}, whole=True),
    "an adapter by the trainer, recomputing": Case(
        "text", {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"peft_config": ADDED}, whole=True
    ),
    "without recomputing": Case("text", {"gradient_checkpointing": False}),
    "tuned prompts": Case(
        "text",
        {"gradient_checkpointing": False},
        {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)},
        whole=True,
    ),
    # They want the routers' logits, for the balance of the experts.
    "experts": Case("text", family="gpt-oss", own=True),
    "experts, a whole model": Case("text", whole=True, family="gpt-oss", own=True),
    "experts without a balance": Case("messages", {"router_aux_loss_coef": 0.0}, family="gpt-oss"),
    "accumulation": Case("text", {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}, family="gemma3"),
}
LOSSES = [
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
    "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
DPO = {
    "pairs": Case("pairs"),
    "conversations": Case("messages pairs", family="qwen3"),
    "implicit prompts": Case("implicit pairs"),
    "a stream": Case("pairs, streamed"),
    # Some are steep: at a large rate the second step is one of rounding.
    **{
        loss: Case("pairs", {"loss_type": [loss], "learning_rate": 1e-4, "label_smoothing": 1e-3 * (loss == "exo_pair")})
        for loss in LOSSES
    },
    "all losses": Case(
        "pairs", {"loss_type": LOSSES, "loss_weights": [0.01] * len(LOSSES), "label_smoothing": 0.1, "learning_rate": 1e-4}
    ),
    "a whole model": Case("pairs", whole=True),
    "a reference that follows": Case(
        "pairs", {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}, whole=True, family="tied"
    ),
    "a reference computed before": Case("pairs", {"precompute_ref_log_probs": True}),
    "weighted": Case("pairs", {"use_weighting": True}),
    "length desensitised": Case("pairs", {"ld_alpha": 0.5}),
    "another divergence": Case("pairs", {"f_divergence_type": "js_divergence"}),
    "without padding": Case("pairs", {"padding_free": True}),
    "cut at the end": Case("pairs", {"max_length": 32}),
    "an adapter by the trainer": Case("pairs", given={"peft_config": ADDED}, whole=True, family="gemma3"),
    "evaluated": Case("pairs", EVALUATED),
    "experts": Case("pairs", family="gpt-oss"),
}
KTO = {
    "rows with labels": Case("unpaired"),
    "pairs": Case("pairs"),
    "conversations": Case("messages unpaired", family="qwen3"),
    "apo": Case("unpaired", {"loss_type": "apo_zero_unpaired"}),
    "a whole model": Case("unpaired", whole=True),
    "a reference computed before": Case("unpaired", {"precompute_ref_log_probs": True}),
    "a reference that follows": Case(
        "unpaired", {"sync_ref_model": True, "ref_model_sync_steps": 1}, whole=True, family="tied"
    ),
    "weights": Case("unpaired", {"desirable_weight": 2.0, "undesirable_weight": 0.5}, family="gemma3"),
    "an adapter by the trainer": Case("unpaired", given={"peft_config": ADDED}, whole=True),
    "evaluated": Case("unpaired", EVALUATED),
}
REWARD = {
    "pairs": Case("pairs", whole=True),
    "conversations": Case("messages pairs", whole=True, family="qwen3"),
    "margins": Case("margin", whole=True),  # they come to the model as an argument, which it does not read
    "centred": Case("implicit pairs", {"center_rewards_coefficient": 0.1}, whole=True),
    "an adapter by the trainer": Case(
        "pairs",
        given={
            "peft_config": LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        },
        whole=True,
    ),
}
ORPO = {"pairs": Case("pairs"), "a whole model": Case("pairs", whole=True)}
CPO = {"pairs": Case("pairs", family="qwen3"), "simpo": Case("pairs", {"loss_type": "simpo", "cpo_alpha": 0.0})}
GROUPS = {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 6, "temperature": 0.9}
GRPO = {
    "prompts": Case("pairs", GROUPS),
    "a whole model": Case("pairs", GROUPS, whole=True, family="tied"),
    "conversations": Case("messages pairs", GROUPS | {"loss_type": "dr_grpo", "scale_rewards": "none"}, family="qwen3"),
    "with a reference": Case("pairs", GROUPS | {"beta": 0.1}),
    # Both generate. Answers to a prompt are the same then, and only the reference gives gradients.
    "the likeliest tokens": Case(
        "pairs", GROUPS | {"beta": 0.1, "generation_kwargs": {"do_sample": False}}, {"peft_config": ADDED}, whole=True
    ),
    "several updates": Case(
        "pairs", GROUPS | {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 4}, family="gemma3"
    ),
    "sequences": Case("pairs", GROUPS | {"importance_sampling_level": "sequence", "epsilon_high": 0.28}),
    "experts": Case("pairs", GROUPS, family="gpt-oss", own=True),
    "an adapter by the trainer": Case("pairs", GROUPS, given={"peft_config": ADDED}, whole=True),
    "evaluated": Case("pairs", GROUPS | EVALUATED | {"per_device_eval_batch_size": 2}),
}
RLOO = {"prompts": Case("pairs", GROUPS), "without a reference": Case("messages pairs", GROUPS | {"beta": 0.0}, family="qwen3")}
TABLES = {"sft": SFT, "dpo": DPO, "kto": KTO, "reward": REWARD, "orpo": ORPO, "cpo": CPO, "grpo": GRPO, "rloo": RLOO}
CASES = {(kind, name): case for kind, cases in TABLES.items() for name, case in cases.items()}
# One of each kind of data, loss and reference; `make dropin-cases` takes all.
SUITE = {
    "sft": ("texts", "only what the assistant says", "packed", "without padding", "an adapter by the trainer",
            "tuned prompts", "experts", "experts without a balance"),
    "dpo": ("all losses", "a reference that follows", "a reference computed before", "without padding"),
    "kto": ("rows with labels", "a reference that follows"),
    "reward": ("margins", "an adapter by the trainer"),
    "orpo": ("pairs",),
    "cpo": ("pairs",),
    "grpo": ("prompts", "the likeliest tokens", "a whole model"),
    "rloo": ("prompts",),
}  # fmt: skip


# ---- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", TorchLogProbs)
    monkeypatch.setattr(dispatch, "_said", set())
    datasets.disable_progress_bars()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families-for-trl")


def with_a_score(model: Any) -> Any:
    """The backbone of a language model, with a head that gives one number, as reward models have it."""
    base = base_of(model)
    config = copy.deepcopy(base.config)
    config.num_labels = 1
    torch.manual_seed(1)
    scored = AutoModelForSequenceClassification.from_config(config)
    scored.model = base.model
    return scored


def drop_what_rounding_decides(entry: dict[str, float]) -> None:
    """In the first step of DPO the model is its reference, and which answer is better is a matter of the last bit. The mean of
    ORPO's logits is over padding, too, where ours are zeros."""
    if abs(entry.get("rewards/margins", 1.0)) < 1e-4:
        entry.pop("rewards/accuracies", None)
    for name in [name for name in entry if name.startswith("logits/") and "nll_loss" in entry]:
        del entry[name]


def trained_by(kind: str, case: Case, folder: Path) -> Callable[[Any], Any]:
    def use(model: Any) -> Any:
        trainer_class, config_class = KINDS[kind]
        tokenizer = make_tokenizer(MARKED if "assistant_only_loss" in case.options else CHATML)
        options = {**ARGUMENTS, "bf16": False, **case.options}
        given, answers = copy.deepcopy(dict(case.given)), []
        if "eval_strategy" in case.options:
            given = {"eval_dataset": table(case.rows, 2)} | given
        if kind in ONLINE:

            def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
                answers.append(completion_ids)
                return [float(number % 2) + 0.1 * number for number in range(len(completion_ids))]

            given["reward_funcs"] = reward
        torch.manual_seed(2)  # the start of an adapter that the trainer adds
        trainer = trainer_class(
            model=with_a_score(model) if kind == "reward" else model,
            processing_class=tokenizer,
            args=config_class(output_dir=str(folder), **options),
            train_dataset=table(case.rows),
            callbacks=[Recorder()],
            **given,
        )
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        seen = run(trainer)
        after = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert moved == {name for gradients in seen[1] for name in gradients}
        for entry in seen[0]:
            drop_what_rounding_decides(entry)
        return [seen, after, answers]

    return use


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not {"kind", "name"} <= set(metafunc.fixturenames):
        return
    wanted = [place for place in CASES if metafunc.config.getoption("--every-case") or place[1] in SUITE[place[0]]]
    metafunc.parametrize(("kind", "name"), wanted)


def test_trl_trains_as_with_a_stock_model(
    models: Path, tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[kind, name]
    folder = written(models, case.family)
    plain = stock_model(folder, adapter=not case.whole)
    fast = fast_model(folder, plain, adapter=not case.whole)
    ran = runs(monkeypatch)
    if kind in ONLINE and "generation_kwargs" not in case.options:  # of equal tokens
        made: list[torch.Tensor] = []
        own = base_of(fast).generate
        base_of(fast).generate = lambda *given, **named: made.append(own(*given, **named)) or made[-1]
        base_of(plain).generate = lambda *given, **named: (torch.randint(1 << 62, (1,)), made.pop(0))[1]  # as ours draws
        compare(trained_by(kind, case, tmp_path), fast, plain)
    else:
        compare(trained_by(kind, case, tmp_path), plain, fast)
    assert bool(ran) != case.own
    if kind in ONLINE:
        assert loop_of(base_of(fast)).generator._generator is not None  # TRL's `generate` reached it
        assert [line for line in dispatch._said if line.startswith("generate: ")] == []


@pytest.mark.parametrize("whole", first_of([True, False]))
def test_sft_and_then_dpo_of_the_same_model(models: Path, tmp_path: Path, whole: bool) -> None:
    """The reference of a whole model is given: a copy of what SFT has made of it."""
    folder = written(models, "qwen3")
    plain = stock_model(folder, adapter=not whole)

    def use(model: Any) -> Any:
        first = trained_by("sft", Case("messages", {"packing": True, "max_length": 64}), tmp_path)(model)
        reference = {"ref_model": copy.deepcopy(model)} if whole else {}
        return [first, trained_by("dpo", Case("pairs", given=reference), tmp_path)(model)]

    compare(use, plain, fast_model(folder, plain, adapter=not whole))


@pytest.mark.parametrize("whole", [True, False])
def test_answers_have_the_precision_of_training(models: Path, tmp_path: Path, whole: bool) -> None:
    """Autocast is around the forward of the model that is trained: of a whole one it counts for generation too, PEFT's
    `generate` goes past it. Afterwards the fast layers train."""
    folder = written(models, "llama")
    fast = fast_model(folder, stock_model(folder, adapter=not whole), adapter=not whole)
    trained_by("grpo", Case("pairs", GROUPS | {"bf16": True}), tmp_path)(fast)
    kept = loop_of(base_of(fast)).generator
    assert kept._dtype == (torch.bfloat16 if whole else torch.float32)
    assert kept._generator is not None


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", ["a copy", "off"])
def test_the_reference_of_a_step_rebuilds_nothing(
    models: Path, tmp_path: Path, kind: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's reference is a copy of the adapter, or the model without it: both run on the fast layers, between a forward and its
    backward, while the adapter that trains has its values."""
    folder = written(models, "llama")
    case = Case("pairs", {"max_steps": 4}, {} if kind == "a copy" else {"peft_config": ADDED})
    plain = stock_model(folder, adapter=kind == "a copy")
    fast = fast_model(folder, plain, adapter=kind == "a copy")
    engine = engine_of(fast)
    assert engine is not None
    if captured:
        with_captured_layers(fast)
    ran = runs(monkeypatch)
    rebuilt = []
    own = FastCausalLM.adapters_from

    def counted(self: Any, others: Any) -> Any:
        rebuilt.append(self.rebuilt)
        return own(self, others)

    monkeypatch.setattr(FastCausalLM, "adapters_from", counted)
    compare(trained_by("dpo", case, tmp_path), plain, fast)
    assert len(rebuilt) == 4
    assert rebuilt == [rebuilt[0]] * 4
    assert captured or len(ran) == 8
    assert not any("transformers layers" in line for line in dispatch._said)


@pytest.mark.parametrize("off", [True, False])
def test_another_adapter_of_a_quantized_model(models: Path, off: bool) -> None:
    """Its GEMMs read adapters where they are, without copies: a forward with others, and a backward that waited for it."""
    found = []
    for between in (False, True):
        model, _ = FastLanguageModel.from_pretrained(str(written(models, "llama")), max_seq_length=512, load_in_4bit=True)
        model = FastLanguageModel.get_peft_model(model, r=4)
        model.add_adapter("other", model.peft_config["default"])
        for number, parameter in enumerate(p for name, p in model.named_parameters() if "lora_B" in name):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
        ids = torch.arange(20, 60).view(2, 20)
        with use_adapter(model, None if off else "other"), loop_of(base_of(model)).own_layers(), torch.no_grad():
            expected = model(ids, labels=ids).loss
        loss = model(ids, labels=ids).loss
        if between:
            engine = engine_of(model)
            assert engine is not None
            rebuilt = engine.rebuilt
            with use_adapter(model, None if off else "other"), torch.no_grad():
                torch.testing.assert_close(model(ids, labels=ids).loss, expected, rtol=2e-5, atol=0)
            assert engine.rebuilt == rebuilt
            assert abs(float(loss - expected)) > 1e-3
        loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
