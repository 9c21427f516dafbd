"""Judges of the broker. ``support`` holds what they share."""
