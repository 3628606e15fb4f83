"""Examples in, packed batches out."""
