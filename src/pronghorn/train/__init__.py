"""The run: loop, step, optimizer, evaluation, health, checkpoints."""
