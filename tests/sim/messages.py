"""Requests and answers of simulated clients and brokers, in addition to the state machines'."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple
from uuid import UUID

from tests.sim.disk import Batch, Key


class Code(IntEnum):
    """Kafka's codes of the errors that clients get."""

    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    UNKNOWN_TOPIC_OR_PARTITION = 3
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100


class Where(NamedTuple):
    """Ask a broker for the leaders of a topic's partitions."""

    topic: str


class Leaders(NamedTuple):
    """The leader and leader epoch of each partition; ``topic_id`` is None for an unknown topic."""

    topic_id: UUID | None
    leaders: tuple[tuple[int, int], ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()


class Produce(NamedTuple):
    """Append a batch; ``acks`` 0, 1 or -1."""

    key: Key
    batch: Batch
    acks: int
    timeout_ms: int = 1_500
    transactional_id: str | None = None


class Produced(NamedTuple):
    """The base offset of the batch, or an error."""

    error: int
    base_offset: int = -1


class Consume(NamedTuple):
    """Read committed records, from the leader of ``leader_epoch`` or from a follower."""

    key: Key
    offset: int
    leader_epoch: int
    from_follower: bool = False
    read_committed: bool = False


class Consumed(NamedTuple):
    """Consecutive batches; ``limit`` is the offset up to which records can be read now."""

    error: int
    batches: tuple[Batch, ...] = ()
    limit: int = 0
    aborted: frozenset[tuple[int, int]] = frozenset()


class InitProducerIdless(NamedTuple):
    """A producer id for an idempotent producer without a transactional id."""


class NewProducerId(NamedTuple):
    """The answer with a producer id, -1 if the client must retry."""

    producer_id: int


class AllocateIds(NamedTuple):
    """A broker's request for a block of producer ids."""

    broker_id: int
    broker_epoch: int
