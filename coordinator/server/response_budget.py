"""A memory budget for the unsent responses of all connections together.

Records are sent from their file, so a response usually takes little memory. Its size counts against
the budget from its encoding until the kernel has taken all of it. Once all connections together
exceed the limit, requests whose responses may be large wait, first come, first served, and their
connections are not read. Only the responses already in preparation may exceed the limit. A client
that receives its response too slowly while others wait is disconnected (``Connection.check_idle``).

Small responses never wait: heartbeats, commits and appends continue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable

from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol.api import ApiKey

MAX_LARGE_RESPONSES = 4
"""The maximum number of responses that may be in preparation for longer than one slice of time.
(The size of a response is unknown until it is encoded.)"""

LARGE_ANSWERS = frozenset(
    {
        ApiKey.FETCH,
        ApiKey.LIST_OFFSETS,
        ApiKey.METADATA,
        ApiKey.OFFSET_FETCH,
        ApiKey.DESCRIBE_GROUPS,
        ApiKey.LIST_GROUPS,
        ApiKey.CREATE_TOPICS,
        ApiKey.DESCRIBE_CONFIGS,
        ApiKey.DESCRIBE_PRODUCERS,
        ApiKey.DESCRIBE_TRANSACTIONS,
        ApiKey.LIST_TRANSACTIONS,
        ApiKey.CONSUMER_GROUP_DESCRIBE,
        ApiKey.DESCRIBE_CLIENT_QUOTAS,
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
        ApiKey.SHARE_FETCH,
    }
)
"""APIs whose responses may be many times larger than their requests."""


class _WaitingLine:
    """Requests that wait for the same resource, first come, first served."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    def wait(self) -> Work[None]:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            yield waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def resume_first(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


class ResponseBudget:
    """Counts the bytes held by connections; ``max_bytes`` ≤ 0 means no limit."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        """The sum of all bytes held."""
        self._held: dict[Hashable, int] = {}
        self._for_room = _WaitingLine(loop)
        self._large = 0
        self._for_large = _WaitingLine(loop)

    @property
    def contended(self) -> bool:
        """Whether any request waits for other connections' responses to be received."""
        return bool(self._for_room)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for memory, or for a slot for large responses."""
        return len(self._for_room) + len(self._for_large)

    def hold(self, connection: Hashable, size: int) -> None:
        """Set the number of bytes that ``connection`` holds."""
        before = self._held.get(connection, 0) if self._held else 0
        if size == before:
            return
        self.held_bytes += size - before
        if size:
            self._held[connection] = size
        else:
            del self._held[connection]
        if size < before:
            self._resume_first()

    @property
    def is_open(self) -> bool:
        """Whether a large response may begin at once."""
        return not self._for_room and self._has_room()

    def _has_room(self) -> bool:
        return self.max_bytes <= 0 or self.held_bytes < self.max_bytes

    def _resume_first(self) -> None:
        if self._has_room():
            self._for_room.resume_first()

    def wait(self) -> Work[None]:
        """Wait until a large response may begin. :meth:`end` must follow in any case."""
        yield from self._for_room.wait()

    def begin_large(self) -> Work[None]:
        """Wait until a response may take more than its first slice of time."""
        while self._large >= MAX_LARGE_RESPONSES:
            yield from self._for_large.wait()
        self._large += 1

    def end(self, *, is_large: bool) -> None:
        """End the preparation of a response, whether or not it was written.

        ``is_large`` tells whether :meth:`begin_large` has returned for the response.
        """
        if is_large:
            self._large -= 1
            self._for_large.resume_first()
        self._resume_first()
