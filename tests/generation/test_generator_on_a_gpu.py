"""Answers on a GPU, where steps are CUDA graphs: transformers' log-probabilities, whatever the buckets."""

from __future__ import annotations

from typing import Any

import pytest
import small_models
import test_decoder_layer
import test_generator
import torch
from torch import Tensor

from pronghorn.generation.generator import Completion, Generator, Request
from pronghorn.generation.sampling import Sampling, key_of
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.text_stack import in_mode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
STOPS = test_generator.STOPS


def model_of(family: str) -> Any:
    model = small_models.model_of(family).cuda()
    assert install(model) == ""
    return model


def log_probs_of(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Of the answer's tokens, by transformers' layers, in float32."""
    ids = torch.tensor([prompt + answer], device="cuda")
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logits.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    for _ in range(new):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt) :].tolist()


def tokens_of(found: list[list[Completion]]) -> list[list[list[int]]]:
    return [[answer.tokens for answer in answers] for answers in found]


def assert_likely(model: Any, request: Request, answers: list[Completion], apart: float) -> None:
    for answer in answers:
        truth = log_probs_of(model, list(request.prompt), answer.tokens)
        torch.testing.assert_close(torch.tensor(answer.log_probs), truth, rtol=apart, atol=apart)


@pytest.mark.parametrize("family", [*small_models.MODELS, *small_models.WITH_STATES])
@torch.no_grad()
def test_answers_are_those_of_transformers(family: str) -> None:
    """Greedy and drawn, more answers than slots, several to a prompt."""
    model = model_of(family)
    generator = Generator(model, slots=5, tokens=3000, longest=64)
    rules = [Sampling(temperature=0.0), Sampling(), Sampling(temperature=0.7, top_k=20, top_p=0.9)]
    requests = [
        Request(prompt, [key_of(i, j) for j in range(3)], 20 + i, rules[i % 2], stops=STOPS[: i % 3])
        for i, prompt in enumerate(test_generator.prompts_of(7, longest=150))
    ]
    found = generator.generate(requests)
    tokens = tokens_of(found)
    assert tokens_of(generator.generate(requests)) == tokens  # from graphs only
    generator._decoder.captures = False
    assert tokens_of(generator.generate(requests)) == tokens
    model.eval()
    for request, answers in zip(requests, found, strict=True):
        if request.rule.temperature == 0:
            assert len({tuple(answer.tokens) for answer in answers}) == 1
            assert answers[0].tokens == greedy(model, list(request.prompt), len(answers[0].tokens))
        assert_likely(model, request, answers, 2e-4)


@torch.no_grad()
def test_adapters_change_under_the_graphs() -> None:
    """After a large change of the adapters, and without them, the graphs draw from the model as it is now."""
    model = model_of("qwen3")
    engine, generator = engine_of(model), Generator(model, slots=8, tokens=3000, longest=64)
    requests = [Request(prompt, [key_of(i)], 20, Sampling()) for i, prompt in enumerate(test_generator.prompts_of(4))]
    first = generator.generate(requests)
    graphs = len(generator._decoder._buckets)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.add_(0.3 * torch.randn_like(parameter))
    second = generator.generate(requests)
    with engine.adapters_off():
        without = generator.generate(requests)
    assert first != second != without
    assert len(generator._decoder._buckets) == graphs
    model.eval()
    for request, answers in zip(requests, second, strict=True):
        assert_likely(model, request, answers, 2e-4)
    with model.disable_adapter():
        for request, answers in zip(requests, without, strict=True):
            assert_likely(model, request, answers, 2e-4)


@torch.no_grad()
def test_weights_that_are_cast_change_under_the_graphs() -> None:
    """Full fine-tuning: weights in float32, of which each `prepare` makes a copy in 16 bits."""
    model = small_models.model_of("qwen2", "full").cuda()
    assert install(model) == ""
    requests = [Request(prompt, [key_of(i)], 20, Sampling()) for i, prompt in enumerate(test_generator.prompts_of(8))]
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):  # which would keep transformers' casts
        generator = Generator(model, slots=8, tokens=3000, longest=64)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
            found = generator.generate(requests)
            generator.engine.prepare(torch.bfloat16)  # as a step in between does
            with in_mode(model, training=False):
                apart = [
                    (torch.tensor(answer.log_probs) - log_probs_of(model, list(request.prompt), answer.tokens)).abs().mean()
                    for request, (answer,) in zip(requests, found, strict=True)
                ]
            assert float(torch.stack(apart).mean()) < 0.05


@torch.no_grad()
def test_16_bits() -> None:
    model = test_decoder_layer.model_of("llama", "lora", torch.bfloat16).cuda()
    assert install(model) == ""
    generator = Generator(model, slots=64, tokens=20_000, longest=64)
    requests = [
        Request(p, [key_of(i, j) for j in range(8)], 64, Sampling()) for i, p in enumerate(test_generator.prompts_of(20))
    ]
    found = generator.generate(requests)
    model.eval()
    apart = [
        (torch.tensor(answer.log_probs) - log_probs_of(model, list(request.prompt), answer.tokens)).abs().mean()
        for request, answers in zip(requests, found, strict=True)
        for answer in answers
    ]
    assert float(torch.stack(apart).mean()) < 0.03  # random weights; a trained model's logits are rounder
