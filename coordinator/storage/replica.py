"""This broker's replica of a replicated partition, and the interfaces that replicas call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from fencepost.cluster.image import LocalPartition, TopicImage
from fencepost.logcore.epochs import UNDEFINED_EPOCH
from fencepost.logcore.errors import (
    StorageError,
)
from fencepost.logcore.partition import Partition
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.cluster.isr import ReplicationView
    from fencepost.cluster.leader import PartitionLeader


class ReplicaFetchers(Protocol):
    """Fetches from leaders: ``coordinator/replication/fetchers.py``."""

    @property
    def max_lag(self) -> int:
        """Return the lag of the replica furthest behind its leader, in records."""

    def follow(self, partitions: Sequence[LocalPartition]) -> None:
        """Start fetching the partitions from their leaders, in the leader epoch of each."""

    def stop(self, partitions: Sequence[tuple[UUID, int]]) -> None:
        """Stop fetching the partitions; responses in flight have no effect."""


class OnPlaced(Protocol):
    """Reports the directories of replicas: ``coordinator/replication/directories.py``."""

    def __call__(self, local: LocalPartition, *, is_offline: bool) -> None:
        """Report a replica; ``is_offline`` if its disk has failed or its log cannot be opened."""


@dataclass(slots=True, eq=False)
class Replica:
    """This broker's replica of a partition that has other replicas as well."""

    local: LocalPartition
    machine: PartitionLeader
    partition: Partition | None = None
    """The log of the replica; None if it could not be opened."""
    failure: StorageError | None = None
    """The reason why the log could not be opened."""
    followed_epoch: int = UNDEFINED_EPOCH
    """The leader epoch in which this broker last began to fetch, or to wait for a leader."""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks that are called whenever the low watermark changes, and when the leadership ends. A
    callback that is done removes itself."""

    @classmethod
    def of(cls, view: ReplicationView, local: LocalPartition) -> Replica:
        """Return the object for a replica that is new on this broker."""
        from fencepost.cluster.leader import PartitionLeader  # noqa: PLC0415 - most brokers are standalone

        return cls(local, PartitionLeader(view, local.topic, local.topic_id, local.index))

    @property
    def log(self) -> Partition:
        """Return the open log. Raises StorageError."""
        if self.partition is None:
            if self.failure is not None:
                raise without_traceback(self.failure)
            raise StorageError(f"{self.local.topic}-{self.local.index} is off line")
        return self.partition

    @property
    def is_offline(self) -> bool:
        """Return whether its disk has failed."""
        return self.partition is None or self.partition.offline is not None

    def low_watermark_moved(self) -> None:
        """Call the callbacks in ``waiting``, each of which checks its condition itself."""
        for callback in list(self.waiting):
            callback()


def partitions_in(
    topics: Iterable[TopicImage], *tables: Mapping[tuple[str, int], object]
) -> Iterator[LocalPartition]:
    """Yield the partitions of ``topics`` that have an entry in any of ``tables``."""
    for topic in topics:
        name, count = topic.name, len(topic.partitions)
        indexes: set[int] = set()
        for table in tables:
            if len(table) < count:
                indexes.update([index for at, index in table if at == name and index < count])
            else:
                indexes.update([index for index in range(count) if (name, index) in table])
        for index in sorted(indexes):
            yield LocalPartition(name, topic.topic_id, index, topic.partitions[index])
