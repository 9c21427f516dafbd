"""The recorded operations of a test's clients, which :mod:`tests.support.checker` checks.

Every operation has ``begin`` and ``end``, the times of its request and of its outcome, on one clock
for all processes (any unit). Three outcomes: OK, FAILED (it certainly had no effect) and UNKNOWN (a
timeout, a lost connection, a process that died: it may or may not have happened).

A partition is a (topic, index) pair. Values are unique, except that a transaction which repeats an
aborted one may send the same values again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

Partition = tuple[str, int]


class Outcome(StrEnum):
    """Whether an operation had its effect, as far as the client knows."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Isolation(StrEnum):
    READ_UNCOMMITTED = "read_uncommitted"
    READ_COMMITTED = "read_committed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The common fields; a restarted client has another ``process``."""

    process: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence(Operation):
    """After ``end``, operations of ``subject`` in an epoch below ``epoch`` have no effect.

    ``subject`` is a transactional id (after InitProducerId) or a group (after a new generation).
    """

    subject: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(Operation):
    """One produced record; ``offset`` is the response's, None if the response had none."""

    value: str
    partition: Partition
    outcome: Outcome
    offset: int | None = None
    txn: str | None = None
    subject: str | None = None
    epoch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Operation):
    """The beginning of a transaction; ``txn`` is its unique name."""

    txn: str
    subject: str | None = None
    epoch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Operation):
    """A request to commit or abort a transaction."""

    txn: str
    commit: bool
    outcome: Outcome
    subject: str | None = None
    epoch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Operation):
    """One poll of one partition, from offset ``position`` up to the next position ``next``.

    ``moved``: the position was reset before this poll (seek, rebalance), so it may differ from the
    ``next`` of the previous poll. ``final``: the poll ran after the faults, and read the whole
    partition. ``txn``: the reader's own open transaction.
    """

    partition: Partition
    isolation: Isolation
    position: int
    next: int
    values: tuple[tuple[int, str], ...]
    moved: bool = False
    final: bool = False
    txn: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOffset(Operation):
    """A commit of a group's offset, inside a transaction or not."""

    group: str
    partition: Partition
    offset: int
    outcome: Outcome
    txn: str | None = None
    subject: str | None = None
    epoch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOffset(Operation):
    """A fetch of a group's stable committed offset, -1 if there is none.

    ``final``: the fetch ran after the faults.
    """

    group: str
    partition: Partition
    offset: int
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned(Operation):
    """A member's assignment at ``epoch`` (the generation)."""

    group: str
    epoch: int
    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks(Operation):
    """The last stable offset and the end offset of a partition.

    ``final``: they were read after the faults.
    """

    partition: Partition
    stable: int
    end_offset: int
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed(Operation):
    """The digest of a state machine that wrote or replayed its log up to ``offset``."""

    machine: str
    offset: int
    digest: str


_KINDS: dict[str, type[Operation]] = {
    kind.__name__: kind
    for kind in (
        *(Fence, Send, Begin, End, Read, CommitOffset, FetchOffset, Assigned, Watermarks),
        Replayed,
    )
}


def dump(operation: Operation) -> str:
    """Return an operation as one line of JSON."""
    return json.dumps({"kind": type(operation).__name__, **asdict(operation)})


def load(line: str) -> Operation:
    """Parse a line of :func:`dump`."""
    fields: dict[str, Any] = json.loads(line)
    kind = _KINDS[fields.pop("kind")]
    return kind(**{name: _restored(name, value) for name, value in fields.items()})


def _restored(name: str, value: Any) -> Any:
    if name == "outcome":
        return Outcome(value)
    if name == "isolation":
        return Isolation(value)
    if name in {"values", "partitions"}:
        return tuple(tuple(item) for item in value)
    return tuple(value) if isinstance(value, list) else value


def load_all(paths: Iterable[Path]) -> list[Operation]:
    """Return all operations of several files, without the torn last lines of killed processes."""
    operations = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").split("\n")
        operations += [load(line) for line in lines[:-1] if line]
    return sorted(operations, key=lambda operation: operation.begin)
