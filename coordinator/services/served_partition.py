"""A share partition with its log, the fetches that wait for it, and its fetch lock."""

from __future__ import annotations

from typing import Protocol

from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.groups.share.partition import SharePartition
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.partition import Partition


class WaitingFetch(Protocol):
    """A fetch that waits for records of a share partition."""

    def wake(self) -> None:
        """Have the fetch try again, in another turn of the event loop."""


class ServedPartition:
    """A share partition, the log of its partition, and the fetches that wait for it."""

    def __init__(self, share: SharePartition, log: Partition) -> None:
        self.share = share
        self.log = log
        self.waiting: dict[WaitingFetch, None] = {}
        """In the order of their arrival."""
        self.has_missed = False
        """Whether a fetch found the fetch lock taken, and must be woken when it is free."""
        self.lock_timeouts = 0
        """The number of offsets whose acquisition locks have timed out."""
        self.lock_seconds = Histogram()
        """How long fetches have held the fetch lock: FetchLockTimeMs."""
        self._since_s = monotonic_s()
        self._locked_s = 0.0

    @property
    def age_s(self) -> float:
        """The seconds since the first fetch."""
        return monotonic_s() - self._since_s

    def take_fetch_lock(self, fetch: object) -> bool:
        """Take the fetch lock for ``fetch``; return False if another fetch holds it."""
        if self.share.take_fetch_lock(fetch):
            self._locked_s = monotonic_s()
            return True
        self.has_missed |= self.share.fetch_lock is not None
        return False

    def release_fetch_lock(self, fetch: object) -> None:
        """Release the fetch lock of ``fetch``; wake the fetches that found the lock taken."""
        if self.share.fetch_lock is not fetch:
            return
        self.share.release_fetch_lock(fetch)
        self.lock_seconds.note(monotonic_s() - self._locked_s)
        if self.has_missed:
            self.has_missed = False
            self.wake(besides=fetch)

    def wake(self, *, besides: object = None) -> None:
        """Have all waiting fetches except ``besides`` try again."""
        for fetch in tuple(self.waiting):
            if fetch is not besides:
                fetch.wake()
