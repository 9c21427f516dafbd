"""The metadata of a broker whose controller is elsewhere: it may be looked at, not changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from fencepost.cluster.records import MetadataRecord
from fencepost.coordinator.errors import MetadataUnavailableError
from fencepost.coordinator.metadata.log import MetadataLog
from fencepost.coordinator.metadata.metadata import Metadata

MEMBER_FEATURES: Final[Mapping[str, tuple[int, int]]] = {
    "eligible.leader.replicas.version": (0, 1),
    "group.version": (0, 1),
    "kraft.version": (0, 1),
    "metadata.version": (7, 30),
    "share.version": (0, 1),
    "streams.version": (0, 1),
    "transaction.version": (0, 2),
}
"""What a broker registers with: those of Apache Kafka 4.3.

A cluster that was formatted by it has levels of all of them, and takes in no broker that does not
name them. For share.version and streams.version that means to hold replicas of their internal
topics; the requests of share groups and streams groups are not served.
"""


class ObservedMetadata(Metadata):
    """What the controller has told so far. Whoever changes something there asks the controller.

    What :class:`fencepost.coordinator.metadata.log.MetadataLog` changes raises
    MetadataUnavailableError here.
    """

    @property
    def features(self) -> Mapping[str, tuple[int, int, int]]:
        """Lowest, highest supported and finalized level of each feature."""
        return {
            name: (low, high, self.feature_level(name))
            for name, (low, high) in MEMBER_FEATURES.items()
        }

    @property
    def epoch(self) -> int:
        """The controller's epoch, as far as it has told."""
        return self.image.epoch

    @property
    def next_offset(self) -> int:
        """The offset of the next record."""
        return self.image.offset + 1

    def force(self) -> None:
        """There is no disk; see :meth:`durable`."""

    def durable(self) -> asyncio.Future[None] | None:
        """None: nothing is written here."""
        return None

    @contextmanager
    def unforced(self) -> Iterator[None]:
        """Nothing is written here."""
        yield

    def append(self, records: Sequence[MetadataRecord]) -> None:  # noqa: ARG002 - see below
        """Raise MetadataUnavailableError: this is the controller's to do."""
        raise MetadataUnavailableError("the controller is elsewhere")

    def compact(self, factor: int | None = None) -> None:
        """Nothing is kept here."""


AnyMetadata = MetadataLog | ObservedMetadata
"""A broker's: its own log, or what the controller of its cluster has told."""
