"""What waits to be sent to the active controller on one connection.

One request is under way at a time. A controller that turns out to be none, and a connection that
breaks, cost nothing but time: the request goes first in line again, to whoever is the controller
then. What is not sent within its time is given up.

Source: ``NodeToControllerRequestThread``.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from fencepost.logcore.values import dataclass

BACKOFF_MS: Final = 100
"""Between two looks for a controller where nobody is known."""

MAX_QUEUED: Final = 10_000
"""Requests that wait on one connection; who comes then is told that the queue is full."""

Address = tuple[str, int]
"""Host and port."""


class QueueFullError(Exception):
    """More requests wait for the controller than are kept."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request of ``token`` to the controller at ``to``, and wait until ``until_ms``."""

    token: int
    to: Address
    until_ms: float


@dataclass(frozen=True, slots=True)
class Expired:
    """The requests of these tokens are given up."""

    tokens: tuple[int, ...]


class ControllerQueue:
    """The state of one channel to the active controller.

    ``retry_timeout_ms`` is how long a request may wait and be repeated, None for ever;
    ``request_timeout_ms`` how long an answer may take.
    """

    def __init__(self, *, retry_timeout_ms: int | None, request_timeout_ms: int) -> None:
        self._retry_timeout_ms = math.inf if retry_timeout_ms is None else retry_timeout_ms
        self._request_timeout_ms = min(request_timeout_ms, self._retry_timeout_ms)
        self._queued: deque[tuple[int, float]] = deque()
        """Tokens, and when each has come."""
        self._in_flight: tuple[int, float] | None = None
        self._to: Address | None = None
        """Whom we take for the controller; None: somebody has to say it anew."""
        self._lost: Address | None = None
        """Who is not to be asked again at once."""
        self._not_before_ms = -math.inf

    @property
    def controller(self) -> Address | None:
        """Whom requests go to; None while that is not known."""
        return self._to

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, and nothing is under way."""
        return not self._queued and self._in_flight is None

    def enqueue(self, token: int, now_ms: float) -> None:
        """A request has come. Raises QueueFullError."""
        if len(self._queued) >= MAX_QUEUED:
            raise QueueFullError(f"{MAX_QUEUED} requests wait for the controller")
        self._queued.append((token, now_ms))

    def next(self, known: Address | None, now_ms: float) -> Send | Expired | float:
        """What to do now, or the time until which there is nothing to do.

        ``known`` is who is said to be the controller. Another one than before is believed at once;
        Kafka goes on with the last one until that is lost, or 30 s late.
        """
        expired = [one for one in self._queued if now_ms - one[1] >= self._retry_timeout_ms]
        if expired:
            self._queued = deque(one for one in self._queued if one not in expired)
            return Expired(tuple(token for token, _ in expired))
        if self._in_flight is not None or not self._queued:
            return self._next_expiry()
        if known not in (None, self._to):
            self._to = None
        if self._to is None:
            if known is None or (known == self._lost and now_ms < self._not_before_ms):
                return min(max(self._not_before_ms, now_ms + BACKOFF_MS), self._next_expiry())
            self._to = known
        self._in_flight = self._queued.popleft()
        return Send(self._in_flight[0], self._to, now_ms + self._request_timeout_ms)

    def _next_expiry(self) -> float:
        return min((came for _, came in self._queued), default=math.inf) + self._retry_timeout_ms

    def on_answer(self, token: int, *, not_controller: bool, now_ms: float) -> bool:
        """An answer has come; whether it is the one for whoever asked.

        It is not where it says NOT_CONTROLLER (41) anywhere: then the request is first in line.
        """
        if self._in_flight is None or self._in_flight[0] != token:
            return False
        if not_controller:
            self.on_disconnect(now_ms)
            return False
        self._in_flight = None
        return True

    def on_disconnect(self, now_ms: float) -> None:
        """The connection is gone, was refused, or its answer is late."""
        self._lost, self._to = self._to or self._lost, None
        self._not_before_ms = now_ms + BACKOFF_MS
        if self._in_flight is not None:
            self._queued.appendleft(self._in_flight)
            self._in_flight = None

    def close(self) -> tuple[int, ...]:
        """Nothing more is sent; the tokens that nobody will answer."""
        tokens = [token for token, _ in self._queued]
        if self._in_flight is not None:
            tokens.insert(0, self._in_flight[0])
        self._queued.clear()
        self._in_flight = None
        return tuple(tokens)
