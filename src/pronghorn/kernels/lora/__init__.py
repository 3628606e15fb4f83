"""Linears that share an input, with LoRA: in 16 bits, over NF4, in FP8."""
