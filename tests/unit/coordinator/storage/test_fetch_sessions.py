"""Fetch sessions (KIP-227): cached partitions, slots and eviction, and the wire protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.errors import (
    FetchSessionIdNotFoundError,
    FetchSessionTopicIdError,
    InvalidFetchSessionEpochError,
)
from fencepost.coordinator.storage.fetch_sessions import (
    EVICTION_MS,
    CachedPartition,
    FetchedPartition,
    FetchSessions,
)
from fencepost.logcore.machine import DomainError
from fencepost.logcore.reading import LogReadInfo
from fencepost.protocol.steps import finish
from tests.support.cluster import Cluster, unique
from tests.support.raw import Answer


def partition(index: int = 0) -> CachedPartition:
    return CachedPartition(("t", index), offset=0, max_bytes=1)


def said(asked: CachedPartition | None = None, error: DomainError | None = None, **read) -> Any:
    """Return a partition's result in a response."""
    marks = LogReadInfo(b"", 0, 0, 0, None, is_behind=False)._replace(**read)
    return FetchedPartition(asked or partition(), marks, error=error)


def partitions(count: int) -> list[CachedPartition]:
    return [partition(index) for index in range(count)]


def opened(sessions: FetchSessions, count: int = 1, *, at: int = 0) -> int:
    return sessions.open(partitions(count), by_topic_id=False, now_ms=at)


def test_session_epoch_counts_up_and_wraps_to_one() -> None:
    sessions = FetchSessions(1)
    session_id = opened(sessions)
    session = sessions.resume(session_id, 1, by_topic_id=False)
    sessions.advance(session, 0)
    with pytest.raises(InvalidFetchSessionEpochError):
        sessions.resume(session_id, 1, by_topic_id=False)
    session.epoch = 2**31 - 1
    sessions.advance(sessions.resume(session_id, 2**31 - 1, by_topic_id=False), 0)
    assert sessions.resume(session_id, 1, by_topic_id=False) is session


def test_request_of_unknown_or_closed_session_or_wrong_topic_type_is_refused() -> None:
    sessions = FetchSessions(1)
    session_id = opened(sessions)
    with pytest.raises(FetchSessionIdNotFoundError):
        sessions.resume(session_id + 1, 1, by_topic_id=False)
    with pytest.raises(FetchSessionTopicIdError):
        sessions.resume(session_id, 1, by_topic_id=True)
    sessions.close(session_id)
    with pytest.raises(FetchSessionIdNotFoundError):
        sessions.resume(session_id, 1, by_topic_id=False)


@pytest.mark.parametrize(
    ("answer", "news"),
    [
        (said(), False),
        (said(records=b"x"), True),
        (said(high_watermark=1), True),
        (said(log_start_offset=1), True),
        (said(error=DomainError()), True),
    ],
)
def test_partition_is_returned_only_with_records_error_or_changed_offsets(
    answer: FetchedPartition, news: bool
) -> None:
    asked = partition()
    asked.learn(said())
    assert asked.learn(answer) is news


def test_partition_is_returned_again_after_an_error() -> None:
    asked = partition()
    assert [asked.learn(s) for s in (said(), said(error=DomainError()), said(), said())] == [
        True,
        True,
        True,
        False,
    ]


def test_partition_is_returned_again_after_divergence() -> None:
    asked = partition()
    parted = FetchedPartition(asked, said().read, diverging=(1, 2))
    assert [asked.learn(fetched) for fetched in (said(), parted, said(), said())] == [
        True,
        True,
        True,
        False,
    ]


def test_partition_is_returned_again_under_another_leader_epoch() -> None:
    asked = partition()
    news = []
    for epoch in (5, 5, 6, 6):
        asked.renew(CachedPartition(asked.key, 0, 1, leader_epoch=epoch))
        news.append(asked.learn(said()))
    assert news == [True, False, True, False]


def test_partitions_with_records_move_to_the_end_of_the_session() -> None:
    sessions = FetchSessions(1)
    session = sessions.resume(opened(sessions, 4), 1, by_topic_id=False)
    for requested in session.partitions.values():
        requested.learn(said())
    reads = {"records": b"x"}, {"error": DomainError()}, {"high_watermark": 1}, {}
    asked = zip(list(session.partitions.values()), reads, strict=True)
    news = [
        requested.key[1] for requested, read in asked if session.is_news(said(requested, **read))
    ]
    assert news == [0, 1, 2]
    assert [key[1] for key in session.partitions] == [1, 2, 3, 0]


def test_session_is_closed_when_its_last_partition_is_forgotten() -> None:
    sessions = FetchSessions(1)
    session = sessions.resume(opened(sessions, 1), 1, by_topic_id=False)
    finish(sessions.change(session, (), [("t", 0), ("t", 7)]))
    assert (len(sessions), sessions.partitions, sessions.id_of(session)) == (0, 0, 0)


def test_partitions_of_session_closed_during_its_request_are_not_counted() -> None:
    sessions = FetchSessions(2)
    session = sessions.resume(opened(sessions, 2), 1, by_topic_id=False)
    changes = sessions.change(session, [partition(8), partition(9)], [("t", 0)])
    next(changes)
    assert sessions.partitions == 3
    sessions.close(session.id)
    finish(changes)
    assert (len(sessions), sessions.partitions, sessions.id_of(session)) == (0, 0, 0)


def test_session_above_the_slot_limit_is_not_opened() -> None:
    sessions = FetchSessions(2)
    assert opened(sessions)
    assert opened(sessions)
    assert opened(sessions) == 0
    assert len(sessions) == 2
    assert FetchSessions(0).open([], by_topic_id=False, now_ms=0) == 0


def test_session_above_the_partition_limit_is_not_opened_or_is_closed() -> None:
    sessions = FetchSessions(9, max_partitions=3)
    assert opened(sessions, 3)
    assert opened(sessions, 1) == 0
    session = sessions.resume(next(iter(sessions._sessions)), 1, by_topic_id=False)
    finish(sessions.change(session, [partition(9)], ()))
    assert (len(sessions), sessions.partitions) == (0, 0)
    assert opened(sessions, 3)
    assert opened(FetchSessions(9, max_partitions=3), 4) == 0


def test_stale_session_is_evicted_for_a_new_one() -> None:
    sessions = FetchSessions(1)
    first = opened(sessions, 5)
    assert opened(sessions, at=EVICTION_MS) == 0
    assert opened(sessions, at=EVICTION_MS + 1)
    with pytest.raises(FetchSessionIdNotFoundError):
        sessions.resume(first, 1, by_topic_id=False)


def test_old_session_is_evicted_only_for_one_at_least_as_large() -> None:
    sessions = FetchSessions(1)
    session = sessions.resume(opened(sessions, 5), 1, by_topic_id=False)
    sessions.advance(session, EVICTION_MS)  # in use, so not stale
    later = EVICTION_MS + 1
    assert opened(sessions, 4, at=later) == 0
    assert opened(sessions, 5, at=later)


# --- over the wire ---


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory) -> Iterator[str]:
    settings = {"max.incremental.fetch.session.cache.slots": "2"}
    with Broker.in_thread(tmp_path_factory.mktemp("data"), config=settings) as broker:
        yield broker.bootstrap


@pytest.fixture
def client(bootstrap: str) -> Iterator[Cluster]:
    with Cluster(bootstrap) as connected:
        yield connected


def fetch(client: Cluster, session: tuple[int, int], topics: list[Answer], **more) -> Answer:
    version = more.pop("version", 12)
    body = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20, **more}
    if version < 15:
        body["replica_id"] = -1
    if version > 12:
        topics = [
            {"topic_id": client.topic_id(t["topic"]), "partitions": t["partitions"]} for t in topics
        ]
    return client.call(
        "fetch", version, topics=topics, session_id=session[0], session_epoch=session[1], **body
    )


def asked(topic: str, **offsets: int) -> Answer:
    parts = [
        {"partition": int(index[1:]), "fetch_offset": offset, "partition_max_bytes": 1 << 20}
        for index, offset in offsets.items()
    ]
    return {"topic": topic, "partitions": parts}


def told(answer: Answer) -> dict[int, int]:
    """Return high watermarks by partition."""
    return {
        part["partition_index"]: part["high_watermark"]
        for topic in answer["responses"]
        for part in topic["partitions"]
    }


@pytest.mark.parametrize("version", [7, 11, 12, 13, 18])
def test_session_over_the_wire_returns_changes_and_checks_epochs(
    client: Cluster, version: int
) -> None:
    topic = client.create_topic(unique("sessions"), 3)
    first = fetch(client, (0, 0), [asked(topic, p0=0, p1=0, p2=0)], version=version)
    session = first["session_id"]
    assert session
    assert told(first) == {0: 0, 1: 0, 2: 0}
    assert told(fetch(client, (session, 1), [], version=version)) == {}
    client.produce(topic, [b"a"], partition=1)
    assert told(fetch(client, (session, 2), [], version=version)) == {1: 1}
    changed = fetch(client, (session, 3), [asked(topic, p1=1)], version=version)
    assert (changed["session_id"], told(changed)) == (session, {})
    stale = fetch(client, (session, 3), [], version=version)
    assert (stale["error_code"], stale["session_id"]) == ("invalid_fetch_session_epoch", 0)
    fetch(client, (session, -1), [], version=version)
    gone = fetch(client, (session, 4), [], version=version)
    assert (gone["error_code"], gone["session_id"]) == ("fetch_session_id_not_found", 0)


def test_waiting_fetch_of_a_session_returns_only_changed_partitions(
    client: Cluster, bootstrap: str
) -> None:
    topic = client.create_topic(unique("sessions"), 2)
    session = fetch(client, (0, 0), [asked(topic, p0=0, p1=0)])["session_id"]
    with Cluster(bootstrap) as producer:
        client.send("fetch", 12, **waiting(session, 1))
        producer.produce(topic, [b"a"], partition=1)
    assert told(client.receive()) == {1: 1}
    fetch(client, (session, -1), [])


def test_request_that_empties_its_session_is_answered_and_closes_it(
    client: Cluster,
) -> None:
    topic = client.create_topic(unique("sessions"), 2)
    session = fetch(client, (0, 0), [asked(topic, p0=0)])["session_id"]
    forgotten = [{"topic": topic, "partitions": [0, 1]}]
    last = fetch(client, (session, 1), [asked(topic, p1=0)], forgotten_topics_data=forgotten)
    assert (last["session_id"], told(last)) == (0, {1: 0})


def waiting(session: int, epoch: int) -> Answer:
    return {
        "max_wait": 20_000,
        "min_bytes": 1,
        "max_bytes": 1 << 20,
        "replica_id": -1,
        "session_id": session,
        "session_epoch": epoch,
        "topics": [],
    }


def test_session_opened_by_topic_names_refuses_topic_ids(client: Cluster) -> None:
    topic = client.create_topic(unique("sessions"))
    session = fetch(client, (0, 0), [asked(topic, p0=0)])["session_id"]
    mixed = fetch(client, (session, 1), [asked(topic, p0=0)], version=13)
    assert mixed["error_code"] == "fetch_session_topic_id_error"
    fetch(client, (session, -1), [])


def test_fetch_without_a_free_session_slot_is_served_without_session(client: Cluster) -> None:
    topic = client.create_topic(unique("sessions"))
    made = [fetch(client, (0, 0), [asked(topic, p0=0)])["session_id"] for _ in range(3)]
    assert made[0]
    assert made[1]
    assert made[2] == 0
    for session in made[:2]:
        fetch(client, (session, -1), [])


def test_deleted_topic_is_unknown_topic_or_partition_in_its_session(client: Cluster) -> None:
    topic = client.create_topic(unique("sessions"))
    session = fetch(client, (0, 0), [asked(topic, p0=0)])["session_id"]
    client.call("delete_topics", 5, topic_names=[topic], timeout=10_000)
    answer = fetch(client, (session, 1), [])
    (part,) = answer["responses"][0]["partitions"]
    assert part["error_code"] == "unknown_topic_or_partition"
    fetch(client, (session, -1), [])
