"""``fencepost cluster describe``, ``topics elect`` and ``topics reassign`` on any Kafka broker.

tests/oracle/test_cluster_commands.py has the tests that need several brokers.
"""

from __future__ import annotations

import json

import pytest

from fencepost import testing
from fencepost.client.queries.moves import plan_text
from tests.support.cluster import Cluster, unique
from tests.support.waits import until
from tests.wire.command_line import cli

SHOWN = "nothing was changed; --execute makes the change"


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return cluster.create_topic(unique("placed"), 2)


def test_cluster_describe_shows_brokers_controller_and_partition_counts(bootstrap, topic):
    told = json.loads(cli(bootstrap, "cluster", "describe", "--format", "json").stdout)
    (broker,) = told["brokers"]
    assert broker["broker"] == told["controller"]
    assert (broker["state"], broker["controller"]) == ("up", "active")
    assert broker["leads"] == broker["preferred"] == broker["replicas"] == broker["in_sync"] >= 2
    assert told["controller_epoch"] >= 1
    assert told["metadata_offset"] > 0
    assert told["health"] == {
        "partitions": broker["replicas"],
        "offline": 0,
        "under_min_isr": 0,
        "under_replicated": 0,
        "not_led_by_preferred": 0,
        "reassigning": 0,
    }
    assert told["problems"] == []
    shown = cli(bootstrap, "cluster", "describe").stdout
    assert f"controller {told['controller']} in epoch {told['controller_epoch']}" in shown
    assert "0 offline, 0 under min ISR, 0 under replicated" in shown


def described(cluster: testing.Cluster, topic: str) -> list[dict[str, object]]:
    line = ("topics", "describe", topic, "--timeout", "2", "--format", "json")
    rows: list[dict[str, object]] = json.loads(cli(cluster.bootstrap, *line).stdout)
    return rows


def test_topic_is_described_between_the_death_and_the_fencing_of_a_leader() -> None:
    with testing.Cluster(2, config={"broker.session.timeout.ms": "600000"}) as several:
        several.topic("placed", 2, replicas=1)
        several.produce("placed", "a", "b")
        dead = several.leader("placed", 0)
        assert several.leader("placed", 1) != dead
        several.kill(dead)
        first, second = described(several, "placed")
    assert (first["leader"], first["earliest"], first["latest"]) == (dead, None, None)
    assert (second["earliest"], second["stable"], second["latest"]) == (0, 1, 1)


def test_topic_is_described_while_another_leader_is_elected() -> None:
    with testing.Cluster(3) as several:
        several.topic("placed", 1, replicas=3)
        several.produce("placed", "a")
        several.wait_for_isr("placed")
        dead = several.leader("placed", 0)
        several.kill(dead)

        def is_led_again() -> bool:
            (row,) = described(several, "placed")
            return row["leader"] != dead and row["latest"] == 1

        until(is_led_again, "the offsets of the new leader")


def test_topics_describe_shows_isr_elr_and_offline_replicas(bootstrap, topic):
    rows = json.loads(cli(bootstrap, "topics", "describe", topic, "--format", "json").stdout)
    assert [row["partition"] for row in rows] == [0, 1]
    for row in rows:
        assert row["isr"] == row["replicas"]
        assert (row["elr"], row["last_known_elr"], row["offline"]) == ([], [], [])
    assert "ELR" in cli(bootstrap, "topics", "describe", topic).stdout


def test_elect_with_preferred_leaders_in_place_plans_nothing(bootstrap, topic):
    for kind in ("preferred", "unclean"):
        asked = cli(bootstrap, "topics", "elect", topic, "--type", kind, "--format", "json")
        assert json.loads(asked.stdout) == []
        assert SHOWN in asked.stderr
        cli(bootstrap, "topics", "elect", "--all", "--type", kind, "--execute")
    cli(bootstrap, "topics", "elect", status=2)
    cli(bootstrap, "topics", "elect", topic, "--all", status=2)
    cli(bootstrap, "topics", "elect", "no-such-topic", status=1)


def test_reassign_to_the_only_broker_plans_nothing(bootstrap, topic):
    only = json.loads(cli(bootstrap, "cluster", "describe", "--format", "json").stdout)
    here = str(only["brokers"][0]["broker"])
    asked = cli(bootstrap, "topics", "reassign", topic, "--to-brokers", here, "--format", "json")
    assert json.loads(asked.stdout) == []
    assert SHOWN in asked.stderr
    every = cli(bootstrap, "topics", "reassign", "--all", "--to-brokers", here, "--format", "json")
    assert json.loads(every.stdout) == []
    assert (
        json.loads(cli(bootstrap, "topics", "reassign", "--verify", "--format", "json").stdout)
        == []
    )
    cli(bootstrap, "topics", "reassign", topic, "--cancel", "--execute")


def test_impossible_reassignment_is_refused_with_a_reason(bootstrap, topic, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(plan_text({(topic, 0): (987,)}))
    done = cli(bootstrap, "topics", "reassign", "--file", str(plan), "--execute", status=1)
    assert "INVALID_REPLICA_ASSIGNMENT" in done.stdout
    plan.write_text(plan_text({(topic, 7): (1,)}))
    done = cli(bootstrap, "topics", "reassign", "--file", str(plan), status=1)
    assert f"{topic} has no partition 7" in done.stderr
    plan.write_text("{}")
    assert (
        "a plan looks like"
        in cli(bootstrap, "topics", "reassign", "--file", str(plan), status=1).stderr
    )
    none = cli(bootstrap, "topics", "reassign", topic, "--to-brokers", "987", status=1)
    assert "there is no broker 987" in none.stderr
    few = cli(bootstrap, "topics", "reassign", topic, "-r", "3", status=1)
    assert "3 replicas need 3 brokers" in few.stderr


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--verify", "--cancel"),
        ("--verify", "--throttle", "5"),
        ("--cancel", "--to-brokers", "1"),
        ("--to-brokers", "one"),
        ("--throttle", "0"),
        ("--all", "--to-brokers", "1"),
    ],
)
def test_contradictory_reassign_options_are_usage_errors(bootstrap, topic, options):
    cli(bootstrap, "topics", "reassign", topic, *options, status=2)
    cli(bootstrap, "topics", "reassign", "--to-brokers", "1", status=2)


def test_unregister_refuses_a_live_or_unknown_broker(bootstrap, topic):
    only = json.loads(cli(bootstrap, "cluster", "describe", "--format", "json").stdout)
    here = str(only["brokers"][0]["broker"])
    refused = cli(bootstrap, "cluster", "unregister", here, "--execute", status=1)
    assert f"broker {here} is up" in refused.stderr
    unknown = cli(bootstrap, "cluster", "unregister", "987", "--execute", status=1)
    assert f"there is no broker 987; the brokers are {here}" in unknown.stderr


def test_history_of_unreplicated_partition_is_empty(bootstrap, topic):
    assert json.loads(cli(bootstrap, "topics", "history", topic, "--format", "json").stdout) == []
    cli(bootstrap, "topics", "history", f"{topic}:0,1", "--since", "-10m")
    assert "no partition 9" in cli(bootstrap, "topics", "history", f"{topic}:9", status=1).stderr
    cli(bootstrap, "topics", "history", "no-such-topic", status=1)
