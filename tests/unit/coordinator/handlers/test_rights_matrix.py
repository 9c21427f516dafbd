"""Each right that the APIs of records, groups and transactions require.

A case lists the rights of an API in the order in which they are checked. For each right it has the
error that a client gets if it only has the earlier rights. The error does not reveal whether the
topic exists.

Source: ``AuthorizerIntegrationTest`` (testAuthorizationWithTopicExisting and …NotExisting).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from fencepost.cluster.acl import Operation as Op
from tests.support import requests
from tests.support.batches import batch
from tests.support.cluster import GROUP, TRANSACTION, Cluster, unique
from tests.support.guarded import Guarded, Right, cluster, group, topic, transactional_id
from tests.support.raw import Answer, ConnectionLostError, errors_in
from tests.unit.coordinator.handlers.asking import txn_batch

CLOSED = "the connection was closed"

T, G, X, C = (
    "topic_authorization_failed",
    "group_authorization_failed",
    "transactional_id_authorization_failed",
    "cluster_authorization_failed",
)
DENIALS = {T, G, X, C}


class Named(NamedTuple):
    """The names and the producer in the requests of a test."""

    topic: str
    group: str
    tid: str
    pid: int
    epoch: int


class Case(NamedTuple):
    """A request; ``needs`` has its rights, each with the errors without that right."""

    api: str
    version: int
    body: Callable[[Named], dict[str, Any]]
    needs: Callable[[Named], list[tuple[Right, list[str] | str]]]
    name: str = ""


def _produce(n: Named, data: bytes | None = None, **more: Any) -> dict[str, Any]:
    parts = [{"index": 0, "records": data or batch([b"x"])}]
    return {
        "acks": -1,
        "timeout": 1,
        "topic_data": [{"name": n.topic, "partition_data": parts}],
        **more,
    }


def _fetch(n: Named, **more: Any) -> dict[str, Any]:
    parts = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]
    return {"max_bytes": 1000, "topics": [{"topic": n.topic, "partitions": parts}], **more}


def _offsets(n: Named, **more: Any) -> dict[str, Any]:
    parts = [{"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}]
    return {"group_id": n.group, "topics": [{"name": n.topic, "partitions": parts}], **more}


def _txn_offsets(n: Named) -> dict[str, Any]:
    more = {"transactional_id": n.tid, "producer_id": n.pid, "producer_epoch": n.epoch}
    return _offsets(n, **more)


def _add(n: Named) -> dict[str, Any]:
    return {
        "v3_and_below_transactional_id": n.tid,
        "v3_and_below_producer_id": n.pid,
        "v3_and_below_producer_epoch": n.epoch,
        "v3_and_below_topics": [{"name": n.topic, "partitions": [0]}],
    }


def _transaction(n: Named) -> dict[str, Any]:
    return {
        "transactional_id": n.tid,
        "producer_id": n.pid,
        "producer_epoch": n.epoch,
        "topics": [{"name": n.topic, "partitions": [0]}],
    }


def _marker(n: Named) -> dict[str, Any]:
    topics = [{"name": n.topic, "partition_indexes": [0]}]
    marker = {"producer_id": n.pid, "producer_epoch": n.epoch, "coordinator_epoch": 0}
    return {"markers": [{**marker, "transaction_result": False, "topics": topics}]}


def _consumer(n: Named) -> dict[str, Any]:
    return {
        "group_id": n.group, "member_id": str(uuid.uuid4()), "member_epoch": 0,
        "rebalance_timeout": 60_000, "subscribed_topic_names": [n.topic], "topic_partitions": [],
    }  # fmt: skip


def _share_offsets(n: Named, *rows: Any) -> dict[str, Any]:
    topics = [{"topic_name": n.topic, "partitions": list(rows)}]
    return {"group_id": n.group, "topics": topics}


def _join(n: Named) -> dict[str, Any]:
    return {
        "group_id": n.group, "session_timeout": 30_000, "rebalance_timeout": 30_000,
        "protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b""}],
    }  # fmt: skip


def _topics(field: str = "partitions", part: Any = None) -> Callable[[Named], dict[str, Any]]:
    partition = {"partition_index": 0} if part is None else part
    return lambda n: {"topics": [{"name": n.topic, field: [partition]}]}


def _epochs(n: Named) -> dict[str, Any]:
    parts = [{"partition": 0, "leader_epoch": 0, "current_leader_epoch": -1}]
    return {"topics": [{"topic": n.topic, "partitions": parts}]}


def _reads_group(n: Named) -> list[tuple[Right, list[str] | str]]:
    return [(group(Op.READ, n.group), [G])]


CASES = [
    Case("produce", 9, _produce, lambda n: [(topic(Op.WRITE, n.topic), [T])]),
    Case(
        "produce", 9, lambda n: _produce(n, acks=0), lambda n: [(topic(Op.WRITE, n.topic), CLOSED)],
        "without acks",
    ),
    Case(
        "produce", 12,
        lambda n: _produce(n, txn_batch(n.pid, n.epoch), transactional_id=n.tid),
        lambda n: [(transactional_id(Op.WRITE, n.tid), [X]), (topic(Op.WRITE, n.topic), [T])],
        "in a transaction",
    ),
    Case("fetch", 12, _fetch, lambda n: [(topic(Op.READ, n.topic), ["none", T])]),
    Case(
        "fetch", 12, lambda n: _fetch(n, replica_id=1),
        lambda n: [(cluster(Op.CLUSTER_ACTION), ["none", T])], "of a follower",
    ),
    Case("list_offsets", 7, lambda n: {"replica_id": -1, **_topics()(n)},
         lambda n: [(topic(Op.DESCRIBE, n.topic), [T])]),
    Case("offset_for_leader_epoch", 4, _epochs, lambda n: [(topic(Op.DESCRIBE, n.topic), [T])]),
    Case("offset_for_leader_epoch", 4, _epochs, lambda n: [(cluster(Op.CLUSTER_ACTION), [T])],
         "by a broker"),
    Case("metadata", 9,
         lambda n: {"topics": [{"name": n.topic}], "allow_auto_topic_creation": False},
         lambda n: [(topic(Op.DESCRIBE, n.topic), [T])]),
    Case("describe_topic_partitions", 0,
         lambda n: {"topics": [{"name": n.topic}], "response_partition_limit": 1},
         lambda n: [(topic(Op.DESCRIBE, n.topic), [T])]),
    Case("offset_commit", 8, _offsets,
         lambda n: [(group(Op.READ, n.group), [G]), (topic(Op.READ, n.topic), [T])]),
    Case("offset_fetch", 1,
         lambda n: {"group_id": n.group,
                    "topics": [{"name": n.topic, "partition_indexes": [0]}]},
         lambda n: [(group(Op.DESCRIBE, n.group), [G]), (topic(Op.DESCRIBE, n.topic), [T])]),
    Case("offset_fetch", 7,
         lambda n: {"group_id": n.group,
                    "topics": [{"name": n.topic, "partition_indexes": [0]}]},
         lambda n: [(group(Op.DESCRIBE, n.group), [G]),
                    (topic(Op.DESCRIBE, n.topic), ["none", T])]),
    Case("offset_fetch", 9,
         lambda n: {"groups": [{"group_id": n.group, "topics": [
             {"name": n.topic, "partition_indexes": [0]}]}]},
         lambda n: [(group(Op.DESCRIBE, n.group), [G]),
                    (topic(Op.DESCRIBE, n.topic), ["none", T])]),
    Case("offset_delete", 0, lambda n: {"group_id": n.group, **_topics()(n)},
         lambda n: [(group(Op.DELETE, n.group), [G]), (topic(Op.READ, n.topic), ["none", T])]),
    Case("find_coordinator", 3, lambda n: {"key": n.group, "key_type": GROUP},
         lambda n: [(group(Op.DESCRIBE, n.group), [G])], "of a group"),
    Case("find_coordinator", 4, lambda n: {"coordinator_keys": [n.tid], "key_type": TRANSACTION},
         lambda n: [(transactional_id(Op.DESCRIBE, n.tid), [X])], "of a transactional id"),
    Case("find_coordinator", 6, lambda n: {"coordinator_keys": ["g:t:0"], "key_type": 2},
         lambda n: [(cluster(Op.CLUSTER_ACTION), [C])], "of a share group"),
    Case("join_group", 5, _join, _reads_group),
    Case("sync_group", 3, lambda n: {"group_id": n.group}, _reads_group),
    Case("heartbeat", 3, lambda n: {"group_id": n.group}, _reads_group),
    Case("leave_group", 3, lambda n: {"group_id": n.group, "members": [{}]}, _reads_group),
    Case("consumer_group_heartbeat", 0, _consumer,
         lambda n: [(group(Op.READ, n.group), [G]), (topic(Op.DESCRIBE, n.topic), [T])]),
    Case("describe_groups", 5, lambda n: {"groups": [n.group]},
         lambda n: [(group(Op.DESCRIBE, n.group), [G])]),
    Case("consumer_group_describe", 0, lambda n: {"group_ids": [n.group]},
         lambda n: [(group(Op.DESCRIBE, n.group), [G])]),
    Case("share_group_heartbeat", 1,
         lambda n: requests.join_share_group(n.group, str(uuid.uuid4()), n.topic),
         lambda n: [(group(Op.READ, n.group), [G]), (topic(Op.DESCRIBE, n.topic), [T])]),
    Case("share_group_describe", 1, lambda n: {"group_ids": [n.group]},
         lambda n: [(group(Op.DESCRIBE, n.group), [G])]),
    Case("describe_share_group_offsets", 1, lambda n: {"groups": [_share_offsets(n, 0)]},
         lambda n: [(group(Op.DESCRIBE, n.group), [G]),
                    (topic(Op.DESCRIBE, n.topic), ["none", T])]),
    Case("alter_share_group_offsets", 0,
         lambda n: _share_offsets(n, {"partition_index": 0, "start_offset": 0}),
         lambda n: [(group(Op.READ, n.group), [G])]),
    Case("delete_share_group_offsets", 0,
         lambda n: {"group_id": n.group, "topics": [{"topic_name": n.topic}]},
         lambda n: [(group(Op.DELETE, n.group), [G])]),
    Case("delete_groups", 2, lambda n: {"groups_names": [n.group]},
         lambda n: [(group(Op.DELETE, n.group), [G])]),
    Case("init_producer_id", 4,
         lambda n: {"transactional_id": n.tid, "transaction_timeout": 60_000},
         lambda n: [(transactional_id(Op.WRITE, n.tid), [X])]),
    Case("init_producer_id", 6,
         lambda n: {"transactional_id": n.tid, "transaction_timeout": 60_000, "enable2_pc": True},
         lambda n: [(transactional_id(Op.WRITE, n.tid), [X]),
                    (transactional_id(Op.TWO_PHASE_COMMIT, n.tid), [X])], "for two phases"),
    Case("add_partitions_to_txn", 3, _add,
         lambda n: [(transactional_id(Op.WRITE, n.tid), [X]), (topic(Op.WRITE, n.topic), [T])]),
    Case("add_partitions_to_txn", 4, lambda n: {"transactions": [_transaction(n)]},
         lambda n: [(cluster(Op.CLUSTER_ACTION), [C])], "by a broker"),
    Case("add_offsets_to_txn", 3, lambda n: {
             "transactional_id": n.tid, "producer_id": n.pid, "producer_epoch": n.epoch,
             "group_id": n.group},
         lambda n: [(transactional_id(Op.WRITE, n.tid), [X]), (group(Op.READ, n.group), [G])]),
    Case("txn_offset_commit", 3, _txn_offsets,
         lambda n: [(transactional_id(Op.WRITE, n.tid), [X]), (group(Op.READ, n.group), [G]),
                    (topic(Op.READ, n.topic), [T])]),
    Case("end_txn", 3, lambda n: {
             "transactional_id": n.tid, "producer_id": n.pid, "producer_epoch": n.epoch},
         lambda n: [(transactional_id(Op.WRITE, n.tid), [X])]),
    Case("write_txn_markers", 1, _marker, lambda n: [(cluster(Op.CLUSTER_ACTION), [C])]),
    Case("write_txn_markers", 1, _marker, lambda n: [(cluster(Op.ALTER), [C])], "by a tool"),
    Case("describe_producers", 0, _topics("partition_indexes", 0),
         lambda n: [(topic(Op.READ, n.topic), [T])]),
    Case("describe_transactions", 0, lambda n: {"transactional_ids": [n.tid]},
         lambda n: [(transactional_id(Op.DESCRIBE, n.tid), [X])]),
]  # fmt: skip


def _ask(guarded: Guarded, case: Case, named: Named) -> Answer | str:
    with Cluster(guarded.bootstrap) as client:
        try:
            client.send(case.api, case.version, **case.body(named))
            if case.name == "without acks":
                # A successful request with acks=0 has no response, so another request shows the
                # success.
                client._waiting.clear()
                return client.call("api_versions", 0)
            return client.receive()
        except ConnectionLostError:
            return CLOSED


def _without_names(value: Any, named: Named) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_names(item, named)
            for key, item in value.items()
            if key != "error_message"
        }
    if isinstance(value, list):
        return [_without_names(item, named) for item in value]
    return "(a name)" if value in named else value


def _named(admin: Cluster, *, exists: bool) -> Named:
    name, group_id, tid = unique("t"), unique("g"), unique("tx")
    if exists:
        admin.create_topic(name)
    # The group exists, with an offset of another topic.
    named = Named("other", group_id, tid, *admin.init_producer(tid))
    assert set(errors_in(admin.call("offset_commit", 8, **_offsets(named)))) == {"none"}
    return named._replace(topic=name)


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: " ".join(filter(None, (f"{case.api}-v{case.version}", case.name))),
)
def test_each_permission_is_required_whether_or_not_the_topic_exists(guarded, admin, case):
    both = [_named(admin, exists=True), _named(admin, exists=False)]
    for place, _ in enumerate(case.needs(both[0])):
        refusals = []
        for named in both:
            needs = case.needs(named)
            guarded.allow(*(right for right, _ in needs[:place]))
            answer = _ask(guarded, case, named)
            told = answer if isinstance(answer, str) else errors_in(answer)
            assert told == needs[place][1]
            refusals.append(_without_names(answer, named))
        assert refusals[0] == refusals[1]
    for named in both:
        guarded.allow(*(right for right, _ in case.needs(named)))
        answer = _ask(guarded, case, named)
        if named is both[0] or case.name != "without acks":
            assert answer != CLOSED
            assert not DENIALS.intersection(errors_in(answer))
