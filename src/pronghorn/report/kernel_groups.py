"""What a kernel on a GPU, or an operator on a CPU, is for: its group, by its name.

CUDA graphs keep nothing of a kernel but its name. Ours say where they come from (kernels/runtime/compile_ahead.py):
`pronghorn__norm__rms_norm__forward_kernel`. Libraries' are recognized by words in their names. Work that is fused into another
kernel counts where it is: RoPE, activations and the head's exponentials in the epilogue of a GEMM are GEMM.
"""

from __future__ import annotations

import re
from functools import cache

OTHER = "other"
# The first pattern that is found in a name decides. Ours first: folder, then file.
RULES: tuple[tuple[str, str], ...] = (
    ("quantization", r"^pronghorn__moe__grouped_fp8__cast"),
    ("GEMM", r"^pronghorn__(moe__grouped_|lora__nf4_rows)|^hopper_gemm"),
    ("norm", r"^pronghorn__(norm__|quant__fp8_norm)"),
    ("RoPE", r"^pronghorn__attention__(rope|latent_heads)"),
    ("attention", r"^pronghorn__attention__"),
    ("MLP activation", r"^pronghorn__(mlp__|lora__gated_lora)"),
    ("LoRA", r"^pronghorn__lora__"),
    ("loss", r"^pronghorn__loss__"),
    ("experts", r"^pronghorn__moe__"),
    ("delta and convolution", r"^pronghorn__(delta|conv)__"),
    ("quantization", r"^pronghorn__quant__"),
    ("optimizer", r"^pronghorn__optim__"),
    ("embedding", r"^pronghorn__embedding__"),
    ("sampling", r"^pronghorn__sampling__"),
    ("copies", r"^pronghorn__runtime__copy_rows|^Memcpy|^Memset|^aten::(copy_|_to_copy|to|clone|contiguous|cat|fill_|zero_)$"),
    ("communication", r"nccl|AllReduce|ReduceScatter|AllGather"),
    ("attention", r"flash|fmha|attention|sdpa|flex_"),
    ("GEMM", r"nvjet|gemm|gemv|cublas|cutlass|splitK|xmma|^aten::(mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm|_grouped_mm)"),
    ("optimizer", r"multi_tensor_apply|_foreach_|_fused_adamw?|Optimizer\.step"),
    ("loss", r"softmax|SoftMax|nll_loss|cross_entropy|logsumexp"),
    ("norm", r"(layer|rms|group|batch)_?norm"),
    ("delta and convolution", r"conv1d|conv_depthwise|convolution|mamba|ssm"),
    ("quantization", r"quantize"),
    ("embedding", r"indexSelect|index_select|embedding|aten::(gather|scatter|index)"),
    ("copies", r"direct_copy_kernel|CatArrayBatchedCopy|FillFunctor"),
    ("elementwise", r"at::native::|^triton_(poi|red|per)_|^aten::"),
    ("Python and autograd", r"^(_?[A-Z]\w*|detach|torch::.*|autograd::.*)$"),  # on a CPU: nodes that call operators
)


@cache
def group_of(name: str) -> str:
    return next((group for group, pattern in RULES if re.search(pattern, name)), OTHER)
