"""Producer ids, taken from blocks that the controller has reserved.

A block belongs to one broker, and the ids that are left in it when the broker stops are never used.

Source: ``ProducerIdManager``, ``RPCProducerIdManager``.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from fencepost.logcore.machine import InvariantViolation
from fencepost.logcore.values import dataclass
from fencepost.txn import epochs
from fencepost.txn.commands import EndTxn, InitProducerId
from fencepost.txn.errors import ProducerIdsUnavailableError

MAX_PRODUCER_ID = 2**63 - 1
"""Ids are int64 on the wire."""

LOW_AT = 0.1
"""The next block is reserved when this share of the current block is left (Kafka: 10 %)."""


def needs_producer_id(command: object) -> bool:
    """Whether the decision on ``command`` may need a new producer id."""
    if isinstance(command, EndTxn):
        return epochs.is_exhausted(command.producer_epoch)
    return isinstance(command, InitProducerId)


class ProducerIds(Protocol):
    """A source of producer ids, each of which is returned once."""

    def next_id(self) -> int:
        """Return a new producer id. Raises ProducerIdsUnavailableError."""


@dataclass(frozen=True, slots=True)
class ProducerIdBlock:
    """``length`` ids from ``first_producer_id`` on, reserved durably for one holder."""

    first_producer_id: int
    length: int

    @property
    def end(self) -> int:
        """The first id after the block."""
        return self.first_producer_id + self.length


class BlockProducerIds:
    """Takes ids from blocks whose reservation is already durable.

    Taking an id needs no I/O: the runtime reserves blocks in advance, never during a decision.
    """

    def __init__(self) -> None:
        self._blocks: deque[ProducerIdBlock] = deque()
        self._position = 0
        self._highest_end = 0

    @property
    def remaining(self) -> int:
        """The number of ids that can be taken."""
        return sum(block.length for block in self._blocks) - self._position

    @property
    def is_low(self) -> bool:
        """Whether the next block should be reserved now."""
        return not self._blocks or self.remaining <= self._blocks[0].length * LOW_AT

    def next_id(self) -> int:
        """Return a new producer id. Raises ProducerIdsUnavailableError."""
        if not self._blocks:
            raise ProducerIdsUnavailableError("no producer ids are reserved")
        block = self._blocks[0]
        producer_id = block.first_producer_id + self._position
        self._position += 1
        if self._position == block.length:
            self._blocks.popleft()
            self._position = 0
        return producer_id

    def add(self, block: ProducerIdBlock) -> None:
        """Add a reserved block after the others.

        Raises InvariantViolation for an empty block, and for a block that overlaps an earlier one,
        because two producers would get the same identity. Raises ProducerIdsUnavailableError for a
        block that exceeds the highest producer id.
        """
        if block.first_producer_id < self._highest_end or block.length <= 0:
            raise InvariantViolation(f"{block} is empty, or has ids below {self._highest_end}")
        if block.end - 1 > MAX_PRODUCER_ID:
            raise ProducerIdsUnavailableError("the producer ids are used up")
        self._highest_end = block.end
        self._blocks.append(block)
