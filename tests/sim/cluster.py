"""A cluster with its clients, and its history; a subclass elects the controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.machine import GroupMachine
from tests.sim.clients import Consumer, Producer, World
from tests.sim.coordinator import TXN_TOPIC
from tests.sim.disk import Disk, ModelLog
from tests.sim.faults import TOPIC, Faults
from tests.sim.groups import GROUP, GROUPS_TOPIC, GroupLedger
from tests.sim.invariants import BrokenInvariantError, Invariants, Site
from tests.sim.members import ClassicMember, ConsumerMember, Member
from tests.sim.network import Network
from tests.sim.process import Process
from tests.sim.scheduler import Scheduler
from tests.sim.shards import SHARD
from tests.sim.swarm import Options
from tests.sim.txn_client import Transactional, TxnProducer

START_MS: Final = 1_500
"""The time before the first fault, in which brokers register and the topic is created."""
LIVELY_MS: Final = 1_000
"""How long producers go on after the last fault; all their batches must be acknowledged."""
CONVERGENCE_MS: Final = 20_000
"""The time after the last fault within which the cluster must have recovered."""
COPYING_MS, MOST_MS = 2_000, 60_000
"""How long a replica that appends records extends that time, and the limit after the last fault."""
LOOK_MS: Final = 100


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a seed."""

    seed: int
    digest: str
    steps: int
    lines: int
    acknowledged: int
    committed: int
    converged_ms: int
    """How long the cluster took to recover after the last fault."""


class Cluster:
    """The brokers, the controller and the clients of one history."""

    def __init__(self, options: Options, told: Callable[[str], None] | None = None) -> None:
        self.options = options
        self.scheduler = Scheduler(options.seed, told)
        self.network = Network(self.scheduler, options.weather)
        self.deciders: tuple[str, ...] = ()
        """Nodes that the controller needs, apart from the brokers'."""
        self.invariants = Invariants()
        self.given_ids: set[int] = set()
        self.processes: dict[int, Process] = {}
        self.ids = tuple(range(1, options.brokers + 1))
        for broker_id in self.ids:
            self.network.add(f"b{broker_id}")
            self.invariants.sites[broker_id] = Site(broker_id, Disk())
        self.world = World(self.network, self.invariants, [f"b{one}" for one in self.ids])
        self.producers: list[Producer] = []
        self.txn_producers: list[Transactional] = []
        self.members: list[Member] = []
        self.ledger = GroupLedger(self.invariants, TOPIC)
        self.consumers: list[Consumer] = []
        self.controller = self._controller()
        self.faults = self._faults()
        self.scheduler.after_step = self.invariants.check

    def _controller(self) -> Any:
        """Return the operators of this cluster, which send requests to its controller."""
        raise NotImplementedError

    def _faults(self) -> Faults:
        raise NotImplementedError

    # --- processes ---

    def _process(self, broker_id: int) -> Process:
        raise NotImplementedError

    def start_broker(self, broker_id: int) -> None:
        """Start a process on a broker's node, unless one is running."""
        if not self.network.nodes[f"b{broker_id}"].is_up:
            self.processes[broker_id] = self._process(broker_id)
            self.processes[broker_id].start()

    def crash_broker(self, broker_id: int) -> None:
        """Kill a broker's process; requests that it has already sent may still arrive."""
        node = self.network.nodes[f"b{broker_id}"]
        if not node.is_up:
            return
        if self.scheduler.chance(0.5):
            self.processes[broker_id].following.last_words()
        node.say("is killed")
        node.end()
        site = self.invariants.sites[broker_id]
        site.process = None
        site.disk.end()
        for key in site.disk.logs:
            self.invariants.shown_again(broker_id, key)

    def ended(self, broker_id: int) -> None:
        """Schedule the restart of a broker whose process has stopped by itself."""
        self.faults.come_back(broker_id)

    # --- a history ---

    def run(self) -> Result:
        """Play the history with all checks. Raises BrokenInvariantError."""
        scheduler, options = self.scheduler, self.options
        scheduler.say("--", str(options))
        for broker_id in self.ids:
            self.start_broker(broker_id)
        scheduler.run(START_MS // 2)
        self.faults.create_topic(options.partitions, options.replication_factor)
        for name in self.first_topics:
            self.faults.create_topic(1, options.replication_factor, name)
        scheduler.run(START_MS)
        self._add_clients()
        self.faults.begin()
        scheduler.run(START_MS + options.chaos_ms)
        healed_ms = scheduler.now
        self.faults.heal()
        scheduler.run(healed_ms + LIVELY_MS)
        clients: list[Producer | Transactional] = [*self.producers, *self.txn_producers]
        for client in clients + self.members:
            client.is_stopped = True
        converged_ms = self._converge(healed_ms)
        self.invariants.finish()
        if not any(one.was_void for one in self.invariants.truths.values()):
            for one in (*self.txn_producers, *self.members):
                one.check(
                    {name: log for name, log in self._leaders_logs().items() if name[0] == TOPIC}
                )
        return Result(
            options.seed,
            scheduler.trace.digest,
            scheduler.steps,
            scheduler.trace.count,
            sum(one.acknowledged for one in self.producers),
            sum(len(one.committed) for one in self.invariants.truths.values()),
            converged_ms,
        )

    @property
    def first_topics(self) -> list[str]:
        """Topics that are created at the start, in addition to the clients' topic."""
        return self.coordinator_topics

    @property
    def coordinator_topics(self) -> list[str]:
        """The internal topics of the coordinators in this history."""
        topics = [TXN_TOPIC] if self.options.has_transactions else []
        return [*topics, GROUPS_TOPIC] if self.options.members else topics

    def _add_clients(self) -> None:
        for number, one in enumerate(self.options.producers):
            self.producers.append(
                Producer(
                    self.world,
                    f"p{number}",
                    TOPIC,
                    one.index,
                    acks=one.acks,
                    is_idempotent=one.is_idempotent,
                    max_in_flight=one.max_in_flight,
                    pause_ms=one.pause_ms,
                )
            )
        for number in range(self.options.transactions):
            self.txn_producers.append(
                TxnProducer(self.world, f"t{number}", TOPIC, self.options.partitions)
            )
        kind = ConsumerMember if self.options.consumer_protocol else ClassicMember
        for number, in_transactions in enumerate(self.options.members):
            member = kind(
                self.world,
                f"m{number}",
                TOPIC,
                self.options.partitions,
                self.ledger,
                in_transactions=in_transactions,
            )
            self.members.append(member)
        for number, prefers_followers in enumerate(self.options.consumers):
            index = number % self.options.partitions
            self.consumers.append(
                Consumer(
                    self.world,
                    f"c{number}",
                    TOPIC,
                    index,
                    prefers_followers=prefers_followers,
                    reads_committed=self.options.has_transactions,
                )
            )

    def _converge(self, healed_ms: int) -> int:
        wrong: list[str] = []
        copied, patient_until_ms = 0, healed_ms + CONVERGENCE_MS
        while self.scheduler.now < patient_until_ms:
            self.scheduler.run(self.scheduler.now + LOOK_MS)
            before, copied = copied, self._copied()
            if copied > before:
                # A long log takes a while to copy with two batches a request over a slow network.
                most_ms = min(self.scheduler.now + COPYING_MS, healed_ms + MOST_MS)
                patient_until_ms = max(patient_until_ms, most_ms)
            wrong = [
                f"{one.node.name} waits after error {one.last_error}"
                for one in self.producers
                if not one.is_done
            ]
            wrong += [
                f"{one.node.name} waits with {one.waits_for}"
                for one in self.txn_producers
                if not one.is_done
            ]
            wrong += self.invariants.converged()
            wrong += [
                f"there is no topic {name}"
                for name in (TOPIC, *self.coordinator_topics)
                if name not in self.invariants.image.topics
            ]
            wrong += self._stale_images()
            wrong += self._open_transactions()
            wrong += self._unsettled_members()
            if not wrong:
                return self.scheduler.now - healed_ms
        raise BrokenInvariantError(
            f"{(self.scheduler.now - healed_ms) / 1000} s after the last fault: " + "; ".join(wrong)
        )

    def _copied(self) -> int:
        """Return the sum of the log end offsets of all replicas."""
        sites = self.invariants.sites.values()
        return sum(log.end for site in sites for log in site.disk.logs.values())

    def _leaders_logs(self) -> dict[tuple[str, int], ModelLog]:
        """Return the leaders' logs of the partitions that transactions write to."""
        known = self.invariants.image.topics
        topics = [
            known[name]
            for name in (TOPIC, GROUPS_TOPIC)
            if name in known and (name == TOPIC or self.members)
        ]
        return {
            (topic.name, index): log
            for topic in topics
            for index, one in enumerate(topic.partitions)
            if one.leader >= 0
            # A leader that does not know of its partition yet has no log.
            and (log := self.invariants.sites[one.leader].disk.logs.get((topic.topic_id, index)))
        }

    def _open_transactions(self) -> list[str]:
        """Return a message for each partition with open transactions."""
        if not self.options.has_transactions:
            return []
        return [
            f"{name} has open transactions: {log.producers.open_transactions()}"
            for name, log in self._leaders_logs().items()
            if log.producers.open_transactions()
        ]

    def _stale_images(self) -> list[str]:
        """Return a message for each difference between brokers' and the controller's metadata."""
        raise NotImplementedError

    def _unsettled_members(self) -> list[str]:
        """Return why the group is not stable, or does not read each partition exactly once."""
        if not self.members:
            return []
        topics = self.invariants.image.topics
        if not {TOPIC, GROUPS_TOPIC} <= topics.keys():
            return ["there is no topic to read, or none for groups"]
        leader = topics[GROUPS_TOPIC].partitions[SHARD].leader
        shard = self.processes[leader].groups.active if leader in self.processes else None
        if shard is None:
            return [f"{leader} does not coordinate the group"]
        group = cast("GroupMachine", shard.machine).groups.get(GROUP)
        names = {one.member_id for one in self.members}
        if group is None or group.members.keys() != names:
            return [f"the group is not the one of {names}: {group}"]
        wrong = [
            f"{one.node.name} is not at work: {one.waits_for}"
            for one in self.members
            if not one.is_idle
        ]
        if isinstance(group, ClassicGroup):
            wrong += [
                f"{one.node.name} is in generation {one.epoch}, not {group.generation_id}"
                for one in self.members
                if one.epoch != group.generation_id
            ]
        owned = sorted(partition for one in self.members for partition in one.owned)
        # After an election that lost records of the group, the coordinator may give two members
        # the same epoch, which neither of them can notice.
        was_void = self.invariants.truth((topics[GROUPS_TOPIC].topic_id, SHARD)).was_void
        if owned != list(range(len(topics[TOPIC].partitions))) and not was_void:
            wrong.append(f"the members read {owned}")
        return wrong
