"""Encoded rows to packed batches."""
