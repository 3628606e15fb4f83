"""Attention over packed documents, and RoPE."""
