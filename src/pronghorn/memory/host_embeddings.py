"""Frozen input embeddings in pinned host memory: 1.05 GB of an 8B model, of which a step reads 134 MB, over the link.

The weight stays the module's parameter, with its name, shape, dtype and device: a tensor of the GPU whose memory is the host's
(host_embedding.py). So saving, exporting and the model's own forward work as ever; training gathers the rows with a
kernel made for it.
"""

from __future__ import annotations

import weakref

import torch

from pronghorn.kernels.embedding.host_embedding import seen_by_gpu
from pronghorn.kernels.runtime.host_memory import pin, unpin
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.text_stack import head_of


def why_embeddings_stay(engine: FastCausalLM) -> str:
    """Empty where they can wait on the host."""
    module = engine.embeddings
    if type(module) is not torch.nn.Embedding:
        return f"they have the type {type(module).__name__}"
    if module.weight.requires_grad:
        return "they are trained"
    if getattr(head_of(engine.model), "weight", None) is module.weight:
        return "the LM head shares them"
    return ""


def move_embeddings(engine: FastCausalLM) -> None:
    """Once, before anything is captured. Without a GPU they are where they would go to."""
    if engine.host_embeddings or why_embeddings_stay(engine):
        return
    weight = engine.embeddings.weight
    if weight.is_cuda:
        host = torch.empty(weight.shape, dtype=weight.dtype)
        host.copy_(weight.detach())
        pin(host, "raise memory.budget so that the embeddings stay on the GPU")
        weakref.finalize(weight, unpin, host, weight.device).atexit = False  # a process that ends takes it along
        weight.data = seen_by_gpu(host)
    engine.host_embeddings = True
