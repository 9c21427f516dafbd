"""Accepting connections of a listening socket, a bounded number per turn of the event loop.

Without free file descriptors, asyncio's own server tries and logs a thousand failing accepts each
second. This listener pauses instead, and logs one line.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import structlog

from fencepost.coordinator.runtime.background import call_later
from fencepost.logcore.fs import handle_limit, held_handles

log = structlog.get_logger(__name__)

BACKLOG = 1024
"""The maximum number of connections that the kernel queues while the event loop is busy."""

ACCEPTED_PER_TURN = 64
"""The maximum number of connections accepted in one turn of the event loop."""

ACCEPT_PAUSE_MS = 100
"""The pause after a failed accept. The system lacks file descriptors or memory, so another accept
would fail immediately. Clients wait in the backlog."""


OWN_FILES = 16
"""The number of file descriptors that are kept free for short-lived files of the broker, such as a
file being trimmed or a module being imported, even if the logs use their whole reserve. At most a
quarter of the reserve is kept free."""


def first_reserved_file() -> int:
    """Return the lowest file descriptor that a connection must not have.

    The system assigns the lowest free descriptor. If a connection gets the returned descriptor or a
    higher one, the logs and short-lived files need all free descriptors.
    """
    limit, reserve = handle_limit()
    return limit - max(reserve - held_handles(), min(OWN_FILES, reserve // 4))


class Listener:
    """Accepts connections on ``listening``, a bound socket.

    ``arrived`` gets the client's socket and its address, as ``accept`` returns it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: socket.socket,
        arrived: Callable[[socket.socket, Any], object],
    ) -> None:
        self._loop = loop
        self._socket = listening
        self._arrived = arrived
        self._pause: asyncio.TimerHandle | None = None
        self._accept_failed = False
        """Whether accept has failed, and some clients have been waiting since then."""
        self._is_held = False
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._accept_on()

    @property
    def address(self) -> tuple[str, int]:
        """The address it listens on."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Stop accepting, and close the socket."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def hold(self, *, is_held: bool) -> None:
        """Pause or resume accepting; may be called from ``arrived``."""
        if is_held is self._is_held or self._socket.fileno() < 0:
            return
        self._is_held = is_held
        if self._pause is None:
            if is_held:
                self._loop.remove_reader(self._socket)
            else:
                self._loop.add_reader(self._socket, self._accept)

    def _accept_on(self) -> None:
        self._pause = None
        if not self._is_held:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            if self._is_held:
                return
            try:
                client, address = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                if self._accept_failed:
                    self._accept_failed = False
                    log.info("connections are accepted again")
                return
            except ConnectionAbortedError:
                continue  # The client has disconnected.
            except OSError as error:
                self._wait(error)
                return
            self._arrived(client, address)

    def _wait(self, error: OSError) -> None:
        """Pause accepting, since the socket would remain ready and each accept would fail."""
        if not self._accept_failed:
            self._accept_failed = True
            log.warning("no connection can be accepted", cause=str(error))
        self._loop.remove_reader(self._socket)
        self._pause = call_later(self._loop, ACCEPT_PAUSE_MS, "accept again", self._accept_on)
