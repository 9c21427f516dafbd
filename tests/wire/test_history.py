"""The history, read by requests and by the command line. Clients cannot write to its topic."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from tests.support.batches import batch
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.processes import Child
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.command_line import cli

ME = "history-test"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    short = {"group.consumer.min.session.timeout.ms": "1000"}
    short |= {"group.consumer.session.timeout.ms": "3000"}
    started = Daemon(tmp_path_factory.mktemp("history"), {**SETTINGS, **short}).start()
    yield started
    started.stop()


def command(daemon: Daemon, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "fencepost", *arguments, "-b", daemon.bootstrap]


def run(daemon: Daemon, *arguments: str) -> str:
    return cli(daemon.bootstrap, *arguments).stdout


def told(daemon: Daemon, kind: str, name: str, *kinds: str) -> list[dict[str, Any]]:
    """Return the JSON history of ``name`` as soon as it contains all ``kinds``."""

    def look() -> list[dict[str, Any]] | None:
        rows: list[dict[str, Any]] = json.loads(run(daemon, kind, "history", name, "--format=json"))
        return rows if set(kinds) <= {row["what"] for row in rows} else None

    return until(look, f"{kinds} of {name}")


def join(cluster: Cluster, group: str, member: str = "", **more: Any) -> Any:
    return cluster.call(
        "join_group",
        5,
        group_id=group,
        session_timeout=6_000,
        rebalance_timeout=6_000,
        member_id=member,
        protocol_type="consumer",
        protocols=[{"name": "range", "metadata": b""}],
        **more,
    )


@pytest.mark.slow
def test_history_of_an_unknown_group_or_id_is_an_error(daemon: Daemon) -> None:
    for kind, says in (
        ("groups", "there is no group 'nobody'"),
        ("txns", "there is no transactional id 'nobody'"),
    ):
        asked = command(daemon, kind, "history", "nobody", "--format", "json")
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert says in done.stderr


def test_group_history_lists_joins_leaves_and_generations(daemon: Daemon) -> None:
    group = unique("told")
    with Cluster(daemon.bootstrap) as cluster:
        cluster.coordinator(group, 0)
        member = join(cluster, group)["member_id"]
        joined = join(cluster, group, member)
        assert joined["error_code"] == "none"
        left = cluster.call("leave_group", 2, group_id=group, member_id=member)
        assert left["error_code"] == "none"
    rows = told(daemon, "groups", group, "member-left")
    assert [row["what"] for row in rows][:2] == ["group-created", "member-joined"]
    whats = {row["what"]: row for row in rows}
    assert whats["member-joined"]["who"] == member
    assert whats["member-joined"]["host"] == "127.0.0.1"
    changes = [row["change"] for row in rows if row["what"] == "generation-started"]
    assert changes == ["generation 0 → 1", "generation 1 → 2"]
    assert {row["subject"] for row in rows} == {group}
    table = run(daemon, "groups", "history", group).splitlines()
    assert len(table) == len(rows) + 1
    assert member in table[2]


def test_followed_transactional_id_history_shows_fencing(daemon: Daemon) -> None:
    name = unique("told")
    with Cluster(daemon.bootstrap) as cluster:
        first = cluster.init_producer(name)
        follower = Child([*command(daemon, "txns", "history", name, "--follow")])
        try:
            follower.wait_for_line(r"epoch-bumped +epoch 0 +InitProducerId", deadline_s=60)
            second = cluster.init_producer(name)
            follower.wait_for_line(r"epoch-bumped +epoch 0 → 1 +InitProducerId", deadline_s=60)
            refused = cluster.call(
                "end_txn",
                3,
                transactional_id=name,
                producer_id=first[0],
                producer_epoch=first[1],
                committed=True,
            )
            assert refused["error_code"] == "producer_fenced"
            follower.wait_for_line(r"producer-refused +epoch 0 ≠ 1 +EndTxn", deadline_s=60)
        finally:
            follower.kill()
    rows = told(daemon, "txns", name, "producer-refused")
    assert rows[-1]["who"] == f"producer {first[0]}"
    assert rows[-1]["host"] == "127.0.0.1"
    assert rows[-1]["detail"]["producer_epoch"] == second[1]


def heartbeat(cluster: Cluster, group: str, member: str, epoch: int, **more: Any) -> int:
    """Send one heartbeat of the consumer protocol; return the member's epoch."""
    joining = {"rebalance_timeout": 60_000, "topic_partitions": []} if epoch == 0 else {}
    answer = cluster.call(
        "consumer_group_heartbeat",
        1,
        group_id=group,
        member_id=member,
        member_epoch=epoch,
        **joining,
        **more,
    )
    assert answer["error_code"] == "none"
    return int(answer["member_epoch"])


def at(daemon: Daemon, group: str, since: str, until_: str) -> list[dict[str, Any]]:
    words = ("groups", "history", group, "--since", since, "--until", until_, "--format", "json")
    found: list[dict[str, Any]] = json.loads(run(daemon, *words))
    return found


def now() -> str:
    """Return a time after all earlier responses, and before or at all later requests."""
    asked = int(time.time() * 1000)
    moment = until(lambda: max(int(time.time() * 1000) - asked, 0) and asked + 1, "a millisecond")
    return dt.datetime.fromtimestamp(moment / 1000, dt.UTC).isoformat(timespec="milliseconds")


@pytest.mark.slow
def test_consumer_group_history_names_the_expired_member_and_its_host(daemon: Daemon) -> None:
    """One member stops sending heartbeats: the entry has its id, host, timer and both epochs."""
    group = unique("at-0213")
    with Cluster(daemon.bootstrap) as cluster:
        topic = cluster.create_topic(unique("told"), 2)
        cluster.coordinator(group, 0)
        stays = heartbeat(cluster, group, "stays", 0, subscribed_topic_names=[topic])
        heartbeat(cluster, group, "silent", 0, subscribed_topic_names=[topic])
        since = now()

        def is_alone() -> bool:
            nonlocal stays
            stays = heartbeat(cluster, group, "stays", stays, topic_partitions=[])
            return stays == 4

        until(is_alone, "the silent member is removed")
        till = now()
        heartbeat(cluster, group, "stays", -1)
        told(daemon, "groups", group, "member-left")
    rows = at(daemon, group, since, till)
    assert not {"member-joined", "member-left"} & {row["what"] for row in rows}
    (gone,) = [row for row in rows if row["what"] == "member-expired"]
    bumped = next(row for row in rows if row["what"] == "group-epoch-bumped")
    for row in (gone, bumped):
        assert (row["who"], row["trigger"], row["host"]) == ("silent", "timer session", "127.0.0.1")
        assert row["client"]
        assert since <= row["time"].replace("Z", "+00:00") < till
    assert "no heartbeat came" in bumped["why"]
    assert bumped["change"] == "epoch 3 → 4"
    later = at(daemon, group, till, now())
    (left,) = [row for row in later if row["what"] == "member-left"]
    assert (left["who"], left["trigger"]) == ("stays", "request ConsumerHeartbeat")
    epochs = [row["change"] for row in later if row["what"] == "group-epoch-bumped"]
    assert epochs[-1] == "epoch 4 → 5"


def test_classic_group_history_names_the_member_that_left(daemon: Daemon) -> None:
    group = unique("at-0213")
    with Cluster(daemon.bootstrap) as cluster:
        cluster.coordinator(group, 0)
        first = join(cluster, group, join(cluster, group)["member_id"])
        since = now()
        cluster.call("leave_group", 2, group_id=group, member_id=first["member_id"])
        told(daemon, "groups", group, "member-left")
        till = now()
        join(cluster, group, join(cluster, group)["member_id"])
    rows = at(daemon, group, since, till)
    assert [row["what"] for row in rows if row["what"].startswith("member")] == ["member-left"]
    (started,) = [row for row in rows if row["what"] == "rebalance-started"]
    assert (started["who"], started["trigger"]) == (first["member_id"], "request LeaveGroup")
    assert started["client"]
    assert started["host"] == "127.0.0.1"
    assert "generation 1" in started["change"]


def test_followed_group_history_is_printed_as_text_and_json(daemon: Daemon) -> None:
    """The timeline is printed as text and as JSON, also for a group that does not exist yet."""
    group = unique("followed")
    words = ("groups", "history", group, "--follow")
    people = Child(command(daemon, *words))
    programs = Child(command(daemon, *words, "--format", "json"))
    try:
        with Cluster(daemon.bootstrap) as cluster:
            cluster.coordinator(group, 0)
            member = join(cluster, group, join(cluster, group)["member_id"])["member_id"]
            for pattern in (r" member-joined .*raw +127\.0\.0\.1", r"generation 0 → 1"):
                people.wait_for_line(pattern, deadline_s=60)
            seen = programs.wait_for_line(r'^\{.*"what": "generation-started"', deadline_s=60)
            cluster.call("leave_group", 2, group_id=group, member_id=member)
            people.wait_for_line(r" member-left .*request LeaveGroup", deadline_s=60)
            programs.wait_for_line(r'"what": "member-left"', deadline_s=60)
    finally:
        people.kill()
        programs.kill()
    row = json.loads(seen.string)
    assert (row["subject"], row["change"]) == (group, "generation 0 → 1")
    told_to_programs = [json.loads(line)["what"] for line in programs.lines if line[:1] == "{"]
    assert told_to_programs[:2] == ["group-created", "member-joined"]


def test_history_names_the_fenced_static_member_and_its_successor(daemon: Daemon) -> None:
    """The entry names the fenced member with its own client id and host, in both protocols."""
    for protocol in ("classic", "consumer"):
        group = unique("static")
        with (
            Cluster(daemon.bootstrap, client_id="first") as first,
            Cluster(daemon.bootstrap, client_id="second") as second,
        ):
            topic = first.create_topic(unique("told"), 2)
            first.coordinator(group, 0)
            if protocol == "classic":
                old = join(first, group, group_instance_id="i")["member_id"]
                new = join(second, group, group_instance_id="i")["member_id"]
            else:
                old, new = "m1", "m2"
                who = {"instance_id": "i", "subscribed_topic_names": [topic]}
                heartbeat(first, group, old, 0, **who)
                heartbeat(first, group, old, -2, instance_id="i")
                heartbeat(second, group, new, 0, **who)
            rows = told(daemon, "groups", group, "member-fenced")
        (fenced,) = [row for row in rows if row["what"] == "member-fenced"]
        assert (fenced["who"], fenced["client"], fenced["host"]) == (old, "first", "127.0.0.1")
        assert fenced["detail"]["successor"] == new
        assert fenced["detail"]["group_instance_id"] == "i"
        assert fenced["trigger"].startswith("request ")
        assert fenced["why"]


def test_history_topic_is_readable_but_not_writable_for_clients(daemon: Daemon) -> None:
    name = unique("told")
    with Cluster(daemon.bootstrap) as cluster:
        cluster.init_producer(name)
        told(daemon, "txns", name, "epoch-bumped")
        (topic,) = cluster.call("metadata", 8, topics=[{"name": HISTORY_TOPIC}])["topics"]
        assert (topic["is_internal"], len(topic["partitions"])) == (True, 1)
        # kafka-topics --describe requests the settings of all topics, and fails at the first error.
        asked = {"resource_type": 2, "resource_name": HISTORY_TOPIC, "configuration_keys": None}
        (described,) = cluster.call("describe_configs", 4, resources=[asked])["results"]
        assert described["error_code"] == "none"
        end = cluster.offset(HISTORY_TOPIC)
        assert end > 0
        refused = cluster.produce(HISTORY_TOPIC, batch([b"forged"]))
        assert refused["error_code"] == "invalid_topic_exception"
        deleted = cluster.call(
            "delete_records",
            1,
            timeout=1_000,
            topics=[{"name": HISTORY_TOPIC, "partitions": [{"partition_index": 0, "offset": end}]}],
        )
        assert deleted["topics"][0]["partitions"][0]["error_code"] != "none"
        for api, version, fields in (
            ("delete_topics", 3, {"topic_names": [HISTORY_TOPIC], "timeout": 1_000}),
            (
                "create_topics",
                5,
                {
                    "timeout": 1_000,
                    "topics": [
                        {"name": HISTORY_TOPIC, "num_partitions": 2, "replication_factor": 1}
                    ],
                },
            ),
        ):
            answer = cluster.call(api, version, **fields)
            (row,) = answer.get("topics") or answer["responses"]
            assert row["error_code"] == "invalid_topic_exception", api
        # During the test the broker itself writes entries about other groups.
        kept = cluster.values(HISTORY_TOPIC)
        assert len(kept) >= end
        assert b"forged" not in kept


def test_history_survives_a_restart(daemon: Daemon) -> None:
    name = unique("told")
    with Cluster(daemon.bootstrap) as cluster:
        cluster.init_producer(name)
    before = told(daemon, "txns", name, "epoch-bumped")
    daemon.stop()
    daemon.start()
    assert told(daemon, "txns", name, "epoch-bumped") == before
