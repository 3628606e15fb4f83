"""The table of heads: every file is a head, objectives name them, and what both say of a model is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pronghorn.errors import ModelError
from pronghorn.model import heads
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.heads import HEADS, auto_class, head_in, require_head
from pronghorn.recipe_objective import KINDS
from pronghorn.train.objectives import CLASSES

SMALL = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
)


def test_every_file_is_a_head_and_every_objective_names_one() -> None:
    files = {file.stem for file in Path(heads.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == set(HEADS)
    assert {name: head.name for name, head in HEADS.items()} == {name: name for name in files}
    assert set(CLASSES) == set(KINDS)
    for kind in KINDS.values():
        assert kind.answers == HEADS[kind.head].generates


@pytest.mark.parametrize("name", HEADS)
def test_a_model_that_gets_a_head_is_known_by_it(name: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL.to_dict())
    head, model = HEADS[name], AutoModelForCausalLM.from_config(config)
    require_head(config, "a model", name)
    model = head.attach(model, seed=1)
    assert head_in(model.config) is head
    assert isinstance(auto_class(model.config).from_config(model.config), type(model))
    kept = dict(model.named_parameters())
    assert all(kept[weight].dtype == torch.float32 and not kept[weight].is_meta for weight in head.weights)
    assert install(model) == ""
    engine = engine_of(model)
    assert type(engine.head) is head
    h_ND = torch.randn(6, 32, requires_grad=True)
    engine.head.sample_loss(h_ND, torch.arange(6)).backward()
    assert h_ND.grad.abs().sum(1).all()  # of every row
    others = [other for other in HEADS if other != name and not head.generates]
    for other in others:  # an LM head that was replaced does not come back
        with pytest.raises(ModelError, match=head.title):
            require_head(model.config, "a model", other)
