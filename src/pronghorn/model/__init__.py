"""A checkpoint in, a model that trains out; the only room besides data/encode/tokens.py that knows transformers."""
