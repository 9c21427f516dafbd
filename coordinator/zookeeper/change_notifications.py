"""Change notifications: sequential znodes by which one broker tells the others of a change.

Source: ``ZkNodeChangeNotificationListener``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from fencepost.coordinator.zookeeper.session import Delete, RefusedError, ZkSession

if TYPE_CHECKING:
    from fencepost.logcore.clock import Clock

KEPT_MS: Final = 900_000
"""The age at which notifications are removed: 15 minutes (kafka: ``changeExpirationMs``)."""

LOOKED_AT: Final = 10
"""The maximum number of notifications whose age one call checks."""


class ChangeNotification(NamedTuple):
    """A change notification."""

    name: str
    path: str
    data: bytes


class ChangeNotifications:
    """The notifications in ``folder``, and which of them this broker has handled."""

    def __init__(self, session: ZkSession, clock: Clock, folder: str) -> None:
        self.folder = folder
        self._session, self._clock = session, clock
        self._names: list[str] = []
        self._handled: set[str] = set()

    async def skip(self) -> None:
        """Ignore all existing notifications; the caller reads all changed znodes afterwards."""
        self._handled = set(await self._session.children(self.folder))

    async def new(self, changed: Callable[[], object] | None = None) -> list[ChangeNotification]:
        """Return unhandled notifications in order; ``changed`` is called when more arrive.

        The caller must handle the notifications, and then call :meth:`mark_handled`.
        """
        self._names = await self._session.children(self.folder, changed)
        notifications = []
        for name in self._names:
            if name not in self._handled:
                path = f"{self.folder}/{name}"
                node = await self._session.get(path)
                if node is not None:
                    notifications.append(ChangeNotification(name, path, node.data))
        return notifications

    async def mark_handled(self, notes: Iterable[ChangeNotification]) -> None:
        """Mark ``notes`` as handled, and remove expired notifications."""
        self._handled |= {note.name for note in notes}
        self._handled &= set(self._names)
        now_ms = self._clock.now_ms()
        for name in self._names[:LOOKED_AT]:
            path = f"{self.folder}/{name}"
            note = await self._session.get(path)
            if note is not None and now_ms - note.ctime_ms > KEPT_MS:
                try:
                    await self._session.do([Delete(path)])
                except RefusedError as refused:
                    if not refused.is_passing:
                        raise
