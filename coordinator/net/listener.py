"""Taking new connections off a listening socket, a bounded number a turn of the loop.

asyncio's own way logs every single attempt that finds no file descriptor, a thousand of them in a
row, and again each second. Here nothing is accepted for a moment then, and one line tells of it.
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
"""Connections that the kernel may hold for us while the loop is busy."""

ACCEPTED_PER_TURN = 64
"""Connections taken from the kernel before others get their turn."""

ACCEPT_PAUSE_MS = 100
"""How long nothing is accepted after the system refused to: it has no descriptor left, or no
memory, and would say so again at once. Clients wait in the backlog."""


OWN_FILES = 16
"""File descriptors that no connection gets even where the logs keep all of theirs, or a quarter of
the reserve if that is less: for what the broker holds for a moment, such as a file that is trimmed
or a module that is loaded at its first use."""


def first_reserved_file() -> int:
    """The file number from which on descriptors are for the logs, less what those keep already.

    The system gives out the lowest free number: a high one means that few are left.
    """
    limit, reserve = handle_limit()
    return limit - max(reserve - held_handles(), min(OWN_FILES, reserve // 4))


class Listener:
    """Accepts what comes to ``listening``, a bound socket.

    ``arrived`` gets the client's socket and its address, the latter as ``accept`` returns it.
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
        self._is_short = False
        """Whether the system has refused, and some clients still wait since then."""
        self._is_held = False
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._accept_on()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Accept nothing more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def hold(self, *, is_held: bool) -> None:
        """Accept nothing from now on, or accept again; may be called while something arrives."""
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
                if self._is_short:
                    self._is_short = False
                    log.info("connections are accepted again")
                return
            except ConnectionAbortedError:
                continue  # That client went away.
            except OSError as error:
                self._wait(error)
                return
            self._arrived(client, address)

    def _wait(self, error: OSError) -> None:
        """Accept nothing for a moment, during which the socket would be ready all the time."""
        if not self._is_short:
            self._is_short = True
            log.warning("no connection can be accepted", cause=str(error))
        self._loop.remove_reader(self._socket)
        self._pause = call_later(self._loop, ACCEPT_PAUSE_MS, "accept again", self._accept_on)
