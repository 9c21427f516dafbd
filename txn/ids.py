"""Where producer ids come from.

Source: ``ProducerIdManager``/``RPCProducerIdManager``: ids are handed out from blocks that the
controller reserves durably; what is left of a block when its holder stops is never used.
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
"""Share of a block that is left when it is time to reserve the next one (Kafka: 10 %)."""


def may_draw_id(command: object) -> bool:
    """Whether the decision on ``command`` may need a producer id of its own."""
    if isinstance(command, EndTxn):
        return epochs.is_exhausted(command.producer_epoch)
    return isinstance(command, InitProducerId)


class ProducerIds(Protocol):
    """A source of ids that were never given out before."""

    def take(self) -> int:
        """Return a fresh producer id. Raises ProducerIdsUnavailableError."""


@dataclass(frozen=True, slots=True)
class ProducerIdBlock:
    """``length`` ids from ``first_producer_id`` on, reserved durably for one holder."""

    first_producer_id: int
    length: int

    @property
    def end(self) -> int:
        """The first id behind the block."""
        return self.first_producer_id + self.length


class BlockProducerIds:
    """Hands out ids from blocks whose reservation is durable already.

    It only draws from memory. Blocks are reserved before an id is needed, never in a decision.
    """

    def __init__(self) -> None:
        self._blocks: deque[ProducerIdBlock] = deque()
        self._position = 0
        self._highest_end = 0

    @property
    def remaining(self) -> int:
        """How many ids can be taken."""
        return sum(block.length for block in self._blocks) - self._position

    @property
    def is_low(self) -> bool:
        """Whether the next block should be reserved now."""
        return not self._blocks or self.remaining <= self._blocks[0].length * LOW_AT

    def take(self) -> int:
        """Return a fresh producer id. Raises ProducerIdsUnavailableError."""
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
        """Put a reserved block behind the others.

        One that overlaps an earlier one is our own bug, because two producers would share an
        identity: InvariantViolation. Raises ProducerIdsUnavailableError behind the last id.
        """
        if block.first_producer_id < self._highest_end or block.length <= 0:
            raise InvariantViolation(f"{block} overlaps ids below {self._highest_end}")
        if block.end - 1 > MAX_PRODUCER_ID:
            raise ProducerIdsUnavailableError("the producer ids are used up")
        self._highest_end = block.end
        self._blocks.append(block)
