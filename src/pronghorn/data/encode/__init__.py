"""Rows to tokens: tokenizers, worker processes, the cache of encoded rows."""
