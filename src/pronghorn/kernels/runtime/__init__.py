"""Where a kernel runs: dispatch, compilation, CUDA sources, host memory, and helpers that kernels share."""
