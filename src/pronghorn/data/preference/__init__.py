"""Pairs of answers and single judged answers: rows, packs, reference log-probs."""
