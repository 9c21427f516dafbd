"""Authorization of requests for several resources, and after ACL changes.

Source: ``AuthorizerIntegrationTest``; docs/security-tests.md has the test for each of its cases.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from fencepost.cluster.acl import ANYTHING
from fencepost.cluster.acl import Operation as Op
from fencepost.coordinator.security.principal import ANONYMOUS, Principal
from tests.support.batches import batch
from tests.support.cluster import GROUP, READ_COMMITTED, TRANSACTION, Cluster, unique
from tests.support.guarded import Guarded, cluster, group, rule, topic, transactional_id
from tests.support.raw import Answer, ConnectionLostError, errors_in
from tests.support.waits import until
from tests.unit.coordinator.handlers.asking import fetch_parts, txn_batch

T, G, X, C = (
    "topic_authorization_failed",
    "group_authorization_failed",
    "transactional_id_authorization_failed",
    "cluster_authorization_failed",
)
NOBODYS = uuid.uuid4()
"""A topic id that no topic has."""


@pytest.fixture
def client(guarded) -> Iterator[Cluster]:
    with Cluster(guarded.bootstrap) as connected:
        yield connected


@pytest.fixture
def open_topic(admin) -> str:
    return admin.create_topic(unique("open"))


@pytest.fixture
def closed_topic(admin) -> str:
    return admin.create_topic(unique("closed"))


def names_of(answer: Answer, field: str = "topics", name: str = "name") -> list[str]:
    return [row[name] for row in answer[field]]


# --- topics by id, and invalid names --------------------------------------------------------------


def produce_by_id(client: Cluster, topic_id: uuid.UUID) -> list[str]:
    parts = [{"index": 0, "records": batch([b"x"])}]
    data = [{"topic_id": topic_id, "partition_data": parts}]
    return errors_in(client.call("produce", 13, acks=-1, timeout=1000, topic_data=data))


def fetch_by_id(client: Cluster, topic_id: uuid.UUID) -> list[str]:
    return errors_in(fetch_parts(client, [{}], version=16, topic=topic_id, session_epoch=-1))


def commit_by_id(client: Cluster, topic_id: uuid.UUID) -> list[str]:
    parts = [{"partition_index": 0, "committed_offset": 1}]
    asked = [{"topic_id": topic_id, "partitions": parts}]
    return errors_in(client.call("offset_commit", 10, group_id="g", topics=asked))


def committed_by_id(client: Cluster, topic_id: uuid.UUID) -> list[str]:
    asked = [{"topic_id": topic_id, "partition_indexes": [0]}]
    groups = [{"group_id": "g", "topics": asked}]
    return errors_in(client.call("offset_fetch", 10, groups=groups))


def described_by_id(client: Cluster, topic_id: uuid.UUID) -> list[str]:
    answer = client.call("metadata", 12, topics=[{"name": None, "topic_id": topic_id}])
    (described,) = answer["topics"]
    if described["error_code"] != "none":
        # The response may contain the topic id, but not the topic's name.
        assert (described["name"], described["topic_id"]) == (None, str(topic_id))
    return [described["error_code"]]


@pytest.mark.parametrize(
    ("ask", "operation"),
    [
        (produce_by_id, Op.WRITE),
        (fetch_by_id, Op.READ),
        (commit_by_id, Op.READ),
        (committed_by_id, Op.DESCRIBE),
        (described_by_id, Op.DESCRIBE),
    ],
)
def test_unknown_topic_id_is_reported_and_a_known_id_is_authorized_by_name(
    guarded, admin, client, ask: Callable[[Cluster, uuid.UUID], list[str]], operation
):
    name = admin.create_topic(unique("t"))
    topic_id = admin.topic_id(name)
    guarded.allow(group(Op.READ, "g"))
    assert ask(client, NOBODYS)[-1] == "unknown_topic_id"
    assert ask(client, topic_id)[-1] == T
    guarded.allow(group(Op.READ, "g"), topic(operation, name))
    assert ask(client, NOBODYS)[-1] == "unknown_topic_id"
    assert set(ask(client, topic_id)) == {"none"}


def test_zero_topic_id_is_unknown_and_empty_topic_name_is_authorized(guarded, admin, client):
    guarded.allow()
    zero = uuid.UUID(int=0)
    assert produce_by_id(client, zero)[-1] == "unknown_topic_id"
    assert fetch_by_id(client, zero)[-1] == "unknown_topic_id"
    assert client.produce("", [b"x"])["error_code"] == T
    assert client.fetch("")["error_code"] == T
    for every in (topic(Op.WRITE, ANYTHING), topic(Op.READ, ANYTHING)):
        guarded.allow(every)
        if every[0] is Op.WRITE:
            assert client.produce("", [b"x"])["error_code"] == "unknown_topic_or_partition"
        else:
            assert client.fetch("")["error_code"] == "unknown_topic_or_partition"


# --- allowed parts are served, others are refused -------------------------------------------------


def test_produce_appends_only_to_authorized_topics(
    guarded, admin, client, open_topic, closed_topic
):
    guarded.allow(topic(Op.WRITE, open_topic))
    parts = [{"index": 0, "records": batch([b"x"])}]
    data = [
        {"name": name, "partition_data": parts} for name in (closed_topic, open_topic, "nowhere")
    ]
    answer = client.call("produce", 9, acks=-1, timeout=1000, topic_data=data)
    assert [(row["name"], *errors_in(row)) for row in answer["responses"]] == [
        (closed_topic, T), (open_topic, "none"), ("nowhere", T),
    ]  # fmt: skip
    assert admin.values(open_topic) == [b"x"]
    assert admin.values(closed_topic) == []
    client.send("produce", 9, acks=0, timeout=1000, topic_data=data)
    with pytest.raises(ConnectionLostError):
        client.receive()
    assert admin.values(open_topic) == [b"x", b"x"]


@pytest.mark.parametrize("operation", [Op.DESCRIBE, Op.READ])
def test_produce_with_only_describe_or_read_on_the_topic_is_refused(
    guarded, client, open_topic, operation
):
    guarded.allow(topic(operation, open_topic))
    assert client.produce(open_topic, [b"x"])["error_code"] == T


def test_internal_topic_with_permission_can_be_fetched_but_not_produced_to(guarded, client):
    guarded.allow()
    assert client.produce("__consumer_offsets", [b"x"])["error_code"] == T
    guarded.allow(topic(Op.WRITE, ANYTHING))
    told = client.produce("__consumer_offsets", [b"x"])["error_code"]
    assert told == "invalid_topic_exception"
    # A client with the READ right may fetch from ``__consumer_offsets`` like from any topic.
    assert client.fetch("__consumer_offsets")["error_code"] == T
    guarded.allow(topic(Op.READ, "__consumer_offsets"))
    assert client.fetch("__consumer_offsets")["error_code"] == "none"
    assert names_of(client.call("metadata", 9, topics=None)) == ["__consumer_offsets"]


def test_fetch_returns_records_only_of_authorized_topics(
    guarded, admin, client, open_topic, closed_topic
):
    for name in (open_topic, closed_topic):
        admin.produce(name, [b"x"])
    guarded.allow(topic(Op.READ, open_topic))
    parts = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]
    asked = [{"topic": name, "partitions": parts} for name in (closed_topic, open_topic)]
    answer = client.call("fetch", 12, max_bytes=1000, session_epoch=-1, topics=asked)
    told = {row["topic"]: row["partitions"][0] for row in answer["responses"]}
    assert told[open_topic]["records"]
    assert (told[closed_topic]["error_code"], told[closed_topic]["records"]) == (T, b"")
    assert told[closed_topic]["high_watermark"] == -1


def test_follower_fetch_needs_cluster_action_and_consumer_fetch_needs_topic_read(
    guarded, client, open_topic
):
    def fetch(replica_id: int) -> str:
        answer = fetch_parts(
            client, [{}], topic=open_topic, replica_id=replica_id, session_epoch=-1
        )
        return answer["responses"][0]["partitions"][0]["error_code"]

    guarded.allow(topic(Op.READ, open_topic))
    assert (fetch(-1), fetch(1)) == ("none", T)
    guarded.allow(cluster(Op.CLUSTER_ACTION))
    assert (fetch(-1), fetch(1)) == (T, "not_leader_or_follower")


def test_offset_requests_are_authorized_topic_by_topic(
    guarded, admin, client, open_topic, closed_topic
):
    group_id = unique("g")
    both = (closed_topic, open_topic)
    guarded.allow(topic(Op.DESCRIBE, open_topic))
    part = {"partition_index": 0, "timestamp": -1}
    asked = [{"name": name, "partitions": [part, part]} for name in both]
    answer = client.call("list_offsets", 5, replica_id=-1, topics=asked)
    assert [(row["name"], *errors_in(row)) for row in answer["topics"]] == [
        (closed_topic, T, T), (open_topic, "invalid_request"),
    ]  # fmt: skip

    guarded.allow(topic(Op.READ, open_topic), group(Op.READ, group_id), group(Op.DELETE, group_id))
    part = {"partition_index": 0, "committed_offset": 1}
    asked = [{"name": name, "partitions": [part]} for name in both]
    answer = client.call("offset_commit", 8, group_id=group_id, topics=asked)
    assert [errors_in(row) for row in answer["topics"]] == [[T], ["none"]]
    assert admin.committed(group_id, open_topic) == 1
    assert admin.committed(group_id, closed_topic) == -1

    asked = [{"name": name, "partitions": [{"partition_index": 0}]} for name in both]
    answer = client.call("offset_delete", 0, group_id=group_id, topics=asked)
    assert [errors_in(row) for row in answer["topics"]] == [[T], ["none"]]
    assert admin.committed(group_id, open_topic) == -1


def test_offset_fetch_returns_only_authorized_groups_and_topics(
    guarded, admin, client, open_topic, closed_topic
):
    mine, others = unique("g"), unique("g")
    part = {"partition_index": 0, "committed_offset": 1}
    asked = [{"name": name, "partitions": [part]} for name in (open_topic, closed_topic)]
    for group_id in (mine, others):
        admin.call("offset_commit", 8, group_id=group_id, topics=asked)
    guarded.allow(topic(Op.DESCRIBE, open_topic), group(Op.DESCRIBE, mine))
    answer = client.call("offset_fetch", 7, group_id=mine, topics=None)
    assert names_of(answer) == [open_topic]
    wanted = [{"name": name, "partition_indexes": [0]} for name in (closed_topic, open_topic)]
    groups = [
        {"group_id": group_id, "topics": topics}
        for group_id in (mine, others)
        for topics in (None, wanted)
    ]
    answer = client.call("offset_fetch", 8, groups=groups)
    assert [
        (row["group_id"], row["error_code"], names_of(row), errors_in(row)[1:])
        for row in answer["groups"]
    ] == [
        (mine, "none", [open_topic], ["none"]),
        (mine, "none", [open_topic, closed_topic], ["none", T]),
        (others, G, [], []),
        (others, G, [], []),
    ]


def test_unauthorized_topic_prevents_adding_any_partition_to_a_transaction(
    guarded, admin, client, open_topic, closed_topic
):
    tid = unique("tx")
    pid, epoch = admin.init_producer(tid)
    guarded.allow(transactional_id(Op.WRITE, tid), topic(Op.WRITE, open_topic))

    def add(*names: str) -> list[str]:
        topics = [{"name": name, "partitions": [0]} for name in names]
        answer = client.call(
            "add_partitions_to_txn", 3, v3_and_below_transactional_id=tid,
            v3_and_below_producer_id=pid, v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=topics,
        )  # fmt: skip
        return errors_in(answer)

    assert add(open_topic, closed_topic) == ["operation_not_attempted", T]
    assert add(open_topic, "nowhere") == ["operation_not_attempted", T]
    for internal in ("__consumer_offsets", "__transaction_state", "__share_group_state"):
        assert add(open_topic, internal) == ["operation_not_attempted", T]
    described = admin.call("describe_transactions", 0, transactional_ids=[tid])
    assert described["transaction_states"][0]["topics"] == []
    assert add(open_topic) == ["none"]


# --- resources left out of responses --------------------------------------------------------------


def test_list_responses_omit_resources_without_describe_permission(
    guarded, admin, client, open_topic, closed_topic
):
    mine, others = unique("g"), unique("g")
    part = {"partition_index": 0, "committed_offset": 1}
    for name in (mine, others):
        asked = [{"name": open_topic, "partitions": [part]}]
        admin.call("offset_commit", 8, group_id=name, topics=asked)
        admin.init_producer(name)
    guarded.allow(
        topic(Op.DESCRIBE, open_topic),
        group(Op.DESCRIBE, mine),
        transactional_id(Op.DESCRIBE, mine),
    )
    assert names_of(client.call("metadata", 9, topics=None)) == [open_topic]
    assert names_of(client.call("metadata", 0, topics=[])) == [open_topic]
    pages = client.call("describe_topic_partitions", 0, response_partition_limit=100)
    assert names_of(pages) == [open_topic]
    assert names_of(client.call("list_groups", 4), "groups", "group_id") == [mine]
    listed = client.call("list_transactions", 0)
    assert names_of(listed, "transaction_states", "transactional_id") == [mine]
    guarded.allow(cluster(Op.DESCRIBE))
    assert {mine, others} <= set(names_of(client.call("list_groups", 4), "groups", "group_id"))
    guarded.allow()
    assert client.call("metadata", 9, topics=[])["cluster_id"]
    for answer in (client.call("list_groups", 4), client.call("list_transactions", 0)):
        assert answer["error_code"] == "none"
    assert client.call("list_groups", 4)["groups"] == []


def test_describe_topic_partitions_lists_unauthorized_topics_last(
    guarded, client, open_topic, closed_topic
):
    guarded.allow(topic(Op.DESCRIBE, open_topic))
    names = ["a-nowhere", closed_topic, open_topic]
    answer = client.call(
        "describe_topic_partitions", 0, topics=[{"name": name} for name in names],
        response_partition_limit=10,
    )  # fmt: skip
    first, *others = [(row["name"], row["error_code"]) for row in answer["topics"]]
    assert first == (open_topic, "none")
    assert set(others) == {("a-nowhere", T), (closed_topic, T)}
    assert {row["topic_authorized_operations"] for row in answer["topics"][1:]} == {-(2**31)}


def test_describe_transactions_omits_unauthorized_topics(
    guarded, admin, client, open_topic, closed_topic
):
    tid, others = unique("tx"), unique("tx")
    pid, epoch = admin.init_producer(tid)
    for name in (open_topic, closed_topic):
        admin.produce(name, txn_batch(pid, epoch), version=12, transactional_id=tid)
    guarded.allow(transactional_id(Op.DESCRIBE, tid), topic(Op.DESCRIBE, open_topic))
    answer = client.call("describe_transactions", 0, transactional_ids=[tid, others])
    assert [
        (row["transactional_id"], row["error_code"], names_of(row, name="topic"))
        for row in answer["transaction_states"]
    ] == [(tid, "none", [open_topic]), (others, X, [])]


# --- topics created on request --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["topic", "cluster"])
def test_metadata_auto_creates_a_topic_only_with_describe_and_create(guarded, admin, client, how):
    name = unique("new")

    def ask(**fields: Any) -> str:
        (row,) = client.call("metadata", 9, topics=[{"name": name}], **fields)["topics"]
        return row["error_code"]

    guarded.allow(topic(Op.DESCRIBE, name))
    assert ask() == T
    assert ask(allow_auto_topic_creation=False) == "unknown_topic_or_partition"
    create = topic(Op.CREATE, name) if how == "topic" else cluster(Op.CREATE)
    guarded.allow(create)
    assert ask() == T
    assert name not in names_of(admin.call("metadata", 9, topics=None))
    guarded.allow(topic(Op.DESCRIBE, name), create)
    assert ask() == "unknown_topic_or_partition"
    assert ask() == "none"
    guarded.allow(topic(Op.DESCRIBE, name), topic(Op.WRITE, name))
    assert client.produce(name, [b"x"])["error_code"] == "none"


def test_invalid_topic_name_is_reported_only_with_create_permission(guarded, client):
    name = "no name"

    def ask() -> str:
        return client.call("metadata", 9, topics=[{"name": name}])["topics"][0]["error_code"]

    guarded.allow()
    assert ask() == T
    guarded.allow(topic(Op.DESCRIBE, name))
    assert ask() == T
    guarded.allow(topic(Op.DESCRIBE, name), topic(Op.CREATE, name))
    assert ask() == "invalid_topic_exception"


def test_unauthorized_find_coordinator_does_not_create_the_internal_topic(tmp_path):
    few = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}
    with Guarded(tmp_path, few) as broker, Cluster(broker.bootstrap) as client:
        admin = broker.admin()

        def find(kind: int, *keys: str) -> list[str]:
            answer = client.call("find_coordinator", 4, key_type=kind, coordinator_keys=keys)
            return errors_in(answer)

        assert (find(GROUP, "g", "h"), find(TRANSACTION, "t")) == ([G, G], [X])
        assert names_of(admin.call("metadata", 9, topics=None)) == []
        broker.allow(group(Op.DESCRIBE, "h"))
        assert find(GROUP, "g", "h") == [G, "none"]
        assert names_of(admin.call("metadata", 9, topics=None)) == ["__consumer_offsets"]


# --- fetches that wait or continue a session ------------------------------------------------------


def test_every_fetch_of_a_session_is_authorized(guarded, admin, client, open_topic, closed_topic):
    for name in (open_topic, closed_topic):
        admin.produce(name, [b"x"])
    guarded.allow(topic(Op.READ, open_topic))
    parts = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]
    asked = [{"topic": name, "partitions": parts} for name in (closed_topic, open_topic)]
    answer = client.call("fetch", 12, max_bytes=1000, session_epoch=0, topics=asked)
    session = answer["session_id"]
    assert session
    assert errors_in(answer) == ["none", "none", T]

    def again(epoch: int) -> dict[str, str]:
        told = client.call(
            "fetch", 12, max_bytes=1000, session_id=session, session_epoch=epoch, topics=[]
        )
        assert told["error_code"] == "none"
        return {row["topic"]: row["partitions"][0]["error_code"] for row in told["responses"]}

    assert again(1) == {open_topic: "none", closed_topic: T}
    guarded.allow(topic(Op.READ, open_topic), topic(Op.READ, closed_topic))
    assert again(2) == {open_topic: "none", closed_topic: "none"}
    guarded.allow(topic(Op.READ, closed_topic))
    assert again(3) == {open_topic: T, closed_topic: "none"}


def test_delayed_fetch_is_authorized_only_on_arrival(guarded, admin, client, open_topic):
    guarded.allow(topic(Op.READ, open_topic))
    parts = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]
    how = {"max_bytes": 1000, "min_bytes": 1, "max_wait": 20_000, "session_epoch": -1}
    asked = [{"topic": open_topic, "partitions": parts}]
    client.send("fetch", 12, topics=asked, **how)
    until(lambda: guarded.waiting_fetches() == 1, "the fetch waits")
    guarded.allow()
    admin.produce(open_topic, [b"x"])
    told = client.receive()["responses"][0]["partitions"][0]
    assert told["error_code"] == "none"
    assert told["records"]
    # A fetch without readable partitions does not wait.
    assert errors_in(client.call("fetch", 12, topics=asked, **how)) == ["none", T]


def test_unauthorized_partition_does_not_complete_a_delayed_fetch(
    guarded, admin, client, open_topic, closed_topic
):
    guarded.allow(topic(Op.READ, open_topic))
    parts = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]
    asked = [{"topic": name, "partitions": parts} for name in (closed_topic, open_topic)]
    client.send(
        "fetch", 12, max_bytes=1000, min_bytes=1, max_wait=20_000, session_epoch=-1, topics=asked
    )
    until(lambda: guarded.waiting_fetches() == 1, "the fetch waits")
    admin.produce(open_topic, [b"x"])
    rows = client.receive()["responses"]
    assert [(row["topic"], *errors_in(row)) for row in rows] == [
        (open_topic, "none"), (closed_topic, T),
    ]  # fmt: skip


# --- producers that lose their rights -------------------------------------------------------------


class Producer:
    """A producer of ``User:ANONYMOUS``; with ``version`` 2 it skips AddPartitionsToTxn (TV2)."""

    def __init__(self, client: Cluster, tid: str, *, version: int) -> None:
        self.client, self.tid, self.version = client, tid, version
        self.pid, self.epoch = -1, -1

    def init(self) -> str:
        answer = self.client.call(
            "init_producer_id", 4, transactional_id=self.tid, transaction_timeout=60_000,
            producer_id=-1, producer_epoch=-1,
        )  # fmt: skip
        self.pid, self.epoch = answer["producer_id"], answer["producer_epoch"]
        return answer["error_code"]

    def send(self, name: str) -> str:
        """Produce to a partition; with transaction version 1, add it to the transaction first."""
        if self.version == 1:
            added = self.client.call(
                "add_partitions_to_txn", 3, v3_and_below_transactional_id=self.tid,
                v3_and_below_producer_id=self.pid, v3_and_below_producer_epoch=self.epoch,
                v3_and_below_topics=[{"name": name, "partitions": [0]}],
            )  # fmt: skip
            if errors_in(added) != ["none"]:
                return errors_in(added)[0]
        return self.client.produce(
            name, txn_batch(self.pid, self.epoch), version=9 if self.version == 1 else 12,
            transactional_id=self.tid,
        )["error_code"]  # fmt: skip

    def end(self, *, commit: bool) -> str:
        answer = self.client.call(
            "end_txn", 3 if self.version == 1 else 5, transactional_id=self.tid,
            producer_id=self.pid, producer_epoch=self.epoch, committed=commit,
        )  # fmt: skip
        return answer["error_code"]

    def send_offsets(self, group_id: str, name: str) -> str:
        of = {
            "transactional_id": self.tid, "producer_id": self.pid, "producer_epoch": self.epoch,
            "group_id": group_id,
        }  # fmt: skip
        if self.version == 1:
            answer = self.client.call("add_offsets_to_txn", 3, **of)
            if answer["error_code"] != "none":
                return answer["error_code"]
        parts = [{"partition_index": 0, "committed_offset": 7}]
        answer = self.client.call(
            "txn_offset_commit", 3 if self.version == 1 else 5, **of,
            topics=[{"name": name, "partitions": parts}], generation_id=-1,
        )  # fmt: skip
        return errors_in(answer)[0]


@pytest.fixture(params=[1, 2], ids=["transactions v1", "transactions v2"])
def producer(request, guarded, client) -> Producer:
    made = Producer(client, unique("tx"), version=request.param)
    guarded.allow(transactional_id(Op.WRITE, made.tid))
    assert made.init() == "none"
    return made


def test_init_producer_id_succeeds_once_write_on_the_id_is_granted(guarded, client):
    producer = Producer(client, unique("tx"), version=2)
    guarded.allow()
    assert producer.init() == X
    guarded.allow(transactional_id(Op.DESCRIBE, producer.tid))
    assert producer.init() == X
    guarded.allow(transactional_id(Op.WRITE, producer.tid))
    assert producer.init() == "none"


def test_transaction_can_be_aborted_after_an_unauthorized_produce(
    guarded, admin, producer, open_topic, closed_topic
):
    may = transactional_id(Op.WRITE, producer.tid), topic(Op.WRITE, open_topic)
    guarded.allow(*may)
    assert producer.send(open_topic) == "none"
    assert producer.send(closed_topic) == T
    (state,) = admin.call("describe_transactions", 0, transactional_ids=[producer.tid])[
        "transaction_states"
    ]
    # In both versions, no transaction has a refused partition.
    assert names_of(state, name="topic") == [open_topic]
    assert producer.end(commit=False) == "none"
    for name in (open_topic, closed_topic):
        assert admin.values(name, isolation=READ_COMMITTED) == []


def test_records_sent_before_a_denied_produce_are_committed(
    guarded, admin, producer, open_topic, closed_topic
):
    guarded.allow(transactional_id(Op.WRITE, producer.tid), topic(Op.WRITE, open_topic))
    assert producer.send(open_topic) == "none"
    guarded.allow(transactional_id(Op.WRITE, producer.tid))
    assert producer.send(open_topic) == T
    assert producer.end(commit=True) == "none"
    assert admin.values(open_topic, isolation=READ_COMMITTED) == [b"x"]


def test_producer_without_write_on_its_transactional_id_cannot_send_or_end(
    guarded, admin, producer, open_topic
):
    may_write = topic(Op.WRITE, open_topic)
    guarded.allow(transactional_id(Op.WRITE, producer.tid), may_write)
    assert producer.send(open_topic) == "none"
    guarded.allow(may_write)
    assert producer.send(open_topic) == X
    assert producer.end(commit=True) == X
    assert producer.end(commit=False) == X
    assert producer.send_offsets("g", open_topic) == X
    assert admin.values(open_topic, isolation=READ_COMMITTED) == []
    guarded.allow(transactional_id(Op.WRITE, producer.tid), may_write)
    assert producer.end(commit=True) == "none"
    assert admin.values(open_topic, isolation=READ_COMMITTED) == [b"x"]


def test_transactional_offset_commit_needs_read_on_group_and_topic(
    guarded, admin, producer, open_topic
):
    group_id = unique("g")
    own = transactional_id(Op.WRITE, producer.tid)
    guarded.allow(own, topic(Op.READ, open_topic))
    assert producer.send_offsets(group_id, open_topic) == G
    guarded.allow(own, group(Op.DESCRIBE, group_id), topic(Op.READ, open_topic))
    assert producer.send_offsets(group_id, open_topic) == G
    guarded.allow(own, group(Op.READ, group_id))
    assert producer.send_offsets(group_id, open_topic) == T
    guarded.allow(own, group(Op.READ, group_id), topic(Op.READ, open_topic))
    assert producer.send_offsets(group_id, open_topic) == "none"
    assert producer.end(commit=True) == "none"
    assert admin.committed(group_id, open_topic, stable=True) == 7


@pytest.mark.parametrize(
    "records", [txn_batch(1, 0), batch([b"x"])], ids=["transactional", "plain"]
)
def test_transactional_id_is_authorized_only_for_transactional_records(
    guarded, client, open_topic, records
):
    guarded.allow(topic(Op.WRITE, open_topic))
    told = client.produce(open_topic, records, transactional_id="somebody's")["error_code"]
    assert told == ("none" if records == batch([b"x"]) else X)
    without = client.produce(open_topic, records)["error_code"]
    assert without == ("none" if records == batch([b"x"]) else X)


def test_idempotent_producer_needs_write_on_any_topic_or_idempotent_write(
    guarded, admin, client, open_topic
):
    def init() -> str:
        return client.call(
            "init_producer_id", 4, transactional_id=None, producer_id=-1, producer_epoch=-1
        )["error_code"]

    guarded.allow()
    assert init() == C
    guarded.allow(topic(Op.READ, open_topic), topic(Op.DESCRIBE, ANYTHING))
    assert init() == C
    guarded.allow(cluster(Op.IDEMPOTENT_WRITE))
    assert init() == "none"
    write = topic(Op.WRITE, open_topic)
    guarded.allow(write)
    assert init() == "none"
    guarded.rule(rule(write, prefixed=True), rule(topic(Op.WRITE, ANYTHING), deny=True))
    assert init() == C
    guarded.rule(rule(write), rule(topic(Op.WRITE, open_topic[:3]), deny=True, prefixed=True))
    assert init() == C
    guarded.rule(rule(write), rule(topic(Op.WRITE, "elsewhere"), deny=True))
    assert init() == "none"
    # The producer id was assigned before the right to the topic is revoked.
    pid, epoch = admin.init_producer()
    data = batch([b"x"], producer_id=pid, producer_epoch=epoch, sequence=0)
    guarded.allow(cluster(Op.IDEMPOTENT_WRITE))
    assert client.produce(open_topic, data)["error_code"] == T
    guarded.allow(write)
    assert client.produce(open_topic, data)["error_code"] == "none"


# --- groups of the consumer protocol --------------------------------------------------------------


class Consumer:
    """A group member."""

    def __init__(self, client: Cluster, group_id: str, **subscribed: Any) -> None:
        self.client, self.group_id, self.subscribed = client, group_id, subscribed
        self.member_id, self.epoch = str(uuid.uuid4()), 0
        self.owned: list[Any] = []

    def beat(self) -> str:
        """Send a full heartbeat and adopt the assignment."""
        answer = self.client.call(
            "consumer_group_heartbeat", 1, group_id=self.group_id, member_id=self.member_id,
            member_epoch=self.epoch, rebalance_timeout=60_000, **self.subscribed,
            topic_partitions=[] if self.epoch == 0 else [
                {"topic_id": uuid.UUID(row["topic_id"]), "partitions": row["partitions"]}
                for row in self.owned
            ],
        )  # fmt: skip
        if answer["error_code"] == "none":
            self.epoch = answer["member_epoch"]
            if answer["assignment"] is not None:
                self.owned = answer["assignment"]["topic_partitions"]
        return answer["error_code"]

    def owns(self) -> set[str]:
        assert self.beat() == "none"
        return {row["topic_id"] for row in self.owned}


def test_consumer_group_heartbeat_needs_describe_on_every_subscribed_topic(
    guarded, client, open_topic, closed_topic
):
    group_id = unique("g")
    both = Consumer(client, group_id, subscribed_topic_names=[open_topic, closed_topic])
    guarded.allow(group(Op.READ, group_id), topic(Op.DESCRIBE, open_topic))
    assert both.beat() == T
    assert Consumer(client, group_id, subscribed_topic_names=[open_topic]).beat() == "none"
    guarded.allow(topic(Op.ALL, ANYTHING))
    assert both.beat() == G
    guarded.allow(topic(Op.ALL, ANYTHING), group(Op.ALL, ANYTHING))
    assert both.beat() == "none"


@pytest.mark.slow
def test_regex_subscription_matches_authorized_topics_and_follows_acl_changes(
    guarded, admin, client
):
    stem, group_id = unique("re"), unique("g")
    seen, other = (admin.create_topic(f"{stem}-{end}") for end in "ab")
    ids = {name: str(admin.topic_id(name)) for name in (seen, other)}
    own = group(Op.READ, group_id)
    guarded.allow(own)
    consumer = Consumer(client, group_id, subscribed_topic_regex=f"{stem}.*")
    assert consumer.owns() == set()
    guarded.allow(own, topic(Op.DESCRIBE, seen))
    until(lambda: consumer.owns() == {ids[seen]}, "the topic that may be seen now")
    guarded.rule(rule(own), rule(topic(Op.READ, stem), prefixed=True))
    until(lambda: consumer.owns() == set(ids.values()), "both topics")
    guarded.allow(own)
    until(lambda: consumer.owns() == set(), "nothing")


def test_members_with_the_same_regex_share_the_topics_of_the_first_member(guarded, admin):
    """As in Apache Kafka: the rights of the member that triggered the evaluation apply to all."""
    stem, group_id = unique("re"), unique("g")
    name = admin.create_topic(f"{stem}-t", 2)
    guarded.allow(group(Op.READ, group_id))
    subscribed = {"subscribed_topic_regex": f"{stem}.*"}
    with guarded.admin() as first, Cluster(guarded.bootstrap) as second:
        strong = Consumer(first, group_id, **subscribed)
        assert strong.owns() == {str(admin.topic_id(name))}
        weak = Consumer(second, group_id, **subscribed)

        def both() -> bool:
            return bool(strong.owns() and weak.owns())

        until(both, "both have a partition")


def test_consumer_group_with_an_unauthorized_topic_is_not_described(
    guarded, admin, client, open_topic, closed_topic
):
    groups = {name: unique("g") for name in (open_topic, closed_topic)}
    for name, group_id in groups.items():
        consumer = Consumer(admin, group_id, subscribed_topic_names=[name])
        until(lambda consumer=consumer: bool(consumer.owns()), "the member has its partition")
    asked = {"group_ids": [*groups.values(), "nobody's"], "include_authorized_operations": True}

    def describe() -> dict[str, tuple[str, int, int]]:
        return {
            row["group_id"]: (
                row["error_code"], len(row["members"]), row["authorized_operations"]
            )
            for row in client.call("consumer_group_describe", 0, **asked)["groups"]
        }  # fmt: skip

    omitted = -(2**31)
    guarded.allow(
        *(group(Op.DESCRIBE, group_id) for group_id in groups.values()),
        topic(Op.DESCRIBE, open_topic),
    )
    assert describe() == {
        groups[open_topic]: ("none", 1, 1 << Op.DESCRIBE),
        groups[closed_topic]: (T, 0, omitted),
        "nobody's": (G, 0, omitted),
    }


# --- principals, hosts and patterns of rules ------------------------------------------------------


def test_acl_matches_by_permission_type_pattern_host_and_principal(
    guarded, admin, client, open_topic
):
    read, any_read = topic(Op.READ, open_topic), topic(Op.READ, open_topic[:6])

    def code() -> str:
        return client.fetch(open_topic)["error_code"]

    guarded.rule(rule(any_read, prefixed=True))
    assert code() == "none"
    guarded.rule(rule(any_read, prefixed=True), rule(read, deny=True))
    assert code() == T
    guarded.rule(rule(read, host="127.0.0.1"))
    assert code() == "none"
    guarded.rule(rule(read, host="127.0.0.2"))
    assert code() == T
    guarded.rule(rule(read), rule(read, host="127.0.0.1", deny=True))
    assert code() == T
    guarded.rule(rule(read, Principal("User", "alice")))
    assert code() == T
    guarded.log_in(client, Principal("User", "alice"))
    assert code() == "none"
    guarded.log_in(client, ANONYMOUS)
    guarded.rule(replace(rule(read), operation=Op.ALL))
    assert code() == "none"


def test_authorized_operations_of_topics_and_groups_follow_the_acls(guarded, client, open_topic):
    group_id = unique("g")
    guarded.allow(
        topic(Op.WRITE, open_topic), topic(Op.DESCRIBE, "nowhere"), group(Op.READ, group_id)
    )
    asked = {"topics": [{"name": open_topic}, {"name": "nowhere"}, {"name": "hidden"}]}
    answer = client.call(
        "metadata", 9, **asked, allow_auto_topic_creation=False,
        include_topic_authorized_operations=True, include_cluster_authorized_operations=True,
    )  # fmt: skip
    told = {row["name"]: row["topic_authorized_operations"] for row in answer["topics"]}
    assert told == {
        open_topic: 1 << Op.WRITE | 1 << Op.DESCRIBE,
        "nowhere": 1 << Op.DESCRIBE,
        "hidden": -(2**31),
    }
    assert answer["cluster_authorized_operations"] == 0
    guarded.allow(cluster(Op.ALTER), group(Op.READ, group_id))
    answer = client.call("metadata", 9, topics=[], include_cluster_authorized_operations=True)
    assert answer["cluster_authorized_operations"] == 1 << Op.ALTER | 1 << Op.DESCRIBE
    described = client.call(
        "describe_groups", 5, groups=[group_id, "hidden"], include_authorized_operations=True
    )
    assert [
        (row["group_id"], row["error_code"], row["authorized_operations"])
        for row in described["groups"]
    ] == [("hidden", G, -(2**31)), (group_id, "none", 1 << Op.READ | 1 << Op.DESCRIBE)]
