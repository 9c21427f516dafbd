"""The subscribers to the metadata: each image is published to them, in one fixed order.

Every broker, standalone or in a cluster, learns of metadata changes only in this way.

Source: ``MetadataPublisher``; ``BrokerMetadataPublisher.onMetadataUpdate`` with
``DynamicConfigPublisher``, ``DynamicClientQuotaPublisher``, ``ScramPublisher``, ``AclPublisher``.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from enum import IntEnum, unique

from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.runtime.background import swallow

Published = Callable[[MetadataImage, MetadataImage], None]
"""Called with the previous image and the next, which is already installed."""


@unique
class Subscriber(IntEnum):
    """The subscribers in their order.

    The dynamic settings of this broker are applied before all of them (``Metadata.install``), so
    that each may read them. Metrics do not subscribe: each scrape reads the image. Kafka applies
    configs after the partitions; here the replicas read them when they create a log.
    """

    TOPIC_CONFIGS = 1
    """Applies the settings of topics to open logs; a log that a later subscriber creates has them
    from the beginning."""
    REPLICAS = 2
    """Deletes, leads and follows partitions. Coordinators write to the partitions led here."""
    CONTROLLED_SHUTDOWN = 3
    """Stops some of the fetches just started, if the broker is about to stop."""
    GROUPS = 4
    """Loads and unloads groups, and drops the offsets of deleted topics, whose logs are gone."""
    TRANSACTIONS = 5
    """Loads and unloads transactions, after the groups: the completion of a loaded transaction may
    commit offsets of a group."""
    SHARE_STATE = 6
    """Loads and unloads the state of share partitions, and drops the state of deleted topics."""
    SHARE_PARTITIONS = 7
    """Drops share partitions whose leader has changed. The new leader reads their state from the
    share coordinator."""
    VERIFICATION = 8
    """Withdraws verification requests to brokers that are unregistered, fenced or restarted."""
    MARKERS = 9
    """Sends transaction markers to new leaders; this broker may be one of them."""
    QUOTAS = 10
    USERS = 11
    ACLS = 12
    """The order of QUOTAS, USERS and ACLS does not matter: no other subscriber checks quotas or
    rights."""
    HISTORY = 13
    """Records the changes that the other subscribers have applied."""
    OBSERVATIONS = 14
    """Begins to record observations of clients when the cluster has transactions."""


class Publication:
    """Publishes images to the subscribers, on the event loop that installs the images."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[Subscriber, Published]] = []

    def subscribe(self, subscriber: Subscriber, publish: Published) -> None:
        """Have ``publish`` called with each new image, in the subscriber's order."""
        insort(self._subscribers, (subscriber, publish), key=lambda subscription: subscription[0])

    def publish(self, old: MetadataImage, image: MetadataImage) -> None:
        """Pass both images to all subscribers; a failure of one is logged."""
        for subscriber, publish in tuple(self._subscribers):
            with swallow("publish metadata", to=subscriber.name, offset=image.offset):
                publish(old, image)
