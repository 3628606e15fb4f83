"""Measurements of Pronghorn, each a script with hardware, versions, date and command in its result."""
