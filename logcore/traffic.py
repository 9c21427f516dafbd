"""Counters of a log's traffic since its opening."""

from __future__ import annotations


class Traffic:
    """The counters of one log, or the sum of several logs."""

    __slots__ = ("bytes_in", "bytes_out", "markers", "records_in", "replicated_in")

    def __init__(self) -> None:
        self.bytes_in = 0
        """The number of bytes in the batches that clients or the broker appended."""
        self.records_in = 0
        """The number of records in these batches, markers included."""
        self.bytes_out = 0
        """The number of bytes in the batches of fetch responses."""
        self.markers = 0
        """Transaction end markers that were appended."""
        self.replicated_in = 0
        """The number of bytes in the batches that were fetched from a leader."""

    def add(self, other: Traffic) -> None:
        """Add the counters of ``other``."""
        self.bytes_in += other.bytes_in
        self.records_in += other.records_in
        self.bytes_out += other.bytes_out
        self.markers += other.markers
        self.replicated_in += other.replicated_in
