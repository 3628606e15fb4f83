"""Milliseconds of a layer and of the rest of a step, without a GPU: from shapes and the rates of the table.

A matrix product takes its floating-point operations at the rate below plus its bytes at the device's bandwidth; everything else
takes its bytes. The efficiencies are what one H200 made of its data sheet (2026-11: 772 TFLOP/s of bf16 products, 645 to 752 at
layer shapes, 4.26 TB/s of copies, pinned host copies at 55 GB/s, flash-attn-4 at 626 / 541 TFLOP/s forward / backward).
`tests/memory/test_costs.py` compares the predictions with the steps in benchmarks/results. For other GPUs nobody has checked
them; measure.py makes the same figures on the machine itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pronghorn.kernels.attention.attention import SHORT
from pronghorn.memory.dry_run import Group, attends_itself, groups, shared_bytes, stacks, trained_parameters
from pronghorn.memory.gpus import Gpu
from pronghorn.memory.job import FP32, RECOMPUTES, Job, Recompute, moment_bytes
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.heads import HEADS

PRODUCTS = 0.73  # of the bf16 rate, bytes aside: what is left of 752 TFLOP/s of 989 in a step, at the power limit
FP8_PRODUCTS = 0.65  # 1,160 to 1,380 of 1,979 at layer shapes
BANDWIDTH = 0.8875  # 4.26 of 4.8
ELEMENTWISE = 0.86  # of that: norms, RoPE, the activation with the adapters' sums in it
THIN = 0.85  # of that: products with 16 or 64 columns
LINK = 0.87  # 55 of 63
ATTENTION = {True: (0.63, 0.55), False: (0.36, 0.31)}  # of the bf16 rate, forward and backward: flash-attn-4, FlashAttention-2
OWN_ATTENTION = (0.58, 0.48)  # our own kernel where documents are not short: 0.71 and 0.57 at 1,024 tokens, 0.50, 0.41 at 4,096
# Tokens by which documents are longer for attention: tiles that are half empty, masks, exponentials. Short documents in our own
# kernel: 0.278 and 0.886 ms for 8B, 0.188 and 0.497 for 1B, whose heads of 64 cost as much as ones of 128 beside the products.
ATTENTION_TILE, SHORT_TILE = 512, 700
LAUNCH_MS = 0.002  # between two kernels of a graph
KERNELS = (20, 40)  # of a layer, forward and backward
EXPERT_KERNELS = (10, 15)  # more, for a router, a sort and experts
# Products of rows sorted by expert, of the bf16 rate; of experts in 4 bits, dequantized where they are multiplied (not measured
# yet: half of that is assumed); and adapters' products, an expert at a time, of the bandwidth. Set with the steps of
# Qwen3-30B-A3B and gpt-oss-20B in view, cut to 4 layers: 35.2, 39.1 (with adapters on the experts), 67.5 and 71.7 ms, of which
# products alone are 26.4, 26.8, 52.7 and 52.8.
GROUPED, GROUPED_4_BITS, GROUPED_THIN = 0.76, 0.38, 0.5
GROUPED_FP8 = 0.5  # of the FP8 rate. A guess until it is measured: somewhat less than FP8_PRODUCTS


@dataclass(frozen=True)
class LayerCosts:
    """Milliseconds of one micro-batch, measured or foretold. Layers are alike, so one stands for all."""

    forward: float
    backward: float
    recompute: Mapping[Recompute, float] = field(hash=False)  # of each level; "nothing" takes 0
    rest: float  # embeddings, head, loss
    optimizer: float  # once a step
    to_host: float  # bytes a millisecond
    from_host: float
    piece: float = 0.0  # each further turn in which a layer's MLP is done
    measured: bool = False

    def times(self, share: int) -> LayerCosts:
        """Measured on a share of the tokens: of all of them."""
        return replace(
            self,
            forward=share * self.forward,
            backward=share * self.backward,
            rest=share * self.rest,
            recompute={level: share * ms for level, ms in self.recompute.items()},
            piece=share * self.piece,
        )


@dataclass(frozen=True)
class Parts:
    """Where a layer's milliseconds go."""

    products: float
    elementwise: float  # norms, RoPE, activation, copies
    attention: float
    thin: float  # adapters' own products
    launches: float
    unpack: float = 0.0  # quantized weights

    @property
    def total(self) -> float:
        return self.products + self.elementwise + self.attention + self.thin + self.launches + self.unpack


class Model:
    """The predictor of one job on one GPU."""

    def __init__(self, job: Job, gpu: Gpu) -> None:
        self.job, self.gpu, self.groups = job, gpu, groups(job)
        self.plain_rate = gpu.bf16_tflops * PRODUCTS * 1e9 / (16 if job.element == FP32 else 1)  # fp32: no tensor cores
        self.rate = gpu.fp8_tflops * FP8_PRODUCTS * 1e9 if job.fp8 else self.plain_rate  # operations a ms
        self.bytes = gpu.bandwidth_gbs * BANDWIDTH * 1e6  # bytes a ms
        mlp = [name for name in ("gate_up", "down") if name in self.groups and self.groups[name].adapters]
        self.fused = [] if job.fp8 or not job.graphed else mlp  # adapters' sums made by the activation's kernels

    def product(self, rows: int, inner: int, outputs: int, *, plain: bool = False) -> float:
        """`plain`: in 16 or 32 bits, whatever the layers' linears are in."""
        e, in_fp8 = self.job.element, self.job.fp8 and not plain
        moved = (rows * inner + inner * outputs) * (1 if in_fp8 else e) + rows * outputs * e
        return 2.0 * rows * inner * outputs / (self.rate if in_fp8 else self.plain_rate) + moved / self.bytes

    def products(self, *names: str, turned: bool = False, plain: bool = False) -> float:
        """Forward, or (turned) the gradient of the input."""
        T, total = self.job.capacity, 0.0
        for g in (group for name, group in self.groups.items() if not names or name in names):
            extra = 3 * g.extra if self.job.fp8 else g.extra  # kernels/lora/fp8.py
            inner, outputs = g.inputs + (0 if turned else extra), sum(g.outputs) + (extra if turned else 0)
            total += self.product(T, outputs, inner) if turned else self.product(T, inner, outputs, plain=plain)
        return total

    def move(self, elements: float) -> float:
        """So many elements a token, read or written."""
        return elements * self.job.capacity * self.job.element / self.bytes

    def attention(self) -> tuple[float, float]:
        s, T = self.job.shape, self.job.capacity
        seen = [min(self.job.attended, 2 * window) for window in s.windows]
        seen += [self.job.attended] * (s.layers - len(seen))
        own = attends_itself(self.job)
        share = OWN_ATTENTION if own and self.job.attended > SHORT else ATTENTION[self.gpu.flash4]
        length = sum(seen) / len(seen) + (SHORT_TILE if own else ATTENTION_TILE)
        operations = 2.0 * T * length * s.out_width
        rate = self.gpu.bf16_tflops * 1e9
        width = s.out_width + s.kv_heads * s.head_width
        sums = T * s.heads * FP32 if own else (T + 128 * self.job.entries) * s.qkv_width * FP32
        forward = operations / (share[0] * rate) + self.move(2 * width)
        backward = 2.5 * operations / (share[1] * rate) + self.move(3 * width + s.out_width) + 2 * sums / self.bytes
        return forward, backward

    def forward(self) -> Parts:
        s, groups = self.job.shape, self.groups
        turned = (s.heads + s.kv_heads) * s.head_width
        elementwise = self.move((2 * len(s.norms) + 2) * s.width + 2 * turned + 3 * s.mlp_width) / ELEMENTWISE
        elementwise += self.casts(turned=False)
        thin = sum(self.move(g.inputs) for name, g in groups.items() if g.adapters and not (self.fused and name == "down"))
        thin /= THIN
        return Parts(self.products(), elementwise, self.attention()[0], thin, KERNELS[0] * LAUNCH_MS, self.unpack())

    def backward(self) -> Parts:
        s, groups = self.job.shape, self.groups
        turned = (s.heads + s.kv_heads) * s.head_width * (2 if s.qk_norm else 1)
        elementwise = self.move(4 * s.width * len(s.norms) + 2 * turned + (5 if self.fused else 6) * s.mlp_width) / ELEMENTWISE
        elementwise += self.casts(turned=True)
        if self.job.method == "full":
            products = self.products(turned=True) + self.products(plain=True)  # the weights' gradients: as many again
            return Parts(products, elementwise, self.attention()[1], 0.0, KERNELS[1] * LAUNCH_MS, self.unpack(turned=True))
        thin = sum(self.move(2 * sum(g.outputs) + g.inputs) for g in groups.values() if g.adapters) / THIN
        if self.fused:  # dB of gate and up, dA of down
            thin -= sum(self.move(s.mlp_width * (2 if name == "gate_up" else 1)) for name in self.fused) / THIN
        return Parts(
            self.products(turned=True), elementwise, self.attention()[1], thin, KERNELS[1] * LAUNCH_MS, self.unpack(turned=True)
        )

    def casts(self, *, turned: bool) -> float:
        """What FP8 products read is written by the kernel that makes it, or read and written by a cast of its own."""
        s = self.job.shape
        if not self.job.fp8:
            return 0.0
        along, apart = (2 * s.mlp_width, 2 * s.width + s.qkv_width) if turned else (2 * s.width + s.mlp_width, s.out_width)
        return (along + apart * (1 + self.job.element)) * self.job.capacity / self.bytes

    def recompute(self, what: Recompute) -> float:
        if what == "nothing":
            return 0.0
        s = self.job.shape
        if what == "gate_up":
            return self.products("gate_up") + self.move(2 * s.width) + 6 * LAUNCH_MS
        whole = self.forward()
        spared = 0.0
        if "after_mlp" not in s.norms:  # the last product's result is needed by nobody
            spared = self.products("down") + self.move(3 * s.mlp_width)
        if what == "around_attention":
            spared += whole.attention
        return whole.total - whole.unpack - spared

    def unpack(self, *, turned: bool = False) -> float:
        """Weights made ready to multiply: 4 bits read and written out; trained ones rounded to FP8; FP8 bytes turned round."""
        weights = sum(g.weights for g in self.groups.values())
        moved = 2.0 if self.job.fp8 and turned else 0.0
        if self.job.method == "qlora" and shared_bytes(self.job):  # not where the checkpoint has only its experts in 4 bits
            moved += FORMATS[self.job.stored_as].bytes_each + (1 if self.job.fp8 else 2)
        elif self.job.method == "full" and self.job.fp8 and not turned:
            moved += FP32 + 1
        return weights * moved / self.bytes

    def rest(self) -> float:
        """Embeddings, final norm, and the head's two products with its softmax between them."""
        s, rows, e = self.job.shape, self.job.rows, self.job.element
        if not HEADS[self.job.head].generates:  # few rows of weights in place of the vocabulary
            return self.move(8 * s.width) + 40 * LAUNCH_MS
        products = (3 if self.job.method == "full" else 2) * self.product(rows, s.width, s.vocabulary, plain=True)
        softmax = 3.0 * rows * s.vocabulary * e / self.bytes
        return products + softmax + self.move(8 * s.width) + 40 * LAUNCH_MS

    def piece(self) -> float:
        """The MLP's weights are read once more, forward, backward and again; and there are more launches."""
        weights = self.groups["gate_up"].weights + self.groups["down"].weights
        return 3.0 * weights * self.job.element / self.bytes + 40 * LAUNCH_MS

    def optimizer(self) -> float:
        trained = trained_parameters(self.job)
        on_device, on_host = moment_bytes(self.job.optimizer, trained)
        # Read: the gradient, twice, the weight, the moments. Written: the weight, the moments. The link carries both at once.
        update = (4.0 * FP32 * trained + 2.0 * on_device) / self.bytes
        return max(update, on_host / (self.gpu.link_gbs * LINK * 1e6)) + 0.1

    def costs(self) -> LayerCosts:
        link = self.gpu.link_gbs * LINK * 1e6
        recompute = {level: self.recompute(level) for level in RECOMPUTES}
        return LayerCosts(
            self.forward().total, self.backward().total, recompute, self.rest(), self.optimizer(), link, link, self.piece()
        )


class MixtureModel(Model):
    """Of layers with experts (mlps/experts.py): attention, and a shared expert if there is one, are any layer's; beside them
    are the products of the K experts that each token chose, and what sorts its K rows and adds them up."""

    def __init__(self, job: Job, gpu: Gpu) -> None:
        super().__init__(job, gpu)
        assert job.shape.mixture is not None
        self.mixture, (self.up, self.down) = job.shape.mixture, stacks(job)
        self.slots = job.capacity * self.mixture.chosen
        self.fused = []

    @property
    def in_fp8(self) -> bool:
        """Whether the chip multiplies stacks in FP8 (kernels/moe/grouped_fp8.py): those do that flash-attn-4 serves. The others
        dequantize the same bytes where they multiply."""
        return self.job.fp8 and self.gpu.flash4

    def grouped(self, *stacks: Group) -> float:
        """One product of all rows with their experts; either way, since they are as large. Weights of all experts are read."""
        row = FORMATS[self.job.stored_as]
        weight, share = (row.bytes_each, GROUPED_4_BITS) if row.quantize else (float(self.job.element), GROUPED)
        rate = self.gpu.fp8_tflops * GROUPED_FP8 * 1e9 if self.in_fp8 else self.plain_rate * share / PRODUCTS
        total = 0.0
        for stack in stacks:
            inner = stack.inputs + (0 if self.in_fp8 else stack.extra)  # in FP8 adapters are products of their own
            read, written = inner * (1 if self.in_fp8 else self.job.element), sum(stack.outputs) * self.job.element
            moved = stack.weights * weight + self.slots * (read + written)
            total += 2.0 * self.slots * inner * sum(stack.outputs) / rate + moved / self.bytes
        return total

    def rows(self, elements: float) -> float:
        """So many elements of each row that is sorted by expert."""
        return self.move(elements * self.mixture.chosen)

    def gathered(self, *, wide: bool) -> float:
        """Tokens' rows written K times; they are read once: the next time they are in L2. Where experts read FP8 they are cast,
        and there in 16 bits, too, if `wide`."""
        D = self.job.shape.width
        if not self.in_fp8:
            return self.rows(D)
        return self.rows(D / self.job.element) + self.move(D) + (self.rows(D) if wide else 0.0)

    def cast_rows(self, elements: float) -> float:
        """Read and written in FP8."""
        return self.rows(elements) * (1 + 1 / self.job.element) if self.in_fp8 else 0.0

    def thin_forward(self, stack: Group) -> float:
        """x A^T, which gate and up have from who gathers their rows; not so in FP8, where adapters' results are added apart."""
        if not stack.rank:
            return 0.0
        apart = self.in_fp8 or stack is self.down
        return self.rows((stack.inputs if apart else 0) + (2 * sum(stack.outputs) if self.in_fp8 else 0)) / GROUPED_THIN

    def with_experts(self, parts: Parts, products: float, elementwise: float, thin: float, kernels: int) -> Parts:
        return replace(
            parts,
            products=parts.products + products,
            elementwise=parts.elementwise + elementwise,
            thin=parts.thin + thin,
            launches=parts.launches + kernels * LAUNCH_MS,
        )

    def forward(self) -> Parts:
        D, F, E = self.job.shape.width, self.mixture.width, self.mixture.experts
        # Rows gathered, activation, rows added up; logits written, read by the choice, and by who counts.
        elementwise = self.gathered(wide=False) + self.rows(3 * F + D) + self.cast_rows(F) + self.move(2 * D + 3 * E)
        router = self.product(self.job.capacity, D, E, plain=True)
        return self.with_experts(
            super().forward(),
            self.grouped(self.up, self.down) + router,
            elementwise / ELEMENTWISE,
            self.thin_forward(self.up) + self.thin_forward(self.down),
            EXPERT_KERNELS[0],
        )

    def backward(self) -> Parts:
        D, F, E = self.job.shape.width, self.mixture.width, self.mixture.experts
        trains = self.job.method == "full"
        again = self.rows(D + F) if self.up.rank or trains else 0.0  # the sorted input, the activation
        elementwise = self.gathered(wide=bool(self.up.rank)) + self.rows(5 * F + D) + self.cast_rows(2 * F)
        elementwise = (elementwise + again + self.move(3 * D + 4 * E)) / ELEMENTWISE
        # dy sB of gate and up; then dA and dB of both stacks read what they are made of; in FP8, dy sB A is added apart
        added = 2 * (D + F) if self.in_fp8 else 0
        thin = self.rows(2 * F + (D + F) + (D + 2 * F) + added) / GROUPED_THIN if self.up.rank else 0.0
        products = self.grouped(self.up, self.down) * (2 if trains else 1)
        router = self.product(self.job.capacity, E, D, plain=True)
        return self.with_experts(super().backward(), products + router, elementwise, thin, EXPERT_KERNELS[1])

    def unpack(self, *, turned: bool = False) -> float:
        stacks = self.up.weights + self.down.weights if self.in_fp8 and turned else 0
        return super().unpack(turned=turned) + 2.0 * stacks / self.bytes

    def recompute(self, what: Recompute) -> float:
        s = self.job.shape
        if what == "nothing":
            return 0.0
        if what == "gate_up":
            again = self.grouped(self.up) + self.thin_forward(self.up) + 6 * LAUNCH_MS
            return again + (self.gathered(wide=False) + self.move(3 * s.width)) / ELEMENTWISE
        whole, F = self.forward(), self.mixture.width
        behind = self.grouped(self.down) + self.thin_forward(self.down) + self.products("down")
        behind += (self.rows(3 * F + s.width) + self.cast_rows(F)) / ELEMENTWISE
        behind += whole.attention if what == "around_attention" else 0.0
        return whole.total - whole.unpack - behind

    def piece(self) -> float:
        """They do all rows at once."""
        return 0.0


def predicted_costs(job: Job, gpu: Gpu) -> LayerCosts:
    return (MixtureModel if job.shape.mixture else Model)(job, gpu).costs()
