"""A broker of Fencepost joins clusters of Apache Kafka with different finalized feature levels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.oracle.test_joining import created, leaders, until_unfenced
from tests.oracle.tool_scenes import CLUSTER, FEATURES
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.kafka import Kafka, required, run_tool, served
from tests.support.member import Member
from tests.support.pipeline import QUIET
from tests.support.targets import SETTINGS
from tests.support.waits import until

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools"), pytest.mark.timeout(300)]

KAFKA, OTHER_CONTROLLER, OURS = 1, 2, 101
BOOTSTRAP = "controller.quorum.bootstrap.servers"
LATEST = {"metadata.version": 33, "share.version": 2}
"""The feature levels of a new cluster of Apache Kafka 4.4."""

DEFAULTS: dict[str, str] = {}
"""No settings, because both brokers must compute the same partitions for coordinators."""


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A broker of Apache Kafka that is also the only voter of a dynamic quorum."""
    own = Kafka(tmp_path_factory.mktemp("kafka"), DEFAULTS, format_words=["--standalone"])
    own.add_settings({BOOTSTRAP: own.controller})
    yield from served(own)


def levels(bootstrap: str) -> dict[str, int]:
    """Return a broker's finalized levels of the features in :data:`LATEST`."""
    with Cluster(bootstrap) as client:
        answer = client.call(
            "api_versions", 3, client_software_name="x", client_software_version="1"
        )
    found = {
        feature["name"]: feature["max_version_level"] for feature in answer["finalized_features"]
    }
    return {name: found[name] for name in LATEST if name in found}


def controllers(kafka: Kafka) -> set[int]:
    """Return the ids of the registered controllers."""
    with Cluster(kafka.controller) as client:
        answer = client.call("describe_cluster", 1, endpoint_type=2)
    return {broker["broker_id"] for broker in answer["brokers"]}


def led_by(bootstrap: str, name: str, broker_id: int) -> None:
    until(lambda: leaders(bootstrap, name) == {0: broker_id}, f"broker {broker_id} leads {name}")


def test_broker_joins_cluster_finalized_at_4_4(kafka: Kafka, member: Member) -> None:
    until_unfenced(kafka, OURS)
    assert levels(kafka.bootstrap) == LATEST
    assert levels(member.bootstrap) == LATEST


def moved(bootstrap: str, name: str, replicas: list[int]) -> None:
    """Make these brokers the replicas of partition 0, of which the first one leads."""
    with Cluster(bootstrap) as client:
        part = {"partition_index": 0, "replicas": replicas}
        topics = [{"name": name, "partitions": [part]}]
        answer = client.call("alter_partition_reassignments", 0, timeout=10_000, topics=topics)
        assert answer["responses"][0]["partitions"][0]["error_code"] == "none", answer
        chosen = [{"topic": name, "partitions": [0]}]
        client.call("elect_leaders", 2, election_type=0, timeout=10_000, topic_partitions=chosen)
    led_by(bootstrap, name, replicas[0])


def test_transactions_are_complete_whichever_broker_leads(kafka: Kafka, member: Member) -> None:
    until_unfenced(kafka, OURS)
    name = unique("both")
    created(kafka.bootstrap, name, [[OURS, KAFKA]])
    bootstrap = f"{kafka.bootstrap},{member.bootstrap}"
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": unique("id"), **QUIET})
    producer.init_transactions(60)
    expected = []
    for number, replicas in enumerate(([OURS, KAFKA], [KAFKA, OURS], [OURS, KAFKA])):
        moved(kafka.bootstrap, name, replicas)
        for is_committed in (False, True):
            producer.begin_transaction()
            producer.produce(name, f"{number} {is_committed}", partition=0)
            producer.flush(60)
            if is_committed:
                producer.commit_transaction(60)
                expected.append(f"{number} True".encode())
            else:
                producer.abort_transaction(60)
        for other in (replicas, replicas[::-1]):
            moved(kafka.bootstrap, name, other)
            leader = member if other[0] == OURS else kafka
            with Cluster(leader.bootstrap) as client:
                # ListOffsets fails while the new leader's high watermark is below its epoch's
                # start.
                until(
                    lambda client=client: client.leaders(name) == 1, "a leader that tells offsets"
                )
                client.settle(name)
                assert client.values(name, isolation=READ_COMMITTED) == expected


def test_broker_forwards_and_replays_unregistration_of_a_controller(
    kafka: Kafka, member: Member, tmp_path: Path
) -> None:
    until_unfenced(kafka, OURS)
    other = Kafka(
        tmp_path,
        {**SETTINGS, BOOTSTRAP: kafka.controller},
        node_id=OTHER_CONTROLLER,
        is_broker=False,
        format_words=["--no-initial-controllers"],
    )
    other.start()
    until(lambda: OTHER_CONTROLLER in controllers(kafka), "the controller's registration")
    other.stop()
    answers = []
    for broker in (kafka, member):
        with Cluster(broker.bootstrap) as client:
            answers.append(client.call("unregister_controller", 0, controller_id=77))
    assert answers[0] == answers[1]
    assert answers[1]["error_code"] == "controller_id_not_registered"
    assert OTHER_CONTROLLER in controllers(kafka)
    words = ("--bootstrap-server", member.bootstrap, "--id", str(OTHER_CONTROLLER))
    said = run_tool(CLUSTER, "unregister-controller", *words)
    assert "no longer registered" in said
    until(lambda: OTHER_CONTROLLER not in controllers(kafka), "the registration is removed")
    name = unique("after")
    created(kafka.bootstrap, name, [[OURS]])
    led_by(member.bootstrap, name, OURS)


def test_cluster_with_a_fencepost_broker_can_be_finalized(tmp_path: Path) -> None:
    kafka = Kafka(tmp_path, DEFAULTS, format_words=["--release-version", "4.3"])
    member = Member(tmp_path / "member", kafka.controller)
    with required():
        kafka.start()
    try:
        member.start()
        until_unfenced(kafka, OURS)
        assert levels(member.bootstrap) == {"metadata.version": 30, "share.version": 1}
        words = ("--bootstrap-server", kafka.bootstrap, "upgrade", "--release-version", "4.4")
        run_tool(FEATURES, *words)
        until(lambda: levels(member.bootstrap) == LATEST, "the broker knows the new levels")
        name = unique("after")
        created(kafka.bootstrap, name, [[OURS, KAFKA]])
        led_by(member.bootstrap, name, OURS)
    finally:
        member.kill()
        kafka.stop()


def test_broker_refuses_unsupported_metadata_version_with_a_message(tmp_path: Path) -> None:
    """The cluster has metadata.version 34, 4.5-IV0, which is not stable in Apache Kafka 4.4."""
    own = Kafka(
        tmp_path,
        {"unstable.feature.versions.enable": "true"},
        is_broker=False,
        format_words=["--feature", "metadata.version=34"],
    )
    with required():
        own.start()
    try:
        child = Member(tmp_path / "member", own.controller).launch()
        assert child.wait(60) == 1
        assert "metadata.version is at level 34, and this broker supports 7 to 33" in child.tail()
    finally:
        own.stop()
