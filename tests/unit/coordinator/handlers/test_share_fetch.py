"""ShareFetch and ShareAcknowledge: limits, rights, quotas, the clock, restarts.

``tests/wire/test_share_sessions.py`` has the scenarios that also run against Apache Kafka.
"""

from __future__ import annotations

from fencepost.cluster.acl import Operation
from fencepost.coordinator.daemon.broker import Broker
from fencepost.testing.clock import TestClock
from tests.support.cluster import Cluster, unique
from tests.support.guarded import group as group_right
from tests.support.guarded import topic as topic_right
from tests.support.share import (
    ACCEPT,
    FINAL,
    RELEASE,
    Member,
    acquired,
    initialize,
    parts_of,
)
from tests.unit.coordinator.handlers.conftest import CONFIG
from tests.unit.coordinator.handlers.test_handlers_quotas import alter, entry

SHARE_CONFIG = {
    **CONFIG,
    "share.coordinator.state.topic.num.partitions": "3",
    "group.share.max.size": "3",
    "group.share.max.share.sessions": "200",
    "fetch.max.bytes": "57671680",
}


def test_share_session_limit_error_is_returned_after_max_wait(tmp_path):
    config = {**SHARE_CONFIG, "group.share.max.size": "1", "group.share.max.share.sessions": "1"}
    with Broker.in_thread(tmp_path, config=config) as broker, Cluster(broker.bootstrap) as client:
        topic_id = client.topic_id(client.create_topic("t"))
        initialize(client, "g", topic_id)
        first, second = Member(client, "g"), Member(client, "g")
        assert first.fetch({topic_id: {0: []}}, max_wait=0)["error_code"] == "none"
        answer = second.fetch({topic_id: {0: []}}, max_wait=10)
        assert answer["error_code"] == "share_session_limit_reached"
        first.epoch = FINAL
        assert first.fetch({})["error_code"] == "none"
        assert second.fetch({topic_id: {0: []}}, max_wait=0)["error_code"] == "none"


def set_share_version(client: Cluster, level: int) -> None:
    """Set the feature ``share.version``; upgrade type 3 is an unsafe downgrade."""
    answer = client.call(
        "update_features",
        2,
        timeout=10_000,
        feature_updates=[
            {
                "feature": "share.version",
                "max_version_level": level,
                "upgrade_type": 1 if level else 3,
            }
        ],
    )
    assert answer["error_code"] == "none", answer


def test_share_fetch_with_share_version_0_is_an_unsupported_version(tmp_path):
    with (
        Broker.in_thread(tmp_path, config=SHARE_CONFIG) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        topic_id = client.topic_id(client.create_topic("t"))
        member = Member(client, "g")
        asked = {topic_id: {0: []}}
        set_share_version(client, 0)
        assert member.fetch(asked)["error_code"] == "unsupported_version"
        assert member.acknowledge(asked)["error_code"] == "unsupported_version"
        set_share_version(client, 1)
        initialize(client, "g", topic_id)
        assert member.fetch(asked, max_wait=0)["error_code"] == "none"
        set_share_version(client, 0)
        assert member.fetch({})["error_code"] == "unsupported_version"
        set_share_version(client, 1)
        assert member.fetch({})["error_code"] == "share_session_not_found"


def test_acknowledgements_survive_a_restart(tmp_path):
    with Broker.in_thread(tmp_path, config=SHARE_CONFIG) as broker:
        # The connection stays open, because closing it would release the records.
        client = Cluster(broker.bootstrap)
        topic_id = client.topic_id(client.create_topic("t"))
        initialize(client, "g", topic_id)
        client.produce("t", [b"a", b"b", b"c"])
        member = Member(client, "g")
        member.fetch({topic_id: {0: []}})
        answer = member.acknowledge({topic_id: {0: [(0, 0, ACCEPT), (1, 1, RELEASE)]}})
        assert parts_of(answer)[0]["error_code"] == "none"
    client.close()
    with (
        Broker.in_thread(tmp_path, config=SHARE_CONFIG) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        part = parts_of(Member(client, "g").fetch({topic_id: {0: []}}, max_wait=30_000))[0]
        # The release of offset 1 was persisted with its delivery count; the acquisition of offset 2
        # was not.
        assert acquired(part) == [(1, 1, 2), (2, 2, 1)]


def test_acquisition_lock_expires_and_returns_the_records(tmp_path):
    clock = TestClock()
    with (
        Broker.in_thread(tmp_path, config=SHARE_CONFIG, clock=clock) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        topic_id = client.topic_id(client.create_topic("t"))
        initialize(client, "g", topic_id)
        client.produce("t", [b"a"])
        member = Member(client, "g")
        assert acquired(parts_of(member.fetch({topic_id: {0: []}}))[0]) == [(0, 0, 1)]
        assert parts_of(member.fetch({}, max_wait=0)) == {}
        fired = clock.advance(seconds=31)
        assert [(deadline.what, deadline.who) for deadline in fired] == [("share-lock", "g")]
        assert fired[0].events == ["share-records-returned"]
        assert acquired(parts_of(member.fetch({}, max_wait=30_000))[0]) == [(0, 0, 2)]


def test_client_above_its_quota_acquires_nothing(tmp_path):
    clock = TestClock()
    with (
        Broker.in_thread(tmp_path, config=SHARE_CONFIG, clock=clock) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        topic_id = client.topic_id(client.create_topic("t"))
        initialize(client, "g", topic_id)
        for _ in range(3):
            client.produce("t", [b"x" * 1000])
        assert alter(client, entry({"client-id": None}, consumer_byte_rate=150.0)) == ["none"]
        member = Member(client, "g")
        answer = member.fetch({topic_id: {0: []}}, max_bytes=1100)
        assert acquired(parts_of(answer)[0]) == [(0, 0, 1)]
        answer = member.fetch({}, max_bytes=1100)
        assert acquired(parts_of(answer)[0]) == [(1, 1, 1)]
        assert answer["throttle_time"] > 0
        # The broker has muted the connection. The quota belongs to the client id, so use a new
        # connection.
        with Cluster(broker.bootstrap) as second:
            answer = Member(second, "g").fetch({topic_id: {0: []}})
        assert parts_of(answer) == {}
        assert answer["throttle_time"] > 0
        clock.advance(seconds=29)
        with Cluster(broker.bootstrap) as third:
            answer = Member(third, "g").fetch({topic_id: {0: []}})
        assert acquired(parts_of(answer)[0]) == [(2, 2, 1)]


def test_share_fetch_needs_read_on_the_group_and_on_each_topic(guarded, admin):
    """READ on the group for the request, READ on the topic for each partition."""
    name, group = admin.create_topic(unique("t")), unique("g")
    topic_id = admin.topic_id(name)
    initialize(admin, group, topic_id)
    admin.produce(name, [b"a"])
    asked = {topic_id: {0: []}}
    with Cluster(guarded.bootstrap) as client:
        member = Member(client, group)
        assert member.fetch(asked)["error_code"] == "group_authorization_failed"
        assert member.acknowledge(asked)["error_code"] == "group_authorization_failed"
        guarded.allow(group_right(Operation.READ, group))
        part = parts_of(member.fetch(asked))[0]
        assert part["error_code"] == "topic_authorization_failed"
        part = parts_of(member.acknowledge({topic_id: {0: [(0, 0, ACCEPT)]}}))[0]
        assert part["error_code"] == "topic_authorization_failed"
        guarded.allow(group_right(Operation.READ, group), topic_right(Operation.READ, name))
        assert acquired(parts_of(member.fetch({}))[0]) == [(0, 0, 1)]
