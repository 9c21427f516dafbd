"""Share sessions: epochs, limits, connections."""

from __future__ import annotations

from random import Random

import pytest

from fencepost.groups.share import session as session_module
from fencepost.groups.share.errors import (
    InvalidShareRequestError,
    InvalidShareSessionEpochError,
    ShareSessionLimitReachedError,
    ShareSessionNotFoundError,
)
from fencepost.groups.share.session import (
    MAX_EPOCH,
    SessionKey,
    ShareSessions,
    TopicPartition,
    rotated,
)
from tests.support.quick import seeds

A, B, C = (TopicPartition(bytes(16), partition) for partition in range(3))
KEY = SessionKey("orders", "m1")
OTHER = SessionKey("orders", "m2")


def opened(max_sessions: int = 10) -> ShareSessions:
    sessions = ShareSessions(max_sessions)
    sessions.fetch(KEY, 0, "c1", additions=[A, B])
    return sessions


def test_each_request_raises_the_epoch_and_a_duplicate_is_refused() -> None:
    sessions = opened()
    assert sessions.fetch(KEY, 1, "c1").epoch == 2
    assert sessions.acknowledge(KEY, 2).epoch == 3
    for epoch in (1, 2, 4, -2):
        with pytest.raises(InvalidShareSessionEpochError):
            sessions.fetch(KEY, epoch, "c1")
        with pytest.raises(InvalidShareSessionEpochError):
            sessions.acknowledge(KEY, epoch)
    assert sessions.fetch(KEY, 3, "c1").epoch == 4


def test_epoch_after_the_highest_one_is_1() -> None:
    sessions = opened()
    session = sessions.get(KEY)
    assert session is not None
    session.epoch = MAX_EPOCH
    assert sessions.fetch(KEY, MAX_EPOCH, "c1").epoch == 1


def test_request_for_an_unknown_session_is_refused() -> None:
    sessions = ShareSessions(10)
    for epoch in (1, -1):
        with pytest.raises(ShareSessionNotFoundError):
            sessions.fetch(KEY, epoch, "c1")
        with pytest.raises(ShareSessionNotFoundError):
            sessions.acknowledge(KEY, epoch)
    with pytest.raises(ShareSessionNotFoundError):
        sessions.end(KEY)


def test_acknowledgements_cannot_open_a_session() -> None:
    sessions = opened()
    with pytest.raises(InvalidShareSessionEpochError):
        sessions.acknowledge(KEY, 0)
    with pytest.raises(InvalidShareRequestError):
        sessions.fetch(KEY, 0, "c1", additions=[C], has_acknowledgements=True)
    session = sessions.get(KEY)
    assert session is not None
    assert list(session.partitions) == [A, B], "a refused request replaces no session"


def test_additions_are_applied_before_forgotten_partitions() -> None:
    sessions = opened()
    session = sessions.fetch(KEY, 1, "c1", additions=[B, C], forgotten=[A, C])
    assert list(session.partitions) == [B]


def test_final_epoch_changes_nothing_until_the_session_ends() -> None:
    sessions = opened()
    session = sessions.fetch(KEY, -1, "c1", additions=[C])
    assert list(session.partitions) == [A, B]
    assert sessions.acknowledge(KEY, -1) is session
    assert sessions.end(KEY) == [A, B]
    assert len(sessions) == 0


def test_session_beyond_the_limit_is_refused_until_another_ends() -> None:
    sessions = opened(max_sessions=2)
    sessions.fetch(OTHER, 0, "c2")
    with pytest.raises(ShareSessionLimitReachedError):
        sessions.fetch(SessionKey("orders", "m3"), 0, "c3")
    sessions.fetch(KEY, 0, "c1")  # the member's own former session ends and makes room
    sessions.end(OTHER)
    sessions.fetch(SessionKey("orders", "m3"), 0, "c3")
    sessions.check()


def test_closed_connection_ends_its_sessions_kafka_19015() -> None:
    sessions = opened()
    sessions.fetch(OTHER, 0, "c2", additions=[C])
    assert sessions.connection_closed("c1") == ({KEY: [A, B]}, frozenset())
    assert sessions.connection_closed("c2") == ({OTHER: [C]}, frozenset({"orders"}))
    assert sessions.connection_closed("c2") == ({}, frozenset())
    assert sessions.evictions == 2


def test_close_of_a_former_connection_keeps_the_new_session_kafka_19950() -> None:
    sessions = opened()
    sessions.fetch(KEY, 0, "c2", additions=[A])
    assert sessions.connection_closed("c1") == ({}, frozenset())
    assert sessions.fetch(KEY, 1, "c2").epoch == 2


def test_group_is_empty_when_the_connection_of_an_ended_session_closes() -> None:
    sessions = opened()
    sessions.end(KEY)
    assert sessions.connection_closed("c1") == ({}, frozenset({"orders"}))


def test_response_contains_changed_partitions_and_rotates_those_with_records() -> None:
    sessions = opened()
    session = sessions.fetch(KEY, 1, "c1", additions=[C])

    def include(partition: TopicPartition, *marks: str) -> bool:
        return session.include(
            partition,
            has_records="records" in marks,
            has_error="error" in marks,
        )

    assert include(C), "just added"
    assert not include(C)
    assert not include(A)
    assert include(A, "records")
    assert list(session.partitions) == [B, C, A]
    assert include(B, "error")
    assert include(B), "the end of an error is reported"
    assert not include(B)


def test_fetches_begin_with_another_partition_each_time() -> None:
    assert [rotated([A, B, C], epoch)[0] for epoch in (0, 1, 2, 3, 4)] == [A, B, C, A, B]
    assert rotated([], 5) == []


@pytest.mark.parametrize("seed", seeds(20))
def test_any_order_of_requests_keeps_the_tables_consistent(seed: int) -> None:
    rng = Random(seed)
    sessions = ShareSessions(4)
    keys = [SessionKey(group, member) for group in "gh" for member in ("m1", "m2", "m3")]
    accepted: dict[SessionKey, int] = {}
    for _ in range(300):
        key, connection = rng.choice(keys), f"c{rng.randrange(3)}"
        epoch = rng.choice((0, -1, accepted.get(key, 1), rng.randint(1, 3)))
        try:
            match rng.randrange(4):
                case 0 | 1:
                    session = sessions.fetch(key, epoch, connection, additions=[A])
                case 2:
                    session = sessions.acknowledge(key, epoch)
                case _:
                    ended = sessions.connection_closed(connection).ended
                    assert all(sessions.get(session_key) is None for session_key in ended)
                    continue
        except (
            ShareSessionNotFoundError,
            InvalidShareSessionEpochError,
            ShareSessionLimitReachedError,
        ):
            continue
        finally:
            sessions.check()
        if epoch == -1:
            sessions.end(key)
        else:
            assert session.epoch == epoch + 1
            accepted[key] = session.epoch


def test_sessions_have_bounded_numbers_of_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_SESSION_PARTITIONS", 3)
    monkeypatch.setattr(session_module, "MAX_PARTITIONS", 5)
    many = [TopicPartition(bytes(16), partition) for partition in range(4)]
    sessions = ShareSessions(10)
    with pytest.raises(InvalidShareRequestError):
        sessions.fetch(KEY, 0, "c1", additions=many)
    sessions.fetch(KEY, 0, "c1", additions=[A, B, B])
    sessions.fetch(KEY, 1, "c1", additions=[A, B, C])
    with pytest.raises(InvalidShareRequestError):
        sessions.fetch(KEY, 2, "c1", additions=[many[3]])
    assert sessions.partition_count == 3
    sessions.fetch(OTHER, 0, "c1", additions=[A, B])
    with pytest.raises(ShareSessionLimitReachedError):
        sessions.fetch(OTHER, 1, "c1", additions=[C])
    sessions.fetch(KEY, 2, "c1", forgotten=[A])
    assert sessions.fetch(OTHER, 1, "c1", additions=[C]).epoch == 2
    sessions.check()
    sessions.end(KEY)
    sessions.connection_closed("c1")
    assert sessions.partition_count == 0
    sessions.check()
