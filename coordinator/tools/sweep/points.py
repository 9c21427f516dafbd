"""Crash points: between any two durable steps of the broker, and before any answer after one.

The file system and the event loop of the broker are wrapped, nothing in the broker itself knows of
it. A kill leaves what was written in the page cache, so the states that a kill can leave behind are
exactly those before and after each call of :class:`fencepost.logcore.fs.FileSystem`, and those in
the middle of a write.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import wraps
from pathlib import PurePath
from typing import Any, cast

from fencepost.logcore.fs import FileMap, OsFileSystem, ReadableBuffer
from fencepost.logcore.values import dataclass


class Where(StrEnum):
    """Where the kill falls, seen from an operation or an answer."""

    BEFORE = "before"
    TORN = "torn"
    """In the middle of a write: its first half is there."""
    AFTER = "after"
    ANSWER = "answer"
    """Before an answer: the first one after each durable operation, or every one."""


@dataclass(frozen=True, slots=True)
class Event:
    """A durable operation, or an answer."""

    what: str
    """``write __transaction_state-2/00000000000000000000.log``"""
    tearable: bool = False

    @property
    def is_answer(self) -> bool:
        """Whether it is an answer."""
        return self.what == ANSWER

    @property
    def kind(self) -> str:
        """One word for all partitions and files of a sort: ``write __transaction_state .log``."""
        action, _, path = self.what.partition(" ")
        if not path:
            return action
        pure = PurePath(path)
        # A file is known by its directory and its suffix, a directory by its name.
        name = pure.parent.name or pure.name
        sort = re.sub(r"-\d+$", "", name)
        suffix = pure.suffix if pure.parent.name else ""
        return f"{action} {sort or '.'} {suffix}".rstrip()


ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Point:
    """One place for a kill: the ``number``-th operation or answer, from 1 on, and its side."""

    where: Where
    number: int
    kind: str = ""
    """The kind of event that stood there when they were counted."""

    def __str__(self) -> str:
        return f"{self.where} {self.number}"


def points_of(events: Sequence[Event]) -> list[Point]:
    """All crash points of a run, in the order of their time."""
    found: list[Point] = []
    operations = answers = 0
    for event in events:
        if event.is_answer:
            answers += 1
            found.append(Point(Where.ANSWER, answers, event.kind))
            continue
        operations += 1
        found.append(Point(Where.BEFORE, operations, event.kind))
        if event.tearable:
            found.append(Point(Where.TORN, operations, event.kind))
        found.append(Point(Where.AFTER, operations, event.kind))
    return found


def spread(points: Sequence[Point], count: int) -> list[Point]:
    """``count`` of ``points``, evenly over the whole run, the first and the last among them."""
    if count >= len(points):
        return list(points)
    if count == 1:
        return [points[len(points) // 2]]
    step = (len(points) - 1) / (count - 1)
    return [points[round(index * step)] for index in range(count)]


class Counter:
    """Counts events from :meth:`arm` on and calls ``die`` at the chosen point.

    ``die`` gets the event, and does not return in a daemon. The disk is the same before each of
    several answers in a row, and what the clients know is not: ``every_answer`` counts them all,
    those of reads and heartbeats too.
    """

    def __init__(
        self, point: Point | None, die: Callable[[Event], None], *, every_answer: bool = False
    ) -> None:
        self.events: list[Event] = []
        self._point = point
        self._die = die
        self._every_answer = every_answer
        self._armed = False
        self._operations = 0
        self._answers = 0
        self._unanswered = False

    def arm(self) -> None:
        """Count from now on."""
        self._armed = True

    def begin_anew(self, point: Point | None) -> None:
        """Forget what was counted, and count from now on to another point."""
        self.events = []
        self._operations = self._answers = 0
        self._unanswered = False
        self._point = point
        self._armed = True

    def disarm(self) -> None:
        """Count no more; the point can not be reached any more."""
        self._armed = False

    def before(self, event: Event) -> bool:
        """An operation is about to happen. True: by half, and then :meth:`torn` is to be called."""
        if not self._armed:
            return False
        self._operations += 1
        self.events.append(event)
        if self._is(Where.BEFORE, self._operations):
            self._die(event)
        return event.tearable and self._is(Where.TORN, self._operations)

    def after(self, event: Event) -> None:
        """The operation has happened."""
        if not self._armed:
            return
        self._unanswered = True
        if self._is(Where.AFTER, self._operations):
            self._die(event)

    def torn(self, event: Event) -> None:
        """Half of the operation has happened."""
        self._die(event)

    def answer(self) -> None:
        """Bytes are about to go to a client."""
        if not self._armed or not (self._unanswered or self._every_answer):
            return
        self._unanswered = False
        self._answers += 1
        event = Event(ANSWER)
        self.events.append(event)
        if self._is(Where.ANSWER, self._answers):
            self._die(event)

    def _is(self, where: Where, number: int) -> bool:
        return (
            self._point is not None and self._point.where is where and self._point.number == number
        )


class CountedMap:
    """A mapped file: a store into it is as durable against a kill as a write."""

    def __init__(self, mapped: FileMap, path: str, counter: Counter) -> None:
        self._mapped = mapped
        self._path = path
        self._counter = counter

    def __getitem__(self, key: slice) -> bytes:
        return self._mapped[key]

    def __setitem__(self, key: slice, value: bytes) -> None:
        event = Event(f"store {self._path}", tearable=len(value) > 1)
        if self._counter.before(event):
            half = len(value) // 2
            self._mapped[key.start : key.start + half] = bytes(value[:half])
            self._counter.torn(event)
        self._mapped[key] = value
        self._counter.after(event)

    def flush(self) -> None:
        """See :class:`FileMap`."""
        event = Event(f"flush {self._path}")
        self._counter.before(event)
        self._mapped.flush()
        self._counter.after(event)

    def close(self) -> None:
        """See :class:`FileMap`."""
        self._mapped.close()


def _counted(action: str, method: Callable[..., None], *, place: int = 0) -> Any:
    """A ``method`` of the file system as a durable step; argument ``place`` is its file or path."""

    @wraps(method)
    def step(self: CountedFileSystem, *args: Any) -> None:
        what = args[place]
        name = self.paths[what] if isinstance(what, int) else self.named(what)
        event = Event(f"{action} {name}")
        self.counter.before(event)
        method(self, *args)
        self.counter.after(event)

    return step


class CountedFileSystem(OsFileSystem):
    """The operating system's, with every durable step counted."""

    def __init__(self, root: str, counter: Counter) -> None:
        self._root = root.rstrip("/") + "/"
        self.counter = counter
        self.paths: dict[int, str] = {}
        """The files that were opened, by handle."""

    def named(self, path: str) -> str:
        """A path as events have it."""
        return path.removeprefix(self._root) if path + "/" != self._root else "."

    def open(self, path: str, *, create: bool = False) -> int:
        """See :class:`FileSystem`."""
        event = Event(f"create {self.named(path)}")
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

    def writing(self, path: str, buffers: Sequence[ReadableBuffer]) -> Event:  # noqa: ARG002 - others name them by it
        """The event of a write."""
        return Event(f"write {path}", tearable=True)

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
    """A transport that says when an answer is about to leave."""

    def __init__(self, transport: asyncio.Transport, counter: Counter) -> None:
        self._transport = transport
        self._counter = counter

    def write(self, data: ReadableBuffer) -> None:
        """See :class:`asyncio.WriteTransport`."""
        self._counter.answer()
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class CountedProtocol(asyncio.BufferedProtocol):
    """Stands between the loop and a connection to hand it a :class:`CountedTransport`."""

    def __init__(self, inner: asyncio.BufferedProtocol, counter: Counter) -> None:
        self._inner = inner
        self._counter = counter
        self.get_buffer = inner.get_buffer  # type: ignore[method-assign]
        self.buffer_updated = inner.buffer_updated  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]
        self.connection_lost = inner.connection_lost  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hand on the transport, wrapped."""
        wrapped = CountedTransport(cast("asyncio.Transport", transport), self._counter)
        self._inner.connection_made(cast("asyncio.Transport", wrapped))


class CountedLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers count their answers."""

    counter: Counter

    async def connect_accepted_socket(self, protocol_factory: Any, *args: Any, **more: Any) -> Any:
        """See :meth:`asyncio.loop.connect_accepted_socket`."""
        return await super().connect_accepted_socket(
            lambda: CountedProtocol(protocol_factory(), self.counter), *args, **more
        )
