"""Multiple choice: which of a question's choices the model finds most likely, by the sum of the log-probabilities of its tokens
(`multiple_choice`), and by that sum over the number of its characters (`multiple_choice_norm`), as lm-evaluation-harness does.

Nothing is generated. A choice follows the prompt as an answer would, and its tokens are scored; the end of a turn is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pronghorn.evaluation.metrics import Scores
from pronghorn.evaluation.questions import Question
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.model.text_stack import in_mode

TOKENS = 16_384  # of a batch, padding included
LOGITS = 1 << 26  # of a batch: 256 MB in float32


def ask_choices(
    model: HFModel, tokenizer: Tokenizer, questions: Sequence[Question], progress: Callable[[str, int, int], None] | None = None
) -> list[tuple[str, Scores]]:
    """For each question the choice that is likeliest by its sum, and whether the right one is, by both measures."""
    backend = tokenizer.backend_tokenizer
    pairs = [
        (question.ids, backend.encode(choice, add_special_tokens=False).ids)
        for question in questions
        for choice in question.choices
    ]
    sums = iter(log_probs(model, pairs, pad=tokenizer.pad_token_id or 0, progress=progress))
    found = []
    for question in questions:
        scores = {choice: next(sums) for choice in question.choices}
        summed = max(scores, key=lambda choice: scores[choice])
        per_letter = max(scores, key=lambda choice: scores[choice] / len(choice))
        right = question.expected.strip()
        found.append(
            (
                summed,
                {"multiple_choice": float(summed.strip() == right), "multiple_choice_norm": float(per_letter.strip() == right)},
            )
        )
    return found


@torch.no_grad()
def log_probs(
    model: HFModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    pad: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[float]:
    """Summed log-probability of each continuation after its prompt. Rows of like length share a batch, padded on the left."""
    device = next(model.parameters()).device
    vocabulary = model.get_output_embeddings().weight.shape[0]
    sums = [0.0] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i])))
    with in_mode(model, training=False):
        done = 0
        while done < len(order):
            batch = _batch(pairs, order[done:], vocabulary)
            width, kept = max(sum(map(len, pairs[i])) for i in batch), max(len(pairs[i][1]) for i in batch) + 1
            ids = torch.full((len(batch), width), pad, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(batch):
                tokens = [*pairs[i][0], *pairs[i][1]]
                ids[row, width - len(tokens) :] = torch.tensor(tokens)
                mask[row, width - len(tokens) :] = 1
            # with a cache: as in generation, the model's own layers; with the adapter off, the base model's
            out = model(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                use_cache=True,
                logits_to_keep=kept,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0).to(device),
            )
            likely = out.logits[:, :-1].float().log_softmax(-1)
            each = likely.gather(2, ids[:, 1 - kept :, None].to(device)).squeeze(2).double().cpu()
            for row, i in enumerate(batch):
                sums[i] = float(each[row, len(each[row]) - len(pairs[i][1]) :].sum())
            done += len(batch)
            if progress:
                progress("scoring choices", done, len(pairs))
    return sums


def _batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], waiting: Sequence[int], vocabulary: int) -> list[int]:
    """The first of those that wait, as many as there is room for, and at least one."""
    batch: list[int] = []
    width = kept = 0
    for i in waiting:
        width, kept = max(width, sum(map(len, pairs[i]))), max(kept, len(pairs[i][1]) + 1)
        rows = len(batch) + 1
        if batch and (rows * width > TOKENS or rows * kept * vocabulary > LOGITS):
            break
        batch.append(i)
    return batch
