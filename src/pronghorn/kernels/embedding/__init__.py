"""Embeddings that stay in host memory."""
