"""Share groups' requests to the group coordinator (KIP-932), field by field."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from fencepost.cluster.acl import Operation as Op
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.handlers import authorized
from fencepost.coordinator.handlers.share_group_heartbeat import is_member_id
from fencepost.groups.share import errors
from fencepost.logcore.machine import DomainError
from tests.support import requests
from tests.support.batches import batch
from tests.support.cluster import GROUP, Cluster, unique
from tests.support.guarded import Guarded, group, topic
from tests.support.raw import Answer
from tests.support.share_state import LocalShareState
from tests.support.waits import until
from tests.unit.coordinator.handlers.conftest import CONFIG

NO_ID = None
"""The decoded value of the zero topic id."""
NO_HOST = "This server does not host this topic-partition."


class Served:
    """A broker at share.version 1, and the share coordinator's machine behind its persister."""

    def __init__(self, client: Cluster, state: LocalShareState | None = None) -> None:
        self.client = client
        self.failures = deque[DomainError]() if state is None else state.failures
        self.group, self.member = unique("g"), str(uuid.uuid4())
        self.topic = client.create_topic(unique("t"), 2)
        self.topic_id = str(client.topic_id(self.topic))
        self.epoch = 0

    def ask(self, api: str, body: requests.Body, version: int = 0) -> Answer:
        return self.client.call(api, version, **body)

    def beat(self, epoch: int, **fields: Any) -> Answer:
        body = requests.share_group_heartbeat(self.group, self.member, epoch, **fields)
        return self.ask("share_group_heartbeat", body, 1)

    def join(self) -> Answer:
        body = requests.join_share_group(self.group, self.member, self.topic)
        return self.ask("share_group_heartbeat", body, 1)

    def assigned(self) -> Answer:
        """Join, and send heartbeats until a response assigns partitions; return this response."""
        self.epoch = 0
        first = self.join()

        def beaten() -> Answer | None:
            answer = self.beat(self.epoch) if self.epoch else first
            assert answer["error_code"] == "none", answer
            self.epoch = answer["member_epoch"]
            told = answer["assignment"]
            return answer if told is not None and told["topic_partitions"] else None

        return until(beaten, "partitions are assigned")

    def leave(self) -> None:
        assert self.beat(-1)["member_epoch"] == -1

    def describe(self, *names: str, **fields: Any) -> list[Answer]:
        body = requests.share_group_describe(*(names or (self.group,)), **fields)
        return self.ask("share_group_describe", body, 1)["groups"]

    def offsets(self, *topics: Any, version: int = 1, of: str | None = None) -> Answer:
        body = requests.describe_share_group_offsets(of or self.group, *topics)
        (found,) = self.ask("describe_share_group_offsets", body, version)["groups"]
        return found

    def alter(self, name: str, offsets: dict[int, int]) -> Answer:
        body = requests.alter_share_group_offsets(self.group, name, offsets)
        return self.ask("alter_share_group_offsets", body)

    def delete_offsets(self, *names: str) -> Answer:
        return self.ask(
            "delete_share_group_offsets", requests.delete_share_group_offsets(self.group, *names)
        )

    def delete_group(self) -> Answer:
        (found,) = self.ask("delete_groups", requests.delete_groups(self.group), 2)["results"]
        return found


def set_level(client: Cluster, level: int) -> None:
    """Set the level of share.version; upgrade type 2 is a safe downgrade."""
    update = {"feature": "share.version", "max_version_level": level}
    kinds = {"upgrade_type": 1 if level else 2}
    answer = client.call("update_features", 1, feature_updates=[{**update, **kinds}])
    assert answer["error_code"] == "none", answer


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[tuple[str, LocalShareState]]:
    config = {**CONFIG, "group.share.assignment.interval.ms": "0"}
    broker = Broker(tmp_path_factory.mktemp("data"), config=config)
    with BrokerThread(lambda: broker) as thread:
        state = LocalShareState(broker.services)
        with Cluster(thread.bootstrap) as client:
            client.coordinator("any", GROUP)
        yield thread.bootstrap, state


@pytest.fixture
def served(running) -> Iterator[Served]:
    bootstrap, state = running
    with Cluster(bootstrap) as client:
        yield Served(client, state)
        state.failures.clear()


# --- 76: heartbeat -------------------------------------------------------------------------------


def test_member_joins_and_gets_its_partitions_once_they_are_initialized(served: Served) -> None:
    assert served.join() == {
        "throttle_time": 0,
        "error_code": "none",
        "error_message": None,
        "member_id": served.member,
        "member_epoch": 2,
        "heartbeat_interval": 5_000,
        "assignment": {"topic_partitions": []},
    }
    assigned = served.assigned()
    assert assigned["assignment"] == {
        "topic_partitions": [{"topic_id": served.topic_id, "partitions": [0, 1]}]
    }
    assert served.beat(served.epoch)["assignment"] is None
    served.leave()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"member_id": ""}, None),
        ({"member_id": "x" * 37}, None),
        ({"group_id": ""}, "GroupId can't be empty."),
        ({"rack_id": ""}, "RackId can't be empty."),
        (
            {"subscribed_topic_names": None},
            "SubscribedTopicNames must be set in first request.",
        ),
        ({"subscribed_topic_names": []}, "SubscribedTopicNames must be set in first request."),
        ({"member_epoch": -2}, "MemberEpoch is invalid."),
    ],
)
def test_share_group_heartbeat_with_an_invalid_field_is_refused(
    served: Served, fields: dict[str, Any], message: str | None
) -> None:
    body = {**requests.join_share_group(served.group, served.member, served.topic), **fields}
    answer = served.ask("share_group_heartbeat", body, 1)
    assert (answer["error_code"], answer["error_message"]) == ("invalid_request", message)


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [("", False), ("x" * 36, True), ("x" * 37, False), ("\U0001f600" * 19, False)],
)
def test_member_id_has_at_most_36_utf_16_units(text: str, is_valid: bool) -> None:
    assert is_member_id(text) is is_valid
    assert not is_member_id(None)


def test_unknown_groups_members_and_epochs_have_their_own_errors(served: Served) -> None:
    missing = served.beat(1)
    assert (missing["error_code"], missing["error_message"]) == (
        "group_id_not_found",
        f"Share group {served.group} not found.",
    )
    served.join()
    stranger = requests.share_group_heartbeat(served.group, "stranger", 1)
    answer = served.ask("share_group_heartbeat", stranger, 1)
    assert answer["error_code"] == "unknown_member_id"
    fenced = served.beat(77)
    assert (fenced["error_code"], fenced["error_message"]) == (
        "fenced_member_epoch",
        (
            "The share group member has a greater member epoch (77) than the one known by the group"
            " coordinator (2). The member must abandon all its partitions and rejoin."
        ),
    )


def test_share_group_requests_do_not_find_a_consumer_group(served: Served) -> None:
    joining = requests.join_consumer_group(served.group, served.member, served.topic)
    assert served.ask("consumer_group_heartbeat", joining, 1)["error_code"] == "none"
    said = f"Group {served.group} is not a share group."
    for answer in (
        served.join(),
        served.alter(served.topic, {0: 7}),
        served.delete_offsets(served.topic),
        *served.describe(),
    ):
        assert (answer["error_code"], answer["error_message"]) == ("group_id_not_found", said)
    assert served.offsets(None) == {
        "group_id": served.group,
        "topics": [],
        "error_code": "none",
        "error_message": None,
    }


def test_requests_of_other_protocols_do_not_find_a_share_group(served: Served) -> None:
    served.join()
    name = served.group
    joining = requests.join_consumer_group(name, served.member, served.topic)
    answer = served.ask("consumer_group_heartbeat", joining, 1)
    assert answer["error_code"] == "group_id_not_found"
    assert answer["error_message"] == f"Group {name} is not a consumer group."
    (described,) = served.ask("describe_groups", requests.describe_groups(name), 6)["groups"]
    assert (described["error_code"], described["group_state"]) == ("group_id_not_found", "Dead")
    row = {"partition_index": 0, "committed_offset": 7, "committed_metadata": ""}
    topics = [{"name": served.topic, "partitions": [row]}]
    committed = served.client.call("offset_commit", 9, group_id=name, topics=topics)
    assert committed["topics"][0]["partitions"][0]["error_code"] == "group_id_not_found"


# --- 77 and ListGroups ----------------------------------------------------------------------------


def test_described_group_has_its_members_and_their_assignments(served: Served) -> None:
    served.assigned()
    (found,) = served.describe(include_authorized_operations=True)
    (member,) = found.pop("members")
    assert found == {
        "error_code": "none",
        "error_message": None,
        "group_id": served.group,
        "group_state": "Stable",
        "group_epoch": served.epoch,
        "assignment_epoch": served.epoch,
        "assignor_name": "simple",
        "authorized_operations": authorized.GROUP,
    }
    partitions = {"topic_id": served.topic_id, "topic_name": served.topic, "partitions": [0, 1]}
    assert member == {
        "member_id": served.member,
        "rack_id": None,
        "member_epoch": served.epoch,
        "client_id": served.client.client_id,
        "client_host": "/127.0.0.1",
        "subscribed_topic_names": [served.topic],
        "assignment": {"topic_partitions": [partitions]},
    }
    served.leave()
    (empty,) = served.describe()
    assert (empty["group_state"], empty["members"]) == ("Empty", [])
    assert empty["authorized_operations"] == authorized.NOT_ASKED


def test_missing_group_is_described_with_group_id_not_found(served: Served) -> None:
    missing, again, nameless = served.describe("missing", "missing", "")
    assert again == missing
    assert (missing["error_code"], missing["error_message"]) == (
        "group_id_not_found",
        "Group missing not found.",
    )
    assert (nameless["error_code"], nameless["error_message"]) == ("invalid_group_id", None)


def test_list_groups_returns_share_groups_with_the_type_share(served: Served) -> None:
    served.join()

    def listed(**filters: Any) -> list[Answer]:
        found = served.client.call("list_groups", 5, **filters)["groups"]
        return [row for row in found if row["group_id"] == served.group]

    stable = {
        "group_id": served.group,
        "protocol_type": "share",
        "group_state": "Stable",
        "group_type": "share",
    }
    assert (
        listed() == listed(types_filter=["Share"]) == listed(states_filter=["stable"]) == [stable]
    )
    assert listed(types_filter=["consumer"]) == []
    served.leave()
    assert [row["group_state"] for row in listed()] == ["Empty"]


# --- 90, 91, 92: offsets -------------------------------------------------------------------------


def partition(index: int, start: int, *, epoch: int = 0, lag: int = -1) -> Answer:
    return {
        "partition_index": index,
        "start_offset": start,
        "leader_epoch": epoch,
        "lag": lag,
        "error_code": "none",
        "error_message": None,
    }


def test_altered_offsets_are_described_with_their_lag(served: Served) -> None:
    data = batch([b"a", b"b", b"c"])
    parts = [{"index": 0, "records": data}]
    topics = [{"name": served.topic, "partition_data": parts}]
    served.client.call("produce", 9, acks=-1, timeout=1_000, topic_data=topics)
    assert served.alter(served.topic, {0: 1, 1: -5, 9: 7}) == {
        "throttle_time": 0,
        "error_code": "none",
        "error_message": None,
        "responses": [
            {
                "topic_name": served.topic,
                "topic_id": served.topic_id,
                "partitions": [
                    {"partition_index": 0, "error_code": "none", "error_message": None},
                    {"partition_index": 1, "error_code": "none", "error_message": None},
                    {
                        "partition_index": 9,
                        "error_code": "unknown_topic_or_partition",
                        "error_message": NO_HOST,
                    },
                ],
            }
        ],
    }
    rows = [partition(0, 1, lag=2), partition(1, -5, lag=5)]
    topic_row = {"topic_name": served.topic, "topic_id": served.topic_id, "partitions": rows}
    for topics in ((None,), ((served.topic, [0, 1]),)):
        assert served.offsets(*topics) == {
            "group_id": served.group,
            "topics": [topic_row],
            "error_code": "none",
            "error_message": None,
        }
    (older,) = served.offsets(None, version=0)["topics"]
    assert "lag" not in older["partitions"][0]


def test_alter_offsets_response_lists_unknown_topics_first(served: Served) -> None:
    rows = [{"partition_index": 0, "start_offset": 7}]
    topics = [{"topic_name": name, "partitions": rows} for name in (served.topic, "missing")]
    body = {"group_id": served.group, "topics": topics}
    missing, known = served.ask("alter_share_group_offsets", body)["responses"]
    assert (missing["topic_name"], missing["topic_id"]) == ("missing", NO_ID)
    assert missing["partitions"][0]["error_code"] == "unknown_topic_or_partition"
    assert missing["partitions"][0]["error_message"] == NO_HOST
    assert known["partitions"][0]["error_code"] == "none"


def test_partitions_without_state_have_the_start_offset_minus_1(served: Served) -> None:
    found = served.offsets((served.topic, [1, 9]), ("missing", [0]))
    known, missing = found["topics"]
    assert known["partitions"] == [partition(1, -1), partition(9, -1)]
    assert missing == {
        "topic_name": "missing",
        "topic_id": NO_ID,
        "partitions": [partition(0, -1)],
    }
    assert served.offsets()["topics"] == []


def test_error_of_the_share_coordinator_is_described_as_no_state(served: Served) -> None:
    served.alter(served.topic, {0: 7})
    served.failures.append(errors.SharePartitionFailedError("the disk is full"))
    (found,) = served.offsets((served.topic, [0]))["topics"]
    assert found["partitions"] == [partition(0, -1)]


def test_partition_that_the_share_coordinator_refuses_is_not_altered(served: Served) -> None:
    served.failures.append(errors.SharePartitionFailedError("the disk is full"))
    (found,) = served.alter(served.topic, {0: 7, 1: 8})["responses"]
    assert [row["error_code"] for row in found["partitions"]] == ["unknown_server_error", "none"]
    (described,) = served.offsets((served.topic, [0, 1]))["topics"]
    assert [row["start_offset"] for row in described["partitions"]] == [-1, 8]


def test_offsets_of_a_group_with_members_are_not_changed(served: Served) -> None:
    served.assigned()
    for answer in (served.alter(served.topic, {0: 7}), served.delete_offsets(served.topic)):
        assert answer["error_code"] == "non_empty_group"
        assert answer["error_message"] == "The group is not empty."
        assert answer["responses"] == []
    assert served.delete_group()["error_code"] == "non_empty_group"


def test_delete_offsets_response_lists_deleted_topics_first(served: Served) -> None:
    served.alter(served.topic, {0: 7})
    other = served.client.create_topic(unique("t"))
    answer = served.delete_offsets(other, "missing", served.topic)
    assert answer["error_code"] == "none"
    deleted, without, missing = answer["responses"]
    assert deleted == {
        "topic_name": served.topic,
        "topic_id": served.topic_id,
        "error_code": "none",
        "error_message": None,
    }
    code = "unknown_topic_or_partition"
    assert missing == {
        "topic_name": "missing",
        "topic_id": NO_ID,
        "error_code": code,
        "error_message": NO_HOST,
    }
    assert without == {
        "topic_name": other,
        "topic_id": NO_ID,
        "error_code": code,
        "error_message": "There is no offset information to delete.",
    }
    assert served.offsets(None)["topics"] == []


@pytest.mark.parametrize("api", ["alter_share_group_offsets", "delete_share_group_offsets"])
def test_offset_change_with_an_empty_group_id_is_refused(served: Served, api: str) -> None:
    answer = served.client.call(api, 0, group_id="", topics=[])
    assert answer["error_code"] == "invalid_group_id"
    assert answer["error_message"] == "The group id is invalid."


def test_group_whose_state_cannot_be_deleted_stays(served: Served) -> None:
    served.alter(served.topic, {0: 7})
    served.failures.append(errors.SharePartitionFailedError("the disk is full"))
    assert served.delete_group()["error_code"] == "unknown_server_error"
    assert served.describe()[0]["error_code"] == "none"
    assert served.delete_group()["error_code"] == "none"
    assert served.describe()[0]["error_code"] == "group_id_not_found"
    assert served.delete_group()["error_code"] == "group_id_not_found"


# --- the feature, and rights ---------------------------------------------------------------------


def test_share_group_apis_at_share_version_0_are_refused_but_advertised(served: Served) -> None:
    served.alter(served.topic, {0: 7})
    set_level(served.client, 0)
    try:
        assert served.join()["error_code"] == "unsupported_version"
        assert [row["error_code"] for row in served.describe("a", "b")] == [
            "unsupported_version"
        ] * 2
        assert served.offsets(None)["error_code"] == "unsupported_version"
        for answer in (served.alter(served.topic, {0: 7}), served.delete_offsets(served.topic)):
            assert answer["error_code"] == "unsupported_version"
            assert answer["error_message"] == "The version of API is not supported."
        advertised = served.client.call("api_versions", 2)["api_keys"]
        versions = {api["api_key"]: (api["min_version"], api["max_version"]) for api in advertised}
        assert [versions.get(key) for key in (76, 77, 90, 91, 92)] == [
            (1, 1), (1, 1), (0, 1), (0, 0), (0, 0)
        ]  # fmt: skip
        listed = served.client.call("list_groups", 5, types_filter=["share"])["groups"]
        assert served.group in {row["group_id"] for row in listed}
    finally:
        set_level(served.client, 1)
    assert served.delete_group()["error_code"] == "none"


@pytest.fixture
def stranger(guarded: Guarded, admin: Cluster) -> Iterator[Served]:
    """Yield a client without rights, and an empty group with state of a topic."""
    owner = Served(admin)
    owner.assigned()
    owner.leave()
    guarded.allow()
    with Cluster(guarded.bootstrap) as client:
        owner.client = client
        yield owner


def test_offsets_of_topics_that_the_client_may_not_read_are_not_changed(
    guarded: Guarded, stranger: Served
) -> None:
    rights = group(Op.READ, stranger.group), group(Op.DELETE, stranger.group)
    guarded.allow(*rights)
    refused = {
        "error_code": "topic_authorization_failed",
        "error_message": "Topic authorization failed.",
    }
    (altered,) = stranger.alter(stranger.topic, {0: 7})["responses"]
    assert altered["partitions"] == [{"partition_index": 0, **refused}]
    (deleted,) = stranger.delete_offsets(stranger.topic)["responses"]
    assert deleted == {"topic_name": stranger.topic, "topic_id": NO_ID, **refused}
    guarded.allow(*rights, topic(Op.READ, stranger.topic))
    (altered,) = stranger.alter(stranger.topic, {0: 7})["responses"]
    assert altered["partitions"][0]["error_code"] == "none"
    (deleted,) = stranger.delete_offsets(stranger.topic)["responses"]
    assert deleted["error_code"] == "none"


def test_topics_that_the_client_may_not_describe_are_hidden(
    guarded: Guarded, stranger: Served
) -> None:
    guarded.allow(group(Op.READ, stranger.group), topic(Op.DESCRIBE, stranger.topic))
    stranger.assigned()
    of_group = group(Op.DESCRIBE, stranger.group)
    guarded.allow(of_group)
    (hidden,) = stranger.describe()
    assert (hidden["error_code"], hidden["members"]) == ("topic_authorization_failed", [])
    assert stranger.offsets(None)["topics"] == []
    (refused,) = stranger.offsets((stranger.topic, [0]))["topics"]
    assert refused["topic_id"] == NO_ID
    assert refused["partitions"] == [
        {
            **partition(0, -1),
            "error_code": "topic_authorization_failed",
            "error_message": "Topic authorization failed.",
        }
    ]
    guarded.allow(of_group, topic(Op.DESCRIBE, stranger.topic))
    assert stranger.describe()[0]["error_code"] == "none"
    assert len(stranger.offsets(None)["topics"]) == 1
