"""Model folders with one thing wrong in a small file or in a weight file's header: refused with a sentence, or taken, and then
`check` passes, the model loads, and its loss is the one that transformers computes from the same files.

A changed number that transformers honours makes another model, and a legal one. Silent is what our layers do not honour:
another loss than that of the model's own layers, or a tokenizer with other ids than transformers' own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz.outcomes import Tally, mutated_bytes, mutated_value
from samples import chat_rows, make_model, make_tokenizer, write_rows

TEXT = "user: is 17 + 25 = 42? Ünïcödé, 水, \t tabs\n and ends <|im_end|>"
TOKENS = 96
SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 2, "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}
# Keys of other families and other times, which a file may set without its family knowing them.
STRANGE_KEYS = (
    "sliding_window", "attention_bias", "mlp_bias", "attention_multiplier", "embedding_multiplier", "logits_scaling",
    "residual_multiplier", "final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar", "layer_types",
    "rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "torch_dtype", "dtype", "auto_map",
    "quantization_config", "attn_implementation", "experts_implementation", "text_config", "tokenizer_class", "architectures",
    "model_type", "num_experts", "head_dim", "attention_dropout", "use_cache", "is_decoder", "pretraining_tp",
    "output_attentions", "return_dict", "id2label", "num_labels", "per_layer_config", "base_model_tp_plan",
    "chunk_size_feed_forward", "tie_word_embeddings", "hidden_act",
)  # fmt: skip
STRANGE_VALUES = (
    None, True, False, 0, 1, 2, 5, -1, -64, 0.5, 1e-30, 1e30, 10**7, 10**12, 10**30, "64", "silu", "relu", "eager",
    "somebody/kernels", "float16", [], [0], ["full_attention"], ["sliding_attention", "sliding_attention"], {},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}, {"rope_type": "yarn", "factor": -2.0},
    {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}, {"a": 1}, float("nan"), float("inf"),
)  # fmt: skip
SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = (5, 3, 2, 1, 1, 2, 1)  # how often each of SMALL, SINGLE and INDEX is chosen


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    from transformers.utils import logging

    os.environ["PRONGHORN_CACHE"] = str(folder / "cache")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    bases = {family: _base(family, folder / family) for family in FAMILIES}
    rows = write_rows(folder / "train.jsonl", chat_rows(4))
    _tried(bases["llama"], folder, rows, used=True)  # imports everything before the first fork, and must pass
    tally = Tally("model_folders", count, seed)
    for number in range(count):
        chance = tally.random(number)
        family = chance.choice(("llama", "llama", *FAMILIES))
        name = chance.choices((*SMALL, SINGLE, INDEX), WEIGHTS)[0]
        source = folder / f"{family}-sharded" if name == INDEX else bases[family]
        content, what = _mutated(name, (source / name).read_bytes(), chance)
        target = folder / "model"

        used = number % 3 == 0 or name == "generation_config.json"  # it takes as long as all the rest

        def work(
            source: Path = source, name: str = name, content: bytes = content, target: Path = target, used: bool = used
        ) -> str:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            for file in source.iterdir():
                os.link(file, target / file.name)
            (target / name).unlink()
            (target / name).write_bytes(content)
            with contextlib.redirect_stderr(io.StringIO()):
                wrong = _tried(target, folder, rows, used=used)
            return f"silent\n{wrong}" if wrong else "same"

        tally.add(number, f"{family}, {name}: {what}", work)
    return tally.outcomes


def _base(family: str, folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if family == "llama":
        model = make_model()
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family]))
    tokenizer = make_tokenizer()
    for target, size in ((folder, "1GB"), (folder.with_name(f"{family}-sharded"), "40KB")):
        model.save_pretrained(target, max_shard_size=size)
        tokenizer.save_pretrained(target)
        special = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>", "lstrip": False, "normalized": False}}
        (target / "special_tokens_map.json").write_text(json.dumps(special))
    return folder


def _mutated(name: str, content: bytes, chance: random.Random) -> tuple[bytes, str]:
    if name == SINGLE:
        return _mutated_header(content, chance)
    if chance.random() < 0.25:
        return mutated_bytes(content, chance)
    plain = json.loads(content)
    if name != "tokenizer.json" and isinstance(plain, dict) and chance.random() < 0.5:
        key = chance.choice((*STRANGE_KEYS, *plain)) if name == "config.json" else chance.choice(list(plain) or [""])
        value = chance.choice(STRANGE_VALUES)
        return json.dumps(plain | {key: value}).encode(), f"{key} = {value!r}"
    changed, what = mutated_value(_without_vocabulary(plain, chance), chance)
    return json.dumps(changed).encode("utf-8", "surrogatepass"), what


def _without_vocabulary(plain: Any, chance: random.Random) -> Any:
    """Of a tokenizer.json, mostly the part that is not 259 equal entries: the vocabulary goes last, where it is seldom met."""
    if isinstance(plain, dict) and isinstance(plain.get("model"), dict) and chance.random() < 0.5:
        return {key: value for key, value in plain.items() if value is not None} | {"model": plain["model"]}
    return plain


def _mutated_header(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    length = int.from_bytes(content[:8], "little")
    header, tensors = content[8 : 8 + length], content[8 + length :]
    kind = chance.random()
    if kind < 0.2:
        other = chance.choice((0, 1, length - 1, length + 1, length + 8, 2 * length, 1 << 31, 1 << 63, (1 << 64) - 1))
        return other.to_bytes(8, "little") + header + tensors, f"a header of {other} bytes"
    if kind < 0.5:
        changed, what = mutated_bytes(header, chance)
    else:
        value, what = mutated_value(json.loads(header), chance)
        changed = json.dumps(value).encode("utf-8", "surrogatepass")
    return len(changed).to_bytes(8, "little") + changed + tensors, f"header: {what}"


def _tried(model: Path, folder: Path, rows: Path, *, used: bool) -> str:
    """What is wrong with the result; empty: nothing. `check`, then loading, then one forward beside transformers' own."""
    from pronghorn.recipe import Recipe
    from pronghorn.train.setup.check import check_run

    recipe = Recipe.model_validate({
        "model": str(model), "precision": "fp32", "lora": {"r": 4}, "output": str(folder / "run"),
        "data": {"train": [str(rows)], "max_length": 128, "workers": 0},
        "train": {"steps": 1, "batch_tokens": 256, "capacity": 256},
    })  # fmt: skip
    check_run(recipe, report=lambda *_: None)
    wrong = _wrong_tokenizer(str(model)) or _wrong_loss(str(model))
    if used:
        _use(str(model), folder / "saved")
    return wrong


def _use(model: str, target: Path) -> None:
    """What a run does with it later: an answer, in 4 bits, and a checkpoint's tokenizer."""
    import torch

    from pronghorn.data.encode.tokens import load_tokenizer
    from pronghorn.generation.answering import answers
    from pronghorn.model.causal_lm import install
    from pronghorn.model.load import load_model

    tokenizer = load_tokenizer(model)
    loaded = load_model(model, torch.float32, torch.device("cpu"), storage="nf4")
    install(loaded)
    answers(loaded, tokenizer, [[5, 6, 7]], max_new_tokens=2)
    tokenizer.save_pretrained(str(target))


def _wrong_tokenizer(model: str) -> str:
    from transformers import AutoTokenizer

    from pronghorn.data.encode.tokens import load_tokenizer

    stock = AutoTokenizer.from_pretrained(model)
    stock.backend_tokenizer.no_truncation()
    stock.backend_tokenizer.no_padding()
    ours, theirs = load_tokenizer(model)(TEXT)["input_ids"], stock(TEXT)["input_ids"]
    return "" if ours == theirs else f"{len(ours)} tokens, transformers' own has {len(theirs)}, and others"


def _wrong_loss(model: str) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    from pronghorn.model.causal_lm import install
    from pronghorn.model.load import load_model

    ours = load_model(model, torch.float32, torch.device("cpu"))
    vocabulary = int(ours.get_input_embeddings().weight.shape[0])
    ids = torch.randint(0, vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    own_layers = install(ours)
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = [float(one.train()(input_ids=ids, labels=ids, use_cache=False).loss.detach()) for one in (ours, stock)]
    if not own_layers and not abs(losses[0] - losses[1]) <= 1e-4 * max(1.0, abs(losses[1])) and losses[1] == losses[1]:
        return f"the loss is {losses[0]:.6f}, transformers' own {losses[1]:.6f}"
    return ""
