"""Simulated runs of daemons with members of a share group, from a seed (``WORLD=shares``).

Members stay until all deliveries are complete. Then all brokers are killed and restarted. The share
state that they read from their disks must have the same start offsets and no lag.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from typing import Any, Final

from fencepost.cluster.image import GROUP_RESOURCE
from fencepost.coordinator.metadata.names import SHARE_GROUP_STATE
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.partition import SharePartition
from fencepost.groups.share.states import PartitionState
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Partition
from tests.sim.cleanup import RETAIN
from tests.sim.daemon_faults import COORDINATORS, LOOK_MS, TOPIC
from tests.sim.daemons import (
    CONVERGENCE_MS,
    History,
    Options,
    Result,
    draw_options,
    played,
)
from tests.sim.framed import Producer, Transaction, TxnProducer
from tests.sim.framed_shares import (
    GROUP,
    HEARTBEAT_MS,
    LOCK_MS,
    SESSION_MS,
    ShareMember,
    ShareObserver,
)
from tests.sim.invariants import BrokenInvariantError
from tests.sim.share_ledger import ShareLedger
from tests.sim.stories import Stories

SETTINGS: Final = {
    "group.share.heartbeat.interval.ms": HEARTBEAT_MS,
    "group.share.min.heartbeat.interval.ms": 1,
    "group.share.session.timeout.ms": SESSION_MS,
    "group.share.min.session.timeout.ms": 1,
    "group.share.assignment.interval.ms": 0,
    "group.share.initialize.retry.interval.ms": 200,
    "group.share.record.lock.duration.ms": LOCK_MS,
    "group.share.min.record.lock.duration.ms": LOCK_MS,
    "share.coordinator.state.topic.num.partitions": COORDINATORS,
    "share.coordinator.state.topic.prune.interval.ms": 700,
    "share.coordinator.cold.partition.snapshot.interval.ms": 900,
}

WARM_UP_MS: Final = 10_000
"""The latest time of the first fault."""
ANSWERED_MS: Final = 150
"""A response that waits for nothing reaches its client within this time."""
DEAF_TURNS: Final = 8
DEAF_MS: Final = 100
"""While a former leader still serves, this many members in turn look up the leader again, at this
interval.
"""
STRANDED_TURNS: Final = 10
"""How often at most a share coordinator is moved to make a leader retry a write."""
RETRIED_MS: Final = 100
"""A write that takes longer than this is being retried."""
FAULTS: Final = (
    "kill_share_coordinator",
    "kill_leader",
    "elect_share_coordinator",
    "lone_share_coordinator",
    "deaf_leader",
)
"""Faults of simulated runs with share groups, besides the faults of other runs."""


@dataclass(frozen=True)
class ShareOptions(Options):
    """The options of a simulated run with a share group."""

    share_members: int = 2
    is_committed: bool = False
    """Whether the group reads committed records only."""
    updates_per_snapshot: int = 500

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of all brokers and of the controller."""
        of_cluster = {
            "share.coordinator.state.topic.replication.factor": self.factor,
            "share.coordinator.state.topic.min.isr": self.min_isr,
        }
        return {
            **super().settings,
            **SETTINGS,
            "share.coordinator.snapshot.update.records.per.snapshot": self.updates_per_snapshot,
            **(of_cluster if self.is_cluster else {}),
        }


def draw_share_options(seed: int) -> ShareOptions:
    """Draw the options of a seed: those of its run without a share group, but no record is lost."""
    draw, drawn = random.Random(f"shares {seed}"), draw_options(seed)
    others = {"lose_disk", "reboot", "recreate", RETAIN}
    faults = tuple(fault for fault in drawn.faults if fault not in others)
    more = draw.sample(FAULTS, draw.choice((0, 1, 2)) if drawn.is_cluster else 0)
    values = {field.name: getattr(drawn, field.name) for field in fields(drawn)}
    values |= {
        "faults": (*faults, *more) or ("kill",),
        "compacts": False,
        "unclean": False,
        "is_forced": True,
        "members": (),
        "readers": 0,
        "transactions": draw.choice((0, 0, 1)),
        "producers": draw.choice((1, 2)),
        "chaos_ms": draw.choice((1_000, 2_000)),
        "fault_pause_ms": draw.choice((100, 200, 400)),
        "fetch_wait_ms": 500,
    }
    return ShareOptions(
        **values,
        share_members=draw.choice((1, 2, 3)),
        is_committed=draw.random() < 0.4,
        updates_per_snapshot=draw.choice((0, 3, 500)),
    )


class ShareFaults(Stories):
    """The faults of other simulated runs, and faults of share coordinators."""

    def kill_share_coordinator(self) -> None:
        """Kill a share coordinator with ``kill -9``."""
        self._kill_leader(SHARE_GROUP_STATE, self.draw.randrange(COORDINATORS))

    def elect_share_coordinator(self) -> None:
        """Have another broker lead a partition of ``__share_group_state``."""
        place, admin = (SHARE_GROUP_STATE, self.draw.randrange(COORDINATORS)), self.history.admin

        async def move() -> None:
            await admin.reassign(place, self._some_replicas())
            await admin.elect_leaders(0)

        if self.options.factor == self.options.brokers:
            self._do(move())

    def strand_write(self) -> None:
        """Break the members' connections while a leader retries a write of share state."""
        self._tell(self._strand_write())

    async def _strand_write(self) -> None:
        for _ in range(STRANDED_TURNS):
            index = self.draw.randrange(COORDINATORS)
            await self.history.admin.reassign((SHARE_GROUP_STATE, index), self._some_replicas())
            await self.history.admin.elect_leaders(0)
            before = self._writes()
            await self._wait(RETRIED_MS)
            if before & self._writes():
                for client in self.history.clients:
                    if isinstance(client, ShareMember):
                        for broker_id in self._ids():
                            self.wires.break_way(client.node, f"b{broker_id}")
                return

    def _writes(self) -> set[tuple[SharePartition, int]]:
        """Return the writes of share state in progress, at all leaders."""
        services = [
            broker.services for broker in self.history.brokers if broker.services is not None
        ]
        return {
            (served.share, write_id)
            for service in services
            if service.has_shares
            for served in service.shares
            for write_id in served.share.writes
        }

    def lone_share_coordinator(self) -> None:
        """Kill a share coordinator whose last write is not replicated, and then a leader."""
        self._tell(self._lone_share_coordinator())

    async def _lone_share_coordinator(self) -> None:
        places = [(SHARE_GROUP_STATE, index) for index in range(COORDINATORS)]
        place = max(
            places, key=lambda candidate: max(self._end(id_, candidate) for id_ in self._ids())
        )
        coordinator = self._led_by(place)
        if coordinator < 0:
            return
        with self._held(self._fetches_of(place)):
            if not await self._until(
                lambda: self._end(coordinator, place) > self._mark(coordinator, place)
            ):
                return
            await self._wait(ANSWERED_MS)
            self._kill_one(coordinator)
        if await self._until(lambda: self._led_by(place) not in (-1, coordinator)):
            # The leader's successor reads the state from the coordinator's successor.
            self.kill_leader()

    def deaf_leader(self) -> None:
        """Keep the election from a former leader, which clients and brokers can still reach."""
        self._tell(self._deaf_leader())

    async def _deaf_leader(self) -> None:
        place = self._place()
        former = self._led_by(place)
        if former < 0:
            return
        with self._held({(f"b{former}", "ct")}):
            if not await self._until(lambda: self._led_by(place) not in (-1, former)):
                return
            for _ in range(DEAF_TURNS):
                members = [
                    client for client in self.history.clients if isinstance(client, ShareMember)
                ]
                # Members learn of the successor one by one.
                self.draw.choice(members).forget()
                await self._wait(DEAF_MS)

    def _ids(self) -> range:
        return range(1, self.options.brokers + 1)

    def _led_by(self, place: tuple[str, int]) -> int:
        """Return the broker that the controller has elected, -1 without one."""
        now = self._registration(place)
        return -1 if now is None else now.leader


class ShareHistory(History):
    """One simulated run with a share group."""

    options: ShareOptions
    start_ms, lively_ms = 300, 300

    def __init__(self, options: ShareOptions, told: Callable[[str], None] | None = None) -> None:
        super().__init__(options, told)
        self.ledger = ShareLedger()
        self.ledger.may_jump = "delete_records" in options.faults
        self.machines.changes += self.ledger.watched()
        self.observer: ShareObserver
        self.drained_ends: dict[int, int] = {}
        """Partition → its log end offset when the delivery of every record was complete."""

    def _faults(self) -> Stories:
        return ShareFaults(self)

    def _warm_up(self) -> None:
        """Wait for the first delivery: earlier faults would end before the group gets records."""
        while not self.ledger.acquired and self.scheduler.now < WARM_UP_MS:
            self.scheduler.run(self.scheduler.now + LOOK_MS)

    async def _make_topic(self) -> None:
        isolation = "read_committed" if self.options.is_committed else "read_uncommitted"
        while not await self.admin.configure(
            GROUP,
            GROUP_RESOURCE,
            **{"share.auto.offset.reset": "earliest", "share.isolation.level": isolation},
        ):
            pass
        await super()._make_topic()

    def _add_clients(self) -> None:
        self.observer = self._client(
            ShareObserver, "so", ledger=self.ledger, is_over=self._is_drained
        )
        for number in range(self.options.share_members):
            self._client(
                ShareMember,
                f"s{number}",
                topic=TOPIC,
                promises=self.promises,
                ledger=self.ledger,
                is_committed=self.options.is_committed,
            )
        super()._add_clients()

    # --- the state of the group at its leaders ---

    def _led(self, index: int) -> tuple[Partition, SharePartition | None] | None:
        """Return the log of a partition at its leader, and its share partition there."""
        found: list[tuple[Partition, SharePartition | None]] = []
        for broker in self.brokers:
            services = broker.services
            if services is None:
                continue
            try:
                log = services.replicas.leader(TOPIC, index)
            except DomainError:
                continue
            topic_id = self.ledger.topic_id
            key = SharePartitionKey(GROUP, b"" if topic_id is None else topic_id.bytes, index)
            served = services.shares.get(key) if services.has_shares else None
            found.append((log, None if served is None else served.share))
        # A former leader may not know yet that it has a successor.
        return max(found, key=lambda replica: replica[0].marks.leader_epoch, default=None)

    def _share(self, index: int) -> SharePartition | None:
        led = self._led(index)
        share = None if led is None else led[1]
        return share if share is not None and share.state is PartitionState.ACTIVE else None

    def _is_drained(self) -> bool:
        """Return whether the producers are done and the delivery of every record is complete."""
        writers = [client for client in self.clients if isinstance(client, Producer | TxnProducer)]
        if not all(writer.is_done or not writer.is_awaited for writer in writers):
            return False
        if self._left():
            return False
        for index in range(self.promises.partitions):
            self.drained_ends[index] = self._log_end(index)
        return True

    def _log_end(self, index: int) -> int:
        led = self._led(index)
        if led is None:
            raise BrokenInvariantError(f"partition {index} has no leader")
        return led[0].log_end_offset

    def _left(self) -> list[str]:
        left: list[str] = []
        for index in range(self.promises.partitions):
            led = self._led(index)
            share = None if led is None else self._share(index)
            if led is None or share is None:
                left.append(f"partition {index} is not fetched from")
            elif share.start_offset < led[0].log_end_offset:
                left.append(
                    f"partition {index} ends at {led[0].log_end_offset}, and the share partition"
                    f" begins at {share.start_offset}: {share.in_flight()}"
                )
        return left

    def _unsettled(self) -> list[str]:
        return [*super()._unsettled(), *self._left()] if not self.ledger.is_drained else []

    # --- the end ---

    def _judge(self) -> None:
        super()._judge()
        aborted = {
            value
            for transaction in self.promises.transactions
            if not transaction.is_acknowledged or not transaction.commits
            for value in _values(transaction)
        }
        for (topic, index), appended in self.promises.appended.items():
            low = self.promises.deleted.get((topic, index), 0)
            for offset, values in appended.items():
                for at, value in enumerate(values, offset):
                    if topic != TOPIC or at < low or value in aborted:
                        continue
                    wrong = self.ledger.unended(index, at)
                    if wrong is not None:
                        raise BrokenInvariantError(f"{value} at {at} of {index}: {wrong}")
        self._judge_disks()

    def _judge_disks(self) -> None:
        """Kill and restart all brokers; check that no start offset falls and no lag is left."""
        for broker in self.brokers:
            broker.kill()
        self.observer.lags.clear()
        found: list[bool] = []

        async def describe() -> None:
            while not await self.observer.describe():
                await self.observer.wait(LOOK_MS)
            found.append(True)

        self._wait_for(describe(), found)
        lags = self.observer.lags
        # Aborted records are archived in memory only, so they count as lag until the next write.
        is_exact = not self.options.is_committed and not self.ledger.may_jump
        # A Produce request may arrive after its producer has given up and the members have stopped.
        late = {index: self._log_end(index) - end for index, end in self.drained_ends.items()}
        if is_exact and not all(0 <= lag <= late[index] for index, lag in lags.items()):
            raise BrokenInvariantError(
                f"every record has ended, apart from {late} late ones, and the lags are {lags}"
            )

    def _wait_for(self, work: Coroutine[Any, Any, None], done: list[bool]) -> None:
        until_ms = self.scheduler.now + CONVERGENCE_MS
        self.observer.spawn(work)
        while not done and self.scheduler.now < until_ms:
            self._start_all()
            self.scheduler.run(self.scheduler.now + LOOK_MS)
        if not done:
            raise BrokenInvariantError("the offsets of the share group cannot be described")


def _values(transaction: Transaction) -> set[str]:
    return {value for values in transaction.tried.values() for value in values}


def play(seed: int, told: Callable[[str], None] | None = None) -> Result:
    """Run the simulation of a seed; a failure raises, with the last events in its notes."""
    return live(draw_share_options(seed), told)


def live(options: ShareOptions, told: Callable[[str], None] | None = None) -> Result:
    """Run the simulation of these options; see :func:`play`."""
    return played(ShareHistory(options, told), f"make sim WORLD=shares SEED={options.seed} N=1")
