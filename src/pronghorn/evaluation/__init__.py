"""Answers to held-out questions, and how good they are."""
