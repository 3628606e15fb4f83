"""What a step keeps, recomputes and moves to the host: planned from one number, the memory there is."""
