"""A common interface of the three transactional producers, so that scenarios are written once.

Each producer raises :class:`Fenced` for an error after which it cannot continue, and
:class:`AbortableError` for an error that only ends the transaction.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Protocol

import aiokafka
import aiokafka.errors
import confluent_kafka
import kafka
import kafka.errors

from tests.wire.clients import SESSION_MS, dotted

Offsets = Mapping[tuple[str, int], int]


class Fenced(Exception):  # noqa: N818 - the state of the producer, as Kafka calls it
    """A newer producer owns the transactional id."""


class AbortableError(Exception):
    """The transaction must be aborted; the producer may continue."""


class TransactionalProducer(Protocol):
    """A producer whose ``send`` returns once the record is acknowledged, or raises its error."""

    async def init(self) -> None: ...
    async def begin(self) -> None: ...
    async def send(self, topic: str, value: bytes, partition: int = 0) -> None: ...
    async def send_offsets(self, offsets: Offsets, group: str) -> None: ...
    async def commit(self) -> None: ...
    async def abort(self) -> None: ...
    async def close(self) -> None: ...


class Confluent:
    """librdkafka's producer."""

    def __init__(self, bootstrap: str, transactional_id: str, timeout_ms: int) -> None:
        self._bootstrap = bootstrap
        self._producer = confluent_kafka.Producer(
            dotted(
                {
                    "bootstrap_servers": bootstrap,
                    "transactional_id": transactional_id,
                    "transaction_timeout_ms": timeout_ms,
                    "linger_ms": 0,
                    "retry_backoff_ms": 20,
                    # The message timeout must not exceed the transaction timeout.
                    "message_timeout_ms": min(timeout_ms, 30_000),
                }
            )
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (confluent_kafka.KafkaException, SystemError) as raised:
            # A fatal error in a delivery callback is the cause of a SystemError.
            told = raised.__cause__ if isinstance(raised, SystemError) else raised
            if not isinstance(told, confluent_kafka.KafkaException):
                raise
            error = told.args[0]
            if error.fatal() or error.code() == confluent_kafka.KafkaError._FENCED:
                raise Fenced(error) from raised
            if error.txn_requires_abort():
                raise AbortableError(error) from raised
            raise

    async def init(self) -> None:
        with self._errors():
            self._producer.init_transactions(60)

    async def begin(self) -> None:
        with self._errors():
            self._producer.begin_transaction()

    async def send(self, topic: str, value: bytes, partition: int = 0) -> None:
        outcome: list[confluent_kafka.KafkaError | None] = []
        with self._errors():
            self._producer.produce(
                topic,
                value,
                partition=partition,
                on_delivery=lambda error, _: outcome.append(error),
            )
            self._producer.flush(60)
        if error := outcome[0]:
            fenced = {
                confluent_kafka.KafkaError._FENCED,
                confluent_kafka.KafkaError.INVALID_PRODUCER_EPOCH,
                confluent_kafka.KafkaError.PRODUCER_FENCED,
            }
            # The error of a purged record does not contain the reason, but the next call raises it.
            raise (Fenced if error.code() in fenced else AbortableError)(error)

    async def send_offsets(self, offsets: Offsets, group: str) -> None:
        marks = [confluent_kafka.TopicPartition(t, p, o) for (t, p), o in offsets.items()]
        member = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": group,
                "session.timeout.ms": SESSION_MS,
            }
        )
        try:
            with self._errors():
                self._producer.send_offsets_to_transaction(
                    marks, member.consumer_group_metadata(), 60
                )
        finally:
            member.close()

    async def commit(self) -> None:
        with self._errors():
            self._producer.commit_transaction(60)

    async def abort(self) -> None:
        with self._errors():
            self._producer.abort_transaction(60)

    async def close(self) -> None:
        with self._errors():
            self._producer.purge()
            self._producer.flush(1)


class Aiokafka:
    """aiokafka's producer, which only sends old request versions."""

    def __init__(self, bootstrap: str, transactional_id: str, timeout_ms: int) -> None:
        self._producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            retry_backoff_ms=20,
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (aiokafka.errors.ProducerFenced, AssertionError) as raised:
            # After the call that reported the fence, every call fails with an AssertionError.
            raise Fenced(raised) from raised
        except aiokafka.errors.KafkaError as raised:
            raise AbortableError(raised) from raised

    async def init(self) -> None:
        with self._errors():
            await self._producer.start()

    async def begin(self) -> None:
        with self._errors():
            await self._producer.begin_transaction()

    async def send(self, topic: str, value: bytes, partition: int = 0) -> None:
        with self._errors():
            await self._producer.send_and_wait(topic, value, partition=partition)

    async def send_offsets(self, offsets: Offsets, group: str) -> None:
        marks = {aiokafka.TopicPartition(t, p): o for (t, p), o in offsets.items()}
        with self._errors():
            await self._producer.send_offsets_to_transaction(marks, group)

    async def commit(self) -> None:
        with self._errors():
            await self._producer.commit_transaction()

    async def abort(self) -> None:
        with self._errors():
            await self._producer.abort_transaction()

    async def close(self) -> None:
        await self._producer.stop()


class KafkaPython:
    """The producer of kafka-python 3."""

    def __init__(self, bootstrap: str, transactional_id: str, timeout_ms: int) -> None:
        self._producer = kafka.KafkaProducer(
            bootstrap_servers=bootstrap,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            retry_backoff_ms=20,
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (
            kafka.errors.ProducerFencedError,
            kafka.errors.InvalidProducerEpochError,
        ) as raised:
            raise Fenced(raised) from raised
        except kafka.errors.KafkaError as raised:
            raise AbortableError(raised) from raised

    async def init(self) -> None:
        with self._errors():
            self._producer.init_transactions()

    async def begin(self) -> None:
        with self._errors():
            self._producer.begin_transaction()

    async def send(self, topic: str, value: bytes, partition: int = 0) -> None:
        with self._errors():
            self._producer.send(topic, value, partition=partition).get(60)

    async def send_offsets(self, offsets: Offsets, group: str) -> None:
        marks = {
            kafka.TopicPartition(t, p): kafka.OffsetAndMetadata(o, "", -1)
            for (t, p), o in offsets.items()
        }
        with self._errors():
            self._producer.send_offsets_to_transaction(marks, group)

    async def commit(self) -> None:
        with self._errors():
            self._producer.commit_transaction()

    async def abort(self) -> None:
        with self._errors():
            self._producer.abort_transaction()

    async def close(self) -> None:
        self._producer.close(timeout=1)


CLIENTS: dict[str, Any] = {
    "aiokafka": Aiokafka,
    "confluent": Confluent,
    "kafka-python": KafkaPython,
}


@contextlib.asynccontextmanager
async def transactional(
    client: str, bootstrap: str, transactional_id: str, *, timeout_ms: int = 60_000
) -> AsyncIterator[TransactionalProducer]:
    """Yield an initialized producer of the named client, and close it at the end."""
    producer: TransactionalProducer = CLIENTS[client](bootstrap, transactional_id, timeout_ms)
    try:
        await producer.init()
        yield producer
    finally:
        with contextlib.suppress(Fenced, AbortableError):
            await producer.close()
