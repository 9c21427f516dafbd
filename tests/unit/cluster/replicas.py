"""Leaders, followers and broker registrations for replication scenarios."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from fencepost.cluster.errors import Errors
from fencepost.cluster.follower import (
    FollowerStep,
    PartitionFetch,
    PartitionFollower,
    PartitionResponse,
)
from fencepost.cluster.image import BrokerRegistration, PartitionRegistration
from fencepost.cluster.isr import AlteredPartition, IsrChange, ReplicationView
from fencepost.cluster.leader import LeaderStep, PartitionLeader

TOPIC, TOPIC_ID = "orders", UUID(int=77)
LAG_MS = 30_000


def broker(
    broker_id: int, *, epoch: int | None = None, fenced: bool = False, leaving: bool = False
) -> BrokerRegistration:
    """Return a registration; the epoch is 100 + id by default."""
    return BrokerRegistration(
        broker_id=broker_id,
        epoch=100 + broker_id if epoch is None else epoch,
        incarnation_id=UUID(int=1000 + broker_id),
        listeners={},
        features={},
        rack=None,
        fenced=fenced,
        in_controlled_shutdown=leaving,
        directories=(),
    )


def registration(
    replicas: Sequence[int] = (1, 2, 3),
    isr: Sequence[int] | None = None,
    *,
    leader: int = 1,
    leader_epoch: int = 5,
    partition_epoch: int = 10,
    adding: Sequence[int] = (),
    removing: Sequence[int] = (),
) -> PartitionRegistration:
    """Return a partition; every replica is in the ISR by default."""
    return PartitionRegistration(
        replicas=tuple(replicas),
        isr=tuple(replicas if isr is None else isr),
        leader=leader,
        leader_epoch=leader_epoch,
        partition_epoch=partition_epoch,
        adding_replicas=tuple(adding),
        removing_replicas=tuple(removing),
    )


def view(broker_id: int = 1, brokers: Iterable[int] = (1, 2, 3, 4, 5, 6)) -> ReplicationView:
    """Return broker ``broker_id``'s view of the cluster, in which all brokers are unfenced."""
    known = {node_id: broker(node_id) for node_id in brokers}
    return ReplicationView(broker_id, 100 + broker_id, LAG_MS, known)


class Led:
    """A partition led by broker 1, with a clock."""

    def __init__(
        self,
        now: PartitionRegistration | None = None,
        *,
        end: int = 0,
        high: int = 0,
        min_isr: int = 1,
    ) -> None:
        self.view = view()
        self.now_ms = 1_000_000
        self.leader = PartitionLeader(self.view, TOPIC, TOPIC_ID, 0, min_insync_replicas=min_isr)
        self.first = self.become(now or registration(), end=end, high=high)

    def become(
        self, now: PartitionRegistration, *, end: int | None = None, high: int = 0
    ) -> LeaderStep:
        """Apply the partition's registration from a new image."""
        ends = self.leader.log_end_offset if end is None else end
        return self.leader.become_leader(now, self.leader.log_start_offset, ends, high, self.now_ms)

    def append(self, count: int) -> LeaderStep:
        """Append ``count`` records."""
        return self.leader.on_appended(self.leader.log_end_offset + count, self.now_ms)

    def fetch(
        self,
        broker_id: int,
        offset: int,
        *,
        start: int = 0,
        epoch: int | None = None,
        diverging: bool = False,
    ) -> LeaderStep:
        """Pass a follower's fetch at ``offset`` to the leader."""
        return self.leader.update_follower_fetch_state(
            broker_id,
            100 + broker_id if epoch is None else epoch,
            offset,
            start,
            self.leader.log_end_offset,
            self.now_ms,
            is_diverging=diverging,
        )

    def wait(self, ms: int) -> None:
        """Advance the clock by ``ms``."""
        self.now_ms += ms

    def knows(self, *brokers: BrokerRegistration) -> None:
        """Replace brokers' registrations in the view."""
        self.view.brokers = {
            **self.view.brokers,
            **{member.broker_id: member for member in brokers},
        }

    def accept(self, change: IsrChange, partition_epoch: int | None = None) -> LeaderStep:
        """Answer a proposed ISR change like a controller that accepts the change."""
        epoch = change.partition_epoch + 1 if partition_epoch is None else partition_epoch
        isr = tuple(broker_id for broker_id, _ in change.new_isr)
        return self.answer(change, AlteredPartition(change.leader_epoch, epoch, isr))

    def answer(self, change: IsrChange, answer: int | AlteredPartition) -> LeaderStep:
        """Deliver the AlterPartition result, or an error code."""
        return self.leader.alter_partition_answered(change, answer, self.now_ms)

    def shrink(self) -> IsrChange:
        """Return the change that the periodic ISR check proposes."""
        change = self.leader.check_isr(self.now_ms).send
        assert change is not None
        return change


@dataclass
class ListLog:
    """A log in memory; a record is a leader epoch and a value."""

    records: list[tuple[int, object]] = field(default_factory=list)
    log_start_offset: int = 0
    high_watermark: int = 0
    extra: list[tuple[int, int]] = field(default_factory=list)
    """Leader epochs that began without a record."""

    @property
    def log_end_offset(self) -> int:
        return self.log_start_offset + len(self.records)

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """Return (epoch, start offset) pairs, oldest first."""
        starts: dict[int, int] = {}
        for at, (epoch, _) in enumerate(self.records):
            if epoch >= 0:
                starts.setdefault(epoch, self.log_start_offset + at)
        for epoch, start in self.extra:
            starts.setdefault(epoch, start)
        return sorted(starts.items())

    @property
    def latest_epoch(self) -> int:
        return self.epochs[-1][0] if self.epochs else -1

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        entries = self.epochs
        if not entries or epoch > entries[-1][0] or epoch < 0:
            return -1, -1
        below = [begun for begun, _ in entries if begun <= epoch]
        above = [start for begun, start in entries if begun > epoch]
        return below[-1] if below else epoch, above[0] if above else self.log_end_offset

    def begin_epoch(self, epoch: int, start: int) -> None:
        """Begin a leader epoch."""
        self.extra = [entry for entry in self.extra if entry[1] < start]
        self.extra.append((epoch, start))

    def append(self, *epochs: int, value: object = None) -> None:
        """Append one record for each of these leader epochs."""
        self.records += [(epoch, value) for epoch in epochs]

    def cut(self, offset: int, *, anew: bool = False) -> None:
        """Truncate to ``offset``; with ``anew``, delete all records and start at ``offset``."""
        if anew:
            self.records.clear()
            self.extra.clear()
            self.log_start_offset = self.high_watermark = offset
            return
        del self.records[offset - self.log_start_offset :]
        self.extra = [entry for entry in self.extra if entry[1] < offset]
        self.high_watermark = min(self.high_watermark, offset)


class Following:
    """A partition on follower 2, with its log and a clock."""

    def __init__(self, *epochs: int, high: int = 0, leader: int = 1, leader_epoch: int = 5) -> None:
        self.log = ListLog(high_watermark=high)
        self.log.append(*epochs)
        self.now_ms = 1_000_000
        self.machine = PartitionFollower(TOPIC, TOPIC_ID, 0, self.log)
        self.do(
            self.machine.become_follower(registration(leader=leader, leader_epoch=leader_epoch))
        )

    def do(self, step: FollowerStep) -> FollowerStep:
        """Execute the parts of a follower's step that need no leader."""
        if step.truncate is not None:
            self.log.cut(step.truncate.offset, anew=step.truncate.full)
            self.do(self.machine.on_truncated())
        if step.high_watermark is not None:
            self.log.high_watermark = step.high_watermark
        if step.log_start_offset is not None:
            del self.log.records[: step.log_start_offset - self.log.log_start_offset]
            self.log.log_start_offset = step.log_start_offset
        return step

    def ask(self) -> PartitionFetch:
        """Return the next fetch; the follower must be ready to fetch."""
        fetch = self.machine.fetch(self.now_ms)
        assert fetch is not None
        return fetch

    def get(
        self,
        *epochs: int,
        high: int = 0,
        start: int = 0,
        error: int = Errors.NONE,
        diverging: tuple[int, int] | None = None,
        sent: PartitionFetch | None = None,
    ) -> FollowerStep:
        """Deliver a response to a fetch, with one record in each of these leader epochs."""
        answer = PartitionResponse(error, high, start, diverging, list(epochs), len(epochs))
        asked = self.ask() if sent is None else sent
        step = self.do(self.machine.on_answer(asked, answer, self.now_ms))
        limit = step.append_up_to_epoch
        if limit is None:
            return step
        taken = [epoch for epoch in epochs if epoch <= limit]
        self.log.append(*taken)
        return self.do(self.machine.on_appended())
