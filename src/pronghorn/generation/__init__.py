"""Answers of a model on its fast layers: pages of keys and values, continuous batching, sampling."""
