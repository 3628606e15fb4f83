"""A reward model: the language model's layers, and a linear head that gives one number (`score`) in place of the LM head.

It is transformers' own sequence classifier with one label, so whatever saves, adapts or merges it finds usual names. It is made
of a loaded language model, whatever its weights are stored in, or loaded from the files of a classifier. The head is float32 in
every precision, and so is its product. N = rows whose score is read, D = model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from pronghorn.errors import ModelError, counted
from pronghorn.model.causal_lm import FastCausalLM, base_of
from pronghorn.model.final_norm import final_norm
from pronghorn.model.layers.types import GradBuffer
from pronghorn.model.text_stack import beside_text, in_use, is_classifier

HEAD = "score"


def require_head(config: Any, name: str, *, scored: bool) -> None:
    """Whether the model has the head that is asked for, or can get it: `scored`, a score; else an LM head."""
    if is_classifier(config):
        if not scored:
            raise ModelError(
                what="the model is a sequence classifier",
                where=name,
                why="it has no LM head, so it predicts no tokens",
                fix="use the language model it was made from; to continue training the classifier, set objective: reward",
            )
        if config.num_labels != 1:
            raise ModelError(
                what=f"the model is a classifier with {counted(config.num_labels, 'label')}",
                where=name,
                why="a reward is one number",
                fix="use a language model, or a classifier with one label",
            )
    elif scored and type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            what=f"objective: reward is not supported for {config.model_type}",
            where=name,
            why="transformers has no sequence classifier of this family, so nothing could load the result",
            fix="use a text model of another family: Llama, Qwen 3, Gemma 2, Mistral, ...",
        )


def with_score(model: Any, seed: int, device: torch.device | None = None) -> Any:
    """The classifier that has this model's layers. A head that is not in the files is drawn as transformers draws it, from the
    seed, on this device or, by default, on the embeddings'. An existing score becomes float32."""
    if not hasattr(model, HEAD):
        model = _in_place_of_lm_head(model, seed, device)
    model.score = model.score.to(torch.float32)
    return model


def _in_place_of_lm_head(model: Any, seed: int, device: torch.device | None) -> Any:
    config, text = model.config, model.config.get_text_config()
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    config.num_labels, config.architectures = 1, [kind.__name__]
    with torch.device("meta"):
        scored: Any = kind(config)
    if beside_text(model) or not isinstance(getattr(scored, HEAD, None), nn.Linear) or not hasattr(scored, "model"):
        raise ModelError(
            what=f"objective: reward is not supported for {config.model_type}",
            why=f"{kind.__name__} is not a text model with a linear head named score",
            fix="use a text model of another family: Llama, Qwen 3, Gemma 2, Mistral, ...",
        )
    scored.model, scored.name_or_path = model.model, model.name_or_path
    if getattr(model, "_weight_conversions", None):
        scored._weight_conversions = model._weight_conversions
    device = device or model.get_input_embeddings().weight.device
    drawn = torch.empty(1, text.hidden_size)
    drawn.normal_(0.0, float(getattr(text, "initializer_range", 0.02)), generator=torch.Generator().manual_seed(seed))
    trained = any(parameter.requires_grad for parameter in model.parameters())
    scored.score.weight = nn.Parameter(drawn.to(device), requires_grad=trained)
    return scored.train(model.training)


def set_padding(model: Any, pad_id: int) -> None:
    """The classifier's own forward reads the score at a row's last token that is not this one."""
    config = base_of(model).config
    config.pad_token_id = config.get_text_config().pad_token_id = pad_id


def packed_scores(engine: FastCausalLM, **inputs: Any) -> Tensor:
    """[N] of the loss rows; `inputs` as `FastCausalLM.packed_rows` takes them."""
    rows = engine.packed_rows(**inputs)
    with torch.autocast(rows.h_ND.device.type, enabled=False):
        return scores_of(engine, rows.h_ND, rows.grad_buffer)


def scores_of(engine: FastCausalLM, h_ND: Tensor, grad_buffer: GradBuffer) -> Tensor:
    """[N] of rows out of `FastCausalLM.hidden`. Outside of autocast."""
    return _scores(engine.model, final_norm(h_ND, engine.norm, grad_buffer, engine.layers[-1].extra))


def own_scores(model: Any, rows: Tensor, **inputs: Any) -> Tensor:
    """[N] of these rows of one packed batch, on transformers' layers."""
    base = base_of(model)
    x_TD = base.model(**inputs, use_cache=False).last_hidden_state[0]
    with torch.autocast(x_TD.device.type, enabled=False):
        return _scores(base, x_TD.index_select(0, rows))


def _scores(model: Any, x_ND: Tensor) -> Tensor:
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    return F.linear(x_ND.to(wide), in_use(model.score).weight.to(wide))[:, 0]
