"""Where producer ids come from.

Source: ``ProducerIdManager``/``RPCProducerIdManager``: ids are handed out from blocks that the
controller reserves durably; what is left of a block when its holder stops is never used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fencepost.logcore.machine import DomainError, InvariantViolation
from fencepost.txn.errors import ProducerIdsUnavailableError

__all__ = ["BlockProducerIds", "ProducerIdBlock", "ProducerIds", "ProducerIdsUnavailableError"]

MAX_PRODUCER_ID = 2**63 - 1
"""Ids are int64 on the wire."""

PREFETCH_AT = 0.1
"""Share of a block that is left when fetching the next one becomes worthwhile (Kafka: 10 %)."""


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
    """Hands out ids from blocks that ``allocate`` reserves.

    ``allocate`` returns a block whose reservation is already durable. A :class:`DomainError` from
    it becomes ProducerIdsUnavailableError, and the next call tries again; a block that overlaps an
    earlier one is our own bug, because two producers would share an identity.
    """

    def __init__(self, allocate: Callable[[], ProducerIdBlock]) -> None:
        self._allocate = allocate
        self._current = ProducerIdBlock(0, 0)
        self._next: ProducerIdBlock | None = None
        self._position = 0
        self._highest_end = 0

    @property
    def remaining(self) -> int:
        """How many ids can be taken without a call of ``allocate``."""
        reserve = 0 if self._next is None else self._next.length
        return self._current.end - self._position + reserve

    def take(self) -> int:
        """Return a fresh producer id. Raises ProducerIdsUnavailableError."""
        if self._position >= self._current.end:
            self._current = self._next or self._reserve()
            self._next = None
            self._position = self._current.first_producer_id
        producer_id = self._position
        self._position += 1
        return producer_id

    def prefetch(self) -> bool:
        """Reserve the next block if nine tenths of this one are used; says whether it did.

        For an idle moment, so that ``take`` seldom has to wait for a reservation.
        """
        left = self._current.end - self._position
        if self._next is not None or left > self._current.length * PREFETCH_AT:
            return False
        self._next = self._reserve()
        return True

    def _reserve(self) -> ProducerIdBlock:
        try:
            block = self._allocate()
        except ProducerIdsUnavailableError:
            raise
        except DomainError as error:
            raise ProducerIdsUnavailableError(f"no block of producer ids: {error}") from error
        if block.first_producer_id < self._highest_end or block.length <= 0:
            raise InvariantViolation(f"{block} overlaps ids below {self._highest_end}")
        if block.end - 1 > MAX_PRODUCER_ID:
            raise ProducerIdsUnavailableError("the producer ids are used up")
        self._highest_end = block.end
        return block
