"""The result of a controller's decision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from fencepost.cluster.image import PartitionRegistration
from fencepost.cluster.records import MetadataRecord, PartitionChangeRecord
from fencepost.logcore.machine import Event
from fencepost.logcore.values import dataclass

OF_PARTITIONS: Final = frozenset(
    {"leader-elected", "leader-lost", "isr-changed", "reassignment-changed", "reassignment-ended"}
)
"""Events whose subject is a partition; the subject of any other event is a broker or a feature."""

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ControllerResult(Generic[T_co]):
    """Records to append, in order, and the answer once they are committed.

    Nothing has changed yet: only :meth:`Controller.replay` changes the image.
    """

    answer: T_co
    records: Sequence[MetadataRecord] = ()
    events: tuple[Event, ...] = ()
    """Events for the event history, each with its cause."""


@dataclass(frozen=True, slots=True)
class PartitionChange:
    """A change of a partition: the states before and after it, its record and its cause."""

    topic: str
    index: int
    before: PartitionRegistration
    after: PartitionRegistration
    record: PartitionChangeRecord
    cause: str


def events_of(changes: Iterable[PartitionChange]) -> Iterator[Event]:
    """Yield the events about leaders, ISRs and reassignments that result from changes."""
    for change in changes:
        old, new, subject = change.before, change.after, f"{change.topic}-{change.index}"
        if new.leader_epoch != old.leader_epoch:
            yield Event(
                "leader-elected" if new.leader >= 0 else "leader-lost",
                subject,
                {
                    "from": old.leader,
                    "to": new.leader,
                    "leader_epoch": new.leader_epoch,
                    "election": _election(old, new),
                    "cause": change.cause,
                },
            )
        joined = [replica for replica in new.isr if replica not in old.isr]
        removed = [replica for replica in old.isr if replica not in new.isr]
        if joined or removed:
            yield Event(
                "isr-changed",
                subject,
                {"joined": joined, "left": removed, "isr": list(new.isr), "cause": change.cause},
            )
        if (old.adding_replicas, old.removing_replicas) != (
            new.adding_replicas,
            new.removing_replicas,
        ):
            is_in_progress = bool(new.adding_replicas or new.removing_replicas)
            yield Event(
                "reassignment-changed" if is_in_progress else "reassignment-ended",
                subject,
                {
                    "replicas": list(new.replicas),
                    "adding": list(new.adding_replicas),
                    "removing": list(new.removing_replicas),
                    "cause": change.cause,
                },
            )


def _election(old: PartitionRegistration, new: PartitionRegistration) -> str:
    if new.leader < 0:
        return "none"
    if new.leader == old.leader:
        return "same leader"
    if new.leader_recovery_state == 1 and new.isr == (new.leader,):
        return "unclean election"
    return "eligible leader replica" if new.leader in old.elr else "clean election"
