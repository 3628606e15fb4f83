"""The gated MLP: activation, with LoRA, in FP8."""
