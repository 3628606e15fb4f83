"""Pronghorn fine-tunes language models. Importing it imports nothing heavy and changes nothing."""

__version__ = "0.1.0"
