"""Errors returned to observers of the metadata log."""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class SnapshotNotFoundError(DomainError):
    """The snapshot does not exist, or has been deleted (SNAPSHOT_NOT_FOUND)."""


class PositionOutOfRangeError(DomainError):
    """The requested position is outside the snapshot (POSITION_OUT_OF_RANGE)."""
