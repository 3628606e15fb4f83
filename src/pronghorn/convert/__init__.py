"""Configs of other tools into recipes, with a list of what became of every key. Nothing in them runs, nothing is fetched."""
