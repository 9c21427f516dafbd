"""The error that fails a simulated history."""

from __future__ import annotations


class BrokenInvariantError(AssertionError):
    """An invariant of the cluster is broken."""
