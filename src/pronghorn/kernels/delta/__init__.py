"""Gated DeltaNet: a state for each head, corrected token by token."""
