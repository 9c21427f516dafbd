"""The error that fails a simulated run."""

from __future__ import annotations


class BrokenInvariantError(AssertionError):
    """An invariant of the cluster is broken."""
