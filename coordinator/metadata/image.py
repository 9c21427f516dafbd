"""The state that the metadata log adds up to: topics, settings, feature levels, producer ids.

Source: ``MetadataImage``, ``TopicsImage``; ours is changed in place.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fencepost.coordinator.metadata.names import INTERNAL_TOPICS


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic. ``partitions`` is their number; ``configs`` are its own settings as texts."""

    name: str
    topic_id: uuid.UUID
    partitions: int
    configs: Mapping[str, str]
    first_start: int
    """How often the broker had been started when the topic was made: its leader epoch 0."""

    @property
    def is_internal(self) -> bool:
        """Whether it belongs to the coordinators."""
        return self.name in INTERNAL_TOPICS


@dataclass(slots=True)
class MetadataImage:
    """The state. Only :func:`fencepost.coordinator.metadata.records.apply` changes it."""

    topics: dict[str, Topic] = field(default_factory=dict)
    by_id: dict[uuid.UUID, Topic] = field(default_factory=dict)
    by_unified: dict[str, str] = field(default_factory=dict)
    """Names by what they are once ``.`` and ``_`` are the same."""
    deleted: set[uuid.UUID] = field(default_factory=set)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, dict[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Rules, credentials and quotas: their fields by kind and name."""
    features_epoch: int = 0
    next_producer_id: int = 0
    starts: int = 0
    partitions: int = 0
    topic_changes: int = 0

    def colliding(self, name: str) -> str | None:
        """The topic whose name differs from ``name`` in ``.`` and ``_`` alone, or is the same."""
        return self.by_unified.get(_unified(name))

    def put(self, topic: Topic) -> None:
        """Let a topic be as this says; another one of its name is gone."""
        old = self.topics.get(topic.name)
        if old is not None and old.topic_id != topic.topic_id:
            self.remove(topic.name)
            old = None
        self.partitions += topic.partitions - (0 if old is None else old.partitions)
        self.topic_changes += 1
        self.topics[topic.name] = topic
        self.by_id[topic.topic_id] = topic
        self.by_unified[_unified(topic.name)] = topic.name

    def remove(self, name: str) -> None:
        """Let a topic be gone."""
        self.topic_changes += 1
        topic = self.topics.pop(name, None)
        if topic is not None:
            del self.by_id[topic.topic_id]
            del self.by_unified[_unified(name)]
            self.partitions -= topic.partitions
            self.deleted.add(topic.topic_id)


def _unified(name: str) -> str:
    return name.replace(".", "_")
