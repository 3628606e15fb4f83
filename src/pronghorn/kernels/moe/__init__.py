"""Mixtures of experts: routing, grouped GEMMs, gather and combine."""
