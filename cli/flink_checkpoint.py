"""Reads the transactions that an Apache Flink checkpoint or savepoint names.

The committer of Flink's Kafka sink stores a committable for each transaction that has been flushed
and not committed yet: producer epoch, producer id and transactional id. They are in the operator
state ``streaming_committer_raw_states``, which ``_metadata`` contains, or a file beside it if the
state is large. A file is looked up by its name beside ``_metadata`` only, even if its path is
absolute: a checkpoint of unknown origin must not choose which file is read, and the path may be one
of a remote file system. The rest of ``_metadata`` is not read. Each occurrence of the state's name
must begin a complete state, so that no transaction is left out silently. Lengths and counts are
checked against the remaining bytes before anything is read or allocated.

Source: Flink's ``MetadataV2V3SerializerBase``, ``CommitterOperator``,
``CommittableCollectorSerializer``; flink-connector-kafka's ``KafkaCommittableSerializer``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from fencepost.txn.epochs import FENCE_EPOCH

T = TypeVar("T")

METADATA = "_metadata"
_MAGIC = 0x4960_672D
_VERSIONS = range(4, 7)
"""Format versions of ``_metadata`` whose end can be recognised; Flink 2.2 writes 6."""
_LAST_PART = b"\xac\xed\0\5sr\0\x38org.apache.flink.runtime.checkpoint.CheckpointProperties"
"""The beginning of the last part of ``_metadata``, which shows that no state before it is missing.
"""

_STATE = "streaming_committer_raw_states"
_COLLECTOR_MAGIC = 0xB91F_252C
_COLLECTOR_VERSION, _COMMITTABLE_VERSION = 2, 1
_CHECKPOINT_VERSIONS, _SUBTASK_VERSIONS = range(2), range(3)
_REQUEST_STATES = range(4)

_OPERATOR_STATE = 4
_INLINE, _ABSOLUTE, _RELATIVE = 1, 2, 6
"""Kinds of stream handles: bytes, a file by its URI, a file beside ``_metadata``."""

OTHERWISE = (
    "restart the job from it, or name each transaction instead: `fencepost txns list --state"
    " Ongoing` has the open ones, `fencepost txns resolve TRANSACTIONAL_ID` resolves one"
)
"""The advice for a checkpoint that cannot be read."""
_MODES = range(3)
_STATES_PREFIX = struct.Struct(">Bi")

MAX_FILE_BYTES = 256 * 1024 * 1024
"""The largest file that is read, in bytes."""

MAX_COMMITTABLES = 100_000
"""The maximum number of transactions that one checkpoint may name."""


class CheckpointError(Exception):
    """The file is no checkpoint, or has a part that is not understood."""


class Committable(NamedTuple):
    """A transaction that a checkpoint names; ``checkpoint_id`` is the checkpoint that sealed it."""

    transactional_id: str
    producer_id: int
    epoch: int
    checkpoint_id: int


class _FieldReader:
    """A cursor over big-endian fields, as Java's ``DataOutputStream`` writes them."""

    def __init__(self, data: bytes, at: int = 0, end: int | None = None) -> None:
        self.data = data
        self.at = at
        self.end = len(data) if end is None else end

    def read_bytes(self, count: int) -> bytes:
        if not 0 <= count <= self.end - self.at:
            raise CheckpointError(f"{count} bytes at {self.at}, but only {self.end - self.at} left")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, size: int, *, signed: bool = True) -> int:
        return int.from_bytes(self.read_bytes(size), "big", signed=signed)

    def read_known(self, size: int, allowed: range, what: str) -> int:
        value = self.number(size, signed=False)
        if value not in allowed:
            raise CheckpointError(f"{what} {value} at {self.at - size} is unknown")
        return value

    def count(self, least_bytes: int, what: str) -> int:
        """Return the number of elements, each of at least ``least_bytes``."""
        count = self.number(4)
        if not 0 <= count * least_bytes <= self.end - self.at:
            raise CheckpointError(f"{count} {what} at {self.at - 4} do not fit into the file")
        return count

    def text(self) -> str:
        """Return a string of ``DataOutput.writeUTF``, whose encoding is Java's modified UTF-8."""
        data = self.read_bytes(self.number(2, signed=False)).replace(b"\xc0\x80", b"\0")
        try:
            units = data.decode("utf-8", "surrogatepass").encode("utf-16-be", "surrogatepass")
            return units.decode("utf-16-be")
        except UnicodeError:
            raise CheckpointError(f"the string before {self.at} is not modified UTF-8") from None

    def read_sized(self) -> _FieldReader:
        """Return the part that follows its length."""
        size = self.number(4)
        self.read_bytes(size)
        return _FieldReader(self.data, self.at - size, self.at)

    def expect_end(self, what: str) -> None:
        if self.at != self.end:
            raise CheckpointError(f"{self.end - self.at} unknown bytes behind {what} at {self.at}")


def read_flink_checkpoint(path: Path) -> list[Committable]:
    """Return the transactions of a checkpoint: its folder, or the ``_metadata`` in it.

    Raises CheckpointError, and OSError if a file cannot be read.
    """
    file = path / METADATA if path.is_dir() else path
    data = _read_file(file)
    head = _FieldReader(data)
    if len(data) < head.at + 8 or head.number(4, signed=False) != _MAGIC:
        raise CheckpointError(f"{file} is not a checkpoint of Apache Flink")
    version = head.number(4, signed=False)
    if version not in _VERSIONS:
        why = "is unknown"
        if version < _VERSIONS.start:
            why = "does not mark the file's end, so that a transaction might be left out"
        raise CheckpointError(f"{file}: format version {version} {why}: {OTHERWISE}")
    try:
        return _committables(data, file.parent)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _committables(data: bytes, folder: Path) -> list[Committable]:
    committables: list[Committable] = []
    for state, offsets in _states(data, folder):
        for value in _values(state, offsets):
            committables += _collector(value)
            if len(committables) > MAX_COMMITTABLES:
                raise CheckpointError(f"more than {MAX_COMMITTABLES} transactions")
    return committables


def _read_file(file: Path) -> bytes:
    if not file.is_file():  # a FIFO would block, and a device has no end
        raise CheckpointError(f"{file} is not a file")
    with file.open("rb") as opened:
        data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise CheckpointError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    return data


def _states(data: bytes, folder: Path) -> Iterator[tuple[bytes, list[int]]]:
    """Yield the state of each committer, with the offsets of its elements."""
    name = len(_STATE).to_bytes(2, "big") + _STATE.encode()
    at = end = 0
    while (at := data.find(name, at)) >= 0:
        # The handle must contain only this state, because the committer has no other state.
        begin = at - _STATES_PREFIX.size
        if begin < 0 or _STATES_PREFIX.unpack_from(data, begin) != (_OPERATOR_STATE, 1):
            raise CheckpointError(f"the committer's state at {at} is not alone in its handle")
        fields = _FieldReader(data, at + len(name))
        fields.read_known(1, _MODES, "distribution mode")
        offsets = [fields.number(8) for _ in range(fields.count(8, "offsets"))]
        yield _stream(fields, folder), offsets
        # Continue after the state: its bytes contain the name as well.
        at = end = fields.at
    if _LAST_PART not in data[end:]:
        raise CheckpointError("the end of the file is missing")


def _stream(fields: _FieldReader, folder: Path) -> bytes:
    """Return the bytes of a stream handle."""
    kind = fields.number(1, signed=False)
    if kind == _INLINE:
        fields.text()
        return fields.read_bytes(fields.number(4))
    if kind == _RELATIVE:
        name, size = fields.text(), fields.number(8)
        return _read_sibling(folder, name, name, size)
    if kind == _ABSOLUTE:
        size, path = fields.number(8), fields.text()
        return _read_sibling(folder, path.rpartition("/")[2], path, size)
    raise CheckpointError(f"a state handle of kind {kind} at {fields.at - 1} is not understood")


def _read_sibling(folder: Path, name: str, path: str, size: int) -> bytes:
    """Read the file ``name`` in ``folder``, to which ``_metadata`` refers as ``path``."""
    if not name or name in {".", ".."} or set(name) & {"/", "\\", "\0"}:
        raise CheckpointError(f"the committer's state is in {path!r}, outside of the folder")
    if name != path and not (folder / name).is_file():
        raise CheckpointError(
            f"the committer's state is in {path}: copy that file into {folder}, and try again"
        )
    state = _read_file(folder / name)
    if len(state) != size:
        raise CheckpointError(f"{name} has {len(state)} bytes, and {size} in the checkpoint")
    return state


def _values(state: bytes, offsets: list[int]) -> Iterator[_FieldReader]:
    """Yield the byte arrays of an operator's state; they must not overlap."""
    end = 0
    for offset in offsets:
        if not end <= offset < len(state):
            raise CheckpointError(f"offset {offset} in a state of {len(state)} bytes, after {end}")
        value = _FieldReader(state, offset).read_sized()
        yield value
        end = value.end


def _collector(fields: _FieldReader) -> list[Committable]:
    """Read a ``CommittableCollector``: committables by checkpoint and by subtask."""
    version = fields.number(4)
    if version != _COLLECTOR_VERSION:
        raise CheckpointError(f"the committer's state has version {version}: {OTHERWISE}")
    inner = fields.read_sized()
    fields.expect_end("the committer's state")
    if inner.number(4, signed=False) != _COLLECTOR_MAGIC:
        raise CheckpointError("the committer's state has no magic number")
    checkpoints = _list(inner, _CHECKPOINT_VERSIONS, _checkpoint)
    inner.expect_end("the committables")
    return [committable for checkpoint in checkpoints for committable in checkpoint]


def _list(fields: _FieldReader, versions: range, read: Callable[[_FieldReader, int], T]) -> list[T]:
    """Read a list that ``writeVersionAndSerializeList`` has written."""
    version = fields.read_known(4, versions, "serializer version")
    items = []
    for _ in range(fields.count(4, "elements")):
        part = fields.read_sized()
        items.append(read(part, version))
        part.expect_end("an element")
    return items


def _checkpoint(fields: _FieldReader, version: int) -> list[Committable]:
    checkpoint_id = fields.number(8)
    if version:
        fields.read_bytes(4)  # the number of subtasks
    subtasks = _list(
        fields, _SUBTASK_VERSIONS, lambda part, its: _subtask(part, its, checkpoint_id)
    )
    return [committable for subtask in subtasks for committable in subtask]


def _subtask(fields: _FieldReader, version: int, checkpoint_id: int) -> list[Committable]:
    if version:
        fields.read_bytes(4)  # the subtask's id
    committables = _list(fields, range(1), lambda part, _: _request(part, checkpoint_id))
    fields.read_bytes(8 if version >= _SUBTASK_VERSIONS[-1] else 12)  # counters
    return committables


def _request(fields: _FieldReader, checkpoint_id: int) -> Committable:
    version = fields.number(4)
    if version != _COMMITTABLE_VERSION:
        raise CheckpointError(f"a committable of version {version}: not one of the Kafka sink")
    part = fields.read_sized()
    epoch, producer_id = part.number(2), part.number(8)
    committable = Committable(part.text(), producer_id, epoch, checkpoint_id)
    part.expect_end("a committable of the Kafka sink")
    if not committable.transactional_id or producer_id < 0 or not 0 <= epoch <= FENCE_EPOCH:
        raise CheckpointError(f"a committable of {committable} has no valid identity")
    fields.read_bytes(4)  # retries
    fields.read_known(4, _REQUEST_STATES, "state of a committable")
    return committable
