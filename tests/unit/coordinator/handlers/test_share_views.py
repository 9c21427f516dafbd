"""In-flight records of a share group: DescribeConfigs by name, ``groups describe``, ``blame``."""

from __future__ import annotations

import json
from typing import Any

from fencepost.cluster.acl import Operation
from tests.support import requests
from tests.support.cluster import Cluster, unique
from tests.support.guarded import group as group_right
from tests.support.guarded import topic as topic_right
from tests.support.share import ACCEPT, RELEASE
from tests.unit.coordinator.handlers.test_share_history import Queue, queue
from tests.wire.test_cli_groups import rows, run

__all__ = ["queue"]
KEY = "fencepost.share.partition/queue/0"
GROUP = 32


def configs(client: Cluster, *keys: str) -> dict[str, Any]:
    resource = requests.described_resource(GROUP, "g", *keys)
    answer = client.call("describe_configs", 4, **requests.describe_configs(resource))
    (result,) = answer["results"]
    assert result["error_code"] == "none", result
    return {config["name"]: config["value"] for config in result["configs"]}


def described(queue: Queue) -> dict[str, Any]:
    (row,) = rows(run(queue.broker.bootstrap, "describe", "g"))
    return row


def blamed(queue: Queue) -> dict[str, Any]:
    (row,) = rows(run(queue.broker.bootstrap, "blame", "g"))
    return row


def test_only_a_request_by_name_returns_in_flight_records(queue: Queue) -> None:
    assert not any(name.startswith("fencepost.share") for name in configs(queue.client))
    view = json.loads(configs(queue.client, KEY)[KEY])
    assert (view["acquired"], view["available"], view["start_offset"]) == (3, 0, 0)
    assert view["first_open"]["member"] == queue.member.member
    absent = f"{KEY[:-1]}7"
    assert configs(queue.client, absent, "fencepost.share.partition/none/0") == {
        absent: "{}",
        "fencepost.share.partition/none/0": "{}",
    }
    assert configs(queue.client, "fencepost.share.partition/queue/x") == {}


def test_describe_counts_records_in_flight(queue: Queue) -> None:
    queue.acknowledge((0, 0, ACCEPT), (1, 1, RELEASE))
    row = described(queue)
    assert (row["committed"], row["lag"]) == (0, 2)
    assert (row["acquired"], row["available"], row["deliveries"]) == (1, 1, 1)
    assert row["lock_end_ms"] == queue.clock.now_ms() + 30_000


def test_describe_without_a_fetching_member_has_the_reason(queue: Queue) -> None:
    queue.client.create_topic("idle")
    alter = requests.alter_share_group_offsets("g2", "idle", {0: 0})
    assert queue.client.call("alter_share_group_offsets", 0, **alter)["error_code"] == "none"
    (row,) = rows(run(queue.broker.bootstrap, "describe", "g2"))
    assert (row["acquired"], row["in_flight_error"]) == (None, "no member fetches")


def test_acquired_record_is_blamed_with_its_owner_and_lock(queue: Queue) -> None:
    queue.acknowledge((0, 0, ACCEPT))
    row = blamed(queue)
    assert (row["record"], row["state"], row["deliveries"]) == ("1-2", "acquired", 1)
    assert (row["member"], row["client"], row["host"]) == (queue.member.member, "raw", "127.0.0.1")
    assert row["lock_end_ms"] == queue.clock.now_ms() + 30_000
    assert row["since_ms"] == queue.clock.now_ms()
    assert row["ends"] == "its owner acknowledges it, or the lock ends"


def test_released_record_is_blamed_with_the_cause(queue: Queue) -> None:
    queue.acknowledge((0, 0, RELEASE))
    queue.told(0, "share-records-returned")
    row = blamed(queue)
    assert (row["record"], row["state"], row["member"]) == (0, "available", None)
    assert row["why"] == "released by its owner"
    assert row["ends"] == "a member that fetches; the group has none"


def test_unread_record_is_blamed_as_not_read(queue: Queue) -> None:
    queue.acknowledge((0, 2, ACCEPT))
    queue.client.produce("queue", [b"d"])
    row = blamed(queue)
    assert (row["record"], row["state"], row["start_offset"]) == (3, "not read", 3)


def test_blame_of_another_kind_of_group_is_refused(queue: Queue) -> None:
    queue.client.call(
        "offset_commit",
        7,
        group_id="plain",
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[{"name": "queue", "partitions": [{"partition_index": 0, "committed_offset": 1}]}],
    )
    refused = run(queue.broker.bootstrap, "blame", "plain", status=1)
    assert "describe plain" in refused.output


def test_in_flight_records_need_describe_configs_and_describe_permissions(
    guarded: Any, admin: Cluster
) -> None:
    """DESCRIBE_CONFIGS and DESCRIBE on the group, DESCRIBE on the topic."""
    name, group = admin.create_topic(unique("t")), unique("g")
    key = f"fencepost.share.partition/{name}/0"
    needed = (
        group_right(Operation.DESCRIBE_CONFIGS, group),
        group_right(Operation.DESCRIBE, group),
        topic_right(Operation.DESCRIBE, name),
    )
    with Cluster(guarded.bootstrap) as client:
        resource = requests.described_resource(GROUP, group, key)
        body = requests.describe_configs(resource)
        (result,) = client.call("describe_configs", 4, **body)["results"]
        assert result["error_code"] == "group_authorization_failed"
        for count in range(1, len(needed) + 1):
            guarded.allow(*needed[:count])
            (result,) = client.call("describe_configs", 4, **body)["results"]
            assert result["error_code"] == "none"
            assert len(result["configs"]) == (count == len(needed))
