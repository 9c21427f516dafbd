"""The metadata log is private to the broker: no request reads, writes or truncates it."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.batches import batch
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.raw import errors_in

NAME, ITS_ID = "__cluster_metadata", uuid.UUID(int=1)


def _produce(version: int, **more: Any) -> dict[str, Any]:
    part = {"index": 0, "records": batch([b"v"], key=b"k", **more)}
    topic = {"topic_id": ITS_ID} if version >= 13 else {"name": NAME}
    return {"acks": -1, "timeout": 5000, "topic_data": [{**topic, "partition_data": [part]}]}


def _fetch(version: int) -> dict[str, Any]:
    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}
    topic = {"topic_id": ITS_ID} if version >= 13 else {"topic": NAME}
    return {
        "max_wait": 0,
        "max_bytes": 1 << 20,
        "session_epoch": -1,
        "topics": [{**topic, "partitions": [{**part, "current_leader_epoch": -1}]}],
    }


def _list_offsets(at: int) -> dict[str, Any]:
    part = {"partition_index": 0, "timestamp": at, "current_leader_epoch": -1}
    return {"replica_id": -1, "topics": [{"name": NAME, "partitions": [part]}]}


def _delete_records(offset: int) -> dict[str, Any]:
    part = {"partition_index": 0, "offset": offset}
    return {"timeout": 5000, "topics": [{"name": NAME, "partitions": [part]}]}


def _write_txn_markers(*, commit: bool) -> dict[str, Any]:
    marker = {
        "producer_id": 5,
        "producer_epoch": 0,
        "transaction_result": commit,
        "topics": [{"name": NAME, "partition_indexes": [0]}],
        "coordinator_epoch": 0,
    }
    return {"markers": [marker]}


REQUESTS: list[tuple[str, int, dict[str, Any]]] = [
    ("produce", 9, _produce(9)),
    ("produce", 9, _produce(9, producer_id=5, producer_epoch=0, sequence=0)),
    ("produce", 13, _produce(13)),
    ("fetch", 11, _fetch(11)),
    ("fetch", 16, _fetch(16)),
    ("list_offsets", 7, _list_offsets(-1)),
    ("list_offsets", 7, _list_offsets(-2)),
    (
        "offset_for_leader_epoch",
        4,
        {
            "replica_id": -1,
            "topics": [
                {
                    "topic": NAME,
                    "partitions": [{"partition": 0, "leader_epoch": 0, "current_leader_epoch": -1}],
                }
            ],
        },
    ),
    ("delete_records", 2, _delete_records(-1)),
    ("delete_records", 2, _delete_records(1)),
    ("write_txn_markers", 1, _write_txn_markers(commit=True)),
    ("write_txn_markers", 1, _write_txn_markers(commit=False)),
    ("describe_producers", 0, {"topics": [{"name": NAME, "partition_indexes": [0]}]}),
]
IDS = [f"{api}-{version}-{at}" for at, (api, version, _) in enumerate(REQUESTS)]


@pytest.mark.parametrize(("api", "version", "body"), REQUESTS, ids=IDS)
def test_metadata_topic_is_unknown_to_every_request(
    cluster: Cluster, api: str, version: int, body: Any
) -> None:
    by_id = version >= 13 and api in {"produce", "fetch"}
    expected = "unknown_topic_id" if by_id else "unknown_topic_or_partition"
    assert [code for code in errors_in(cluster.call(api, version, **body)) if code != "none"] == [
        expected
    ]


@pytest.mark.slow
def test_metadata_survives_requests_against_its_log_and_a_restart(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "data").start()
    topic = unique("kept")
    with Cluster(daemon.bootstrap) as cluster:
        topic_id = cluster.topic_id(cluster.create_topic(topic, 3))
        cluster.produce(topic, [b"v"])
        first = cluster.init_producer()[0]
        log = tmp_path / "data" / f"{NAME}-0" / f"{0:020}.log"
        before = log.read_bytes()
        for api, version, body in REQUESTS:
            cluster.call(api, version, **body)
        assert log.read_bytes() == before
    daemon.kill()
    daemon.start()
    with Cluster(daemon.bootstrap) as cluster:
        assert (cluster.topic_id(topic), cluster.leaders(topic)) == (topic_id, 3)
        assert cluster.values(topic) == [b"v"]
        assert cluster.init_producer()[0] > first
    daemon.stop()
