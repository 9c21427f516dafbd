"""The partitions that consumers fetch from a broker under test.

A consumer looks up the committed offsets of new partitions (OffsetFetch), and fetches a partition
once it has a position there. So the first Fetch after the lookup shows that the position is known.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakKeyDictionary

from fencepost.coordinator.handlers import Context, Run, replica_id_of
from fencepost.protocol.api import ApiKey
from fencepost.testing.faults import OWN_CLIENT_ID
from fencepost.testing.requests import fetched_partitions, topic_name
from fencepost.testing.views import Partition

if TYPE_CHECKING:
    from fencepost.client.queries.group_view import GroupView
    from fencepost.coordinator.daemon.broker import Broker
    from fencepost.coordinator.server.connection import Connection

MAX_PARTITIONS: Final = 10_000
"""The maximum number of partitions that are remembered per connection, and of lookups that are
remembered in total; the oldest are dropped first."""


@dataclass
class _Fetched:
    """A connection's client id, and the number of the last Fetch of each partition."""

    client_id: str | None
    partitions: OrderedDict[Partition, int] = field(default_factory=OrderedDict)


class FetchPositions:
    """The fetched partitions of all connections to one broker or to the brokers of a cluster.

    Brokers call it on their own threads, the test on another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count()
        self._fetched: WeakKeyDictionary[Connection, _Fetched] = WeakKeyDictionary()
        self._lookups: OrderedDict[tuple[str, Partition], int] = OrderedDict()

    def attach(self, broker: Broker) -> None:
        """Observe the requests of a broker that has just started; call it on the broker's loop."""
        registry = broker.server.registry
        for key, observe in (
            (ApiKey.FETCH, self._observe_fetch),
            (ApiKey.OFFSET_FETCH, self._observe_lookup),
        ):
            if key in registry.versions:
                registry.wrap(key, partial(_observed, observe))

    def not_fetched(self, group: GroupView) -> list[Partition]:
        """Return the assigned partitions that their members are not known to fetch."""
        with self._lock:
            fetched: dict[tuple[str | None, str, Partition], int] = {}
            for connection, positions in list(self._fetched.items()):
                if not connection.closed:
                    for place, number in positions.partitions.items():
                        key = (positions.client_id, connection.peer_host, place)
                        fetched[key] = max(number, fetched.get(key, -1))
            return [
                place
                for member in group.members
                for place in member.assigned
                if fetched.get((member.client_id, member.host, place), -1)
                <= self._lookups.get((group.group, place), -1)
            ]

    def _observe_fetch(self, ctx: Context) -> None:
        if replica_id_of(ctx.body) >= 0:
            return
        with self._lock:
            number = next(self._numbers)
            connection = cast("Connection", ctx.connection)
            partitions = self._fetched.setdefault(connection, _Fetched(ctx.client_id)).partitions
            for _, place in islice(fetched_partitions(ctx), MAX_PARTITIONS):
                _put(partitions, place, number)

    def _observe_lookup(self, ctx: Context) -> None:
        with self._lock:
            number = next(self._numbers)
            for place in islice(_looked_up(ctx), MAX_PARTITIONS):
                _put(self._lookups, place, number)


def _observed(observe: Callable[[Context], None], run: Run) -> Run:
    def call(ctx: Context) -> Any:
        if ctx.client_id != OWN_CLIENT_ID:
            observe(ctx)
        return run(ctx)

    return call


def _put(positions: OrderedDict[Any, int], key: object, number: int) -> None:
    positions[key] = number
    positions.move_to_end(key)
    if len(positions) > MAX_PARTITIONS:
        positions.popitem(last=False)


def _looked_up(ctx: Context) -> Iterator[tuple[str, Partition]]:
    """Yield the groups and partitions of an OffsetFetch."""
    body = ctx.body
    for group in getattr(body, "groups", None) or (body,):
        for topic in group.topics or ():
            name = topic_name(ctx, topic)[1]
            yield from ((group.group_id, (name, index)) for index in topic.partition_indexes)
