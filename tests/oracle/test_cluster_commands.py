"""The commands for several brokers show the state of three brokers of Apache Kafka."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.client.queries.session import ClusterSession
from fencepost.console.history import HistoryCache
from fencepost.console.overview import overview_view
from fencepost.console.topics import topic_view
from tests.support.cluster import unique
from tests.support.kafka import KafkaCluster, run_tool, served
from tests.support.waits import until
from tests.wire.command_line import cli


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    yield from served(KafkaCluster(tmp_path_factory.mktemp("kafka-cluster")))


def rows(three: KafkaCluster, *arguments: str, status: int = 0) -> Any:
    done = cli(three.bootstrap, *arguments, "--format", "json", status=status)
    return json.loads(done.stdout)


def created(three: KafkaCluster, replicas: int, partitions: int = 3) -> str:
    name = unique("moved")
    cli(three.bootstrap, "topics", "create", name, "-p", str(partitions), "-r", str(replicas))
    until(lambda: len(_led(three, name)) == partitions, "leaders")
    return name


def _led(three: KafkaCluster, topic: str) -> list[Any]:
    done = cli(three.bootstrap, "topics", "list", "--format", "json")
    if topic not in done.stdout:
        return []
    described = rows(three, "topics", "describe", topic)
    return [row for row in described if row["leader"] > 0]


def finished(three: KafkaCluster, plan: Path) -> bool:
    return all(
        row["result"] == "done"
        for row in rows(three, "topics", "reassign", "--file", str(plan), "--verify")
    )


def test_replicas_are_reassigned_and_moved_back(three: KafkaCluster, tmp_path: Path):
    topic = created(three, 3)
    plan, back = tmp_path / "plan.json", tmp_path / "back.json"
    asked = rows(
        three, "topics", "reassign", topic, "--to-brokers", "1,2", "-r", "2",
        "--write", str(plan), "--write-current", str(back),
    )  # fmt: skip
    assert {tuple(row["removing"]) for row in asked} == {(3,)}
    assert {row["result"] for row in asked} == {"would move"}
    begun = rows(three, "topics", "reassign", "--file", str(plan), "--execute")
    assert {row["result"] for row in begun} == {"moving"}
    until(lambda: finished(three, plan), "the move")
    # Apache Kafka's tool reads Fencepost's file, and reports the same assignment.
    told = run_tool(
        "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
        "--bootstrap-server", three.bootstrap,
        "--reassignment-json-file", str(plan), "--verify",
    )  # fmt: skip
    assert f"Reassignment of partition {topic}-0 is completed." in told
    assert {len(row["replicas"]) for row in rows(three, "topics", "describe", topic)} == {2}
    cli(three.bootstrap, "topics", "reassign", "--file", str(back), "--execute")
    until(lambda: finished(three, back), "the way back")

    def is_in_sync() -> bool:  # this broker may learn of the completion later
        described = rows(three, "topics", "describe", topic)
        return all(sorted(row["isr"]) == [1, 2, 3] for row in described)

    until(is_in_sync, "all replicas in sync")


def test_throttled_reassignment_is_cancelled_and_its_throttle_removed(three: KafkaCluster):
    topic = created(three, 1, partitions=2)
    cli(three.bootstrap, "produce", topic, stdin=("x" * 900_000 + "\n") * 12)
    before = {row["partition"]: row["replicas"] for row in rows(three, "topics", "describe", topic)}
    command = ("topics", "reassign", topic)
    rows(three, *command, "-r", "3", "--throttle", "1000", "--execute")
    (first, second) = rows(three, *command, "--verify")
    assert first["result"] == second["result"] == "moving"
    assert len(first["adding"]) == 2
    health = rows(three, "cluster", "describe")["health"]
    assert health["reassigning"] == 2
    assert health["under_replicated"] == 0, "what is being added is not missing"
    assert "still set" not in cli(three.bootstrap, *command, "--verify").stderr
    rates = rows(three, "configs", "get", "broker", "2", "follower.replication.throttled.rate")
    assert rates[0]["value"] == "1000"
    assert rows(three, *command, "--throttle", "2000")[0]["result"] == "would throttle"
    assert rows(three, *command, "--throttle", "2000", "--execute")[0]["result"] == "throttled"
    assert {row["result"] for row in rows(three, *command, "--cancel")} == {"would cancel"}
    cancelled = rows(three, *command, "--cancel", "--execute")
    assert {row["result"] for row in cancelled} == {"cancelled"}
    until(lambda: rows(three, *command, "--verify") == [], "the end of the moves")
    after = {row["partition"]: row["replicas"] for row in rows(three, "topics", "describe", topic)}
    assert after == before
    assert "throttles are still set" in cli(three.bootstrap, *command, "--verify").stderr
    cli(three.bootstrap, *command, "--verify", "--execute")
    assert "still set" not in cli(three.bootstrap, *command, "--verify").stderr


def test_killed_broker_is_reported_and_its_return_allows_an_election(three: KafkaCluster):
    """This is the last test, because it kills one of the brokers."""
    topic, lone = created(three, 3), unique("lone")
    cli(three.bootstrap, "topics", "create", lone, "-p", "3", "-r", "1")
    three.node(3).kill()

    def state() -> Any:
        return rows(three, "cluster", "describe")

    def is_fenced() -> bool:
        return bool(state()["brokers"][2]["state"] == "fenced")

    until(is_fenced, "the session of broker 3 to end")
    told = state()
    assert told["brokers"][2]["leads"] == told["brokers"][2]["in_sync"] == 0
    assert told["health"]["offline"] >= 1
    offline = next(row for row in told["problems"] if row["topic"] == lone)
    assert (offline["leader"], offline["offline"], offline["elr"]) == (-1, [3], [3])
    assert "offline" in offline["problems"]
    described = rows(three, "topics", "describe", topic, lone)
    assert all(row["offline"] == [3] for row in described if 3 in row["replicas"])
    assert [row["latest"] for row in described if row["leader"] == -1] == [None]
    with ClusterSession(three.bootstrap, 10) as session:
        seen = overview_view(session, {}, HistoryCache())
        page = topic_view(session, {"name": lone}, HistoryCache())
    assert [row["fenced"] for row in seen["brokers"]] == [False, False, True]
    assert {"kind": "down", "level": "bad", "broker": 3} in seen["attention"]
    assert [row["elr"] for row in page["partitions"] if row["leader"] < 0] == [[3]]
    assert [row["offline"] for row in page["partitions"] if row["leader"] < 0] == [[3]]
    unclean = rows(three, "topics", "elect", lone, "--type", "unclean")
    assert [(row["new"], row["result"]) for row in unclean] == [(None, "no broker is up")]
    refused = rows(three, "topics", "elect", lone, "--type", "unclean", "--execute", status=1)
    assert refused[0]["result"] == "ELIGIBLE_LEADERS_NOT_AVAILABLE"
    moved = rows(three, "topics", "elect", topic)
    assert [(row["new"], row["result"]) for row in moved] == [(3, "not in the ISR")]

    three.node(3).start()
    until(lambda: not state()["problems"], "a full ISR")
    assert {row["result"] for row in rows(three, "topics", "elect", topic)} == {"would elect"}
    elected = rows(three, "topics", "elect", topic, "--execute")
    assert [(row["new"], row["result"]) for row in elected] == [(3, "elected")]
    until(lambda: rows(three, "topics", "elect", topic) == [], "the preferred leader")


def test_doctor_on_apache_kafka_checks_only_settings(three: KafkaCluster):
    clean, unclean = created(three, 3, 1), created(three, 3, 1)
    setting = "unclean.leader.election.enable=true"
    cli(three.bootstrap, "configs", "set", "topic", unclean, setting, "--execute")
    done = cli(three.bootstrap, "doctor", "--json", "--topic", unclean, status=1)
    (row,) = (json.loads(line) for line in done.stdout.splitlines())
    assert (row["rule"], row["request"], row["topics"]) == ("unclean-election", None, [unclean])
    assert "the brokers have recorded no requests" in done.stderr
    done = cli(three.bootstrap, "doctor", "--topic", clean, status=0)
    assert "nothing found" in done.stderr
    assert not done.stdout
