"""Tasks of one machine that write under one transaction, and what they tell each other by files.

Each attempt at a batch has a folder of its own (:class:`Spool`), in which stand

* ``transaction``: what the first task that had something to send has begun; the others join it;
* ``task-N``: that somebody works as task N; whoever comes second is refused;
* a file per topic-partition with the sequence number that is next in it, locked from the sealing of
  a batch until it is acknowledged.

Locks are the kernel's (``flock``) and end with the process that holds them. A batch of which nobody
can tell any more whether it has arrived leaves its partition without a number, and whoever comes
next is refused: a number used twice would be taken for a repetition, and its records be lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fencepost.pipelines.spark.errors import SharedTransactionError
from fencepost.pipelines.spark.offsets import Partition
from fencepost.pipelines.spark.progress import Progress
from fencepost.pipelines.spark.spool import Spool, folders
from fencepost.pipelines.spark.transaction import Ticket

_TRANSACTION = "transaction"
_UNDER_WAY = b"under way"
"""Stands for a partition's number while a batch is, and behind it why one was given up."""

_MAX_CAUSE = 2_000
"""Characters that are told of it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A transaction, and what was committed when it began."""

    ticket: Ticket
    done: Progress | None = None


class Turns:
    """What one task has of it. ``turn`` is that of :class:`~.transaction.Alone`."""

    def __init__(self, spool: Spool) -> None:
        self._folder = Path(spool.folder)

    def claim(self, task: int) -> None:
        """Become task number ``task``. Raises :class:`SharedTransactionError` for the second."""
        try:
            os.close(self._open(f"task-{task}", os.O_EXCL))
        except FileExistsError:
            raise second_attempt() from None

    def joined(self, begin: Callable[[], Begun]) -> Begun:
        """What the first task has begun; the first is who finds nothing.

        Others wait meanwhile. Where ``begin`` fails the next one tries.
        """
        with self._locked(_TRANSACTION) as file:
            told = _content(file)
            if told:
                found: Begun = pickle.loads(told)  # noqa: S301 - see Spool
                return found
            begun = begin()
            os.pwrite(file, pickle.dumps(begun), 0)
            return begun

    @contextlib.contextmanager
    def turn(self, parts: Collection[Partition]) -> Iterator[dict[Partition, int]]:
        """The next number of each partition, nobody else's before the context is over.

        The caller puts in the numbers behind what was acknowledged. Raises
        :class:`SharedTransactionError` where a task did not live, or not get, to tell them.
        """
        with contextlib.ExitStack() as held:
            # In one order for all, so that no two wait for each other.
            files = {part: held.enter_context(self._locked(_name(part))) for part in sorted(parts)}
            numbers = {part: _number(part, file) for part, file in files.items()}
            for file in files.values():
                _write(file, _UNDER_WAY)
            try:
                yield numbers
            except Exception as error:
                # Whichever task Spark lets a query fail with: what lies behind it is told.
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
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)  # which unlocks it

    def _open(self, name: str, flags: int = 0) -> int:
        path = self._folder / name
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
        except FileNotFoundError:
            raise SharedTransactionError(
                f"{self._folder} is gone: this attempt at the batch was given up"
            ) from None


def second_attempt() -> SharedTransactionError:
    """What a task is told whose first attempt may have written under the transaction."""
    return SharedTransactionError(
        "another attempt of a task would write a second time into the transaction of the first;"
        " the whole batch has to run again. Set spark.task.maxFailures to 1, and restart the query"
        " (fencepost.pipelines.spark.supervise)"
    )


def left_behind(subject: str | None) -> list[Ticket]:
    """The transactions that tasks of ``subject`` have begun, as far as their folders stand."""
    found: list[Ticket] = []
    for folder in folders(subject):
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            begun: Begun = pickle.loads((folder / _TRANSACTION).read_bytes())  # noqa: S301 - ours
            found.append(begun.ticket)
    return found


def _name(part: Partition) -> str:
    # A topic's name may be as long as that of a file.
    return f"{hashlib.sha256(part[0].encode()).hexdigest()[:32]}-{part[1]}"


def _content(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


def _number(part: Partition, file: int) -> int:
    told = _content(file)
    if told and not told.isdigit():
        cause = told.partition(_UNDER_WAY)[2].decode(errors="replace")
        raise SharedTransactionError(
            f"{part[0]}-{part[1]}: a task has ended amid its write, and whether its records are"
            f" there can't be told; the whole batch has to run again{cause and f' ({cause})'}"
        )
    return int(told) if told else 0


def _write(file: int, content: bytes) -> None:
    os.pwrite(file, content, 0)
    os.ftruncate(file, len(content))
