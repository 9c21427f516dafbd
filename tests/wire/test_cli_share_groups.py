"""``fencepost groups`` with share groups, on either broker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from fencepost.client.queries.share_partitions import NOT_FETCHED, NOT_REPORTED
from tests.support import requests
from tests.support.cluster import Cluster, unique
from tests.support.waits import until
from tests.wire.test_cli_groups import execute, rows, run
from tests.wire.test_share_groups import assigned, beat, cluster, produce

__all__ = ["cluster"]


@pytest.fixture
def topic(cluster: Cluster) -> str:
    name = cluster.create_topic(unique("t"), 2)
    produce(cluster, name, b"0", b"1", b"2")
    return name


@pytest.fixture
def group(cluster: Cluster, topic: str) -> str:
    """Create a share group without members, with start offsets 1 and 0."""
    name = unique("g")
    alter = requests.alter_share_group_offsets(name, topic, {0: 1, 1: 0})

    def is_altered() -> bool:
        # The request as a whole succeeds even if a partition gets an error.
        cluster.call("alter_share_group_offsets", 0, **alter)
        return len(cluster_offsets(cluster, name)) == 2

    until(is_altered, "the offsets are altered")
    return name


def cluster_offsets(cluster: Cluster, group: str) -> dict[int, int]:
    body = requests.describe_share_group_offsets(group, None)
    (found,) = cluster.call("describe_share_group_offsets", 1, **body)["groups"]
    return {
        part["partition_index"]: part["start_offset"]
        for topic in found["topics"]
        for part in topic["partitions"]
    }


@pytest.fixture
def member(cluster: Cluster, group: str, topic: str) -> Iterator[str]:
    """Run a member that is assigned both partitions."""
    name = str(uuid.uuid4())
    assigned(cluster, group, name, topic)
    yield name
    beat(cluster, group, name, -1)


def test_start_offsets_are_described_with_the_lag(bootstrap: str, topic: str, group: str) -> None:
    found = rows(run(bootstrap, "describe", group))
    assert [(row["partition"], row["committed"], row["lag"]) for row in found] == [
        (0, 1, 2),
        (1, 0, 0),
    ]
    (total,) = rows(run(bootstrap, "describe", group, "--summary"))
    assert (total["type"], total["state"], total["lag"], total["unknown"]) == (
        "share",
        "Empty",
        2,
        0,
    )
    listed = rows(run(bootstrap, "list", "--type", "share"))
    assert group in {row["group"] for row in listed}


def test_share_group_members_are_listed_with_their_partitions(
    bootstrap: str, topic: str, group: str, member: str
) -> None:
    (found,) = rows(run(bootstrap, "members", group))
    assert (found["member"], found["type"]) == (member, "share")
    assert found["assigned"] == [f"{topic}:0", f"{topic}:1"]
    assert found["target"] is None


def test_active_share_group_is_neither_reset_nor_deleted(
    bootstrap: str, topic: str, group: str, member: str
) -> None:
    reset = ("reset-offsets", group, "--topic", topic, "--to-latest", "--execute")
    assert "is active" in run(bootstrap, *reset, status=1).output
    assert "is active" in run(bootstrap, "delete", group, "--execute", status=1).output
    refused = run(bootstrap, "plan", group, status=1)
    assert "share group" in refused.output


def test_start_offsets_are_reset_and_restored(
    cluster: Cluster, bootstrap: str, topic: str, group: str, tmp_path
) -> None:
    run(bootstrap, "reset-offsets", group, "--topic", topic, "--to-latest")
    assert cluster_offsets(cluster, group) == {0: 1, 1: 0}
    undo = str(tmp_path / "undo")
    latest = ("reset-offsets", group, "--topic", f"{topic}:0", "--to-latest")
    run(bootstrap, *latest, "--execute", "--undo", undo)
    assert cluster_offsets(cluster, group) == {0: 3, 1: 0}
    run(bootstrap, "reset-offsets", group, "--from-file", undo, *execute(tmp_path))
    assert cluster_offsets(cluster, group) == {0: 1, 1: 0}


def test_share_group_offsets_are_deleted_only_for_whole_topics(
    cluster: Cluster, bootstrap: str, topic: str, group: str, tmp_path
) -> None:
    command = ("delete-offsets", group, "--topic", f"{topic}:0", *execute(tmp_path))
    assert "whole topics" in run(bootstrap, *command, status=1).output
    assert cluster_offsets(cluster, group) == {0: 1, 1: 0}
    run(bootstrap, "delete-offsets", group, "--topic", topic, *execute(tmp_path))
    assert cluster_offsets(cluster, group) == {}


def test_share_group_is_deleted_with_its_start_offsets(
    cluster: Cluster, bootstrap: str, topic: str, group: str
) -> None:
    found = rows(run(bootstrap, "delete", group, "--execute"))
    assert [(row["partition"], row["committed"]) for row in found] == [(0, 1), (1, 0)]
    assert run(bootstrap, "describe", group, status=1)
    assert cluster_offsets(cluster, group) == {}


def test_missing_in_flight_counts_are_explained(bootstrap: str, topic: str, group: str) -> None:
    """No member fetches, so Fencepost has no counts; Apache Kafka never reports counts."""
    for command in ("describe", "blame"):
        found = rows(run(bootstrap, command, group))
        assert [row["partition"] for row in found] == [0, 1]
        assert {row["in_flight_error"] for row in found} <= {NOT_FETCHED, NOT_REPORTED}
    assert {row.get("acquired") for row in found} == {None}
