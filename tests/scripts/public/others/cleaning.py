"""Beside spawned_cleaning.py, which imports it."""

import re


def normalized(text):
    return re.sub(r"\s+", " ", text).strip()
