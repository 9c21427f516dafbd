"""Crash points of a broker in a cluster, named by their operation and its number of occurrences.

In a cluster the total number of operations before a point varies, because fetches, heartbeats and
checkpoints depend on timing. So a point has a name, and a number among the points of this name:
``before write out-0 records #1``, ``after mark __transaction_state-0 #2``, ``before answer EndTxn
#1``. The name of a fetch between brokers contains the writes since the previous fetch:
``before ask Fetch of 2 | write out-0 records #1`` is the point where a follower is about to confirm
these records to its leader.

As in ``fencepost crash-sweep``, the file system and the loop are wrapped. This module also wraps
connections to other brokers, and the only method of the log that moves a high watermark.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, TRANSACTION_STATE
from fencepost.coordinator.runtime.commits import Commits
from fencepost.coordinator.runtime.shard import ShardRuntime
from fencepost.coordinator.services.marker_appends import MarkerAppends
from fencepost.logcore.batch import decode_records, iter_headers, parse_control
from fencepost.logcore.fs import ReadableBuffer
from fencepost.logcore.machine import Record
from fencepost.logcore.marks import Marks
from fencepost.logcore.partition import Partition
from fencepost.protocol.api import KNOWN_APIS, ApiKey
from fencepost.tools.sweep.daemon import CountingWrappers
from fencepost.tools.sweep.points import (
    CountedEvent,
    CountedFileSystem,
    CountedLoop,
    CountedProtocol,
    EventCounter,
    KillMoment,
    KillPoint,
)
from fencepost.txn.records import decode

NAMED = frozenset(
    {
        ApiKey.PRODUCE,
        ApiKey.FETCH,
        ApiKey.INIT_PRODUCER_ID,
        ApiKey.ADD_PARTITIONS_TO_TXN,
        ApiKey.ADD_OFFSETS_TO_TXN,
        ApiKey.TXN_OFFSET_COMMIT,
        ApiKey.END_TXN,
        ApiKey.WRITE_TXN_MARKERS,
        ApiKey.ALTER_PARTITION,
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
    }
)
"""The requests of a transaction and its replication; the timing of all others varies."""

LAG_S = 0.02
"""Responses to followers are delayed, to detect a leader that does not wait for replication."""

_HEAD_BYTES = 64
"""Enough bytes for a request's header up to its client id."""

_BROKER = re.compile(r"^(?:broker|AddPartitionsManager-client)-(\d+)")
"""The client ids of brokers in requests to other brokers."""


class NamedCounter(EventCounter):
    """Counts each name separately, from the start of the process, as a restart has points too."""

    def __init__(self, point: KillPoint | None, die: Callable[[CountedEvent], None]) -> None:
        super().__init__(point, die)
        self._named: Counts[str] = Counts()
        self._done: list[str] = []
        """The log writes so far, with their numbers."""
        self._seen: dict[str, int] = {}
        """Name of a message → number of log writes before the last message of this name."""
        self.arm()

    def reset(self, point: KillPoint | None) -> None:
        """See :class:`EventCounter`."""
        self._named.clear()
        self._done, self._seen = [], {}
        super().reset(point)

    def before(self, event: CountedEvent) -> bool:
        """See :class:`EventCounter`."""
        if not self._armed:
            return False
        self._named[event.what] += 1
        self.events.append(event)
        if self._comes(KillMoment.BEFORE, event):
            self._die(event)
        return event.tearable and self._comes(KillMoment.TORN, event)

    def after(self, event: CountedEvent) -> None:
        """See :class:`EventCounter`."""
        if not self._armed:
            return
        if self._comes(KillMoment.AFTER, event):
            self._die(event)
        if event.what.startswith("write") and "/" not in event.what:  # a log
            self._done.append(f"{event.what} #{self._named[event.what]}")

    def message(self, api: int, name: str) -> list[CountedEvent]:
        """Return the events of a message; a fetch has an event per write since the last fetch."""
        if api not in NAMED:
            return []
        if api != ApiKey.FETCH:
            return [CountedEvent(name)]
        since, self._seen[name] = self._seen.get(name, 0), len(self._done)
        return [CountedEvent(f"{name} | {event}") for event in self._done[since:]]

    def _comes(self, where: KillMoment, event: CountedEvent) -> bool:
        wanted = self._point
        return (
            wanted is not None
            and wanted.where is where
            and wanted.kind == event.what
            and wanted.number == self._named[event.what]
        )


@dataclass(frozen=True)
class Naming(CountingWrappers):
    """See :class:`CountingWrappers`; ``ports`` maps each port to the broker that listens on it.

    ``bug`` is a key of :data:`BUGS`: a planted bug that a sweep must find.
    """

    ports: Mapping[int, int] = field(default_factory=dict)
    bug: str = ""

    def counter(self, point: KillPoint | None, die: Callable[[CountedEvent], None]) -> NamedCounter:
        """See :class:`CountingWrappers`; wraps the log class of this process."""
        counter = NamedCounter(point, die)
        _count_marks(counter)
        if self.bug:
            BUGS[self.bug]()
        return counter

    def file_system(self, root: str, counter: EventCounter) -> NamedFileSystem:
        """See :class:`CountingWrappers`."""
        return NamedFileSystem(root, counter)

    def loop(self, counter: EventCounter) -> NamedLoop:
        """See :class:`CountingWrappers`."""
        # A new class, because a broker makes a second loop of the same type for its heartbeats.
        own = {"counter": counter, "ports": self.ports}
        return type(NamedLoop.__name__, (NamedLoop,), own)()


def _wait_for_no_replica_of(topic: str) -> None:
    """Plant a bug: a topic's coordinators reply and act before their records are replicated."""
    after = Commits.after

    def rash(self: Commits, partitions: Iterable[Partition], callback: Callable[[], None]) -> bool:
        partitions = list(partitions)
        waits = getattr(getattr(callback, "func", None), "__self__", None)
        if isinstance(waits, ShardRuntime) and partitions[0].topic == topic:
            return False
        return after(self, partitions, callback)

    Commits.after = rash  # type: ignore[method-assign]


def _answer_markers_at_once() -> None:
    MarkerAppends.committed = lambda _: None  # type: ignore[method-assign]
    MarkerAppends.settle = lambda _: None  # type: ignore[method-assign]


BUGS: Mapping[str, Callable[[], None]] = {
    "decisions are not waited for": partial(_wait_for_no_replica_of, TRANSACTION_STATE),
    "offsets are not waited for": partial(_wait_for_no_replica_of, CONSUMER_OFFSETS),
    "markers are not waited for": _answer_markers_at_once,
}


def _count_marks(counter: EventCounter) -> None:
    """Make each move of a high watermark an event."""
    move = Marks.move_high_watermark

    def counted(self: Marks, offset: int) -> None:
        if not self.is_replicated or offset == getattr(self, "high_watermark", offset):
            move(self, offset)
            return
        event = CountedEvent(f"mark {self.name}")
        counter.before(event)
        move(self, offset)
        counter.after(event)

    Marks.move_high_watermark = counted  # type: ignore[method-assign]


class NamedFileSystem(CountedFileSystem):
    """Names writes to a log by the kinds of their records."""

    def named(self, path: str) -> str:
        """See :class:`CountedFileSystem`; all segments of a log have one name.

        A compacted log begins a new segment after each truncation, so the base offset would vary.
        """
        return re.sub(r"/\d{20}(?=\.)", "/segment", super().named(path))

    def writing(self, path: str, buffers: Sequence[ReadableBuffer]) -> CountedEvent:
        """See :class:`CountedFileSystem`."""
        if not path.endswith(".log"):
            return super().writing(path, buffers)
        partition = path.partition("/")[0]
        sorts = " ".join(dict.fromkeys(_sorts(partition, b"".join(buffers))))
        return CountedEvent(f"write {partition} {sorts}", tearable=True)


def _sorts(partition: str, data: bytes) -> Iterator[str]:
    for position, header in iter_headers(data):
        records = decode_records(data, position, header)
        if header.is_control:
            yield f"{parse_control(records[0]).type.name} marker"
        elif partition.startswith(TRANSACTION_STATE):
            for record in records:
                known = decode(Record(record.key or b"", record.value))
                yield "tombstone" if known is None or known.txn is None else known.txn.state.name
        elif partition.startswith(CONSUMER_OFFSETS):
            yield "offsets"
        else:
            yield "records"


# --- messages ---


class Heads:
    """Finds the boundaries of frames in a stream of bytes."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._left = 0

    def feed(self, data: ReadableBuffer) -> tuple[list[bytes], int]:
        """Return the beginnings of the frames whose header is now complete.

        The second value is the number of frames whose last byte is in ``data``.
        """
        begun: list[bytes] = []
        ended, at = 0, 0
        view = memoryview(data)
        while at < len(view):
            if self._left:
                taken = min(self._left, len(view) - at)
                self._left -= taken
                at += taken
                ended += not self._left
                continue
            wanted = 4
            if len(self._head) >= 4:
                size = int.from_bytes(self._head[:4], "big")
                wanted = 4 + min(size, _HEAD_BYTES)
            part = view[at : at + wanted - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) == wanted and wanted > 4:
                begun.append(bytes(self._head))
                self._left = 4 + size - wanted
                ended += not self._left
                self._head.clear()
        return begun, ended


def _request(head: bytes) -> tuple[int, int, str]:
    """Return API key, correlation id and client id of a request."""
    api, _, correlation, length = struct.unpack_from(">hhih", head, 4)
    return api, correlation, head[14 : 14 + max(0, length)].decode("utf-8", "replace")


class NamedTransport:
    """Reports each sent frame to the counter, before its first byte and after its last byte."""

    def __init__(
        self, transport: asyncio.Transport, counter: NamedCounter, name: Callable[[bytes], Any]
    ) -> None:
        """``name`` returns the events of a frame, from the frame's first bytes."""
        self._transport, self._counter, self._name = transport, counter, name
        self._heads = Heads()
        self._under_way: list[list[CountedEvent]] = []
        self.lag_s = 0.0
        """The delay of all writes in seconds."""

    def write(self, data: ReadableBuffer) -> None:
        """See :class:`asyncio.WriteTransport`."""
        if self.lag_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self.lag_s, self._write, bytes(data))
        else:
            self._write(data)

    def _write(self, data: ReadableBuffer) -> None:
        begun, ended = self._heads.feed(data)
        for head in begun:
            events = self._name(head)
            self._under_way.append(events)
            for event in events:
                self._counter.before(event)
        self._transport.write(data)
        for event in [event for events in self._under_way[:ended] for event in events]:
            self._counter.after(event)
        del self._under_way[:ended]

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See :class:`asyncio.BaseTransport`; hides the socket, so that no write bypasses it."""
        return default if name == "socket" else self._transport.get_extra_info(name, default)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class NamedProtocol(CountedProtocol):
    """Parses requests, to find the request that a response belongs to."""

    def __init__(self, inner: asyncio.BufferedProtocol, counter: NamedCounter) -> None:
        super().__init__(inner, counter)
        self._named, self._told = counter, inner
        self._heads = Heads()
        self._asked: dict[int, tuple[int, str]] = {}
        self._space = memoryview(b"")
        self._transport: NamedTransport | None = None
        self.get_buffer = self._where  # type: ignore[method-assign]
        self.buffer_updated = self._came  # type: ignore[method-assign]

    def _where(self, sizehint: int) -> memoryview:
        self._space = memoryview(self._told.get_buffer(sizehint))
        return self._space

    def _came(self, nbytes: int) -> None:
        for head in self._heads.feed(bytes(self._space[:nbytes]))[0]:
            api, correlation, client = _request(head)
            self._asked[correlation] = api, client
            if api == ApiKey.FETCH and _BROKER.match(client) and self._transport is not None:
                self._transport.lag_s = LAG_S
        self._space = memoryview(b"")
        self._told.buffer_updated(nbytes)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`CountedProtocol`."""
        named = NamedTransport(cast("asyncio.Transport", transport), self._named, self._name)
        self._transport = named
        self._told.connection_made(cast("asyncio.Transport", named))

    def _name(self, head: bytes) -> list[CountedEvent]:
        api, client = self._asked.pop(struct.unpack_from(">i", head, 4)[0], (-1, ""))
        known = _BROKER.match(client)
        if known is None:
            return [] if api == ApiKey.FETCH else self._named.message(api, f"answer {_title(api)}")
        return self._named.message(api, f"answer {_title(api)} to {known[1]}")


class NamedLoop(CountedLoop):
    """An event loop whose servers and clients report the frames that they send."""

    ports: Mapping[int, int]

    async def connect_accepted_socket(self, protocol_factory: Any, *args: Any, **more: Any) -> Any:
        """See :meth:`asyncio.loop.connect_accepted_socket`."""
        counter = cast("NamedCounter", self.counter)
        return await asyncio.SelectorEventLoop.connect_accepted_socket(
            self, lambda: NamedProtocol(protocol_factory(), counter), *args, **more
        )

    async def create_connection(self, *args: Any, **more: Any) -> Any:
        """See :meth:`asyncio.loop.create_connection`."""
        transport, protocol = await super().create_connection(*args, **more)
        counter = cast("NamedCounter", self.counter)
        port = transport.get_extra_info("peername")[1]
        to = f" of {self.ports[port]}" if port in self.ports else ""

        def name(head: bytes) -> list[CountedEvent]:
            api, _, _ = _request(head)
            return counter.message(api, f"ask {_title(api)}{to}")

        named = NamedTransport(transport, counter, name)
        return named, protocol


def _title(api: int) -> str:
    return KNOWN_APIS[api].name if api in KNOWN_APIS else str(api)
