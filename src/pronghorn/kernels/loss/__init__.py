"""The head: cross-entropy and log-probs without logits in memory."""
