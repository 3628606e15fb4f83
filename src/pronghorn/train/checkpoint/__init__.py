"""Checkpoints: writing, verifying, resuming."""
