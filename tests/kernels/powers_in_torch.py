"""hopper_gemm.powers_mm, which needs a Hopper GPU, in torch: for what stands around it."""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.gemm.hopper_gemm import COLUMNS, Labelled


class Product:
    """Notes of each second call whether it was wanted."""

    def __init__(self) -> None:
        self.wanted: list[bool] = []

    def __call__(self, x_CK: Tensor, weight_VK: Tensor, rows: Labelled, *, out: Tensor, scale: float, sums_2NC: Tensor,
                 wanted: Tensor | None = None) -> bool:  # fmt: skip
        if wanted is not None:
            self.wanted.append(bool(wanted[0]))
            if not wanted[0]:
                return True
        logits = x_CK.float() @ weight_VK.float().T
        powers = torch.exp2(logits * scale - rows.anchors_C[:, None])
        out.copy_(powers)
        there = (rows.labels_C >= 0) & (rows.labels_C < len(weight_VK))
        rows.logits_C[there] = logits[there, rows.labels_C[there]]
        for tile, (part, of_logits) in enumerate(zip(powers.split(COLUMNS, 1), logits.split(COLUMNS, 1), strict=True)):
            sums_2NC[0, tile], sums_2NC[1, tile] = part.sum(1), of_logits.max(1).values
        return True
