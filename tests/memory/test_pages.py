"""What answering takes beside a step: as many bytes as the pages have, and enough of them for every slot."""

from __future__ import annotations

import pytest
import test_decoder_layer
import test_gated_delta_mixer
import test_mamba_mixer
import torch

from pronghorn.generation.cache import bytes_of_a_slot, slots_within
from pronghorn.generation.generator import Generator, Request
from pronghorn.generation.sampling import Sampling
from pronghorn.memory.pages import LOGITS, answering_bytes, slots_of, stored_tokens
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.recipe_rollouts import Rollouts
from samples import make_model

MODELS = {
    "llama": make_model,
    "heads by layer": lambda: test_decoder_layer.model_of("gemma4_unified_text", "full", torch.float32),
    "states": lambda: test_gated_delta_mixer.model_of("qwen3_5_text", "full"),
    "states beside pages": lambda: test_mamba_mixer.model_of("falcon_h1", "full"),
    "states of Mamba-2": lambda: test_mamba_mixer.model_of("nemotron_h", "full"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_pages_are_counted_and_hold_all_slots(kind: str) -> None:
    """Also where layers have heads of their own number and width, or states."""
    model = MODELS[kind]()
    install(model)
    spec = Rollouts(prompts=3, answers=4, max_new_tokens=70, slots=6)
    generator = Generator(model, slots=slots_of(spec), tokens=stored_tokens(spec, 100), longest=70, stops=1)
    pages = generator._decoder.states.pages.values()
    stored = sum(tensor.nbytes for pair in pages for tensor in pair)
    nobody = sum(tensor[:1].nbytes for pair in pages for tensor in pair)  # the page that belongs to nobody
    logits = LOGITS * 4 * 6 * model.config.vocab_size
    states = sum(tensor.nbytes for tensor in generator._decoder.states.at_places)
    assert bytes_of_a_slot(generator.engine, torch.float32) * 7 == states
    assert answering_bytes(spec, model.config, 100, 4) == stored - nobody + logits + states
    requests = [Request([5] * 100, [10 * i + one for one in range(4)], 70, Sampling()) for i in range(3)]
    most = []
    for request in requests:
        generator.submit(request)
    with torch.no_grad():
        generator.engine.prepare(torch.float32)
        for _ in generator.run():
            most.append(len(generator._slot))
    assert max(most) == 6  # memory never left a slot empty


def test_states_leave_half_of_the_memory_for_keys_and_values() -> None:
    model = test_gated_delta_mixer.model_of("qwen3_5_text", "full")
    install(model)
    engine = engine_of(model)
    each = bytes_of_a_slot(engine, torch.float32)
    assert [slots_within(engine, torch.float32, 32, room) for room in (0, 20 * each, 1000 * each)] == [1, 10, 32]
    attends = make_model()
    install(attends)
    assert slots_within(engine_of(attends), torch.float32, 32, 0) == 32
