"""What an answer is worth: the metrics of a recipe, a user's own functions, a reward model."""
