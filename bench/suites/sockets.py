"""Ways in which a server can send a part of a file over a socket, as in a Fetch response.

A server in this process sends responses of 1 MiB, each with a small header, to a child process that
only reads them. The wall-clock time covers both ends and the loopback; the processor time is only
the server's.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.suite import Figures, Local, Suite

ANSWER_BYTES = 1 << 20
HEADER = bytes(64)
FILE_BYTES = 64 << 20
TOTAL_BYTES = 2 << 30
"""Bytes sent in each way; the file stays in the page cache."""


class Source:
    """The file, and the position of the next response."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(os.urandom(FILE_BYTES))
        self.handle = os.open(path, os.O_RDONLY)
        self.map = mmap.mmap(self.handle, FILE_BYTES, prot=mmap.PROT_READ)
        self.view = memoryview(self.map)
        self._at = 0

    def next(self) -> int:
        at = self._at
        self._at = (at + ANSWER_BYTES) % FILE_BYTES
        return at

    def read(self) -> bytes:
        return os.pread(self.handle, ANSWER_BYTES, self.next())

    def close(self) -> None:
        self.view.release()
        self.map.close()
        os.close(self.handle)


class Sender(asyncio.Protocol):
    """Writes responses through the transport, and waits when that is paused."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.connected = asyncio.get_running_loop().create_future()
        self.free = asyncio.Event()
        self.free.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.connected.set_result(None)

    def pause_writing(self) -> None:
        self.free.clear()

    def resume_writing(self) -> None:
        self.free.set()


Send = Callable[[asyncio.Transport, Source], None]


def _mapped(transport: asyncio.Transport, source: Source) -> None:
    at = source.next()
    transport.write(HEADER)
    transport.write(source.view[at : at + ANSWER_BYTES])


def _apart(transport: asyncio.Transport, source: Source) -> None:
    data = source.read()
    transport.write(HEADER)
    transport.write(data)


def _joined(transport: asyncio.Transport, source: Source) -> None:
    transport.write(HEADER + source.read())


def _lines(transport: asyncio.Transport, source: Source) -> None:
    transport.writelines([HEADER, source.read()])


def through_transport(send: Send) -> Callable[[Path], Figures]:
    async def serve(sock: socket.socket, source: Source) -> None:
        loop = asyncio.get_running_loop()
        _, sender = await loop.connect_accepted_socket(Sender, sock)
        sender.transport.set_write_buffer_limits(high=ANSWER_BYTES)
        for _ in range(TOTAL_BYTES // ANSWER_BYTES):
            await sender.free.wait()
            send(sender.transport, source)
            await asyncio.sleep(0)
        sender.transport.set_write_buffer_limits(high=0)
        await sender.free.wait()
        sender.transport.close()

    return lambda home: _measure(home, serve)


async def _sendfile_by_hand(sock: socket.socket, source: Source) -> None:
    """Send with ``os.sendfile`` on the socket itself, waiting until it is writable."""
    loop = asyncio.get_running_loop()
    for _ in range(TOTAL_BYTES // ANSWER_BYTES):
        await loop.sock_sendall(sock, HEADER)
        at, left = source.next(), ANSWER_BYTES
        while left:
            try:
                sent = os.sendfile(sock.fileno(), source.handle, at, left)
            except BlockingIOError:
                await _writable(loop, sock)
                continue
            at, left = at + sent, left - sent
        await asyncio.sleep(0)


async def _writable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready = loop.create_future()
    loop.add_writer(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(sock)


async def _loop_sendfile(sock: socket.socket, source: Source) -> None:
    loop = asyncio.get_running_loop()
    transport, sender = await loop.connect_accepted_socket(Sender, sock)
    with os.fdopen(os.dup(source.handle), "rb") as file:
        for _ in range(TOTAL_BYTES // ANSWER_BYTES):
            transport.write(HEADER)
            await loop.sendfile(transport, file, source.next(), ANSWER_BYTES)
    transport.set_write_buffer_limits(high=0)
    await sender.free.wait()
    transport.close()


def _take(port: int) -> None:
    """Read and discard, at the other end."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        room = bytearray(ANSWER_BYTES)
        while sock.recv_into(room):
            pass


def _measure(home: Path, serve: Callable[[socket.socket, Source], Awaitable[None]]) -> Figures:
    source = Source(home / "file")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        context = multiprocessing.get_context("spawn")
        taker = context.Process(target=_take, args=(listener.getsockname()[1],))
        taker.start()
        sock, _ = listener.accept()
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    processor, begin = time.process_time(), time.perf_counter()
    asyncio.run(serve(sock, source))
    sock.close()
    taker.join(60)
    seconds, processor = time.perf_counter() - begin, time.process_time() - processor
    source.close()
    return {
        "throughput (MB/s)": TOTAL_BYTES / 1e6 / seconds,
        "CPU time of the sender per GB (ms)": processor / (TOTAL_BYTES / 1e9) * 1e3,
    }


SOCKETS = Suite(
    "sockets",
    "Responses of 1 MiB, each with a header, from a file in the page cache to a loopback socket.",
    (
        Local("mmap and two calls of transport.write", through_transport(_mapped)),
        Local("os.sendfile on the raw socket", lambda home: _measure(home, _sendfile_by_hand)),
        Local("os.pread and two calls of transport.write", through_transport(_apart)),
        Local("loop.sendfile", lambda home: _measure(home, _loop_sendfile)),
        Local("os.pread and one call of transport.write", through_transport(_joined)),
        Local("os.pread and transport.writelines", through_transport(_lines)),
    ),
)
