"""What mixes the tokens of a document: one file for each kind."""
