"""Whether packed documents attend to each other, asked of the model before it trains."""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.errors import ModelError
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import base_of, engine_of, running
from pronghorn.model.heads import head_in
from pronghorn.model.layers.types import Documents
from pronghorn.model.text_stack import in_mode
from pronghorn.packs import PackedDocuments


def require_isolated_documents(model: HFModel, device: torch.device, vocabulary: int) -> None:
    """With two documents in one pack, changing the first must not change the second. Takes milliseconds, before training, on
    the layers that will train.

    Equal bits pass. Different bits are a leak, or sums in another order (experts multiply the tokens of all documents
    together). The gradient decides: what a document does not depend on has a gradient of exactly zero.
    """
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]], device=device)
    bounds = torch.tensor([0, 5, 11], dtype=torch.int32, device=device)
    pack = PackedDocuments(cu_seqlens=bounds, positions_T=positions[0], longest=6)
    ids = torch.arange(11, device=device)[None] % vocabulary
    changed = ids.clone()
    changed[0, :5] = (ids[0, :5] + 7) % vocabulary
    engine = engine_of(model)

    def result(x: Tensor, embedded: list[Tensor]) -> Tensor:
        """The result of both documents; their embeddings are appended to the list."""

        def leaf(_module: torch.nn.Module | None, _inputs: object, h: Tensor) -> Tensor:
            embedded.append(h.detach().requires_grad_())
            return embedded[0]

        if engine is not None:
            return engine.hidden(leaf(None, None, engine.embed(x[0])), Documents.of(pack, engine.positions))
        hook = model.get_input_embeddings().register_forward_hook(leaf)
        try:
            inputs, base = {"input_ids": x, "position_ids": positions, "use_cache": False}, base_of(model)
            generates = head_in(base.config).generates  # else its own forward may give a number for a whole text
            found: Tensor = model(**inputs).logits if generates else base.model(**inputs).last_hidden_state
        finally:
            hook.remove()
        return found[0]

    def leaked() -> bool:
        embedded: list[Tensor] = []
        second = running(model, lambda: result(ids, embedded))[5:]
        (gradient,) = torch.autograd.grad(second.float().sum(), embedded[:1])
        return bool(gradient.view(11, -1)[:5].any())  # NaN counts

    with in_mode(model, training=False):
        with torch.no_grad():
            one, other = running(model, lambda: (result(ids, []), result(changed, [])))
        apart = float((one - other)[5:].abs().max())
        mixed = apart != 0.0 and leaked()
    if mixed:
        raise ModelError(
            what=f"packed documents attend to each other in this model (results differ by {apart:.2g})",
            why="its layers do not separate documents by position ids, so packing would mix documents",
            fix="use a model type whose transformers layers do: Llama, Qwen, Gemma, Mistral, Phi-3, ...",
        )
