"""Log-probabilities of labels under a language-model head, a gradient for each, without ever holding the logits.

    log_prob_n = -loss_n                       of linear_cross_entropy.py, which computes d loss_n / d hidden_n beside it
    d hidden_n = -gradient_n * that            whatever gradient comes in for each row: the row is multiplied by it, once
    entropy_n  = loss_n - <hidden_n, d loss_n / d hidden_n>
    top_n      = [exp(-loss_n) >= the largest probability of another token]

The entropy needs no pass over the logits: with z_v = hidden . W_v and p = softmax(z), d loss / d hidden is sum_v p_v W_v -
W_label, whose product with hidden is sum_v p_v z_v - z_label; and the entropy is lse - sum_v p_v z_v. The largest probability
is read off the logits' gradient, which is p_v everywhere but at the label: one pass over it, 4 GB at 16,384 rows of 128,256.

The gradient of a trained head is a sum over rows, which cannot be weighted afterwards. There the forward keeps no gradient, and
the backward computes the logits once more, with the incoming gradients as the rows' weights: 8·N·D·V operations instead of 6.
Entropy and top are for frozen heads without a softcap; `sampled_entropy` computes the logits of some rows of any head.
N = rows, D = model width, V = vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.loss.cross_entropy_rows import Terms
from pronghorn.kernels.loss.linear_cross_entropy import HeadLoss, _precise, _scale_in_place, linear_cross_entropy_forward
from pronghorn.kernels.runtime.dispatch import keeps_graph
from pronghorn.kernels.runtime.first_order import Ctx, first_order

ROWS = 4096  # at a time, in fp32: three times 67 MB at D = 4096
SAMPLED, AT_A_TIME = 128, 16  # rows with logits of their own, and how many in memory: three times 17 MB of 262,144 tokens


Asked = tuple[bool, bool, bool]  # the gradient, the entropy, whether the label is the likeliest token


class LogProbs(NamedTuple):
    log_probs: Tensor  # [N] fp32, differentiable
    entropy: Tensor | None  # [N] fp32; its own gradient is refused
    top: Tensor | None  # [N] bool: whether no other token is likelier


def linear_log_probs_reference(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, bias_V: Tensor | None = None, **given: Any
) -> LogProbs:
    """Plain torch, all logits at once. `given`: the fields of `Terms`."""
    terms, logits = Terms(**given), torch.nn.functional.linear(hidden_ND, weight_VD, bias_V)
    logits = logits.to(_precise(logits.dtype)) * terms.logit_scale
    everything = (torch.tanh(logits / terms.softcap) * terms.softcap if terms.softcap else logits).log_softmax(-1)
    entropy = -(everything.exp() * everything).sum(-1)
    log_probs = everything.gather(1, labels_N[:, None])[:, 0]
    return LogProbs(log_probs, entropy, log_probs >= everything.amax(-1))


def linear_log_probs(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, bias_V: Tensor | None = None, entropy: bool = False,
    top: bool = False, **given: Any,
) -> LogProbs:  # fmt: skip
    """Differentiable once in hidden, weight and bias; 0 where the label is IGNORED. A bias moves the logits, and so the entropy
    asks for none. `given`: the fields of `Terms`."""
    terms = Terms(**given)
    trained = weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad)
    if ((entropy or top) and (trained or terms.softcap)) or (entropy and bias_V is not None):
        raise ValueError("entropy and top of a trained LM head, or of one with a softcap or a bias, need the logits")
    if trained and torch.is_grad_enabled():
        recomputed = _TrainedHeadLogProbs.apply(hidden_ND, weight_VD, bias_V, labels_N, terms)  # type: ignore[no-untyped-call]
        return LogProbs(recomputed, None, None)
    wanted = entropy or top or (torch.is_grad_enabled() and hidden_ND.requires_grad)
    return LogProbs(*_LinearLogProbs.apply(hidden_ND, weight_VD, bias_V, labels_N, terms, (wanted, entropy, top)))  # type: ignore[no-untyped-call]


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: Terms, asked: Asked
    ) -> tuple[Tensor | None, ...]:
        wanted, entropy, top = asked
        ctx.set_materialize_grads(False)  # so that a gradient of the entropy is noticed
        found = linear_cross_entropy_forward(
            hidden, weight, labels, bias_V=bias, terms=terms, needs=(wanted, False, False), factors_later=True, need_most=top
        )
        ctx.gradient, ctx.factors = found.d_hidden, found.factors
        likeliest = _likeliest(found, terms) if top else None
        if likeliest is not None:
            ctx.mark_non_differentiable(likeliest)
        return -found.row_losses, _entropy(found, hidden) if entropy else None, likeliest

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        of_log_probs, of_entropy, _ = incoming
        if of_entropy is not None:
            raise RuntimeError("the entropy of the fused LM head has no gradient: detach it, or compute it from logits")
        if of_log_probs is None:
            return (None,) * 6
        gradient = ctx.gradient
        if gradient is None:
            raise RuntimeError(
                "linear_log_probs: backward was already called and released its gradient: recompute the loss, "
                "or call the first backward with retain_graph=True"
            )
        if keeps_graph():
            gradient = gradient.clone()
        else:
            ctx.gradient = None
        rows = -of_log_probs.to(_precise(gradient.dtype))
        one = torch.ones((), dtype=rows.dtype, device=rows.device)
        _scale_in_place(gradient, one, rows if ctx.factors is None else rows * ctx.factors)
        return (gradient, *(None,) * 5)


class _TrainedHeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: Terms) -> Tensor:
        found = linear_cross_entropy_forward(hidden, weight, labels, bias_V=bias, terms=terms, needs=(False,) * 3)
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.terms = terms
        return -found.row_losses

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        rows = -incoming[0].contiguous()
        scale: float | Tensor = 1.0
        if hidden.dtype == torch.float16:  # rows of order one: smaller weights would leave fp16's range
            scale = rows.abs().amax().clamp_min(torch.finfo(rows.dtype).tiny)
            rows = rows / scale
        needs = ctx.needs_input_grad[:3]
        found = linear_cross_entropy_forward(
            hidden, weight, labels, bias_V=bias, weights_N=rows, terms=ctx.terms, needs=needs, grad_scale=scale
        )
        of_weight = None if found.d_weight is None else found.d_weight.to(weight.dtype)
        of_bias = None if found.d_bias is None else found.d_bias.to(bias.dtype)
        return found.d_hidden, of_weight, of_bias, None, None


@torch.no_grad()
def sampled_entropy(hidden_ND: Tensor, weight_VD: Tensor, *, bias_V: Tensor | None = None, **given: Any) -> Tensor:
    """[N], nan but of every n-th row, SAMPLED of them at most: a figure, of any head. `given`: the fields of `Terms`."""
    every = max(1, -(-len(hidden_ND) // SAMPLED))
    rows_MD = hidden_ND[::every]
    label = torch.zeros(AT_A_TIME, dtype=torch.long, device=hidden_ND.device)
    parts = [
        linear_log_probs_reference(part, weight_VD, label[: len(part)], bias_V=bias_V, **given).entropy
        for part in rows_MD.split(AT_A_TIME)
    ]
    found = torch.full((len(hidden_ND),), torch.nan, dtype=_precise(hidden_ND.dtype), device=hidden_ND.device)
    found[::every] = torch.cat([part for part in parts if part is not None])
    return found


def _entropy(found: HeadLoss, hidden_ND: Tensor) -> Tensor:
    assert found.d_hidden is not None
    along, precise = torch.empty_like(found.row_losses), found.row_losses.dtype
    for first in range(0, len(along), ROWS):
        part = slice(first, first + ROWS)
        along[part] = torch.linalg.vecdot(hidden_ND[part].to(precise), found.d_hidden[part].to(precise))
    return found.row_losses - (along if found.factors is None else along * found.factors)


def _likeliest(found: HeadLoss, terms: Terms) -> Tensor:
    assert found.most is not None
    most = found.most.to(found.row_losses.dtype) / terms.logit_scale
    return torch.exp(-found.row_losses) >= (most if found.factors is None else most * found.factors)
