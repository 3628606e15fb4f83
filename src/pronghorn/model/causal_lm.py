"""What must hold of a model before it trains on packed documents.

transformers separates documents by their positions (each starts at 0) as long as there is no cache and no mask.
"""

from __future__ import annotations

from typing import Any

import torch

from pronghorn.errors import ModelError


@torch.no_grad()
def require_isolated_documents(model: Any, device: torch.device, vocabulary: int) -> None:
    """Two documents in one pack: changing the first must not change the second. Milliseconds, before anything trains."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]], device=device)
    ids = torch.arange(11, device=device)[None] % vocabulary
    changed = ids.clone()
    changed[0, :5] = (ids[0, :5] + 7) % vocabulary
    was_training = model.training
    model.eval()
    one, other = (model(input_ids=x, position_ids=positions, use_cache=False).logits[0, 5:] for x in (ids, changed))
    model.train(was_training)
    if not torch.equal(one, other):
        raise ModelError(
            what=f"documents in a pack see each other in this model (logits differ by {(one - other).abs().max():.2g})",
            why="its layers do not separate documents by their positions, so packing would train on mixed-up text",
            fix="use a model type whose transformers layers do: Llama, Qwen, Gemma, Mistral, Phi-3, ...",
        )
