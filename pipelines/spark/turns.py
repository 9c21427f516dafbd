"""Tasks of one machine that share a transaction, and coordinate by files.

Each attempt at a batch has a folder of its own (:class:`Spool`) with these files:

* ``transaction``: the transaction that the first task with rows began; the others join it;
* ``task-N``: marks task N as started; a second attempt of the task is refused;
* a file per topic-partition with its next sequence number, locked from the sealing of a batch until
  the batch is acknowledged.

The locks are the kernel's (``flock``) and end with the process that holds them. If it is unknown
whether a batch has arrived, its partition has no number and later tasks are refused: the broker
would take a batch with a reused number for a retry, and its records would be lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fencepost.logcore.system import OPEN_FLAGS, read_at, wait_for_lock, write_at
from fencepost.pipelines.spark.errors import SharedTransactionError
from fencepost.pipelines.spark.offsets import Partition
from fencepost.pipelines.spark.progress import Progress
from fencepost.pipelines.spark.spool import Spool, folders
from fencepost.pipelines.spark.transaction import TransactionHandle

_TRANSACTION = "transaction"
_UNDER_WAY = b"under way"
"""The content of a partition's file while a batch is in flight, instead of a number. If the batch
fails, the error's text is appended."""

_MAX_CAUSE = 2_000
"""The maximum number of characters of the error's text that the file keeps."""


@dataclass(frozen=True, slots=True)
class BegunTransaction:
    """A transaction, and the progress that was committed when it began."""

    ticket: TransactionHandle
    done: Progress | None = None


class TaskTurns:
    """One task's access to the files of an attempt; implements :class:`~.transaction.Numbers`."""

    def __init__(self, spool: Spool) -> None:
        self._folder = Path(spool.folder)

    def claim(self, task: int) -> None:
        """Mark a task as started. Raises :class:`SharedTransactionError` if it already is."""
        try:
            os.close(self._open(f"task-{task}", os.O_EXCL))
        except FileExistsError:
            raise second_attempt() from None

    def joined(self, begin: Callable[[], BegunTransaction]) -> BegunTransaction:
        """Return the shared transaction; the first task begins it.

        Other tasks wait meanwhile. If ``begin`` fails, the next task tries it.
        """
        with self._locked(_TRANSACTION) as file:
            content = _content(file)
            if content:
                transaction: BegunTransaction = pickle.loads(content)  # noqa: S301 - see Spool
                return transaction
            begun = begin()
            write_at(file, (pickle.dumps(begun),), 0)
            return begun

    @contextlib.contextmanager
    def turn(self, parts: Collection[Partition]) -> Iterator[dict[Partition, int]]:
        """Lock partitions, and yield their next sequence numbers.

        The caller updates the numbers after the acknowledgement. Raises
        :class:`SharedTransactionError` if an earlier task ended without doing so.
        """
        with contextlib.ExitStack() as held:
            # In the same order for all tasks, to avoid a deadlock.
            files = {part: held.enter_context(self._locked(_name(part))) for part in sorted(parts)}
            numbers = {part: _number(part, file) for part, file in files.items()}
            for file in files.values():
                _write(file, _UNDER_WAY)
            try:
                yield numbers
            except Exception as error:
                # Spark may report the failure of any task, so later tasks get this one's cause.
                cause = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
                for file in files.values():
                    _write(file, _UNDER_WAY + cause[:_MAX_CAUSE].encode(errors="replace"))
                raise
            for part, file in files.items():
                _write(file, b"%d" % numbers[part])

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        file = self._open(name)
        try:
            wait_for_lock(file)
            yield file
        finally:
            os.close(file)  # which unlocks it

    def _open(self, name: str, flags: int = 0) -> int:
        path = self._folder / name
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | OPEN_FLAGS | flags, 0o600)
        except FileNotFoundError:
            raise SharedTransactionError(
                f"{self._folder} is gone: this attempt at the batch was given up"
            ) from None


def second_attempt() -> SharedTransactionError:
    """Return the error for a task whose first attempt may have written in the transaction."""
    return SharedTransactionError(
        "another attempt of a task would write a second time into the transaction of the first;"
        " the whole batch has to run again. Set spark.task.maxFailures to 1, and restart the query"
        " (fencepost.pipelines.spark.supervise)"
    )


def left_behind(subject: str | None) -> list[TransactionHandle]:
    """Return transactions that tasks of ``subject`` began, as far as their folders still exist."""
    handles: list[TransactionHandle] = []
    for folder in folders(subject):
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            begun: BegunTransaction = pickle.loads((folder / _TRANSACTION).read_bytes())  # noqa: S301 - ours
            handles.append(begun.ticket)
    return handles


def _name(part: Partition) -> str:
    # A topic's name may be as long as a file's name can be.
    return f"{hashlib.sha256(part[0].encode()).hexdigest()[:32]}-{part[1]}"


def _content(file: int) -> bytes:
    return read_at(file, os.fstat(file).st_size, 0)


def _number(part: Partition, file: int) -> int:
    content = _content(file)
    if content and not content.isdigit():
        cause = content.partition(_UNDER_WAY)[2].decode(errors="replace")
        raise SharedTransactionError(
            f"{part[0]}-{part[1]}: a task has ended amid its write, and whether its records are"
            f" there can't be told; the whole batch has to run again{cause and f' ({cause})'}"
        )
    return int(content) if content else 0


def _write(file: int, content: bytes) -> None:
    write_at(file, (content,), 0)
    os.ftruncate(file, len(content))
