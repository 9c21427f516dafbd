"""The metadata of a broker whose controllers are other nodes: read-only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fencepost.coordinator.metadata.metadata import Metadata

MEMBER_FEATURES: Final[Mapping[str, tuple[int, int]]] = {
    "eligible.leader.replicas.version": (0, 1),
    "group.version": (0, 1),
    "kraft.version": (0, 1),
    "metadata.version": (7, 33),
    "share.version": (0, 2),
    "streams.version": (0, 1),
    "transaction.version": (0, 2),
}
"""The features that a broker registers with: those of Apache Kafka 4.4.

A cluster that Apache Kafka has formatted finalizes levels of all of them, and rejects brokers that
do not support them. For share.version and streams.version, support means replicas of their internal
topics; the requests of share groups and streams groups are not served.
"""


class KRaftMetadataCache(Metadata):
    """The metadata as replayed so far; only the controller changes them."""

    @property
    def features(self) -> Mapping[str, tuple[int, int, int]]:
        """Lowest supported, highest supported and finalized level of each feature."""
        return {
            name: (low, high, self.feature_level(name))
            for name, (low, high) in MEMBER_FEATURES.items()
        }
