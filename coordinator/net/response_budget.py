"""How much memory the responses that clients have not taken yet may hold, all together.

Records are sent from their file, so a response holds little as a rule. What it does hold counts
from when it is written until the client has taken it. Once all connections together hold the limit,
requests whose answers may be large wait, first come, first served, and their connections are read
no further; the limit is exceeded by less than what is made at the same time. Who takes a response
too slowly while others wait is cut off (``Connection.check_idle``).

Small answers are never held up: heartbeats, commits and appends go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable

from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire.api import ApiKey

MAX_LARGE_RESPONSES = 4
"""Answers of more than one slice of time that are made at the same time: until they are written
nobody knows how much they will hold."""

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
    }
)
"""APIs whose answers may be many times as large as their requests."""


class _Line:
    """Requests that wait for the same thing, first come, first served."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._places: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._places)

    def wait(self) -> Work[None]:
        place: asyncio.Future[None] = self._loop.create_future()
        self._places.append(place)
        try:
            yield place
        finally:
            if place in self._places:
                self._places.remove(place)

    def let_one_on(self) -> None:
        while self._places:
            place = self._places.popleft()
            if not place.done():
                place.set_result(None)
                return


class ResponseBudget:
    """Bytes held by connections; ``max_bytes`` ≤ 0 sets no bound."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        """The sum of what is held."""
        self._held: dict[Hashable, int] = {}
        self._for_room = _Line(loop)
        self._large = 0
        self._for_large = _Line(loop)

    @property
    def contended(self) -> bool:
        """Whether somebody waits for others to take their responses."""
        return bool(self._for_room)

    @property
    def waiting(self) -> int:
        """Requests that wait for others to take their responses, or for their turn to be large."""
        return len(self._for_room) + len(self._for_large)

    def hold(self, connection: Hashable, size: int) -> None:
        """Note how much ``connection`` holds now."""
        before = self._held.get(connection, 0) if self._held else 0
        if size == before:
            return
        self.held_bytes += size - before
        if size:
            self._held[connection] = size
        else:
            del self._held[connection]
        if size < before:
            self._let_one_on()

    @property
    def is_open(self) -> bool:
        """Whether a large answer may be begun at once."""
        return not self._for_room and self._has_room()

    def _has_room(self) -> bool:
        return self.max_bytes <= 0 or self.held_bytes < self.max_bytes

    def _let_one_on(self) -> None:
        if self._has_room():
            self._for_room.let_one_on()

    def wait(self) -> Work[None]:
        """Wait until a large answer may be begun. :meth:`end` follows, whatever comes of it."""
        yield from self._for_room.wait()

    def begin_large(self) -> Work[None]:
        """Wait until an answer may take more than its first slice of time."""
        while self._large >= MAX_LARGE_RESPONSES:
            yield from self._for_large.wait()
        self._large += 1

    def end(self, *, is_large: bool) -> None:
        """An answer is written, or there is none; ``is_large``: it has passed the second gate."""
        if is_large:
            self._large -= 1
            self._for_large.let_one_on()
        self._let_one_on()
