"""The marks of a log (high watermark, flushed end, recovery point, log start), and its failures.

After an error of the file system, the end of the file is unknown: the log goes off line with a
:class:`StorageError`, which every later call raises, and the next start recovers the log. A full
disk is different: the operation is undone and raises :class:`NoSpaceError`, and the log stays on
line.

Source: ``UnifiedLog``, ``Partition``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fencepost.logcore.config import MAX_INT64
from fencepost.logcore.errors import NoSpaceError, StorageError
from fencepost.logcore.fs import NO_HANDLES, NO_ROOM
from fencepost.logcore.index import CorruptIndexError
from fencepost.logcore.producers import ProducerStateManager
from fencepost.logcore.recovery import LoadedLog
from fencepost.logcore.tracebacks import without_traceback

STORAGE_FAILURES: Final = (OSError, CorruptIndexError)
"""Errors that put a log off line."""


class Marks:
    """The marks of one log, which all classes of the log share, and listeners for changes."""

    def __init__(
        self,
        name: str,
        loaded: LoadedLog,
        producers: ProducerStateManager,
        *,
        leader_epoch: int,
        high_watermark: int | None = None,
    ) -> None:
        """``high_watermark``: the last known one of a replicated log; None for a single replica."""
        self.name = name
        """Topic and index, for log lines and error messages."""
        self._producers = producers
        self.leader_epoch = leader_epoch
        """The partition's current leader epoch; no batch of the log has a newer one."""
        self.log_start_offset = loaded.log_start_offset
        """The first readable offset."""
        self.recovery_point = loaded.recovery_point
        """The offset below which everything survives power loss."""
        self.recovery_limit = MAX_INT64
        """An upper bound of the recovery point: the offset of a planned truncation, if any."""
        self._listeners: dict[int, Callable[[], None]] = {}
        self._next_listener = 0
        self.stopped: StorageError | None = None
        """Raised by every call, once the log is closed, deleted or off line."""
        self.offline: StorageError | None = None
        """Why the log is off line; None while it is on line and after a clean close."""
        self.on_offline: Callable[[StorageError], None] | None = None
        """Called once, with the cause, when the file system fails under the log."""
        self.is_replicated = high_watermark is not None
        """Whether other replicas or the leader determine the high watermark."""
        self.on_flushed_end: Callable[[int], None] | None = None
        """Called after a replicated log's :attr:`flushed_end` moves, before :meth:`notify`."""
        self.move_flushed_end(loaded.log.log_end_offset)
        if high_watermark is not None:
            self.replicate(high_watermark)

    def move_flushed_end(self, offset: int) -> None:
        """Move :attr:`flushed_end` to ``offset``; :meth:`notify` must follow.

        Without other replicas, the high watermark moves to the same offset.
        """
        self.flushed_end = offset
        """This replica's end in the computation of the high watermark: the log end offset, or the
        flushed offset while a flush that ``flush.messages`` has made due is running."""
        if not self.is_replicated:
            self.move_high_watermark(offset)
        elif self.on_flushed_end is not None:
            self.on_flushed_end(offset)

    def replicate(self, high_watermark: int) -> None:
        """Let other replicas determine the high watermark from now on; :meth:`notify` must follow.

        The high watermark becomes the given value, limited to the log.
        """
        self.is_replicated = True
        self.move_high_watermark(max(self.log_start_offset, min(high_watermark, self.flushed_end)))

    def end_replication(self) -> None:
        """Move the high watermark with :attr:`flushed_end` again; :meth:`notify` must follow."""
        self.is_replicated, self.on_flushed_end = False, None
        self.move_high_watermark(self.flushed_end)

    def move_high_watermark(self, offset: int) -> None:
        """Show readers the log up to ``offset``; :meth:`notify` must follow."""
        self.high_watermark = offset
        """The offset below which all replicas in the ISR have the log; consumers read up to it."""
        self._producers.high_watermark_moved(offset)

    @property
    def last_stable_offset(self) -> int:
        """The offset below which no transaction is open; the limit of ``READ_COMMITTED``."""
        stable = self._producers.last_stable_offset(self.high_watermark)
        return max(stable, self.log_start_offset)

    # --- listeners ---

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` after each change of the marks; return a function to unsubscribe.

        It is called after appends, markers, truncations and a deletion, and when the log goes off
        line. The callback must not append to this log.
        """
        token = self._next_listener
        self._next_listener += 1
        self._listeners[token] = callback

        def unsubscribe() -> None:
            self._listeners.pop(token, None)

        return unsubscribe

    def notify(self) -> None:
        """Call all listeners."""
        for callback in tuple(self._listeners.values()):
            callback()

    # --- the end ---

    def fail(self, error: Exception) -> StorageError:
        """Go off line: only recovery can tell what is on disk."""
        failure = StorageError(f"{self.name} is off line: {error}")
        if self.stopped is None:
            self.offline = self.stopped = failure
            if self.on_offline is not None:
                self.on_offline(failure)
            self.notify()
        return failure

    def refuse(self, error: Exception) -> StorageError:
        """Return the exception for a failure; go off line, unless the failure had no effect.

        A full disk and the limit of open files have no effect on the log.
        """
        if isinstance(error, OSError) and error.errno in NO_ROOM | NO_HANDLES:
            return NoSpaceError(f"{self.name} can't go on now: {error}")
        return self.fail(error)

    def raise_if_stopped(self) -> None:
        """Raise the error that stopped the log, if it is stopped."""
        if self.stopped is not None:
            raise without_traceback(self.stopped)
