"""AdamW, in 32 and in 8 bits."""
