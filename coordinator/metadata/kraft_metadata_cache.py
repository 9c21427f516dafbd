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
"""The features that a broker registers with; Apache Kafka 4.4 has the same.

A cluster that Apache Kafka has formatted finalizes levels of all of them, and rejects brokers that
do not support them. For streams.version, support means that its level is kept; the requests of
streams groups are not served.
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
