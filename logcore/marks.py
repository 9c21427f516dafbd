"""How far a log goes for each who looks at it, and whether it still serves.

When the file system fails, nothing can be said about the end of a file any more: the log goes off
line with a :class:`StorageError`, which every later call raises, and the next start recovers what
is there. A full disk is another matter: what was begun is taken back, :class:`NoRoomError` says so,
and the log goes on.

Source: ``UnifiedLog``, ``Partition``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fencepost.logcore.config import MAX_INT64
from fencepost.logcore.errors import NoRoomError, StorageError
from fencepost.logcore.fs import NO_HANDLES, NO_ROOM
from fencepost.logcore.index import CorruptIndexError
from fencepost.logcore.producers import ProducerStateManager
from fencepost.logcore.recovery import LoadedLog
from fencepost.logcore.tracebacks import without_traceback

STORAGE_FAILURES: Final = (OSError, CorruptIndexError)
"""After one of these a log is off line."""


class Marks:
    """The marks of one log, which its parts share and move, and who waits for news of them."""

    def __init__(
        self,
        name: str,
        loaded: LoadedLog,
        producers: ProducerStateManager,
        *,
        leader_epoch: int,
        high_watermark: int | None = None,
    ) -> None:
        """``high_watermark``: the last that is known of a log with other replicas, None alone."""
        self.name = name
        """Topic and index as logs and messages have them."""
        self._producers = producers
        self.leader_epoch = leader_epoch
        """The epoch under which this broker leads; no batch of the log has a newer one."""
        self.log_start_offset = loaded.log_start_offset
        """The first offset that can be read."""
        self.recovery_point = loaded.recovery_point
        """The offset below which everything survives power loss."""
        self.recovery_limit = MAX_INT64
        """Beyond it the recovery point does not move: the log is about to be cut there."""
        self._listeners: dict[int, Callable[[], None]] = {}
        self._next_listener = 0
        self.stopped: StorageError | None = None
        """What every call raises, once the log is closed, deleted or off line."""
        self.offline: StorageError | None = None
        """Why the log is off line, None while it serves and after a clean close."""
        self.on_offline: Callable[[StorageError], None] | None = None
        """Called once, with the cause, when the file system fails under the log."""
        self.is_replicated = high_watermark is not None
        """Whether the high watermark comes from outside: other replicas, or the leader, say it."""
        self.on_own_end: Callable[[int], None] | None = None
        """Told of each move of :attr:`own_end` of a replicated log, before :meth:`notify`."""
        self.move_own_end(loaded.log.log_end_offset)
        if high_watermark is not None:
            self.replicate(high_watermark)

    def move_own_end(self, offset: int) -> None:
        """Vouch for the log up to ``offset``; :meth:`notify` has to follow.

        The high watermark goes along where there is no other replica.
        """
        self.own_end = offset
        """What this replica has: the end of the log, or where the disk is if ``flush.messages``
        asks for that."""
        if not self.is_replicated:
            self.move_high_watermark(offset)
        elif self.on_own_end is not None:
            self.on_own_end(offset)

    def replicate(self, high_watermark: int) -> None:
        """From now on let the high watermark come from outside; :meth:`notify` has to follow.

        It begins at the one given, as far as that lies within the log.
        """
        self.is_replicated = True
        self.move_high_watermark(max(self.log_start_offset, min(high_watermark, self.own_end)))

    def stand_alone(self) -> None:
        """Let the high watermark be the own end again; :meth:`notify` has to follow."""
        self.is_replicated, self.on_own_end = False, None
        self.move_high_watermark(self.own_end)

    def move_high_watermark(self, offset: int) -> None:
        """Show readers the log up to ``offset``; :meth:`notify` has to follow."""
        self.high_watermark = offset
        """The offset below which every replica has the log; readers see nothing beyond."""
        self._producers.high_watermark_moved(offset)

    @property
    def last_stable_offset(self) -> int:
        """The offset below which no transaction is open; the end for ``READ_COMMITTED``."""
        stable = self._producers.last_stable_offset(self.high_watermark)
        return max(stable, self.log_start_offset)

    # --- news ---

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called after each change of the marks; return what ends that.

        It is called after an append, marker, truncation or deletion, and when the log goes off
        line. It must not append to this log.
        """
        token = self._next_listener
        self._next_listener += 1
        self._listeners[token] = callback

        def unsubscribe() -> None:
            self._listeners.pop(token, None)

        return unsubscribe

    def notify(self) -> None:
        """Call all who listen."""
        for callback in tuple(self._listeners.values()):
            callback()

    # --- the end ---

    def fail(self, error: Exception) -> StorageError:
        """Go off line: what is on disk is known again after recovery only."""
        failure = StorageError(f"{self.name} is off line: {error}")
        if self.stopped is None:
            self.offline = self.stopped = failure
            if self.on_offline is not None:
                self.on_offline(failure)
            self.notify()
        return failure

    def refuse(self, error: Exception) -> StorageError:
        """Say what a failure means: the log is off line, unless nothing has changed by it.

        That is so without room on disk, and where no further file may be opened.
        """
        if isinstance(error, OSError) and error.errno in NO_ROOM | NO_HANDLES:
            return NoRoomError(f"{self.name} can't go on now: {error}")
        return self.fail(error)

    def throw_if_stopped(self) -> None:
        """Raise what stopped the log, if anything has."""
        if self.stopped is not None:
            raise without_traceback(self.stopped)
