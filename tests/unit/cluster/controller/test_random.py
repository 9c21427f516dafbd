"""Random events in a cluster; invariants are checked after every record."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

from fencepost.cluster.controller.brokers import BrokerHeartbeatReply
from fencepost.cluster.controller.partition_change import Election
from fencepost.cluster.controller.reassignments import ReassignablePartition
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import MetadataRecord
from fencepost.logcore.machine import DomainError
from tests.support.quick import seeds
from tests.unit.cluster.controller.cluster_driver import Cluster

STEPS = 150
BROKERS = range(5)


class Life:
    """A cluster with random events; every batch is checked when it is written."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.elr = self.draw.random() < 0.6
        self.min_isr = self.draw.choice((1, 2, 3))
        self.cluster = Cluster((), elr=self.elr, min_isr=self.min_isr)
        append = self.cluster.append

        def watched(records: Sequence[MetadataRecord]) -> None:
            before = self.cluster.image
            append(records)
            self.check(before, self.cluster.image)

        self.cluster.append = watched  # type: ignore[method-assign]
        for broker_id in BROKERS:
            self.cluster.register(broker_id)
            self.cluster.beat(broker_id)
        self.unclean = self.draw.random() < 0.3

    # --- invariants ---

    def check(self, before: MetadataImage, after: MetadataImage) -> None:
        active = {broker.broker_id for broker in after.brokers.values() if broker.is_active}
        for topic in after.topics_by_id.values():
            former = before.topics_by_id.get(topic.topic_id)
            min_isr = self.cluster.controller.view.min_isr(topic.name)
            for index, state in enumerate(topic.partitions):
                replicas, isr, elr = set(state.replicas), set(state.isr), set(state.elr)
                assert len(replicas) == len(state.replicas)
                assert len(isr) == len(state.isr)
                assert isr <= replicas
                assert elr <= replicas
                assert not isr & elr
                assert set(state.adding_replicas) | set(state.removing_replicas) <= replicas
                assert len(state.directories) == len(state.replicas)
                if state.leader >= 0:
                    assert state.leader in isr
                    assert state.leader in active
                    # A broker that is fenced or shutting down stays in an ISR only as the last
                    # member.
                    assert isr <= active
                if self.elr:
                    assert not elr or len(isr) < min(min_isr, len(replicas))
                    assert isr <= active
                else:
                    assert isr
                    assert not elr
                if former is None or index >= len(former.partitions):
                    continue
                old = former.partitions[index]
                assert state.partition_epoch >= old.partition_epoch
                assert state.leader_epoch >= old.leader_epoch
                if state != old:
                    assert state.partition_epoch > old.partition_epoch
                if state.leader != old.leader or not set(old.replicas) <= replicas:
                    assert state.leader_epoch > old.leader_epoch
                is_new = state.leader not in {-1, *old.isr, *old.elr}
                if is_new and state.replicas == old.replicas:
                    assert state.leader_recovery_state == 1

    # --- events ---

    def step(self) -> None:
        if not self.cluster.image.brokers:
            self.reboot()
            return
        if not self.cluster.image.topics:
            with suppress(DomainError):
                self.create()
            self.beat()
            return
        kinds = (
            self.beat, self.beat, self.beat, self.reboot, self.shut_down, self.fence, self.create,
            self.alter_isr, self.alter_isr, self.alter_isr, self.reassign, self.elect, self.wait,
            self.restart, self.grow, self.delete, self.unregister, self.configure,
        )  # fmt: skip
        with suppress(DomainError):
            self.draw.choice(kinds)()

    def broker(self) -> int:
        return self.draw.choice(sorted(self.cluster.image.brokers) or [0])

    def some(self) -> tuple[str, int]:
        name = self.draw.choice(sorted(self.cluster.image.topics))
        return name, self.draw.randrange(len(self.cluster.image.topics[name].partitions))

    def beat(self) -> BrokerHeartbeatReply | None:
        broker_id = self.broker()
        return self.cluster.beat(broker_id) if broker_id in self.cluster.image.brokers else None

    def reboot(self) -> None:
        broker_id = self.draw.choice(BROKERS)
        if broker_id in self.cluster.image.brokers:
            self.cluster.reboot(broker_id, clean=self.draw.random() < 0.5)
        else:
            self.cluster.register(broker_id)

    def shut_down(self) -> None:
        self.cluster.beat(self.broker(), want_shut_down=True)

    def fence(self) -> None:
        self.cluster.fence(self.broker())

    def create(self) -> None:
        count = self.draw.randrange(1, 4)
        known = sorted(self.cluster.image.brokers)
        size = self.draw.randrange(1, len(known) + 1)
        configs = {"unclean_leader_election_enable": "true"} if self.unclean else {}
        self.cluster.create(
            f"t{self.draw.randrange(5)}",
            *(self.draw.sample(known, size) for _ in range(count)),
            **configs,
        )

    def alter_isr(self) -> None:
        name, index = self.some()
        state = self.cluster.partition(name, index)
        if state.leader < 0:
            return
        registered = [
            replica for replica in state.replicas if replica in self.cluster.image.brokers
        ]
        wanted = [
            state.leader,
            *(broker_id for broker_id in registered if self.draw.random() < 0.7),
        ]
        self.cluster.alter_isr(name, dict.fromkeys(wanted), index)

    def reassign(self) -> None:
        name, index = self.some()
        known = sorted(self.cluster.image.brokers)
        target = self.draw.sample(known, self.draw.randrange(1, len(known) + 1))
        wanted = None if self.draw.random() < 0.3 else tuple(target)
        self.cluster.do(
            self.cluster.controller.alter_partition_reassignments(
                [ReassignablePartition(name, index, wanted)]
            )
        )

    def elect(self) -> None:
        election = self.draw.choice((Election.PREFERRED, Election.UNCLEAN))
        wanted = None if self.draw.random() < 0.5 else [self.some()]
        self.cluster.do(self.cluster.controller.elect_leaders(election, wanted))

    def wait(self) -> None:
        beating = [
            broker_id for broker_id in self.cluster.image.brokers
            if self.draw.random() < 0.7
        ]  # fmt: skip
        self.cluster.pass_time(self.draw.choice((1_000, 10_000)), beating=beating)

    def restart(self) -> None:
        self.cluster.restart()

    def grow(self) -> None:
        name, _ = self.some()
        count = len(self.cluster.image.topics[name].partitions) + 1
        self.cluster.do(
            self.cluster.controller.create_partitions(name, count, assignments=None, draw=self.draw)
        )

    def delete(self) -> None:
        if self.draw.random() < 0.3:
            name, _ = self.some()
            self.cluster.do(
                self.cluster.controller.delete_topic(self.cluster.image.topics[name].topic_id)
            )

    def unregister(self) -> None:
        if self.draw.random() < 0.2:
            self.cluster.do(self.cluster.controller.unregister_broker(self.broker()))

    def configure(self) -> None:
        name, _ = self.some()
        self.cluster.set_config(name, "min.insync.replicas", str(self.draw.randrange(1, 4)))


def live(seed: int) -> Life:
    life = Life(seed)
    for _ in range(STEPS):
        life.step()
    return life


@pytest.mark.parametrize("seed", seeds(40))
def test_random_cluster_histories_keep_the_invariants(seed: int) -> None:
    live(seed)


def test_same_seed_writes_the_same_records() -> None:
    assert live(1).cluster.log == live(1).cluster.log
