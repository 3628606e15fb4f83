"""`fast_generate` in vLLM's shape: texts, tokens, limits, stops, seeds, and whose weights generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from api_parts import adapted, load, step
from pronghorn.compat.dropin.instance import set_generation
from pronghorn.compat.dropin.sampling_params import SamplingParams, of
from pronghorn.compat.outer_loop import loop_of
from pronghorn.errors import CommandError, ModelError
from pronghorn.model.causal_lm import ENGINE, base_of, engine_of
from tables import table

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPT = "hello"


@pytest.fixture(scope="module")
def trained(tiny_model: Path) -> tuple[Any, Any]:
    model, tokenizer = adapted(tiny_model)
    step(model)
    return model, tokenizer


def own(model: Any, ids: list[int], new: int = 10) -> list[int]:
    """transformers' loop on its own layers."""
    base = base_of(model)
    with loop_of(base).own_layers():
        found = type(base).generate(
            base.eval(), torch.tensor([ids]), do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0
        )
    return found[0, len(ids) :].tolist()  # type: ignore[no-any-return]


def test_an_answer_has_vllms_shape(trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    ids = tokenizer(PROMPT).input_ids
    with model.disable_adapter():
        expected = own(model, ids)
    (found,) = model.fast_generate(PROMPT, sampling_params=GREEDY, lora_request=None)
    (one,) = found.outputs
    assert (found.prompt, found.prompt_token_ids, found.finished) == (PROMPT, ids, True)
    assert (one.index, one.token_ids, one.finish_reason, one.stop_reason) == (0, expected, "length", None)
    assert one.text == tokenizer.decode(expected, skip_special_tokens=True)
    with torch.no_grad(), model.disable_adapter():
        logits = model(torch.tensor([ids + expected]), use_cache=False).logits[0, len(ids) - 1 : -1]
    told = logits.log_softmax(-1).gather(1, torch.tensor(expected)[:, None]).sum()
    assert one.cumulative_logprob == pytest.approx(float(told), abs=1e-4)
    for prompts in ([PROMPT], ids, [ids], {"prompt_token_ids": ids}, [{"prompt": PROMPT}]):
        assert model.fast_generate(prompts, GREEDY)[0].outputs[0].token_ids == expected
    assert len(model.fast_generate([PROMPT, ids], [GREEDY, SamplingParams(max_tokens=3)])[1].outputs[0].token_ids) == 3


def test_the_adapter_of_a_folder_is_for_one_call(trained: tuple[Any, Any], tiny_model: Path, tmp_path: Path) -> None:
    model, tokenizer = trained
    model.save_lora(tmp_path)
    ids = tokenizer(PROMPT).input_ids
    with_adapter = own(model, ids)
    other, _ = adapted(tiny_model)
    for name, parameter in other.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    weights = {name: weight.clone() for name, weight in other.state_dict().items()}
    before, engine = own(other, ids), engine_of(other)
    request = other.load_lora(tmp_path)
    assert request.lora_path == str(tmp_path)
    found = other.fast_generate(PROMPT, GREEDY, lora_request=request)[0].outputs[0].token_ids
    assert found == with_adapter
    assert found != before
    assert all(torch.equal(weight, weights[name]) for name, weight in other.state_dict().items())
    assert own(other, ids) == before
    assert other.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=10, eos_token_id=None)[0, 5:].tolist() == before
    rebuilt = engine.rebuilt  # type: ignore[union-attr]
    other.fast_generate(PROMPT, GREEDY, lora_request=request)
    assert engine.rebuilt == rebuilt  # type: ignore[union-attr]  # weights were copied in place
    with pytest.raises(ModelError, match="does not belong"):
        adapted(tiny_model, r=8)[0].load_lora(tmp_path)
    plain, _ = load(tiny_model)
    with pytest.raises(CommandError, match="has no adapter"):
        plain.load_lora(tmp_path)
    assert plain.fast_generate(PROMPT, GREEDY)[0].outputs[0].token_ids == own(plain, ids)
    with pytest.raises(CommandError, match="lora_request is a str"):
        other.fast_generate(PROMPT, GREEDY, lora_request=str(tmp_path))


def test_draws_stops_and_limits(trained: tuple[Any, Any]) -> None:
    model, _ = trained
    sampled = [
        [one.token_ids for one in model.fast_generate(PROMPT, SamplingParams(n=3, seed=seed, max_tokens=9))[0].outputs]
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    assert sampled[0][0] != sampled[0][1]
    whole = model.fast_generate(PROMPT, GREEDY)[0].outputs[0]
    middle = whole.text[2:4]
    for included in (True, False):
        params = SamplingParams(temperature=0, max_tokens=10, stop=[middle, "zz"], include_stop_str_in_output=included)
        cut = model.fast_generate(PROMPT, params)[0].outputs[0]
        end = whole.text.index(middle)
        assert cut.text == whole.text[: end + 2 * included]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", middle)
        assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
        assert len(cut.token_ids) < 10
    token = whole.token_ids[3]
    ended = model.fast_generate(PROMPT, SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[token]))[0].outputs[0]
    assert (ended.token_ids[-1], ended.finish_reason, ended.stop_reason) == (token, "stop", token)
    assert len(model.fast_generate("a" * 500, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0].token_ids) == 12
    assert len(model.fast_generate("a" * 500, GREEDY)[0].outputs[0].token_ids) == 10
    with pytest.raises(CommandError, match="512 tokens, and max_seq_length is 512"):
        model.fast_generate("a" * 512, GREEDY)


def test_special_tokens_end_and_begin(trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop text that is one token stops there; a prompt that begins with BOS gets no second."""
    model, tokenizer = trained
    seen: list[Any] = []
    loop = loop_of(base_of(model))
    answer = loop.answers
    monkeypatch.setattr(loop, "answers", lambda requests, dtype: seen.extend(requests) or answer(requests, dtype))
    model.fast_generate(PROMPT, SamplingParams(max_tokens=2, stop=[tokenizer.eos_token, "<|im_start|>"]))
    assert {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")} <= set(seen[0].stops)
    hook = base_of(model).lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(CommandError) as caught:
        model.fast_generate(PROMPT, GREEDY)
    hook.remove()
    assert "has a hook" in str(caught.value.why)


@table(("given", "words"), [
    ({"temprature": 1.0}, "did you mean `temperature`?"),
    ({"repetition_penalty": 1.2}, "remove repetition_penalty"),
    ({"logprobs": 3}, "remove logprobs"),
    ({"top_p": 0.0}, "above 0, up to 1"),
    ({"max_tokens": 0}, "at least 1"),
    ({"temperature": -1.0}, "at least 0"),
])  # fmt: skip
def test_options_of_sampling_that_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises((CommandError, TypeError)) as caught:
        SamplingParams(**given)
    assert words in str(getattr(caught.value, "fix", caught.value))


def test_sampling_params_of_vllm_itself() -> None:
    class Struct:
        """As vLLM's own is read."""

        __struct_fields__ = ("n", "top_k", "min_p", "output_kind", "logprobs", "_all_stop_token_ids")

        def __init__(self, **given: Any) -> None:
            usual = {"n": 1, "top_k": 0, "min_p": 0.0, "output_kind": 2, "logprobs": None, "_all_stop_token_ids": set()}
            self.__dict__.update(usual | given)

    assert of(Struct(top_k=-1, min_p=0.1)).min_p == 0.1
    assert of({"top_k": -1}).top_k == -1
    with pytest.raises(CommandError, match="logprobs=2"):
        of(Struct(logprobs=2))
    with pytest.raises(CommandError, match="is a int"):
        of(3)


def test_memory_for_answers(tiny_model: Path) -> None:
    model, _ = load(tiny_model, fast_inference=True, gpu_memory_utilization=0.7, max_lora_rank=8, unsloth_vllm_standby=True)
    assert loop_of(model).generator.share == 0.7
    base, tokenizer = load(tiny_model)
    object.__setattr__(base, ENGINE, None)  # as a family without fast layers has it
    with pytest.raises(CommandError, match="fast_inference=True is not supported"):
        set_generation(base, tokenizer, True, None)
    with pytest.raises(CommandError, match="fast_generate cannot run"):
        base.fast_generate(PROMPT, GREEDY)
