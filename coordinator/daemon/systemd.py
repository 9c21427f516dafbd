"""What systemd is told of a service of ``Type=notify``: that it serves, reloads, lives, stops.

Without ``NOTIFY_SOCKET`` in the environment nothing is told to anybody. The watchdog is fed by the
event loop, so that a loop that hangs is a service that hangs.

Source: sd_notify(3), systemd.service(5).
"""

from __future__ import annotations

import asyncio
import os
import socket

from fencepost.coordinator.runtime.background import call_later
from fencepost.logcore.clock import monotonic_ns

FEEDS_PER_WATCHDOG = 3
"""How often the watchdog is fed within the time after which it bites."""


class Notifier:
    """Tells the service manager of this process about it; a manager that is gone is no error."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._path = os.environ.get("NOTIFY_SOCKET", "")
        self._watchdog: asyncio.TimerHandle | None = None

    def ready(self, status: str) -> None:
        """The broker serves; from now on the watchdog is fed."""
        self._tell("READY=1", f"STATUS={status}")
        if self._watchdog is None and (wait_ms := _watchdog_ms()) is not None:
            self._feed(wait_ms / FEEDS_PER_WATCHDOG)

    def reloading(self) -> None:
        """The settings are read anew; :meth:`ready` follows."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The broker stops, which may take its time."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._tell("STOPPING=1", "WATCHDOG=1")

    def _feed(self, wait_ms: float) -> None:
        self._tell("WATCHDOG=1")
        self._watchdog = call_later(self._loop, wait_ms, "watchdog", lambda: self._feed(wait_ms))

    def _tell(self, *lines: str) -> None:
        if not self._path:
            return
        # A name in Linux's abstract space is written with @ and begins with a zero byte.
        address = f"\0{self._path[1:]}" if self._path.startswith("@") else self._path
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            try:
                sender.sendto("\n".join(lines).encode(), address)
            except OSError:
                return


def _watchdog_ms() -> float | None:
    """After how long without a word the manager ends this process; None if it does not."""
    text, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not text.isdecimal() or int(text) == 0 or pid not in {"", str(os.getpid())}:
        return None
    return int(text) / 1000
