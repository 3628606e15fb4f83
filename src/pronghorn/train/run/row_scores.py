"""`pronghorn data audit --score`: one forward pass of the model, before training, over all training rows.

It gives the loss of each row, and how alike it is to the held-out rows: the cosine of the mean state that the LM head reads at
the row's labels, with the mean of such states of the held-out rows, each of length 1.

N = loss rows of a batch, D = width, R = rows.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.data.audit.scores import Floats, RowScores, of_losses
from pronghorn.data.encode.tokens import TokenTable, padding_id
from pronghorn.data.pack.loader import evaluation_batches
from pronghorn.errors import CommandError
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.load import DTYPES, load_base, load_model
from pronghorn.packs import IGNORED
from pronghorn.recipe import Recipe
from pronghorn.train.setup.setup import look_ahead
from pronghorn.train.source.source import Report


def score_rows(recipe: Recipe, table: TokenTable, held: TokenTable | None, report: Report) -> RowScores:
    began = time.perf_counter()
    device, precision, _, tokenizer = look_ahead(recipe)
    report("loading the model", 0, 0)
    if recipe.method == "full":
        model = load_model(recipe.model, DTYPES[precision], device)
    else:
        model = load_base(recipe, DTYPES[precision], device, progress=report)
    if why := install(model, fp8=recipe.fp8):
        raise CommandError(what="--score needs the fast layers", why=why, fix="use --run with the folder of an earlier run")
    model.eval()
    scoring = _Scoring(model, recipe.train.capacity, padding_id(tokenizer), device, report)
    like_D = None
    if held is not None:
        like_D = F.normalize(scoring.look(held, "scoring held-out rows", None)[1], dim=0)
    losses_R, _, alike_R = scoring.look(table, "scoring rows", like_D)
    source = f"one forward pass of {recipe.model}"
    seconds = time.perf_counter() - began
    return of_losses(losses_R, table.loss_counts, alike_R=alike_R if held is not None else None, source=source, seconds=seconds)


class _Scoring:
    def __init__(self, model: HFModel, capacity: int, pad_id: int, device: torch.device, report: Report) -> None:
        self._model, self._capacity, self._pad_id, self._device, self._report = model, capacity, pad_id, device, report

    @torch.no_grad()
    def look(self, table: TokenTable, label: str, like_D: Tensor | None) -> tuple[Floats, Tensor, Floats]:
        """Losses of the rows, the sum of their directions, and their similarity to `like_D`."""
        engine = engine_of(self._model)
        assert engine is not None
        losses_R, alike_R = np.zeros(len(table)), np.full(len(table), np.nan)
        total_D, seen = torch.zeros((), device=self._device), 0
        for batch in evaluation_batches(table, self._capacity, self._pad_id):
            self._report(label, seen, len(table))
            documents = list(batch.documents)
            labels_N = batch.row_labels.numpy()
            of_N = np.searchsorted(batch.cu_seqlens.numpy()[1 : len(documents) + 1], batch.loss_rows.numpy(), side="right")
            real_N = torch.from_numpy(np.flatnonzero((labels_N != IGNORED) & (of_N < len(documents)))).to(self._device)
            place_N = torch.from_numpy(of_N).to(self._device)[real_N]
            rows = engine.packed_rows(batch.to(self._device))
            states_ND = engine.lm.inputs(rows.h_ND.clone())[0][real_N].float()  # a clone: the loss reads the rows, too
            losses_N = engine.lm.losses(rows)[1][real_N].double()
            sums = torch.zeros(len(documents), dtype=torch.float64, device=self._device).index_add_(0, place_N, losses_N)
            means_D = torch.zeros(len(documents), states_ND.shape[1], device=self._device).index_add_(0, place_N, states_ND)
            directions = F.normalize(means_D, dim=1)  # a mean has the direction of the sum
            losses_R[documents] = sums.cpu().numpy()
            if like_D is not None:
                alike_R[documents] = (directions @ like_D).double().cpu().numpy()
            total_D = total_D + directions.sum(0)
            seen += len(documents)
        self._report(label, len(table), len(table))
        return losses_R, total_D, alike_R
