"""Adapter from a partition to the log interface of the follower's state machine."""

from __future__ import annotations

from fencepost.logcore.partition import Partition


class FollowedLog:
    """Implements the follower's ``FollowerLog`` with a partition."""

    __slots__ = ("partition",)

    def __init__(self, partition: Partition) -> None:
        self.partition = partition

    @property
    def log_start_offset(self) -> int:
        """See ``FollowerLog``."""
        return self.partition.log_start_offset

    @property
    def log_end_offset(self) -> int:
        """See ``FollowerLog``."""
        return self.partition.log_end_offset

    @property
    def high_watermark(self) -> int:
        """See ``FollowerLog``."""
        return self.partition.high_watermark

    @property
    def latest_epoch(self) -> int:
        """See ``FollowerLog``."""
        return self.partition.reader.latest_epoch

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """See ``EpochEnds``."""
        return self.partition.reader.offset_for_leader_epoch(epoch)
