"""Notes of changes under a znode: whoever changes something leaves one, and everybody looks at it.

Source: ``ZkNodeChangeNotificationListener``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from fencepost.coordinator.zookeeper.session import Delete, RefusedError, Session

if TYPE_CHECKING:
    from fencepost.logcore.clock import Clock

KEPT_MS: Final = 900_000
"""Notes are removed after 15 minutes (kafka: ``changeExpirationMs``)."""

LOOKED_AT: Final = 10
"""Notes whose age is looked at in one go."""


class Note(NamedTuple):
    """One of them."""

    name: str
    path: str
    data: bytes


class Notes:
    """Those in ``folder``, and which of them this broker has gone by already."""

    def __init__(self, session: Session, clock: Clock, folder: str) -> None:
        self.folder = folder
        self._session, self._clock = session, clock
        self._names: list[str] = []
        self._seen: set[str] = set()

    async def skip(self) -> None:
        """All that are there by now are known: what they are about is yet to be read."""
        self._seen = set(await self._session.children(self.folder))

    async def new(self, changed: Callable[[], object] | None = None) -> list[Note]:
        """Those that are not known yet, in their order; ``changed`` is called when there are more.

        :meth:`went_by` has to follow.
        """
        self._names = await self._session.children(self.folder, changed)
        found = []
        for name in self._names:
            if name not in self._seen:
                path = f"{self.folder}/{name}"
                node = await self._session.get(path)
                if node is not None:
                    found.append(Note(name, path, node.data))
        return found

    async def went_by(self, notes: Iterable[Note]) -> None:
        """Know these, and remove some that everybody must have seen."""
        self._seen |= {one.name for one in notes}
        self._seen &= set(self._names)
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
