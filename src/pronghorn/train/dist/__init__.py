"""Several ranks: launching, collectives, sharded weights."""
