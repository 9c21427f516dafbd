"""Notifications to systemd about a service of ``Type=notify``: ready, reloading, alive, stopping.

Without ``NOTIFY_SOCKET`` in the environment nothing is sent. The event loop feeds the watchdog, so
a hanging loop is reported as a hanging service.

Source: sd_notify(3), systemd.service(5).
"""

from __future__ import annotations

import asyncio
import os

from fencepost.coordinator.runtime.background import call_later
from fencepost.logcore.clock import monotonic_ns
from fencepost.logcore.system import local_datagram_socket

FEEDS_PER_WATCHDOG = 3
"""How often the watchdog is fed within its timeout."""


class Notifier:
    """Notifies the service manager of this process; errors in sending are ignored."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._path = os.environ.get("NOTIFY_SOCKET", "")
        self._watchdog: asyncio.TimerHandle | None = None

    def ready(self, status: str) -> None:
        """Report that the broker serves, and start feeding the watchdog."""
        self._notify("READY=1", f"STATUS={status}")
        if self._watchdog is None and (wait_ms := _watchdog_ms()) is not None:
            self._send_watchdog(wait_ms / FEEDS_PER_WATCHDOG)

    def reloading(self) -> None:
        """Report that the settings are being reloaded; :meth:`ready` follows."""
        self._notify("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Report that the broker stops; feed the watchdog once more to leave enough time."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._notify("STOPPING=1", "WATCHDOG=1")

    def _send_watchdog(self, wait_ms: float) -> None:
        self._notify("WATCHDOG=1")
        self._watchdog = call_later(
            self._loop, wait_ms, "watchdog", lambda: self._send_watchdog(wait_ms)
        )

    def _notify(self, *lines: str) -> None:
        if not self._path or (sock := local_datagram_socket()) is None:
            return
        # A name in Linux's abstract space is written with @ and begins with a zero byte.
        address = f"\0{self._path[1:]}" if self._path.startswith("@") else self._path
        with sock as sender:
            try:
                sender.sendto("\n".join(lines).encode(), address)
            except OSError:
                return


def _watchdog_ms() -> float | None:
    """Return the watchdog's timeout in milliseconds; None if the manager set none."""
    text, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not text.isdecimal() or int(text) == 0 or pid not in {"", str(os.getpid())}:
        return None
    return int(text) / 1000
