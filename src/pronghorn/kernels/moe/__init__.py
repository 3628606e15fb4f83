"""Mixtures of experts: routing, grouped products, gather and combine."""
