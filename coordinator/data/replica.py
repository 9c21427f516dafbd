"""One replica on this broker of a partition that has others, and who fetches for it."""

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


class Fetchers(Protocol):
    """Who follows: ``coordinator/replication/fetchers.py``."""

    @property
    def max_lag(self) -> int:
        """Records that the replica furthest behind its leader lacks."""

    def follow(self, partitions: Sequence[LocalPartition]) -> None:
        """Fetch these from their leaders from now on, in the leader epoch that each has."""

    def stop(self, partitions: Sequence[tuple[UUID, int]]) -> None:
        """Fetch these no more; what is under way for them has no effect."""


class Placed(Protocol):
    """Hears where replicas are: ``coordinator/replication/directories.py``."""

    def __call__(self, one: LocalPartition, *, is_offline: bool) -> None:
        """``is_offline``: its disk has failed, or it could not be opened."""


@dataclass(slots=True, eq=False)
class Replica:
    """One partition with a replica here, unless that is the only one."""

    local: LocalPartition
    machine: PartitionLeader
    partition: Partition | None = None
    """Its log; None where it could not be opened."""
    failure: StorageError | None = None
    """Why that is so."""
    followed_epoch: int = UNDEFINED_EPOCH
    """The leader epoch in which it was last told to be fetched, or to wait for a leader."""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Who waits for the low watermark: called with each move of it, and with the end of the
    leadership. Whoever is served takes itself out."""

    @classmethod
    def of(cls, view: ReplicationView, one: LocalPartition) -> Replica:
        """A replica that was not here before."""
        from fencepost.cluster.leader import PartitionLeader  # noqa: PLC0415 - most brokers are alone

        return cls(one, PartitionLeader(view, one.topic, one.topic_id, one.index))

    @property
    def log(self) -> Partition:
        """The open log, or StorageError."""
        if self.partition is None:
            if self.failure is not None:
                raise without_traceback(self.failure)
            raise StorageError(f"{self.local.topic}-{self.local.index} is off line")
        return self.partition

    @property
    def is_offline(self) -> bool:
        """Whether its disk has failed."""
        return self.partition is None or self.partition.offline is not None


def partitions_in(
    topics: Iterable[TopicImage], *tables: Mapping[tuple[str, int], object]
) -> Iterator[LocalPartition]:
    """Return the partitions of ``topics`` that have an entry in any of ``tables``."""
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
