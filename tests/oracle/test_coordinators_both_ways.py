"""Coordinators that move between Apache Kafka and Fencepost, in both directions.

One partition of ``__consumer_offsets`` has groups of every kind, and one of ``__transaction_state``
has transactions in every state, of TV1 and of TV2. After every kind of move the new coordinator
must describe all groups and transactions as before, and members and producers must continue without
an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.oracle import zoo_of_groups, zoo_of_transactions
from tests.oracle.failover.judging import (
    Client,
    are_at_work,
    check,
    go_on,
    java_program,
    python_command,
)
from tests.support.cluster import GROUP, TRANSACTION
from tests.support.controllers import Pretender
from tests.support.kafka import CLUSTER_ID
from tests.support.pair import BOTH, GROUPS, KAFKAS, OURS, TRANSACTIONS, Pair
from tests.support.pipeline import Clients
from tests.support.waits import until

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]


SESSIONS = {
    f"group.{kind}.{which}session.timeout.ms": "600000"
    for kind in ("consumer", "share", "streams")
    for which in ("max.", "")
}
"""Session timeouts that do not expire while the coordinator moves, even on a slow machine."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    brokers = Pair(tmp_path_factory.mktemp("pair"), SESSIONS)
    try:
        yield brokers.start()
    finally:
        brokers.stop()
        for node in brokers.all_nodes:  # helps to analyse a failure
            print("\n".join(node.child.lines[-80:]) if node.child else "")


@pytest.fixture(autouse=True)
def _whole(pair: Pair) -> None:
    """Restart the brokers that a failed test has left stopped."""
    for node_id in set(BOTH) - set(pair.running):
        pair.restart_broker(node_id)


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{path}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{path}/{at}")
    elif old != new:
        yield f"{path}: {old!r} -> {new!r}"


WAYS = "elect", "reassign", "stop", "kill"
STUCK, PRETENDER = "stuck", 77
MIN_ISR = "min.insync.replicas"


class Story:
    """The groups and transactions of the cluster, which continue after every move."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        # Apache Kafka's coordinator keeps the state of its share group in this topic.
        pair.create("__share_group_state", [(KAFKAS,)])
        pair.create(zoo_of_transactions.DATA, [(KAFKAS, OURS), (OURS, KAFKAS)])
        for topic in (zoo_of_groups.TOPIC, zoo_of_groups.TABLE):
            pair.create(topic, [(KAFKAS, OURS)] * zoo_of_groups.PARTITIONS)
        pair.serves(KAFKAS, GROUP, "any")
        pair.serves(KAFKAS, TRANSACTION, "any")
        self.foreign = zoo_of_groups.Foreign(pair, "theirs")
        self.strangers = self.foreign.strangers(KAFKAS)
        self.groups = [zoo_of_groups.Zoo(pair, KAFKAS, "theirs")]
        # This broker stops fetching, and the topic's min.insync.replicas requires all replicas.
        with closing(Pretender(pair.quorum, PRETENDER, CLUSTER_ID)) as silent:
            silent.join()
            pair.create(STUCK, [(KAFKAS, OURS, PRETENDER)], {MIN_ISR: "3"})

        def is_short() -> bool:
            isrs = (pair.partition(STUCK, witness=witness)["isr_nodes"] for witness in BOTH)
            return all(sorted(isr) == [*BOTH] for isr in isrs)

        until(is_short, "the silent one is out of the ISR", poll_s=0.1)
        self.transactions: list[zoo_of_transactions.Zoo] = []
        self.offset = 10

    def pictures(self, node_id: int) -> dict[str, Any]:
        return {
            "groups": zoo_of_groups.picture(self.pair, node_id),
            "transactions": zoo_of_transactions.picture(self.pair, node_id),
        }

    def move(self, way: str, origin: int, target: int) -> None:
        """Move both coordinators to ``target``, compare their descriptions, and continue."""
        pair, self.offset = self.pair, self.offset + 1
        zoo = zoo_of_transactions.Zoo(pair, f"{way}-from-{origin}", STUCK)
        self.transactions.append(zoo)
        before = self.pictures(origin)
        if way == "elect":
            pair.elect(GROUPS, target)
            pair.elect(TRANSACTIONS, target)
        elif way == "reassign":
            pair.move_away(GROUPS, target)
            pair.move_away(TRANSACTIONS, target)
        else:
            pair.stop_broker(origin, way)
        pair.serves(target, GROUP, "any")
        pair.serves(target, TRANSACTION, "any")
        assert not list(differences(before, self.pictures(target)))
        for group in self.groups:
            group.go_on(target, self.offset)
        zoo.go_on()
        known = {**before["groups"], "offsets": 0}
        now = {**zoo_of_groups.picture(pair, target), "offsets": 0}
        assert not list(differences(known, now))
        if target == KAFKAS:
            self.foreign.go_on()
        if way in {"stop", "kill"}:
            # No election occurs when the other broker returns, so parked requests stay parked.
            parked = zoo_of_groups.Parked(pair, f"parked-{way}-{target}", target)
            pair.restart_broker(origin)
            parked.resume()
            for index, node_id in enumerate(zoo_of_transactions.LEADERS):
                pair.elect(zoo_of_transactions.DATA, node_id, index)


def test_groups_and_transactions_survive_coordinator_moves_both_ways(pair: Pair) -> None:
    story = Story(pair)
    for way in WAYS:
        story.move(way, KAFKAS, OURS)
        if len(story.groups) == 1:
            assert not list(differences(story.strangers, story.foreign.strangers(OURS)))
            story.groups.append(zoo_of_groups.Zoo(pair, OURS, "ours"))
        story.move(way, OURS, KAFKAS)
    config = {"name": MIN_ISR, "config_operation": 0, "value": "1"}
    lowered = {"resource_type": 2, "resource_name": STUCK, "configs": [config]}
    answer = pair.call(KAFKAS, "incremental_alter_configs", 1, resources=[lowered])
    assert answer["responses"][0]["error_code"] == "none"
    for zoo in story.transactions:
        zoo.finish()
    expected = sorted(value for zoo in story.transactions for value in zoo.expected)
    for values in zoo_of_transactions.committed_values(pair):
        assert sorted(values) == expected


def test_transactions_work_in_every_pairing_of_coordinators(pair: Pair) -> None:
    """Markers, verification, implicit adds and offsets, in every pairing of the two brokers."""
    topic = pair.create("pairs", [(KAFKAS, OURS), (OURS, KAFKAS)])
    answers: dict[str, dict[str, Any]] = {}
    for coordinator in (OURS, KAFKAS):
        for leader in (KAFKAS, OURS):
            pair.elect(TRANSACTIONS, coordinator)
            pair.elect(GROUPS, leader)
            pair.serves(coordinator, TRANSACTION, "any")
            pair.serves(leader, GROUP, "any")
            mark = f"{coordinator}-{leader}"
            answers[mark] = {
                str(version): zoo_of_transactions.history(pair, mark, version, topic)
                for version in (1, 2)
            }
    wanted = answers[f"{KAFKAS}-{KAFKAS}"]
    told = {mark: [*differences(wanted, found)] for mark, found in answers.items()}
    assert not any(told.values()), told
    for found in wanted.values():
        assert found["zombie coordinator"] == ["transaction_coordinator_fenced"] * 2, found
        assert found["offset"] == 6


def test_clients_stay_exactly_once_while_coordinators_move(pair: Pair, tmp_path: Path) -> None:
    """Three clients write, read in groups and copy in transactions; each record is copied once."""
    commands = {
        "librdkafka": python_command("librdkafka"),
        "java": java_program(),
        "aiokafka": python_command("by_aiokafka"),
    }
    for name in commands:
        for way in ("in", "out"):
            pair.create(f"{way}-{name}", [(KAFKAS, OURS), (OURS, KAFKAS), (KAFKAS, OURS)])
    stop = tmp_path / "stop"
    clients = [Client(*named, pair.bootstrap, stop) for named in commands.items()]
    try:
        are_at_work(clients)
        for target in (OURS, KAFKAS):
            pair.elect(GROUPS, target)
            pair.elect(TRANSACTIONS, target)
            go_on(clients, f"elected: {target}")
        for victim, way in ((KAFKAS, "kill"), (OURS, "stop")):
            pair.stop_broker(victim, way)
            pair.restart_broker(victim)
            go_on(clients, f"{way} of {victim}")
        stop.touch()
        for client in clients:
            check(client, Clients(pair.bootstrap))
    finally:
        for client in clients:
            client.end()
