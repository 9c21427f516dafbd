"""The subscribers to the metadata: each image is published to them, in one fixed order.

Publication is the only way in which a broker learns of changes, alone or in a cluster.

Source: ``MetadataPublisher``; ``BrokerMetadataPublisher.onMetadataUpdate`` with
``DynamicConfigPublisher``, ``DynamicClientQuotaPublisher``, ``ScramPublisher``, ``AclPublisher``.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from enum import IntEnum

from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.runtime.background import survived

Published = Callable[[MetadataImage, MetadataImage], None]
"""Takes the former image and the next, which is installed already."""


class Subscriber(IntEnum):
    """The subscribers in their order.

    The dynamic settings of this broker come before them all (``Metadata.install``): each may
    read them. Metrics are no subscriber, they read the image at each scrape. Kafka applies
    configs behind the partitions; here the replicas read them when they create a log.
    """

    TOPIC_CONFIGS = 1
    """Open logs take over the settings of their topics; a log that a later subscriber creates has
    them from the beginning."""
    REPLICAS = 2
    """Partitions are deleted, led and followed. Coordinators write to what is led."""
    CONTROLLED_SHUTDOWN = 3
    """A broker about to stop fetches less than the replicas have just begun to."""
    GROUPS = 4
    """Groups load and unload, and forget the offsets of deleted topics, whose logs are gone."""
    TRANSACTIONS = 5
    """Transactions load and unload. Groups come first: what loading completes ends in them."""
    VERIFICATION = 6
    """Questions to coordinators on brokers that are gone."""
    MARKERS = 7
    """Transaction markers go to the new leaders, of which this broker may be one by now."""
    QUOTAS = 8
    USERS = 9
    ACLS = 10
    """Nothing above asks for rights or quotas, so their order does not matter."""
    HISTORY = 11
    """Keeps what happened, when it has."""


class Publication:
    """Publishes images to the subscribers. Belongs to the loop of what installs them."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[Subscriber, Published]] = []

    def subscribe(self, subscriber: Subscriber, publish: Published) -> None:
        """Have ``publish`` called with each image from now on; it takes a place in the order."""
        insort(self._subscribers, (subscriber, publish), key=lambda one: one[0])

    def publish(self, old: MetadataImage, image: MetadataImage) -> None:
        """Have all take the step to ``image``; a failure of one is logged."""
        for subscriber, publish in tuple(self._subscribers):
            with survived("publish metadata", to=subscriber.name, offset=image.offset):
                publish(old, image)
