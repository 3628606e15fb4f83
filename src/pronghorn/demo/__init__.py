"""Five minutes that show the whole pipeline on a real model."""
