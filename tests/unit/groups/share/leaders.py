"""Random events of share partitions on several leaders, with a real share coordinator.

Former leaders do not know of the new leader: they serve until a write is fenced. Requests to the
coordinator are delayed, overtake each other, and lose their responses. The coordinator is reloaded
from a pruned log, and the group's offset is altered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from fencepost.groups.share.commands import (
    Acknowledged,
    ReadState,
    SharePartitionKey,
    StateRead,
    WriteState,
)
from fencepost.groups.share.errors import (
    FencedShareLeaderEpochError,
    FencedStateEpochError,
    ShareError,
    SharePartitionFailedError,
)
from fencepost.groups.share.partition import SharePartition
from fencepost.groups.share.state import (
    ReadShareState,
    ReadStateSummary,
    SnapshotColdPartitions,
    StateSummary,
    WriteShareState,
)
from fencepost.groups.share.states import PartitionState, RecordState
from fencepost.logcore.machine import DomainError
from tests.unit.groups.share.driver import LOCK_MS, Driver, log
from tests.unit.groups.share.state_driver import KEY, Coordinator

MEMBERS = ("m1", "m2")
LOST = SharePartitionFailedError("the answer was lost")


@dataclass
class Leader:
    """A share partition on one broker."""

    driver: Driver
    epoch: int
    generation: int = 0
    """The number of alterations of the group's offset before the leader read its state."""
    read_at: int = 0
    """The step in which the coordinator answered the leader's read."""
    confirming: dict[int, set[int]] = field(default_factory=dict)
    """Token → offsets that are final once the reply to the token is successful."""
    delivered: dict[int, int] = field(default_factory=dict)


class Cluster:
    """One random run of a share partition with several brokers."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.coordinator = Coordinator()
        self.coordinator.initialize(state_epoch=0)
        self.end = 0
        self.batches: list[tuple[int, int]] = []
        self.steps = 0
        self.generation = 0
        self.altered_at = 0
        self.finished: dict[int, int] = {}
        """Offset → the step in which NONE confirmed the offset's final state, since the last
        alteration.
        """
        self.leaders: list[Leader] = []
        self.elect()

    # --- brokers ---------------------------------------------------------------------------------

    @property
    def leader(self) -> Leader:
        return self.leaders[-1]

    def elect(self) -> None:
        """Make another broker the leader. The former leader learns of the change later."""
        self._lead(self.leader.epoch + 1 if self.leaders else 1)

    def _lead(self, epoch: int) -> None:
        driver = Driver(start=None, leader_epoch=epoch)
        driver.now_ms = self.coordinator.now_ms
        self.leaders.append(Leader(driver, epoch))
        token = driver.token()
        driver.run(lambda decision: driver.partition.initialize(decision, token))

    def requests(self) -> list[tuple[Leader, ReadState | WriteState]]:
        """Return the in-flight requests to the coordinator."""
        return [
            (leader, request)
            for leader in self.leaders
            for request in (*leader.driver.reads, *leader.driver.writes)
        ]

    def deliver(self, leader: Leader, request: ReadState | WriteState, *, lossy: bool) -> None:
        """Deliver a request and its response; if ``lossy``, either may be lost."""
        rng, driver = self.rng, leader.driver
        answer: object = LOST
        if not lossy or rng.random() < 0.9:
            try:
                answer = self.coordinator(_command(request))
            except ShareError as error:
                answer = error
            if lossy and rng.random() < 0.1:
                answer = LOST
        failure = answer if isinstance(answer, DomainError) else None
        if isinstance(request, WriteState):
            driver.complete(driver.writes.index(request), failure)
            self._note_answers(leader)
            if isinstance(failure, FencedStateEpochError | FencedShareLeaderEpochError):
                assert driver.partition.state is PartitionState.FENCED
        else:
            driver.reads.remove(request)
            leader.read_at, leader.generation = self.steps, self.generation
            state = answer if isinstance(answer, StateRead | DomainError) else LOST
            driver.run(lambda decision: driver.partition.state_read(decision, state))
        self._replace_dropped()

    def _note_answers(self, leader: Leader) -> None:
        replies = leader.driver.replies
        for token in [token for token in leader.confirming if token in replies]:
            offsets = leader.confirming.pop(token)
            if replies[token] != Acknowledged() or leader.generation != self.generation:
                continue
            twice = offsets & self.finished.keys()
            assert not twice, f"{twice} finished by two leaders (rules 2, 10)"
            self.finished.update(dict.fromkeys(offsets, self.steps))

    def _replace_dropped(self) -> None:
        """Remove fenced and failed leaders; replace the current leader if it is among these.

        A broker must not create the new share partition before the old share partition's writes
        have completed. These writes have the same epochs, and the coordinator would accept them
        after the new read.
        """
        for leader in list(self.leaders):
            gone = leader.driver.partition.state in (PartitionState.FENCED, PartitionState.FAILED)
            if gone and not leader.driver.writes:
                is_current = leader is self.leader
                self.leaders.remove(leader)
                if is_current:
                    self._lead(leader.epoch)

    # --- steps -----------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            self.step()
            self.check()
        self.finish()

    def step(self) -> None:
        rng = self.rng
        actions = (
            self.produce, self.fetch, self.acknowledge, self.exchange, self.pass_time,
            self.elect, self.reload, self.alter,
        )  # fmt: skip
        rng.choices(actions, (6, 14, 14, 16, 3, 0.7, 1, 0.8))[0]()

    def produce(self) -> None:
        size = self.rng.randint(1, 8)
        self.batches.append((self.end, self.end + size - 1))
        self.end += size

    def some_leader(self) -> Leader:
        return self.leader if self.rng.random() < 0.7 else self.rng.choice(self.leaders)

    def fetch(self, leader: Leader | None = None) -> None:
        leader = leader or self.some_leader()
        partition = leader.driver.partition
        if partition.state is not PartitionState.ACTIVE:
            return
        offset = partition.next_fetch_offset()
        batches = [batch for batch in self.batches if batch[1] >= offset]
        if not batches or not partition.can_acquire():
            return
        acquired = leader.driver.fetch(
            self.rng.choice(MEMBERS),
            log(*batches[: self.rng.randint(1, 4)]),
            at=offset,
            max_records=self.rng.choice((1, 10)),
        )
        for first, last, count in acquired:
            for record_offset in range(first, last + 1):
                self._check_delivery(leader, record_offset, count)

    def _check_delivery(self, leader: Leader, offset: int, count: int) -> None:
        assert count > leader.delivered.get(offset, 0), f"{offset}: count {count} (rule 4)"
        leader.delivered[offset] = count
        ended_at = self.finished.get(offset)
        if leader.generation == self.generation and ended_at is not None:
            assert leader.read_at < ended_at, f"{offset} delivered after its end (rule 3)"

    def acknowledge(self, leader: Leader | None = None, *, accept: bool = False) -> None:
        rng = self.rng
        leader = leader or self.some_leader()
        partition = leader.driver.partition
        owned = [entry for entry in partition.in_flight() if entry.state is RecordState.ACQUIRED]
        if not owned or partition.state is not PartitionState.ACTIVE:
            return
        entry = rng.choice(owned)
        first = rng.randint(entry.first, entry.last)
        last = rng.randint(first, entry.last)
        if accept:
            first, last = entry.first, entry.last
        kind = 1 if accept else rng.choice((0, 1, 1, 2, 3))
        token = leader.driver.acknowledge(entry.member_id or "", (first, last, kind))
        if kind != 2:
            leader.confirming[token] = set(range(first, last + 1))
        self._note_answers(leader)

    def exchange(self) -> None:
        requests = self.requests()
        if requests:
            self.deliver(*self.rng.choice(requests), lossy=True)

    def pass_time(self) -> None:
        ms = self.rng.choice((1, LOCK_MS // 2, LOCK_MS, 300_000))
        for leader in self.leaders:
            leader.driver.advance(ms)
        self.coordinator.now_ms += ms
        if self.rng.random() < 0.3:
            self.coordinator(SnapshotColdPartitions())

    def reload(self) -> None:
        """Reload the coordinator from the first record that pruning keeps."""
        start = self.coordinator.machine.redundant_offset()
        digest = self.coordinator.machine.digest()
        self.coordinator.machine = self.coordinator.loaded(start)
        assert self.coordinator.machine.digest() == digest, "rule 11"

    def alter(self) -> None:
        """Set the group's offset, with a higher state epoch."""
        self.generation += 1
        self.finished.clear()
        self.persisted_start = 0
        offset = self.rng.randint(0, self.end)
        self.coordinator.initialize(state_epoch=self.generation, start=offset)

    # --- rules -----------------------------------------------------------------------------------

    persisted_start = 0

    def check(self) -> None:
        self.coordinator.machine.check()
        summary = self.summary()
        assert summary.start_offset >= self.persisted_start, "rule 6"
        self.persisted_start = summary.start_offset
        assert 0 <= summary.delivery_complete_count <= self.end - summary.start_offset, "rule 12"

    def summary(self) -> StateSummary:
        summary = self.coordinator(ReadStateSummary(KEY))
        assert isinstance(summary, StateSummary)
        return summary

    def finish(self) -> None:
        """Check that, without faults, the last leader delivers all records that are not final."""
        for _ in range(1_000):
            self.steps += 1
            while requests := self.requests():
                self.deliver(*requests[0], lossy=False)
            partition = self.leader.driver.partition
            if partition.start_offset >= self.end:
                break
            self.fetch(self.leader)
            while _owned(partition):
                self.acknowledge(self.leader, accept=True)
        assert partition.start_offset >= self.end, f"stuck at {partition.start_offset}"
        summary = self.summary()
        lag = self.end - summary.start_offset - summary.delivery_complete_count
        assert lag == 0, f"lag {lag} of {summary} (rule 12)"


def _owned(partition: SharePartition) -> bool:
    return any(entry.state is RecordState.ACQUIRED for entry in partition.in_flight())


def _command(request: ReadState | WriteState) -> ReadShareState | WriteShareState:
    key: SharePartitionKey = KEY
    if isinstance(request, ReadState):
        return ReadShareState(key, request.leader_epoch)
    return WriteShareState(
        key,
        request.state_epoch,
        request.leader_epoch,
        request.start_offset,
        request.delivery_complete_count,
        request.batches,
    )
