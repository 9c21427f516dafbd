"""Runnable programs, each of which ends with its own check."""
