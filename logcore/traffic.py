"""What has gone in and out of a log since it was opened: plain numbers, for whoever looks later."""

from __future__ import annotations


class Traffic:
    """Of one log, or of several added up."""

    __slots__ = ("bytes_in", "bytes_out", "markers", "records_in", "replicated_in")

    def __init__(self) -> None:
        self.bytes_in = 0
        """Bytes of the batches that were appended, by clients or by the broker."""
        self.records_in = 0
        """Records in them, markers among them."""
        self.bytes_out = 0
        """Bytes of batches that fetches were answered with."""
        self.markers = 0
        """Ends of transactions that were appended."""
        self.replicated_in = 0
        """Bytes of the batches that were fetched from a leader."""

    def add(self, other: Traffic) -> None:
        """Count what another has counted."""
        self.bytes_in += other.bytes_in
        self.records_in += other.records_in
        self.bytes_out += other.bytes_out
        self.markers += other.markers
        self.replicated_in += other.replicated_in
