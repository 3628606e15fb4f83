"""Storage formats and casts: NF4, MXFP4, NVFP4, FP8."""
