"""Tensor maths: torch and Triton only, one op a file."""
