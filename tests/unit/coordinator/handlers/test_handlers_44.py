"""The API versions that Apache Kafka 4.4 adds, on a standalone broker."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from fencepost.cluster.acl import Operation
from fencepost.coordinator.daemon.broker import Broker
from tests.support.cluster import GROUP, TRANSACTION, Cluster, unique
from tests.support.guarded import Guarded, group, transactional_id
from tests.support.raw import Answer, RawClient

NODE = 3
SOFTWARE = {"client_software_name": "raw", "client_software_version": "1"}
BAD_SOFTWARE = {"client_software_name": "", "client_software_version": "1"}


# --- ApiVersions 5 (KIP-1242) --------------------------------------------------------------------


@pytest.fixture
def cluster_id(client: Cluster) -> str:
    found = client.call("metadata", 12, topics=[])["cluster_id"]
    assert found
    return str(found)


@pytest.mark.parametrize(
    ("cluster", "node", "software", "error"),
    [
        (None, -1, SOFTWARE, "none"),
        ("ours", NODE, SOFTWARE, "none"),
        ("ours", NODE + 1, SOFTWARE, "rebootstrap_required"),
        ("another", NODE, SOFTWARE, "rebootstrap_required"),
        ("", NODE, SOFTWARE, "rebootstrap_required"),
        ("ours", -2, SOFTWARE, "rebootstrap_required"),
        ("ours", -1, SOFTWARE, "invalid_request"),
        ("another", -1, SOFTWARE, "invalid_request"),
        (None, NODE, SOFTWARE, "invalid_request"),
        # An invalid request is refused before the ids are compared.
        ("another", NODE, BAD_SOFTWARE, "invalid_request"),
    ],
)
def test_api_versions_for_another_cluster_or_node_requires_rebootstrap(
    client: Cluster, cluster_id: str, cluster: str | None, node: int, software: Any, error: str
) -> None:
    meant = {"cluster_id": cluster_id if cluster == "ours" else cluster, "node_id": node}
    answer = client.call("api_versions", 5, **software, **meant)
    assert answer["error_code"] == error
    assert bool(answer["api_keys"]) is (error == "none")
    # The connection stays open: older versions, which have no ids, still work.
    assert client.call("api_versions", 4, **SOFTWARE)["api_keys"]


def test_cluster_and_node_id_are_accepted_on_the_first_connection(tmp_path: Path) -> None:
    """The first request to a new broker, and to a restarted broker, may contain both ids."""
    told = None
    for node in (7, 7):
        with (
            Broker.in_thread(tmp_path, config={"node.id": str(node)}) as broker,
            RawClient(broker.bootstrap) as client,
        ):
            cluster_id = dict(
                line.split("=", 1)
                for line in (tmp_path / "meta.properties").read_text().splitlines()
                if "=" in line
            )["cluster.id"]
            meant = {"cluster_id": cluster_id, "node_id": node}
            assert client.call("api_versions", 5, **SOFTWARE, **meant)["error_code"] == "none"
            assert told in (None, cluster_id)
            told = cluster_id


# --- TxnOffsetCommit 6 (KIP-1319) ----------------------------------------------------------------


class Producer:
    """A producer with transaction version 2 and an open transaction."""

    def __init__(
        self, client: Cluster, topic: str, topic_id: uuid.UUID, name: str, group: str
    ) -> None:
        self._client, self.topic, self.topic_id = client, topic, topic_id
        self.name, self.group = name, group
        for key, kind in ((self.name, TRANSACTION), (self.group, GROUP)):
            client.coordinator(key, kind)
        self.id, self.epoch = client.init_producer(self.name)

    def commit(
        self, version: int, topic_id: uuid.UUID | None = None, partition: int = 0, **member: Any
    ) -> list[tuple[str, int, str]]:
        """Commit offset 7 of a partition; return the rows of the response."""
        row = {"partition_index": partition, "committed_offset": 7, "committed_metadata": ""}
        named = {"name": self.topic} if version < 6 else {"topic_id": topic_id or self.topic_id}
        answer: Answer = self._client.call(
            "txn_offset_commit",
            version,
            transactional_id=self.name,
            group_id=self.group,
            producer_id=self.id,
            producer_epoch=self.epoch,
            topics=[{**named, "partitions": [row]}],
            **member,
        )
        return [
            (
                topic["name" if version < 6 else "topic_id"],
                state["partition_index"],
                state["error_code"],
            )
            for topic in answer["topics"]
            for state in topic["partitions"]
        ]

    def end(self) -> None:
        answer = self._client.call(
            "end_txn",
            5,
            transactional_id=self.name,
            producer_id=self.id,
            producer_epoch=self.epoch,
            committed=True,
        )
        assert answer["error_code"] == "none"


@pytest.fixture
def producer(client: Cluster, topic: str) -> Producer:
    return Producer(client, topic, client.topic_id(topic), unique("txn"), unique("group"))


def test_txn_offset_commit_by_topic_id_commits_the_offset(
    client: Cluster, producer: Producer
) -> None:
    topic_id = str(producer.topic_id)
    assert producer.commit(6) == [(topic_id, 0, "none")]
    assert client.committed(producer.group, producer.topic) == -1
    producer.end()
    assert client.committed(producer.group, producer.topic, stable=True) == 7


def test_txn_offset_commit_of_an_unknown_topic_id_or_partition_is_refused(
    producer: Producer,
) -> None:
    for unknown in (uuid.UUID(int=0), uuid.UUID(int=77)):
        rows = producer.commit(6, unknown)
        assert [row[1:] for row in rows] == [(0, "unknown_topic_id")]
    topic_id = str(producer.topic_id)
    assert producer.commit(6, partition=99) == [(topic_id, 99, "unknown_topic_or_partition")]


@pytest.mark.parametrize(
    ("version", "error"), [(5, "illegal_generation"), (6, "group_id_not_found")]
)
def test_txn_offset_commit_error_for_a_missing_group_depends_on_the_version(
    producer: Producer, version: int, error: str
) -> None:
    field = "generation_id" if version < 6 else "generation_id_or_member_epoch"
    rows = producer.commit(version, **{field: 1, "member_id": "m"})
    assert [row[2] for row in rows] == [error]


@pytest.mark.parametrize(
    ("version", "error"), [(5, "illegal_generation"), (6, "stale_member_epoch")]
)
def test_txn_offset_commit_error_for_a_stale_epoch_depends_on_the_version(
    client: Cluster, producer: Producer, version: int, error: str
) -> None:
    joined = client.call(
        "consumer_group_heartbeat",
        1,
        group_id=producer.group,
        member_id=str(uuid.uuid4()),
        member_epoch=0,
        rebalance_timeout=60_000,
        subscribed_topic_names=[producer.topic],
        topic_partitions=[],
    )
    assert joined["error_code"] == "none"
    field = "generation_id" if version < 6 else "generation_id_or_member_epoch"
    epoch, member = joined["member_epoch"], joined["member_id"]

    def error_of(**said: Any) -> str:
        ((_, _, code),) = producer.commit(version, **said)
        return code

    assert error_of(**{field: epoch + 1, "member_id": member}) == error
    assert error_of(**{field: epoch, "member_id": "stranger"}) == "unknown_member_id"
    assert error_of(**{field: epoch, "member_id": member}) == "none"


def test_unknown_topic_id_is_reported_before_authorization(
    guarded: Guarded, admin: Cluster
) -> None:
    closed, name, of = admin.create_topic(unique("closed")), unique("txn"), unique("group")
    guarded.allow(transactional_id(Operation.WRITE, name), group(Operation.READ, of))
    with Cluster(guarded.bootstrap) as stranger:
        producer = Producer(stranger, closed, admin.topic_id(closed), name, of)
        assert producer.commit(6, uuid.UUID(int=77))[0][2] == "unknown_topic_id"
        assert producer.commit(6)[0][2] == "topic_authorization_failed"


# --- DeleteGroups 3, UnregisterController --------------------------------------------------------


def test_delete_groups_version_3_returns_a_null_error_message(
    client: Cluster, producer: Producer
) -> None:
    producer.commit(6)
    producer.end()
    assert client.committed(producer.group, producer.topic, stable=True) == 7
    answer = client.call("delete_groups", 3, groups_names=[producer.group, "no such group"])
    assert {result["group_id"]: result["error_code"] for result in answer["results"]} == {
        producer.group: "none",
        "no such group": "group_id_not_found",
    }
    assert {result["error_message"] for result in answer["results"]} == {None}


def test_unregister_controller_below_metadata_version_33_is_refused(client: Cluster) -> None:
    assert client.call("unregister_controller", 0, controller_id=77) == {
        "throttle_time": 0,
        "error_code": "unsupported_version",
        "error_message": (
            "The current MetadataVersion is too old to support controller unregistration."
        ),
    }
    refused = client.call("unregister_controller", 0, controller_id=NODE)
    assert refused["error_code"] == "invalid_request"
