"""Memory that answering prompts during a run takes beside its steps: pages of keys and values, states of slots and prompts, and
a decoding step's logits."""

from __future__ import annotations

import math

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.attention.attention_paged import PAGE
from pronghorn.model.families import FAMILIES, heads_of, layer_type, shares_keys
from pronghorn.model.family import ATTENTION, HYBRID
from pronghorn.recipe_rollouts import OWN, Rollouts

LOGITS = 3  # float32 tensors of a row's logits at a time, while it is drawn from


def slots_of(spec: Rollouts) -> int:
    """Answers that are generated at a time."""
    return min(spec.slots, spec.prompts * spec.answers)


def stored_tokens(spec: Rollouts, longest_prompt: int) -> int:
    """Tokens with keys and values in the pages: every slot has an answer of full length, and each prompt is there once."""
    slots = slots_of(spec)
    prompts = min(spec.prompts, -(-slots // spec.answers) + 1)
    return PAGE * (slots * _pages(spec.max_new_tokens) + prompts * _pages(longest_prompt))


def answering_bytes(spec: Rollouts, config: HFConfig, longest_prompt: int, element: int) -> int:
    """`element`: bytes of a number in the run's precision."""
    if spec.engine != OWN:
        return 0
    text = config.get_text_config()
    kinds = [layer_type(text, index) for index in range(int(text.num_hidden_layers))]
    writes = [i for i, kind in enumerate(kinds) if kind in (*ATTENTION, HYBRID) and not shares_keys(text, i)]
    of_a_token = sum(math.prod(heads_of(text, i)) for i in writes)
    kept = stored_tokens(spec, longest_prompt) * 2 * of_a_token * element
    if with_states := sum(kind in ("linear_attention", HYBRID) for kind in kinds):
        kept += 2 * (slots_of(spec) + 1) * with_states * _state_bytes(text, element)
    return kept + LOGITS * 4 * slots_of(spec) * int(text.vocab_size)


def _state_bytes(text: HFConfig, element: int) -> int:
    """The size of a layer with states at one place: a state in float32, and the last inputs of its convolution."""
    J, K, N, V, taps = (int(getattr(text, key)) for key in FAMILIES[text.model_type].states)
    return 4 * N * K * V + (taps - 1) * (2 * J * K + N * V) * element


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)
