"""CreatePartitions, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import pytest

from tests.support.cluster import unique


@pytest.mark.parametrize("version", range(4))
def test_create_partitions_in_every_version_validates_and_adds_partitions(client, version):
    name = client.create_topic(unique("g"), 2)

    def grow(**fields):
        entry = {"name": name, "assignments": None, **fields}
        answer = client.call("create_partitions", version, topics=[entry])
        return answer["results"][0]["error_code"]

    assert grow(count=2) == grow(count=1) == grow(count=-1) == "invalid_partitions"
    assert grow(count=3, assignments=[{"broker_ids": [4]}]) == "invalid_replica_assignment"
    assert grow(count=3, assignments=[]) == "invalid_replica_assignment"
    assert grow(count=20_000) == "policy_violation"
    assert grow(name="none", count=3) == "unknown_topic_or_partition"
    answer = client.call(
        "create_partitions",
        version,
        topics=[{"name": name, "count": 4, "assignments": None}],
        validate_only=True,
    )
    assert answer["results"][0]["error_code"] == "none"
    assert client.leaders(name) == 2
    assert grow(count=4, assignments=[{"broker_ids": [3]}, {"broker_ids": [3]}]) == "none"
    assert client.leaders(name) == 4
    assert client.produce(name, [b"x"], partition=3)["error_code"] == "none"
