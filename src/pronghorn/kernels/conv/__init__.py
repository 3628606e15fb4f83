"""Short convolutions along the tokens of a document."""
