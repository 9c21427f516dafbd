"""Crash points: before and after each durable operation of a broker, and before responses.

The broker's file system and event loop are wrapped; the broker itself is unchanged. A SIGKILL
leaves writes in the page cache, so the possible states after it are exactly those before and after
each call of :class:`fencepost.logcore.fs.FileSystem`, and those in the middle of a write.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import wraps
from pathlib import PurePath
from typing import Any, cast

from fencepost.logcore.fs import FileMap, OsFileSystem
from fencepost.logcore.system import ReadableBuffer
from fencepost.logcore.values import dataclass


class KillMoment(StrEnum):
    """The position of the kill relative to an operation or a response."""

    BEFORE = "before"
    TORN = "torn"
    """In the middle of a write: its first half is written."""
    AFTER = "after"
    ANSWER = "answer"
    """Before a response: the first one after each durable operation, or every one."""


@dataclass(frozen=True, slots=True)
class CountedEvent:
    """A durable operation, or a response."""

    what: str
    """For example ``write __transaction_state-2/00000000000000000000.log``."""
    tearable: bool = False

    @property
    def is_answer(self) -> bool:
        """Whether the event is a response."""
        return self.what == ANSWER

    @property
    def kind(self) -> str:
        """The kind of event, without partition and offset: ``write __transaction_state .log``."""
        action, _, path = self.what.partition(" ")
        if not path:
            return action
        pure = PurePath(path)
        # A file is identified by its directory and its suffix, a directory by its name.
        name = pure.parent.name or pure.name
        sort = re.sub(r"-\d+$", "", name)
        suffix = pure.suffix if pure.parent.name else ""
        return f"{action} {sort or '.'} {suffix}".rstrip()


ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class KillPoint:
    """A place for a kill, relative to the ``number``-th operation or response, counted from 1."""

    where: KillMoment
    number: int
    kind: str = ""
    """The kind that the event of this number had in the counting run."""

    def __str__(self) -> str:
        return f"{self.where} {self.number}"


def points_of(events: Sequence[CountedEvent]) -> list[KillPoint]:
    """Return all crash points of a run, in order of time."""
    points: list[KillPoint] = []
    operations = answers = 0
    for event in events:
        if event.is_answer:
            answers += 1
            points.append(KillPoint(KillMoment.ANSWER, answers, event.kind))
            continue
        operations += 1
        points.append(KillPoint(KillMoment.BEFORE, operations, event.kind))
        if event.tearable:
            points.append(KillPoint(KillMoment.TORN, operations, event.kind))
        points.append(KillPoint(KillMoment.AFTER, operations, event.kind))
    return points


def spread(points: Sequence[KillPoint], count: int) -> list[KillPoint]:
    """Return ``count`` of ``points``, evenly spread, including the first and the last."""
    if count >= len(points):
        return list(points)
    if count == 1:
        return [points[len(points) // 2]]
    step = (len(points) - 1) / (count - 1)
    return [points[round(index * step)] for index in range(count)]


class EventCounter:
    """Counts events from :meth:`arm` on, and calls ``die`` at the chosen point.

    ``die`` gets the event, and does not return in a daemon. Only the first response after a durable
    operation is counted, as later ones do not change the state on disk. With ``every_answer`` they
    are counted too, because they change what clients know.
    """

    def __init__(
        self,
        point: KillPoint | None,
        die: Callable[[CountedEvent], None],
        *,
        every_answer: bool = False,
    ) -> None:
        self.events: list[CountedEvent] = []
        self._point = point
        self._die = die
        self._every_answer = every_answer
        self._armed = False
        self._operations = 0
        self._answers = 0
        self._unanswered = False

    def arm(self) -> None:
        """Start counting."""
        self._armed = True

    def reset(self, point: KillPoint | None) -> None:
        """Restart the count, with another crash point."""
        self.events = []
        self._operations = self._answers = 0
        self._unanswered = False
        self._point = point
        self._armed = True

    def disarm(self) -> None:
        """Stop counting; the point can no longer be reached."""
        self._armed = False

    def before(self, event: CountedEvent) -> bool:
        """Count an operation before it happens.

        If this returns True, the caller does half of the operation and then calls :meth:`torn`.
        """
        if not self._armed:
            return False
        self._operations += 1
        self.events.append(event)
        if self._is(KillMoment.BEFORE, self._operations):
            self._die(event)
        return event.tearable and self._is(KillMoment.TORN, self._operations)

    def after(self, event: CountedEvent) -> None:
        """Note that the operation has happened."""
        if not self._armed:
            return
        self._unanswered = True
        if self._is(KillMoment.AFTER, self._operations):
            self._die(event)

    def torn(self, event: CountedEvent) -> None:
        """Die after half of the operation."""
        self._die(event)

    def answer(self) -> None:
        """Count a response before its bytes are sent."""
        if not self._armed or not (self._unanswered or self._every_answer):
            return
        self._unanswered = False
        self._answers += 1
        event = CountedEvent(ANSWER)
        self.events.append(event)
        if self._is(KillMoment.ANSWER, self._answers):
            self._die(event)

    def _is(self, where: KillMoment, number: int) -> bool:
        return (
            self._point is not None and self._point.where is where and self._point.number == number
        )


class CountedMap:
    """A memory-mapped file that counts stores: like a write, a store survives a SIGKILL."""

    def __init__(self, mapped: FileMap, path: str, counter: EventCounter) -> None:
        self._mapped = mapped
        self._path = path
        self._counter = counter

    def __getitem__(self, key: slice) -> bytes:
        return self._mapped[key]

    def __setitem__(self, key: slice, value: bytes) -> None:
        event = CountedEvent(f"store {self._path}", tearable=len(value) > 1)
        if self._counter.before(event):
            half = len(value) // 2
            self._mapped[key.start : key.start + half] = bytes(value[:half])
            self._counter.torn(event)
        self._mapped[key] = value
        self._counter.after(event)

    def flush(self) -> None:
        """See :class:`FileMap`."""
        event = CountedEvent(f"flush {self._path}")
        self._counter.before(event)
        self._mapped.flush()
        self._counter.after(event)

    def close(self) -> None:
        """See :class:`FileMap`."""
        self._mapped.close()


def _counted(action: str, method: Callable[..., None], *, place: int = 0) -> Any:
    """Wrap a ``method`` as a durable operation; the argument at ``place`` is its handle or path."""

    @wraps(method)
    def step(self: CountedFileSystem, *args: Any) -> None:
        what = args[place]
        name = self.paths[what] if isinstance(what, int) else self.named(what)
        event = CountedEvent(f"{action} {name}")
        self.counter.before(event)
        method(self, *args)
        self.counter.after(event)

    return step


class CountedFileSystem(OsFileSystem):
    """The operating system's file system, with every durable operation counted."""

    def __init__(self, root: str, counter: EventCounter) -> None:
        self._root = root.rstrip("/") + "/"
        self.counter = counter
        self.paths: dict[int, str] = {}
        """The paths of opened files, by handle."""

    def named(self, path: str) -> str:
        """Return a path as it appears in events."""
        return path.removeprefix(self._root) if path + "/" != self._root else "."

    def open(self, path: str, *, create: bool = False) -> int:
        """See :class:`FileSystem`."""
        event = CountedEvent(f"create {self.named(path)}")
        if create:
            self.counter.before(event)
        handle = super().open(path, create=create)
        if create:
            self.counter.after(event)
        self.paths[handle] = self.named(path)
        return handle

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        """See :class:`FileSystem`."""
        event = self.writing(self.paths[handle], buffers)
        if self.counter.before(event):
            whole = b"".join(buffers)
            super().write(handle, (whole[: len(whole) // 2],), position)
            self.counter.torn(event)
        written = super().write(handle, buffers, position)
        self.counter.after(event)
        return written

    def writing(self, path: str, buffers: Sequence[ReadableBuffer]) -> CountedEvent:  # noqa: ARG002 - for overrides
        """Return the event of a write."""
        return CountedEvent(f"write {path}", tearable=True)

    truncate = _counted("truncate", OsFileSystem.truncate)
    allocate = _counted("allocate", OsFileSystem.allocate)
    sync = _counted("sync", OsFileSystem.sync)

    def map(self, handle: int, size: int) -> FileMap:
        """See :class:`FileSystem`."""
        return CountedMap(super().map(handle, size), self.paths[handle], self.counter)

    rename = _counted("rename", OsFileSystem.rename, place=1)
    remove = _counted("remove", OsFileSystem.remove)
    remove_tree = _counted("remove", OsFileSystem.remove_tree)
    make_directory = _counted("mkdir", OsFileSystem.make_directory)
    sync_directory = _counted("sync", OsFileSystem.sync_directory)


class CountedTransport:
    """A transport that counts responses before they are sent."""

    def __init__(self, transport: asyncio.Transport, counter: EventCounter) -> None:
        self._transport = transport
        self._counter = counter

    def write(self, data: ReadableBuffer) -> None:
        """See :class:`asyncio.WriteTransport`."""
        self._counter.answer()
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class CountedProtocol(asyncio.BufferedProtocol):
    """A protocol that gives the wrapped protocol a :class:`CountedTransport`."""

    def __init__(self, inner: asyncio.BufferedProtocol, counter: EventCounter) -> None:
        self._inner = inner
        self._counter = counter
        self.get_buffer = inner.get_buffer  # type: ignore[method-assign]
        self.buffer_updated = inner.buffer_updated  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]
        self.connection_lost = inner.connection_lost  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the transport to the inner protocol, wrapped so that responses are counted."""
        wrapped = CountedTransport(cast("asyncio.Transport", transport), self._counter)
        self._inner.connection_made(cast("asyncio.Transport", wrapped))


class CountedLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers count their responses."""

    counter: EventCounter

    async def connect_accepted_socket(self, protocol_factory: Any, *args: Any, **more: Any) -> Any:
        """See :meth:`asyncio.loop.connect_accepted_socket`."""
        return await super().connect_accepted_socket(
            lambda: CountedProtocol(protocol_factory(), self.counter), *args, **more
        )
