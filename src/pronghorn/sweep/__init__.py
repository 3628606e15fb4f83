"""Which values of a recipe are best: many runs begun, the better ones continued."""
