"""Requests waiting for the active controller on one connection.

One request is in flight at a time. If the node is not the controller, or the connection breaks, the
request returns to the head of the queue and is sent to the next known controller. Queued requests
expire after ``retry_timeout_ms``.

Source: ``NodeToControllerRequestThread``.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from fencepost.logcore.values import dataclass

BACKOFF_MS: Final = 100
"""The pause before looking for the controller again."""

MAX_QUEUED: Final = 10_000
"""The maximum number of requests that wait on one connection; further ones are refused."""

Address = tuple[str, int]
"""Host and port."""


class QueueFullError(Exception):
    """The queue for the controller is full."""


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send the request of ``token`` to the controller at ``to``, and wait until ``until_ms``."""

    token: int
    to: Address
    until_ms: float


@dataclass(frozen=True, slots=True)
class RequestsExpired:
    """The requests with these tokens have timed out in the queue."""

    tokens: tuple[int, ...]


class ControllerQueue:
    """The state of one channel to the active controller.

    ``retry_timeout_ms`` is how long a request may wait and be repeated, None for no limit;
    ``request_timeout_ms`` is how long the controller may take to answer.
    """

    def __init__(self, *, retry_timeout_ms: int | None, request_timeout_ms: int) -> None:
        self._retry_timeout_ms = math.inf if retry_timeout_ms is None else retry_timeout_ms
        self._request_timeout_ms = min(request_timeout_ms, self._retry_timeout_ms)
        self._queued: deque[tuple[int, float]] = deque()
        """Tokens, and the time at which each was queued."""
        self._in_flight: tuple[int, float] | None = None
        self._to: Address | None = None
        """The controller that requests are sent to; None if it must be looked up again."""
        self._lost: Address | None = None
        """The controller whose connection broke last; it is not tried again before the backoff
        ends."""
        self._not_before_ms = -math.inf

    @property
    def controller(self) -> Address | None:
        """The controller that requests are sent to; None while it is unknown."""
        return self._to

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or in flight."""
        return not self._queued and self._in_flight is None

    def enqueue(self, token: int, now_ms: float) -> None:
        """Queue a request. Raises QueueFullError."""
        if len(self._queued) >= MAX_QUEUED:
            raise QueueFullError(f"{MAX_QUEUED} requests wait for the controller")
        self._queued.append((token, now_ms))

    def next(
        self, controller: Address | None, now_ms: float
    ) -> SendRequest | RequestsExpired | float:
        """Return the next action, or the time at which to call again.

        ``controller`` is the controller according to the metadata.
        """
        expired = [
            queued for queued in self._queued if now_ms - queued[1] >= self._retry_timeout_ms
        ]
        if expired:
            self._queued = deque(queued for queued in self._queued if queued not in expired)
            return RequestsExpired(tuple(token for token, _ in expired))
        if self._in_flight is not None or not self._queued:
            return self._next_expiry()
        # Switch to a new controller at once. Kafka's channel keeps the previous controller until
        # its connection breaks or a request times out (30 s).
        if controller not in (None, self._to):
            self._to = None
        if self._to is None:
            if controller is None or (controller == self._lost and now_ms < self._not_before_ms):
                return min(max(self._not_before_ms, now_ms + BACKOFF_MS), self._next_expiry())
            self._to = controller
        self._in_flight = self._queued.popleft()
        return SendRequest(self._in_flight[0], self._to, now_ms + self._request_timeout_ms)

    def _next_expiry(self) -> float:
        return min((came for _, came in self._queued), default=math.inf) + self._retry_timeout_ms

    def on_answer(self, token: int, *, not_controller: bool, now_ms: float) -> bool:
        """Handle an answer; return whether to pass it to the caller of the request.

        An answer with NOT_CONTROLLER (41) anywhere is not passed on: the request returns to the
        head of the queue.
        """
        if self._in_flight is None or self._in_flight[0] != token:
            return False
        if not_controller:
            self.on_disconnect(now_ms)
            return False
        self._in_flight = None
        return True

    def on_disconnect(self, now_ms: float) -> None:
        """Handle a connection that broke, was refused, or whose answer timed out."""
        self._lost, self._to = self._to or self._lost, None
        self._not_before_ms = now_ms + BACKOFF_MS
        if self._in_flight is not None:
            self._queued.appendleft(self._in_flight)
            self._in_flight = None

    def close(self) -> tuple[int, ...]:
        """Empty the queue; return the tokens of the requests that stay unanswered."""
        tokens = [token for token, _ in self._queued]
        if self._in_flight is not None:
            tokens.insert(0, self._in_flight[0])
        self._queued.clear()
        self._in_flight = None
        return tuple(tokens)
