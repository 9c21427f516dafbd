"""Pauses between polls that clients have pushed: ``groups describe``, ``members``, ``blame``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner

from fencepost.cli import main
from fencepost.cluster.acl import Operation
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.handlers.telemetry_views import KEY
from fencepost.coordinator.telemetry.manager import MIN_PAUSE_MS
from fencepost.testing import Cluster as BrokerCluster
from fencepost.testing.clock import TestClock
from tests.support import otlp, requests
from tests.support.cluster import Cluster, unique
from tests.support.guarded import Guarded
from tests.support.guarded import group as group_right
from tests.support.telemetry import ENABLED
from tests.support.waits import until
from tests.unit.coordinator.handlers.test_share_history import CONFIG, Queue
from tests.unit.coordinator.handlers.test_telemetry import PAUSE, push
from tests.wire.test_cli_groups import rows, run

GROUP = 32
SHARE_PAUSE = "org.apache.kafka.consumer.share.time.between.poll.max"
PAUSE_MS = 2 * MIN_PAUSE_MS


def pushed_pause(
    client: Cluster,
    group: str,
    member: str = "",
    number: int = 1,
    pause_ms: int = PAUSE_MS,
    name: str = PAUSE,
) -> None:
    metrics = otlp.metrics_data(
        otlp.gauge(name, otlp.point(float(pause_ms)), unit="ms"),
        group_id=group,
        group_member_id=member,
    )
    assert push(client, UUID(int=100 + number), metrics) == "none"


def joined(client: Cluster, group: str, *members: str) -> None:
    """Add members to a consumer group."""
    client.coordinator(group, 0)
    for member in members:
        body = requests.join_consumer_group(group, member, "none")
        assert client.call("consumer_group_heartbeat", 1, **body)["error_code"] == "none"


def pauses(bootstrap: str, group: str) -> list[tuple[object, object]]:
    found = rows(run(bootstrap, "members", group))
    return [(row["member"], row["poll_pause_ms"]) for row in found]


def table(bootstrap: str, *words: str) -> str:
    done = CliRunner().invoke(main, ["groups", *words, "-b", bootstrap])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("command", [("members",), ("describe", "--members")])
def test_members_show_the_pause_that_their_client_reported(
    client: Cluster, bootstrap: str, command: tuple[str, ...]
) -> None:
    group = unique("g")
    joined(client, group, "m-1", "m-2")
    assert "POLL_PAUSE" not in table(bootstrap, *command, group)
    pushed_pause(client, group, "m-2")
    found = {row["member"]: row for row in rows(run(bootstrap, *command, group))}
    assert (found["m-1"]["poll_pause_ms"], found["m-1"]["poll_pause_reported_ms"]) == (None, None)
    assert found["m-2"]["poll_pause_ms"] == PAUSE_MS
    assert isinstance(found["m-2"]["poll_pause_reported_ms"], int)
    assert "poll_pause" not in found["m-2"]
    printed = table(bootstrap, *command, group)
    assert "POLL_PAUSE" in printed
    (line,) = (text for text in printed.splitlines() if "m-2" in text)
    assert f"{PAUSE_MS / 1000:.1f} s, 20" in line


def test_short_pause_and_pause_in_another_group_are_not_shown(
    client: Cluster, bootstrap: str
) -> None:
    group, other = unique("g"), unique("g")
    joined(client, group, "m-1")
    pushed_pause(client, group, "m-1", number=2, pause_ms=MIN_PAUSE_MS - 1)
    pushed_pause(client, other, "m-1", number=3)
    assert pauses(bootstrap, group) == [("m-1", None)]


def test_client_that_has_rejoined_is_found_by_its_id_and_host(
    client: Cluster, bootstrap: str
) -> None:
    group, client.client_id = unique("g"), unique("rejoined")
    joined(client, group, "m-2")
    pushed_pause(client, group, "m-1", number=4)
    assert pauses(bootstrap, group) == [("m-2", PAUSE_MS)]
    joined(client, group, "m-3")
    assert pauses(bootstrap, group) == [("m-2", None), ("m-3", None)]


def test_pause_is_forgotten_with_its_connection(client: Cluster, bootstrap: str) -> None:
    group = unique("g")
    joined(client, group, "m-1")
    with Cluster(bootstrap) as other:
        pushed_pause(other, group, "m-1", number=5)
        assert pauses(bootstrap, group) == [("m-1", PAUSE_MS)]
    until(lambda: pauses(bootstrap, group) == [("m-1", None)], "the pause is forgotten")


def test_pauses_of_a_group_need_describe_configs_describe_and_read(guarded: Guarded) -> None:
    """DESCRIBE_CONFIGS and DESCRIBE show the pause, which was pushed by a client with READ."""
    group = unique("g")
    resource = requests.described_resource(GROUP, group, KEY)
    body = requests.describe_configs(resource)
    needed = (
        group_right(Operation.DESCRIBE_CONFIGS, group),
        group_right(Operation.DESCRIBE, group),
    )
    with Cluster(guarded.bootstrap) as client:

        def shown() -> list[str]:
            (result,) = client.call("describe_configs", 4, **body)["results"]
            return [config["value"] for config in result["configs"]]

        guarded.allow(group_right(Operation.DESCRIBE, group))
        pushed_pause(client, group, "m-1", number=6)
        guarded.allow(*needed)
        assert shown() == ["[]"]
        guarded.allow(group_right(Operation.READ, group))
        pushed_pause(client, group, "m-1", number=7)
        guarded.allow(*needed)
        (value,) = shown()
        assert '"member": "m-1"' in value
        for right in needed:
            guarded.allow(right)
            assert shown() == []


def test_group_is_described_without_a_broker_that_does_not_answer(tmp_path: Path) -> None:
    config = {**ENABLED, "broker.session.timeout.ms": "600000"}  # it is not fenced either
    with BrokerCluster(2, tmp_path, config) as brokers:
        with Cluster(brokers.brokers[1].bootstrap) as client:

            def coordinator() -> int:
                found = client.call("find_coordinator", 2, key="g", key_type=0)
                return max(0, int(found["node_id"]))

            node = until(coordinator, "the group has a coordinator")
        (other,) = {1, 2} - {node}
        address = brokers.brokers[node].bootstrap
        with Cluster(address) as member:
            joined(member, "g", "m-1")
            pushed_pause(member, "g", "m-1")
            brokers.pause(other)
            try:
                found = rows(run(address, "members", "g", "--timeout", "2"))
            finally:
                brokers.resume(other)
    assert [(row["member"], row["poll_pause_ms"]) for row in found] == [("m-1", PAUSE_MS)]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    clock = TestClock()
    with (
        Broker.in_thread(tmp_path, config={**CONFIG, **ENABLED}, clock=clock) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        yield Queue(broker, client, clock)


def test_blame_names_the_pause_for_which_the_acquisition_lock_expired(queue: Queue) -> None:
    queue.clock.advance(seconds=31)
    queue.told(2, "share-records-returned")
    pushed_pause(queue.client, "g", queue.member.member, name=SHARE_PAUSE)

    def blamed() -> Any:
        (row,) = rows(run(queue.broker.bootstrap, "blame", "g"))
        return row["poll_pause_ms"] and row

    row = until(blamed, "the pause is part of the cause")
    why = f"acquisition lock expired; its client had not called poll for {PAUSE_MS / 1000:.1f} s"
    assert (row["poll_pause_ms"], row["why"], row["state"]) == (PAUSE_MS, why, "available")
    assert why in table(queue.broker.bootstrap, "blame", "g")
    assert queue.told(2, "share-records-returned")["why"] == why


def test_describe_shows_the_pause_of_a_share_groups_member(queue: Queue) -> None:
    body = requests.join_share_group("g", "m-1", "queue")
    assert queue.client.call("share_group_heartbeat", 1, **body)["error_code"] == "none"
    pushed_pause(queue.client, "g", "m-1", name=SHARE_PAUSE)
    printed = table(queue.broker.bootstrap, "describe", "g")
    (line,) = (text for text in printed.splitlines() if text.startswith("m-1"))
    assert f"{PAUSE_MS / 1000:.1f} s" in line
    assert f"{PAUSE_MS / 1000:.1f} s" in table(queue.broker.bootstrap, "describe", "--members", "g")
