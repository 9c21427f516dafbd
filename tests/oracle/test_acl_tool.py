"""Apache Kafka's kafka-acls prints the same on both brokers, which have an authorizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fencepost.coordinator.security.authorizer import STANDARD
from tests.oracle.desk import Desk, Tools, differences, tools_at_hand
from tests.oracle.test_kafka_tools import said
from tests.oracle.tool_scenes import ACLS
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka
from tests.support.targets import SETTINGS
from tests.support.waits import until

pytestmark = pytest.mark.oracle

GUARDED = {**SETTINGS, "authorizer.class.name": STANDARD, "super.users": "User:ANONYMOUS"}
EVERYTHING = {
    "resource_type_filter": 1,
    "pattern_type_filter": 1,
    "operation": 1,
    "permission_type": 1,
}


def rules(desk: Desk) -> int:
    found = desk.cluster.call("describe_acls", 3, **EVERYTHING)["resources"]
    return sum(len(resource["acls"]) for resource in found)


def scene(desk: Desk) -> None:
    """Run the tool with each option; a broker replays ACLs shortly after its controller."""
    tool = partial(desk.run, ACLS)

    def change(count: int, *words: str) -> None:
        tool(*words)
        until(lambda: rules(desk) == count, f"{count} rules")

    alice = ("--allow-principal", "User:alice", "--operation", "Read")
    change(1, "--add", *alice, "--topic", "t")
    change(1, "--add", *alice, "--topic", "t")
    change(3, "--add", *alice, "--topic", "t", "--operation", "Write", "--operation", "Alter")
    change(4, "--add", *alice, "--group", "app")
    tool("--add", *alice, "--transactional-id", "x")  # transactional ids have no Read
    change(5, "--add", "--allow-principal", "User:alice", "--transactional-id", "x")
    prefixed = ("--resource-pattern-type", "prefixed")
    deny = ("--deny-principal", "User:*", "--deny-host", "10.0.0.1", "--deny-host", "::1")
    change(7, "--add", *deny, "--topic", "te", *prefixed)
    change(8, "--add", "--allow-principal", "User:root", "--cluster")
    change(9, "--add", "--allow-principal", "User:b", "--topic", "*", "--operation", "Describe")
    for words in (
        (),
        ("--topic", "t"),
        ("--topic", "test"),
        ("--topic", "test", "--resource-pattern-type", "match"),
        ("--topic", "te", "--resource-pattern-type", "any"),
        ("--topic", "te", *prefixed),
        ("--group", "app"),
        ("--group", "*"),
        ("--cluster",),
        ("--transactional-id", "x"),
        ("--principal", "User:alice"),
        ("--principal", "User:*", "--principal", "User:nobody"),
    ):
        tool("--list", *words)
    app = ("--allow-principal", "User:app", "--allow-host", "10.0.0.7")
    change(12, "--add", *app, "--producer", "--topic", "p")
    change(
        15, "--add", *app, "--producer", "--idempotent", "--topic", "p", "--transactional-id", "y"
    )
    change(17, "--add", *app, "--consumer", "--topic", "p", "--group", "g")
    tool("--list", "--principal", "User:app")
    tool("--add", "--allow-principal", "User:a", "--user-principal", "User:b", "--operation", "All")
    until(lambda: rules(desk) == 18, "18 rules")
    tool("--add", "--allow-principal", "alice", "--topic", "t")
    tool("--add", "--allow-principal", "User:a", "--topic", "t", "--operation", "ClusterAction")
    change(17, "--remove", "--force", *alice, "--topic", "t")
    change(17, "--remove", "--force", *alice, "--topic", "nothing")
    change(15, "--remove", "--force", "--topic", "t")
    change(12, "--remove", "--force", "--topic", "te", "--resource-pattern-type", "match")
    change(8, "--remove", "--force", "--topic", "p")
    change(7, "--remove", "--force", "--user-principal", "User:b")
    change(5, "--remove", "--force", "--cluster")
    tool("--list")


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    with tools_at_hand() as started:
        yield started


@pytest.mark.timeout(300)
def test_kafka_acls_prints_the_same_for_both_brokers(
    java_tools: Path, tools: Tools, tmp_path: Path
) -> None:
    assert java_tools.is_dir()
    ours = Daemon(tmp_path / "fencepost", GUARDED).start()
    theirs = Kafka(tmp_path / "kafka", GUARDED)
    (tmp_path / "kafka").mkdir()
    try:
        theirs.start()
        told = [said(scene, tools, broker, tmp_path) for broker in (ours, theirs)]
    finally:
        theirs.stop()
        ours.stop()
    assert [status for _, status, _ in told[1]].count(0) > 30
    found = differences(*told)
    assert not found, "\n".join(found)
