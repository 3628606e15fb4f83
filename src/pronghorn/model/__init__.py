"""A checkpoint in, a model that trains out; the only room besides data/tokens.py that knows transformers."""
