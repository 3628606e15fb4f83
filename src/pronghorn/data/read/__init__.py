"""Rows out of people's files: sources, columns, copies, mixing, splitting."""
