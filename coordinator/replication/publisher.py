"""What an image of the metadata changes on this broker, in Kafka's order.

First everybody may look at the new image; then partitions are dropped, led and followed, then
coordinators come and go with the partitions of their topics, and last go the traces of topics that
are no more. What fails in one step is logged, and the others are done.

Source: ``BrokerMetadataPublisher.onMetadataUpdate``, ``updateCoordinator``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol
from uuid import UUID

from fencepost.cluster.image import (
    NO_LEADER,
    LocalChanges,
    LocalPartition,
    MetadataImage,
    TopicImage,
    changed_topics,
    local_changes,
)
from fencepost.coordinator.runtime.background import survived


class Cache(Protocol):
    """What everybody asks for the metadata."""

    def install(self, image: MetadataImage) -> None:
        """Let this be what is known, and tell whoever listens: settings, quotas, rules, users."""


class Replicas(Protocol):
    """The partitions of this broker."""

    def apply(self, changes: LocalChanges, image: MetadataImage) -> None:
        """Drop, lead and follow."""


class Coordinator(Protocol):
    """Who looks after what is in the partitions of an internal topic."""

    def elected(self, index: int, leader_epoch: int) -> None:
        """This broker has come to lead a partition."""

    def resigned(self, index: int, leader_epoch: int | None) -> None:
        """It leads one no more; None where the replica or the topic is gone."""


class Publisher:
    """Applies images, one after the other. Belongs to the broker's loop.

    ``coordinators`` are by the name of their topic; ``deleted`` is told of topics that are gone.
    While ``is_leaving``, ``stop_fetching`` is told of partitions that are not to be followed any
    more: this broker must not come back into their ISRs (KAFKA-14296).
    """

    def __init__(
        self,
        node_id: int,
        cache: Cache,
        replicas: Replicas,
        coordinators: Mapping[str, Coordinator],
        *,
        deleted: Callable[[Sequence[TopicImage]], None],
        is_leaving: Callable[[], bool] = lambda: False,
        stop_fetching: Callable[[Sequence[tuple[UUID, int]]], None] = lambda _: None,
    ) -> None:
        self._node_id = node_id
        self._cache, self._replicas = cache, replicas
        self._coordinators, self._deleted = coordinators, deleted
        self._is_leaving, self._stop_fetching = is_leaving, stop_fetching
        self.image = MetadataImage()
        """The last one that was applied."""

    def publish(self, image: MetadataImage) -> None:
        """Do all that the step to ``image`` asks of this broker."""
        old, self.image = self.image, image
        changes = local_changes(old, image, self._node_id)
        with survived("install metadata", offset=image.offset):
            self._cache.install(image)
        with survived("apply replicas", offset=image.offset):
            self._replicas.apply(changes, image)
        if self._is_leaving():
            with survived("stop fetching", offset=image.offset):
                self._leave(changes.followers)
        for topic, coordinator in self._coordinators.items():
            self._update(coordinator, topic, old, changes)
        gone = [
            old.topics_by_id[topic_id]
            for topic_id in changed_topics(old, image)
            if topic_id in old.topics_by_id and topic_id not in image.topics_by_id
        ]
        if gone:
            with survived("forget topics", offset=image.offset):
                self._deleted(gone)

    def _leave(self, followers: Sequence[LocalPartition]) -> None:
        stopped = [
            (one.topic_id, one.index)
            for one in followers
            if one.registration.leader == NO_LEADER or self._node_id not in one.registration.isr
        ]
        if stopped:
            self._stop_fetching(stopped)

    def _update(
        self, coordinator: Coordinator, topic: str, old: MetadataImage, changes: LocalChanges
    ) -> None:
        was = old.topics.get(topic)
        for one in changes.deletes:
            if one.topic == topic or (was is not None and one.topic_id == was.topic_id):
                with _survived(one):
                    coordinator.resigned(one.index, None)
        for one in changes.elected:
            if one.topic == topic:
                with _survived(one):
                    coordinator.elected(one.index, one.registration.leader_epoch)
        for one in changes.followers:
            if one.topic == topic:
                with _survived(one):
                    coordinator.resigned(one.index, one.registration.leader_epoch)


def _survived(one: LocalPartition) -> AbstractContextManager[None]:
    """What fails for one partition keeps the shards of no other from coming and going."""
    return survived("update coordinator", partition=f"{one.topic}-{one.index}")
