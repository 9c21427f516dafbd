"""The metadata of a broker whose controllers are other nodes: read-only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fencepost.cluster.controller.activation import METADATA_VERSION
from fencepost.coordinator.metadata.metadata import FEATURES, KRAFT_VERSION, Metadata

MEMBER_FEATURES: Final[Mapping[str, tuple[int, int]]] = {
    **{name: (low, high) for name, (low, high, _) in FEATURES.items()},
    KRAFT_VERSION: (0, 1),
    METADATA_VERSION: (7, 33),
}
"""The features that a broker registers: the same ones as a broker of Apache Kafka 4.4.

A cluster that Apache Kafka has formatted finalizes levels of all these features, and rejects
brokers that do not support them. This broker keeps the level of streams.version, but does not serve
the requests of streams groups.
"""


class KRaftMetadataCache(Metadata):
    """The metadata that was replayed so far; only the controller changes it."""

    @property
    def features(self) -> Mapping[str, tuple[int, int, int]]:
        """Lowest supported, highest supported and finalized level of each feature."""
        return {
            name: (low, high, self.feature_level(name))
            for name, (low, high) in MEMBER_FEATURES.items()
        }
