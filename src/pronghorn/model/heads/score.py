"""The score of a reward model: a linear head that gives one number, in place of the LM head.

It is transformers' own sequence classifier with one label, so whatever saves, adapts or merges it finds usual names. It is made
of a loaded language model, whatever its weights are stored in, or loaded from the files of a classifier. The head is float32 in
every precision, and so is its product. N = rows whose score is read, D = model width.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

from pronghorn.errors import ModelError, counted
from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.model.head import Head, Outputs, PackedRows
from pronghorn.model.text_stack import beside_text, in_use
from pronghorn.packs import PackedBatch


class ScoreHead(Head):
    name, title, gives, one_per_document = "score", "a reward model", "scores", True
    weights, task, pipeline = ("score.weight",), "SEQ_CLS", "text-classification"
    usage = """\
rows = [[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]]
inputs = tokenizer.apply_chat_template(rows, return_dict=True, return_tensors="pt")
reward = model(**inputs).logits[:, 0]"""
    suffix: ClassVar[str] = "ForSequenceClassification"
    kinds: ClassVar[Any] = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING  # transformers' class, by the config's

    @classmethod
    def fits(cls, architecture: str) -> bool:
        return architecture.endswith(cls.suffix)

    @classmethod
    def auto_class(cls, config: HFConfig) -> Any:
        return AutoModelForSequenceClassification

    @classmethod
    def require(cls, config: HFConfig, name: str) -> None:
        if any(map(cls.fits, getattr(config, "architectures", None) or ())):
            if config.num_labels != 1:
                raise ModelError(
                    what=f"the model is a classifier with {counted(config.num_labels, 'label')}",
                    where=name,
                    why=f"{cls.title} gives one number",
                    fix="use a language model, or a classifier with one label",
                )
        elif type(config) not in cls.kinds:
            raise cls._not_supported(config, f"transformers has no class {cls.suffix} of this family", name)

    @classmethod
    def _not_supported(cls, config: HFConfig, why: str, where: str = "") -> ModelError:
        return ModelError(
            what=f"{config.model_type} cannot become {cls.title}",
            where=where,
            why=f"{why}, so nothing could load the result",
            fix="use a text model of another family: Llama, Qwen 3, Gemma 2, Mistral, ...",
        )

    @classmethod
    def attach(cls, model: HFModel, seed: int, device: torch.device | None = None) -> Any:
        """The classifier that has this model's layers. Its head is drawn as transformers draws it."""
        if not hasattr(model, "score"):
            model = cls._in_place_of_lm_head(model, seed, device)
        model.score = model.score.to(torch.float32)
        return model

    @classmethod
    def _in_place_of_lm_head(cls, model: HFModel, seed: int, device: torch.device | None) -> Any:
        config, text = model.config, model.config.get_text_config()
        kind = cls.kinds[type(config)]
        config.num_labels, config.architectures = 1, [kind.__name__]
        with torch.device("meta"):
            scored: Any = kind(config)
        if beside_text(model) or not isinstance(getattr(scored, "score", None), nn.Linear) or not hasattr(scored, "model"):
            raise cls._not_supported(config, f"{kind.__name__} is not a text model with a linear head named score")
        scored.model, scored.name_or_path = model.model, model.name_or_path
        if getattr(model, "_weight_conversions", None):
            scored._weight_conversions = model._weight_conversions
        device = device or model.get_input_embeddings().weight.device
        drawn = torch.empty(1, text.hidden_size)
        drawn.normal_(0.0, float(getattr(text, "initializer_range", 0.02)), generator=torch.Generator().manual_seed(seed))
        trained = any(parameter.requires_grad for parameter in model.parameters())
        scored.score.weight = nn.Parameter(drawn.to(device), requires_grad=trained)
        return scored.train(model.training)

    @classmethod
    def set_padding(cls, base: HFModel, pad_id: int) -> None:
        """The classifier's own forward reads the score at a row's last token that is not this one."""
        base.config.pad_token_id = base.config.get_text_config().pad_token_id = pad_id

    @classmethod
    def loading_options(cls, pad_id: int) -> str:
        return f", num_labels=1, pad_token_id={pad_id}"

    def outputs(self, rows: PackedRows) -> Outputs:
        with torch.autocast(rows.h_ND.device.type, enabled=False):
            return Outputs(self.scores(self.stack.model, self.normed(rows.h_ND, rows.grad_buffer)))

    @classmethod
    def own_outputs(cls, base: HFModel, pack: PackedBatch) -> Outputs:
        x_TD = base.model(input_ids=pack.ids_T[None], position_ids=pack.position_ids, use_cache=False).last_hidden_state[0]
        with torch.autocast(x_TD.device.type, enabled=False):
            return Outputs(cls.scores(base, x_TD.index_select(0, pack.loss_rows)))

    def sample_loss(self, h_ND: Tensor, labels_N: Tensor) -> Tensor:
        return self.scores(self.stack.model, self.normed(h_ND)).sum()

    @classmethod
    def scores(cls, base: HFModel, x_ND: Tensor) -> Tensor:
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        return F.linear(x_ND.to(wide), in_use(base.score).weight.to(wide))[:, 0]


HEAD = ScoreHead
