"""What a run tells people: one log, and everything shown is made from it."""
