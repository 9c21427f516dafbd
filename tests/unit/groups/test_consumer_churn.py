"""Random actions of consumer groups' members, and every compacted form of the logs."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from fencepost.groups.commands import DeleteGroup, ExpireOffsets, TopicsDeleted
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.logcore.machine import DomainError
from tests.support.quick import seeds
from tests.unit.groups.churn import (
    every_prefix_loads,
    every_variant_loads_back,
    live,
    lives,
    log_loads_back,
    long_life,
)
from tests.unit.groups.consumer_driver import (
    CONSUMER_SESSION,
    Client,
    ConsumerDriver,
    T,
    V,
    changed,
    settings,
    settle,
)
from tests.unit.groups.group_driver import RETENTION, Driver, G

NAMES = (("t",), ("t", "u"), ("u",), ("t", "new"))


class Churn:
    """Clients that join, leave, stall, lose responses and change their subscriptions."""

    def __init__(self) -> None:
        self.driver = ConsumerDriver(consumer=settings(max_size=5, assignment_interval_ms=100))
        self.clients: list[Client] = []
        self.count = 0

    def step(self, action: int, who: int, what: int) -> None:
        actions = (
            *(self.join, self.join_static, self.beat, self.beat, self.beat, self.beat_lost),
            *(self.catch_up, self.catch_up, self.catch_up, self.everybody, self.everybody),
            *(self.leave, self.vanish, self.subscribe, self.topics, self.wait, self.commit),
            *(self.crash, self.upkeep, self.classic),
        )
        with contextlib.suppress(DomainError):
            actions[action % len(actions)](who, what)
        self.look()

    def client(self, who: int) -> Client | None:
        return self.clients[who % len(self.clients)] if self.clients else None

    def join(self, who: int, what: int) -> None:
        self.count += 1
        regex = {"subscribed_topic_regex": "t|n.*"} if what == 3 else {}
        self.clients.append(
            self.driver.client(f"m{self.count}", *NAMES[what], rebalance_timeout_ms=500, **regex)
        )

    def join_static(self, who: int, what: int) -> None:
        self.count += 1
        instance = f"i{who % 2}"
        client = self.driver.client(f"s{self.count}", *NAMES[what], instance_id=instance)
        self.clients = [c for c in self.clients if c.fields.get("instance_id") != instance]
        self.clients.append(client)

    def beat(self, who: int, what: int) -> None:
        if (client := self.client(who)) is not None:
            client.beat()

    def beat_lost(self, who: int, what: int) -> None:
        if (client := self.client(who)) is not None:
            client.beat(lost=True)

    def catch_up(self, who: int, what: int) -> None:
        if (client := self.client(who)) is not None:
            client.catch_up()

    def everybody(self, who: int, what: int) -> None:
        for client in list(self.clients):
            self.beat(self.clients.index(client), what)
            client.catch_up()

    def leave(self, who: int, what: int) -> None:
        if (client := self.client(who)) is None:
            return
        is_static = "instance_id" in client.fields
        self.clients.remove(client)
        client.leave(-2 if is_static and what < 3 else -1)

    def vanish(self, who: int, what: int) -> None:
        if what == 0 and (client := self.client(who)) is not None:
            self.clients.remove(client)
            self.driver.advance(CONSUMER_SESSION - 1)
            self.everybody(who, what)
            self.driver.advance(1)

    def subscribe(self, who: int, what: int) -> None:
        if (client := self.client(who)) is not None:
            client.names = NAMES[what]
            client.beat(subscribed_topic_names=NAMES[what], server_assignor="range")

    def topics(self, who: int, what: int) -> None:
        sizes = {"t": (T, 4 + who % 3), "new": None if what == 1 else (V, 1 + who % 2)}
        self.driver.image = changed(self.driver.image, **sizes)

    def wait(self, who: int, what: int) -> None:
        if what == 0:
            self.driver.jump((-3_600_000, 3_600_000)[who % 2])
        self.driver.advance((10, 100, 500, 1_000)[what])

    def commit(self, who: int, what: int) -> None:
        if (client := self.client(who)) is not None:
            self.driver.commit(
                ("t", what, who),
                generation=client.epoch,
                member_id=client.member_id,
                knows_member_epochs=True,
            )

    def crash(self, who: int, what: int) -> None:
        self.driver.reload()

    def upkeep(self, who: int, what: int) -> None:
        match what:
            case 0:
                self.driver.ask(DeleteGroup(G))
            case 1:
                self.driver.ask(ExpireOffsets())
            case 2:
                self.driver.ask(TopicsDeleted((("t", None),)))
            case _:
                self.driver.now += RETENTION
                self.driver.advance(0)

    def classic(self, who: int, what: int) -> None:
        group = self.driver.groups.get(G)
        if what > 1 or (isinstance(group, ConsumerGroup) and group.members):
            return
        Driver.join(self.driver, version=3)
        self.driver.advance(100_000)

    def look(self) -> None:
        """Check that no two live clients with valid membership own the same partition."""
        group = self.driver.groups.get(G)
        members = group.members if isinstance(group, ConsumerGroup) else {}
        alive = [client for client in self.clients if client.member_id in members]
        for one, other in itertools.combinations(alive, 2):
            if one.member_id != other.member_id and one.epoch > 0 and other.epoch > 0:
                held = self.held(one) & self.held(other)
                assert not held, (one.member_id, other.member_id, held)

    def held(self, client: Client) -> frozenset:
        """Return the partitions that a client owns, or no partitions if it is fenced."""
        group = self.driver.consumer_group()
        current = group.current(client.member_id)
        if client.epoch not in {current.member_epoch, current.previous_member_epoch}:
            return frozenset()
        return client.owned

    def finish(self) -> None:
        group = self.driver.groups.get(G)
        if isinstance(group, ConsumerGroup) and self.clients:
            for client in self.clients:
                with contextlib.suppress(DomainError):
                    client.beat()
            self.driver.advance(CONSUMER_SESSION - 1)
            with contextlib.suppress(DomainError):
                settle(*self.clients, rounds=1)
            self.driver.advance(1)
            self.driver.advance(1_000)
            with contextlib.suppress(DomainError):
                settle(*self.clients, rounds=6)
        self.driver.reload()
        log_loads_back(self.driver.log, self.driver.machine.digest(), variants=15)


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(lives(max_size=60))
def test_random_history_keeps_consumer_group_invariants(steps):
    live(Churn(), steps)


@pytest.mark.slow
@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(lives(max_size=60))
def test_further_random_histories_keep_consumer_group_invariants(steps):
    live(Churn(), steps)


@pytest.mark.parametrize("seed", seeds(8))
def test_long_random_history_keeps_consumer_group_invariants(seed):
    long_life(Churn(), seed, 300)


@pytest.mark.parametrize("seed", range(4))
def test_consumer_group_becomes_stable_after_lost_responses(seed):
    rng = random.Random(seed)
    driver = ConsumerDriver()
    clients = [driver.client(f"m{number}", *NAMES[number % 3]) for number in range(4)]
    for _ in range(60):
        client = rng.choice(clients)
        rng.choice([client.beat, client.catch_up, lambda c=client: c.beat(lost=True)])()
    settle(*clients)
    assert driver.state_of_consumers() == "Stable"
    owned = [partition for client in clients for partition in client.owned]
    assert len(owned) == len(set(owned)) == 6


# --- every compacted variant of the scenarios' logs ----------------------------------------------


def shared() -> ConsumerDriver:
    driver = ConsumerDriver()
    clients = [driver.client("m"), driver.client("n", "t", "u"), driver.client("o")]
    settle(*clients)
    return driver


def left_behind() -> ConsumerDriver:
    driver = shared()
    driver.beat("n", -1)
    driver.join("s", instance_id="i", subscribed_topic_regex="u.*")
    driver.beat("s", -2, instance_id="i")
    driver.join("s2", instance_id="i")
    driver.commit(("t", 0, 5), generation=-1, group_id="h")
    return driver


def deleted() -> ConsumerDriver:
    driver = left_behind()
    for member_id in list(driver.consumer_group().members):
        driver.beat(member_id, -1)
    driver.ask(DeleteGroup(G))
    return driver


def born_again_as_classic() -> ConsumerDriver:
    driver = deleted()
    driver.join("m")
    driver.beat("m", -1)
    Driver.join(driver, version=3)
    driver.finish_initial_delay()
    driver.sync_all()
    return driver


def and_back() -> ConsumerDriver:
    driver = born_again_as_classic()
    driver.leave(*driver.groups[G].members)
    driver.join("m")
    driver.join("n")
    return driver


SCENARIOS = {
    "shared": shared,
    "left behind": left_behind,
    "deleted": deleted,
    "born again as classic": born_again_as_classic,
    "and back": and_back,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_compacted_variant_loads_to_the_same_state(name):
    every_variant_loads_back(SCENARIOS[name])


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_prefix_of_the_log_loads(name):
    every_prefix_loads(SCENARIOS[name])
