"""What exists for other people's training loops and scripts; nothing in model/ imports it."""
