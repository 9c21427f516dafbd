"""Watches of a controller: one for each znode, however often that is looked at.

ZooKeeper's watches fire once. Whoever looks asks for the next one, which may be there already.
"""

from __future__ import annotations

from collections.abc import Callable

Changed = Callable[[], object]


class Watches:
    """What is watched; it goes with the session, or with the office."""

    def __init__(self) -> None:
        self._armed: set[str] = set()

    def once(self, path: str, changed: Changed) -> Changed | None:
        """What to hand to ZooKeeper with the next look at a path; None if it is watched."""
        if path in self._armed:
            return None
        self._armed.add(path)

        def fired() -> None:
            self._armed.discard(path)
            changed()

        return fired

    def has(self, path: str) -> bool:
        """Whether a path is watched."""
        return path in self._armed
