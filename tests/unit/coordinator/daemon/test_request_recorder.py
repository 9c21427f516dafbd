"""Recording of requests in the history, over real connections."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.client.queries.entries import entries_of
from fencepost.client.queries.incident import IncidentError
from fencepost.client.queries.recording import SETTING, incident_of, with_scopes
from fencepost.client.queries.session import ClusterSession
from fencepost.client.queries.settings import EVERY_BROKER, alter
from fencepost.coordinator.daemon.request_recorder import MAX_PARTITIONS, MAX_SUBJECTS
from fencepost.coordinator.history.entries import REQUEST_SCOPES, Entry
from fencepost.testing import Kafka
from tests.support.cluster import Cluster
from tests.support.waits import until


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[Kafka]:
    with Kafka(tmp_path, {SETTING: True}) as started:
        yield started


@pytest.fixture
def client(kafka: Kafka) -> Iterator[Cluster]:
    with Cluster(kafka.bootstrap) as cluster:
        cluster.coordinator("g", 0)
        yield cluster


def recorded(kafka: Kafka, *subjects: str) -> list[Entry]:
    kafka.history()  # writes the queued entries
    with ClusterSession(kafka.bootstrap, 20) as session:
        found = entries_of(session, subjects=with_scopes(subjects or ("g",)))
        return [entry for entry in found if entry.scope in REQUEST_SCOPES]


def heartbeat(client: Cluster, member: str = "m", group: str = "g") -> Any:
    return client.call("heartbeat", 4, group_id=group, generation_id=1, member_id=member)


def switch(kafka: Kafka, value: str) -> None:
    with ClusterSession(kafka.bootstrap, 20) as session:
        alter(session, ("broker", EVERY_BROKER), {SETTING: value}, (), execute=True)


def test_requests_are_recorded_while_the_setting_is_true(kafka: Kafka, client: Cluster) -> None:
    heartbeat(client)
    assert [entry.trigger for entry in recorded(kafka)] == ["request Heartbeat"]
    switch(kafka, "false")
    heartbeat(client)
    assert len(recorded(kafka)) == 1
    switch(kafka, "true")
    heartbeat(client)
    assert len(recorded(kafka)) == 2


def test_other_readers_of_the_history_do_not_see_requests(kafka: Kafka, client: Cluster) -> None:
    heartbeat(client)
    assert recorded(kafka)
    assert [entry for entry in kafka.history() if entry.scope in REQUEST_SCOPES] == []


def test_recorded_requests_have_their_order_error_and_connection(
    kafka: Kafka, client: Cluster
) -> None:
    heartbeat(client)
    with Cluster(kafka.bootstrap) as other:
        heartbeat(other, "n")

    def closed() -> bool:
        return any(entry.what == "connection-closed" for entry in recorded(kafka))

    until(closed, "the end of the connection is recorded")
    with ClusterSession(kafka.bootstrap, 20) as session:
        incident = incident_of(session, recorded(kafka), ["g"])
    assert [(step.api, step.connection, step.answered_after) for step in incident.steps] == [
        ("Heartbeat", 1, 1),
        ("Heartbeat", 2, 2),
        ("connection-closed", 2, None),
    ]
    assert [(step.response or {}).get("error_code") for step in incident.steps] == [
        *("UNKNOWN_MEMBER_ID", "UNKNOWN_MEMBER_ID", None)
    ]


def test_metadata_of_commits_is_not_recorded(kafka: Kafka, client: Cluster) -> None:
    topic = client.create_topic("orders", 1)
    row = {"partition_index": 0, "committed_offset": 1, "committed_metadata": "secret"}
    client.call("offset_commit", 8, group_id="g", topics=[{"name": topic, "partitions": [row]}])
    (entry,) = recorded(kafka)
    request = b64decode(entry.detail["request"])
    assert b"orders" in request
    assert b"secret" not in request


def test_large_request_is_served_and_only_its_size_recorded(kafka: Kafka, client: Cluster) -> None:
    client.create_topic("orders", 1)
    row = {"partition_index": 0, "committed_offset": 1}
    topics = [{"name": "orders", "partitions": [row] * (MAX_PARTITIONS + 1)}]
    answer = client.call("offset_commit", 8, group_id="g", topics=topics)
    assert len(answer["topics"][0]["partitions"]) == MAX_PARTITIONS + 1
    (entry,) = recorded(kafka)
    assert entry.detail["request"] > MAX_PARTITIONS
    with (
        ClusterSession(kafka.bootstrap, 20) as session,
        pytest.raises(IncidentError, match=r"a OffsetCommit request of \d+ bytes is larger"),
    ):
        incident_of(session, [entry], ["g"])


def test_recorded_groups_of_one_connection_are_limited(kafka: Kafka) -> None:
    names = [f"g{number}" for number in range(MAX_SUBJECTS + 1)]
    with Cluster(kafka.bootstrap) as other:
        for name in names:
            heartbeat(other, group=name)

    def ends() -> int:
        found = recorded(kafka, *names)
        return len([entry for entry in found if entry.what == "connection-closed"])

    until(lambda: ends() == MAX_SUBJECTS, "the ends are recorded")


def test_recording_without_the_first_request_of_a_member_is_refused(
    kafka: Kafka, client: Cluster
) -> None:
    switch(kafka, "false")
    joined = client.call(
        "consumer_group_heartbeat",
        1,
        group_id="g",
        member_id="m",
        member_epoch=0,
        rebalance_timeout=60_000,
        topic_partitions=[],
        subscribed_topic_names=["orders"],
    )
    switch(kafka, "true")
    client.call(
        "consumer_group_heartbeat",
        1,
        group_id="g",
        member_id="m",
        member_epoch=joined["member_epoch"],
    )
    with (
        ClusterSession(kafka.bootstrap, 20) as session,
        pytest.raises(IncidentError, match="begins at ConsumerGroupHeartbeat of member id m"),
    ):
        incident_of(session, recorded(kafka), ["g"])


def test_history_without_requests_is_refused_with_the_setting(kafka: Kafka) -> None:
    with (
        ClusterSession(kafka.bootstrap, 20) as session,
        pytest.raises(IncidentError, match=rf"no requests of g: set {SETTING}=true"),
    ):
        incident_of(session, [], ["g"])
