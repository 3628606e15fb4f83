"""What answering takes beside a step: as many bytes as the pages have, and enough of them for every slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_decoder_layer
import torch

from pronghorn.generation.generator import Generator, Request
from pronghorn.generation.sampling import Sampling
from pronghorn.memory.pages import LOGITS, answering_bytes, slots_of, stored_tokens
from pronghorn.model.causal_lm import install
from pronghorn.recipe_rollouts import Rollouts
from samples import make_model


def gemma4() -> Any:
    return test_decoder_layer.model_of("gemma4_unified_text", "full", torch.float32)


@pytest.mark.parametrize("make", [make_model, gemma4])
def test_the_pages_are_counted_and_hold_all_slots(make: Callable[[], Any]) -> None:
    """Also where layers have heads of their own number and width."""
    model = make()
    install(model)
    spec = Rollouts(prompts=3, answers=4, max_new_tokens=70, slots=6)
    generator = Generator(model, slots=slots_of(spec), tokens=stored_tokens(spec, 100), longest=70, stops=1)
    pages = generator._decoder.states.pages.values()
    stored = sum(tensor.nbytes for pair in pages for tensor in pair)
    nobody = sum(tensor[:1].nbytes for pair in pages for tensor in pair)  # the page that belongs to nobody
    logits = LOGITS * 4 * 6 * model.config.vocab_size
    assert answering_bytes(spec, model.config, 100, 4) == stored - nobody + logits
    requests = [Request([5] * 100, [10 * i + one for one in range(4)], 70, Sampling()) for i in range(3)]
    most = []
    for request in requests:
        generator.submit(request)
    with torch.no_grad():
        generator.engine.prepare(torch.float32)
        for _ in generator.run():
            most.append(len(generator._slot))
    assert max(most) == 6  # memory never left a slot empty
