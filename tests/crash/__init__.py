"""The real daemon is killed at every step, and must still have every acknowledged write."""
