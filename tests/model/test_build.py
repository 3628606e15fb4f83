"""Which layer is built for a model's own: in FP8 or not, and what it can do."""

from __future__ import annotations

import copy

from test_fp8_gemms import FAMILIES, engine, model_of
from transformers import AutoModelForCausalLM

from pronghorn.model.causal_lm import FastCausalLM, install


def test_who_can_do_the_mlp_in_pieces() -> None:
    assert engine(model_of("llama")).can_chunk_mlp
    assert engine(model_of("llama", stored="nf4")).can_chunk_mlp
    trained = AutoModelForCausalLM.from_config(FAMILIES["llama"])
    assert install(trained, fp8=True) == ""
    assert all(layer.fp8 for layer in engine(trained).layers)
    assert not engine(trained).can_chunk_mlp


def test_layers_that_are_not_stored_so_are_plain() -> None:
    model = model_of("llama", stored="nf4", fast=False)
    assert install(copy.deepcopy(model)) == ""
    plain = FastCausalLM(model.get_base_model())
    assert not any(layer.fp8 for layer in plain.layers)
