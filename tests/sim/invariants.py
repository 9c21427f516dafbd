"""The error of a history in which a rule does not hold."""

from __future__ import annotations


class BrokenInvariantError(AssertionError):
    """An invariant of the cluster is broken."""
