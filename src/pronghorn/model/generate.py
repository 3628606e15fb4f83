"""Greedy answers to many prompts at once, for evaluation, the demo and chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer: the model's own list, the tokenizer's, and the recipe's (of data.eot_tokens)."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ids = set(own if isinstance(own, list) else [own]) | {tokenizer.eos_token_id}
    ids |= set(tokenizer.convert_tokens_to_ids(list(getattr(tokenizer, "pronghorn_stop_tokens", ()))))
    return sorted(i for i in ids if i is not None)


@torch.no_grad()
def generate_answers(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
                     batch_size: int = 32, progress: Callable[[str, int, int], None] | None = None) -> list[str]:
    """Prompts of similar length share a batch, padded on the left; answers come back in the prompts' order."""
    device = next(model.parameters()).device
    stops = end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers = [""] * len(prompts)
    was_training = model.training
    model.eval()
    try:
        for begin in range(0, len(by_length), batch_size):
            chosen = by_length[begin : begin + batch_size]
            width = max(len(prompts[i]) for i in chosen)
            ids = torch.full((len(chosen), width), pad, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(chosen):
                ids[row, width - len(prompts[i]) :] = torch.tensor(list(prompts[i]))
                mask[row, width - len(prompts[i]) :] = 1
            out = model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), do_sample=False, max_new_tokens=max_new_tokens,
                use_cache=True, pad_token_id=pad, eos_token_id=stops or None, temperature=None, top_p=None, top_k=None,
            )
            for row, i in enumerate(chosen):
                answers[i] = tokenizer.decode(out[row, width:], skip_special_tokens=True).strip()
            if progress:
                progress("answering", min(begin + batch_size, len(prompts)), len(prompts))
    finally:
        model.train(was_training)
    return answers
