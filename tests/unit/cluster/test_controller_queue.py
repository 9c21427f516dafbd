"""Cases of Kafka's ``NodeToControllerRequestThreadTest`` for the queue to the controller."""

from __future__ import annotations

import math

import pytest

from fencepost.cluster import controller_queue as rules
from fencepost.cluster.controller_queue import (
    ControllerQueue,
    QueueFullError,
    RequestsExpired,
    SendRequest,
)

OLD, NEW = ("old", 1), ("new", 2)


def queue(retry_timeout_ms: int | None = 60_000) -> ControllerQueue:
    return ControllerQueue(retry_timeout_ms=retry_timeout_ms, request_timeout_ms=30_000)


def test_requests_sent() -> None:
    """Requests are sent one at a time, in order."""
    waiting = queue()
    for token in (1, 2):
        waiting.enqueue(token, 0)
    assert waiting.next(OLD, 0) == SendRequest(1, OLD, 30_000)
    assert waiting.next(OLD, 5) == 60_000
    assert waiting.on_answer(1, not_controller=False, now_ms=10)
    assert waiting.next(OLD, 10) == SendRequest(2, OLD, 30_010)
    assert waiting.on_answer(2, not_controller=False, now_ms=20)
    assert waiting.is_idle


def test_retry_timeout_while_controller_not_available() -> None:
    waiting = queue(retry_timeout_ms=150)
    waiting.enqueue(1, 0)
    assert waiting.next(None, 0) == rules.BACKOFF_MS
    assert waiting.next(None, 100) == 150
    assert waiting.next(None, 149) == 150
    assert waiting.next(None, 150) == RequestsExpired((1,))
    assert waiting.is_idle


def test_controller_changed() -> None:
    """After a disconnect the in-flight request is resent first, to the current controller."""
    waiting = queue()
    for token in (1, 2):
        waiting.enqueue(token, 0)
    assert waiting.next(OLD, 0) == SendRequest(1, OLD, 30_000)
    waiting.on_disconnect(10)
    assert waiting.controller is None
    assert waiting.next(NEW, 10) == SendRequest(1, NEW, 30_010)


def test_next_request_goes_to_the_new_controller_at_once() -> None:
    """A frozen controller may keep its connection open. None stands for the last controller."""
    waiting = queue()
    for token in (1, 2, 3):
        waiting.enqueue(token, 0)
    for token, known, expected in ((1, OLD, OLD), (2, None, OLD), (3, NEW, NEW)):
        assert waiting.next(known, 10) == SendRequest(token, expected, 30_010)
        assert waiting.on_answer(token, not_controller=False, now_ms=10)


def test_not_controller() -> None:
    waiting = queue()
    waiting.enqueue(1, 0)
    assert waiting.next(OLD, 0) == SendRequest(1, OLD, 30_000)
    assert not waiting.on_answer(1, not_controller=True, now_ms=10)
    # Retry the same controller after a backoff: the controller may not know of its election yet.
    assert waiting.next(OLD, 10) == 10 + rules.BACKOFF_MS
    assert waiting.next(OLD, 110) == SendRequest(1, OLD, 30_110)


def test_retry_timeout() -> None:
    """A request with a retry timeout expires; a request without it is retried without end."""
    for limit in (100, None):
        waiting = queue(retry_timeout_ms=limit)
        waiting.enqueue(1, 0)
        assert isinstance(waiting.next(OLD, 0), SendRequest)
        assert not waiting.on_answer(1, not_controller=True, now_ms=99)
        expected = RequestsExpired((1,)) if limit else SendRequest(1, NEW, 30_100)
        assert waiting.next(NEW, 100) == expected


def test_kafka_14392_heartbeat_to_hanging_controller_expires_in_time() -> None:
    """KAFKA-14392: the first heartbeat expires at 4.5 s, so that the next one is sent in time."""
    waiting = queue(retry_timeout_ms=4_500)
    waiting.enqueue(1, 0)
    assert waiting.next(OLD, 0) == SendRequest(1, OLD, 4_500)
    waiting.on_disconnect(4_500)
    assert waiting.next(OLD, 4_500) == RequestsExpired((1,))
    waiting.enqueue(2, 6_500)
    assert waiting.next(OLD, 6_500) == SendRequest(2, OLD, 11_000)


def test_response_after_disconnect_is_ignored() -> None:
    waiting = queue()
    waiting.enqueue(1, 0)
    waiting.next(OLD, 0)
    waiting.on_disconnect(30_000)
    assert not waiting.on_answer(1, not_controller=False, now_ms=30_001)
    assert isinstance(waiting.next(NEW, 30_002), SendRequest)


def test_request_above_the_queue_limit_is_refused() -> None:
    waiting = queue(retry_timeout_ms=None)
    for token in range(rules.MAX_QUEUED):
        waiting.enqueue(token, 0)
    with pytest.raises(QueueFullError, match="10000 requests"):
        waiting.enqueue(rules.MAX_QUEUED, 0)
    assert len(waiting.close()) == rules.MAX_QUEUED


def test_close_returns_queued_and_in_flight_requests() -> None:
    waiting = queue()
    for token in (1, 2, 3):
        waiting.enqueue(token, 0)
    waiting.next(OLD, 0)
    assert waiting.close() == (1, 2, 3)
    assert waiting.next(OLD, 1) == math.inf
