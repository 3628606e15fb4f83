"""One optimizer step: forward, backward, update, its health and its memory."""
