"""Errors returned to observers of the metadata log."""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class SnapshotNotFoundError(DomainError):
    """There is no such snapshot, or no longer (SNAPSHOT_NOT_FOUND)."""


class PositionOutOfRangeError(DomainError):
    """The snapshot has no such byte (POSITION_OUT_OF_RANGE)."""
