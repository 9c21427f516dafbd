"""The controller's watches: at most one on each znode, even if the znode is read often.

A ZooKeeper watch fires once. A read sets a new watch, unless the previous watch has not fired yet.
"""

from __future__ import annotations

from collections.abc import Callable

Changed = Callable[[], object]


class ZnodeWatches:
    """The watches that are set. They end with the session, or when the controller resigns."""

    def __init__(self) -> None:
        self._armed: set[str] = set()

    def once(self, path: str, changed: Changed) -> Changed | None:
        """Return the watch to set with the next read of a path; None if a watch is already set."""
        if path in self._armed:
            return None
        self._armed.add(path)

        def fired() -> None:
            self._armed.discard(path)
            changed()

        return fired

    def has(self, path: str) -> bool:
        """Return whether a watch is set on a path."""
        return path in self._armed
