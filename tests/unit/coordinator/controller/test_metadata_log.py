"""Observers fetch the metadata log: epochs, divergence, long polls, snapshots, restarts."""

from __future__ import annotations

import uuid
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from fencepost.cluster.records import (
    ConfigRecord,
    FeatureLevelRecord,
    NoOpRecord,
    PartitionChangeRecord,
    RegisterBrokerRecord,
)
from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.metadata import log as metadata_log
from fencepost.coordinator.metadata.snapshots import snapshots
from fencepost.logcore.batch import ControlType, decode_records, iter_headers, parse_control
from tests.support.cluster import unique
from tests.support.controllers import Pretender, records_of
from tests.support.waits import until
from tests.unit.coordinator.controller.conftest import Enter, Node

UNREACHED_MS = 20_000
"""A maximum wait in milliseconds that is longer than every test."""


# --- fetching ---


def test_observer_with_a_stale_epoch_learns_the_current_epoch_and_leader(
    enter: Enter, node: Node
) -> None:
    broker = enter(joins=False)
    broker.quorum_epoch = 0
    answer = broker.fetch()
    assert answer["error_code"] == "none"
    (part,) = answer["responses"][0]["partitions"]
    assert part["error_code"] == "fenced_leader_epoch"
    assert part["current_leader"]["leader_id"] == 3000
    assert part["current_leader"]["leader_epoch"] > 0
    host, port = node.bootstrap.split(":")
    assert answer["node_endpoints"] == [
        {"node_id": 3000, "host": host, "port": int(port), "rack": None}
    ]
    broker.quorum_epoch = part["current_leader"]["leader_epoch"] + 1
    assert broker.part()["error_code"] == "unknown_leader_epoch"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"cluster_id": "another"}, "inconsistent_cluster_id"),
        ({"cluster_id": None}, "none"),
        ({"topic_id": uuid.uuid4()}, "invalid_request"),
        ({"partition": 1}, "invalid_request"),
    ],
)
def test_metadata_fetch_of_another_cluster_or_partition_is_refused(
    enter: Enter, changes: dict[str, Any], error: str
) -> None:
    assert enter(joins=False).fetch(**changes)["error_code"] == error


@pytest.mark.parametrize(
    "name", ["fetch_offset", "last_fetched_epoch", "current_leader_epoch", "max_wait"]
)
def test_metadata_fetch_with_a_negative_number_is_refused(enter: Enter, name: str) -> None:
    assert enter(joins=False).part(**{name: -1})["error_code"] == "invalid_request"


def test_metadata_log_of_a_new_cluster_begins_with_feature_levels(enter: Enter) -> None:
    broker = enter(joins=False)
    part = broker.part()
    assert part["high_watermark"] == broker.end()
    levels = {
        level.name: level.feature_level
        for level in records_of(part["records"])
        if isinstance(level, FeatureLevelRecord)
    }
    assert levels == {
        "metadata.version": 30,
        "eligible.leader.replicas.version": 1,
        "group.version": 1,
        "share.version": 1,
        "transaction.version": 2,
    }
    assert ConfigRecord(4, "", "min.insync.replicas", "1") in records_of(part["records"])
    first = next(header for _, header in iter_headers(memoryview(part["records"])))
    (record,) = decode_records(memoryview(part["records"])[: first.size], 0, first)
    assert parse_control(record).type == ControlType.LEADER_CHANGE


def test_metadata_fetch_from_a_diverging_log_returns_the_diverging_epoch(enter: Enter) -> None:
    broker = enter(joins=False)
    end, epoch = broker.end(), broker.quorum_epoch
    for offset, last_epoch in ((end + 1, epoch), (1 << 40, epoch)):
        part = broker.part(offset, last_epoch)
        assert part["diverging_epoch"] == {"epoch": epoch, "end_offset": end}
        assert part["records"] == b""
    part = broker.part(3, epoch - 1)
    assert part["diverging_epoch"]["end_offset"] == 0
    assert broker.part(end, epoch)["diverging_epoch"]["epoch"] == -1


def test_metadata_fetch_at_the_log_end_waits_for_new_records(enter: Enter) -> None:
    waits, other = enter(), enter()
    end = waits.end()
    begin = monotonic()
    assert waits.part(end, waits.quorum_epoch, max_wait=50)["records"] == b""
    assert monotonic() - begin >= 0.05
    waits.controller.send(
        "fetch",
        18,
        cluster_id=None,
        replica_state={"replica_id": waits.broker_id, "replica_epoch": -1},
        max_wait=UNREACHED_MS,
        max_bytes=1 << 20,
        topics=[
            {
                "topic_id": uuid.UUID(int=1),
                "partitions": [
                    {
                        "current_leader_epoch": waits.quorum_epoch,
                        "fetch_offset": end,
                        "last_fetched_epoch": waits.quorum_epoch,
                        "high_watermark": end,
                    }
                ],
            }
        ],
    )
    other.topic(unique("t"), (other.broker_id,))
    answer = waits.controller.receive()
    assert records_of(answer["responses"][0]["partitions"][0]["records"])


def test_metadata_fetch_with_an_old_high_watermark_returns_at_once(enter: Enter) -> None:
    """KIP-1166: an observer with an old high watermark gets the new high watermark at once."""
    broker = enter()
    end = broker.end()
    part = broker.part(end, broker.quorum_epoch, max_wait=UNREACHED_MS, high_watermark=end - 1)
    assert (part["high_watermark"], part["records"]) == (end, b"")


def test_no_op_records_advance_the_high_watermark_while_an_observer_fetches(tmp_path: Path) -> None:
    with Node(tmp_path, metadata_max_idle_interval_ms="5") as node:
        broker = node.pretender(1)
        end = broker.end()
        part = broker.part(end, broker.quorum_epoch, max_wait=UNREACHED_MS)
        assert set(records_of(part["records"])) == {NoOpRecord()}
        broker.close()


# --- snapshots ---


def _compact(services: Services) -> tuple[int, int]:
    metadata = services.metadata
    metadata.write_snapshot()
    (found,) = snapshots(services.storage.fs, metadata.partition.log.directory)
    return found


def piece(broker: Pretender, snapshot: tuple[int, int], position: int, **changes: object) -> dict:  # type: ignore[type-arg]
    part = {
        "partition": 0,
        "current_leader_epoch": broker.quorum_epoch,
        "snapshot_id": {"end_offset": snapshot[0], "epoch": snapshot[1]},
        "position": position,
    }
    fields = {"cluster_id": broker.cluster_id, "max_bytes": 100, **changes}
    topic = fields.pop("topic", "__cluster_metadata")
    answer = broker.controller.call(
        "fetch_snapshot", 1, **fields, topics=[{"name": topic, "partitions": [part]}]
    )
    if answer["error_code"] != "none":
        return answer
    return answer["topics"][0]["partitions"][0]  # type: ignore[no-any-return]


def test_observer_below_the_log_start_offset_fetches_a_snapshot(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        broker = node.pretender(1)
        name = unique("t")
        broker.topic(name, (1,))
        snapshot = node.ask(_compact)
        for offset, epoch in ((0, 0), (5, 1)):
            told = broker.part(offset, epoch)
            assert told["snapshot_id"] == dict(zip(("end_offset", "epoch"), snapshot, strict=True))
            assert told["records"] == b""
        content, size = b"", 1
        while len(content) < size:
            found = piece(broker, snapshot, len(content))
            assert (found["error_code"], found["position"]) == ("none", len(content))
            content, size = content + found["unaligned_records"], found["size"]
        records = records_of(content)
        assert any(isinstance(record, RegisterBrokerRecord) for record in records)
        # The log continues at the end offset of the snapshot.
        assert broker.part(snapshot[0], snapshot[1])["error_code"] == "none"
        assert piece(broker, (1, 1), 0)["error_code"] == "snapshot_not_found"
        assert piece(broker, snapshot, size)["error_code"] == "position_out_of_range"
        assert piece(broker, snapshot, -1)["error_code"] == "position_out_of_range"
        assert piece(broker, snapshot, 0, topic="x")["error_code"] == "unknown_topic_or_partition"
        assert piece(broker, snapshot, 0, cluster_id="x")["error_code"] == (
            "inconsistent_cluster_id"
        )
        broker.quorum_epoch -= 1
        assert piece(broker, snapshot, 0)["error_code"] == "fenced_leader_epoch"
        broker.close()


def test_metadata_log_start_offset_advances_after_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_log, "COMPACT_SLACK_RECORDS", 0)
    monkeypatch.setattr(metadata_log, "COMPACT_FACTOR", 0)
    with Node(tmp_path, metadata_max_idle_interval_ms="5") as node:
        broker = node.pretender(1)
        node.ask(lambda services: services.active_controller.log.maybe_write_snapshot(0))
        until(lambda: broker.part()["snapshot_id"]["end_offset"] > 0, "the log is cut")
        broker.close()


# --- sessions, restarts ---


def test_broker_without_heartbeats_is_fenced_and_loses_its_leaderships(tmp_path: Path) -> None:
    with Node(tmp_path, broker_session_timeout_ms="300") as node:
        silent, lives = node.pretender(1), node.pretender(2)
        lives.topic(unique("t"), (1, 2))
        end = lives.end()

        def led_by_the_other() -> bool:
            lives.heartbeat()
            changes = [
                record for record in lives.records(end) if isinstance(record, PartitionChangeRecord)
            ]
            return any(change.leader == 2 and change.isr == (2,) for change in changes)

        until(led_by_the_other, "broker 2 leads")
        assert silent.heartbeat(0)["is_fenced"]
        silent.close()
        lives.close()


def test_restarted_controller_recovers_brokers_topics_and_the_log(tmp_path: Path) -> None:
    name = unique("t")
    with Node(tmp_path) as node:
        broker = node.pretender(1)
        broker.topic(name, (1,))
        cluster_id, epoch, end = broker.cluster_id, broker.quorum_epoch, broker.end()
        broker_epoch, incarnation_id = broker.broker_epoch, broker.incarnation_id
        broker.close()
    with Node(tmp_path) as node:
        broker = node.pretender(1, joins=False)
        assert broker.cluster_id == cluster_id
        assert broker.quorum_epoch > epoch
        # After the controller restarts, an observer's log has not diverged.
        assert broker.part(end, epoch)["diverging_epoch"]["epoch"] == -1
        broker.broker_epoch, broker.incarnation_id = broker_epoch, incarnation_id
        beat = broker.heartbeat()
        assert (beat["error_code"], beat["is_fenced"]) == ("none", False)
        assert node.ask(lambda services: list(services.metadata.image.topics)) == [name]
        broker.close()
