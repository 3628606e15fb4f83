"""The folder of a run: its log, identity, evaluation and answers."""
