"""The Python clients, with settings for short waits. A ``with`` statement closes a client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import aiokafka
import confluent_kafka
import kafka

from tests.support.waits import until

SESSION_MS = 6_000
HEARTBEAT_MS = 100
CONSUMING: Mapping[str, Any] = {
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
    "session_timeout_ms": SESSION_MS,
    "heartbeat_interval_ms": HEARTBEAT_MS,
    "fetch_max_wait_ms": 100,
    "retry_backoff_ms": 20,
}
"""The common settings of the consumers of aiokafka and kafka-python."""


@contextlib.contextmanager
def confluent_producer(bootstrap: str, **conf: Any) -> Iterator[confluent_kafka.Producer]:
    """Yield librdkafka's producer; keys of ``conf`` have underscores for dots."""
    settings = {"bootstrap.servers": bootstrap, "linger.ms": 0, **dotted(conf)}
    producer = confluent_kafka.Producer(settings)
    yield producer
    producer.flush(60)


@contextlib.contextmanager
def confluent_consumer(bootstrap: str, **conf: Any) -> Iterator[confluent_kafka.Consumer]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": HEARTBEAT_MS,
            "fetch.wait.max.ms": 100,
            **dotted(conf),
        }
    )
    try:
        yield consumer
    finally:
        consumer.close()


def dotted(conf: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "."): value for key, value in conf.items()}


@contextlib.asynccontextmanager
async def aio_producer(bootstrap: str, **conf: Any) -> AsyncIterator[aiokafka.AIOKafkaProducer]:
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=bootstrap, **conf)
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


@contextlib.asynccontextmanager
async def aio_consumer(
    bootstrap: str, *topics: str, **conf: Any
) -> AsyncIterator[aiokafka.AIOKafkaConsumer]:
    consumer = aiokafka.AIOKafkaConsumer(
        *topics,
        **{
            "bootstrap_servers": bootstrap,
            **CONSUMING,
            **conf,
        },
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


@contextlib.contextmanager
def kp_producer(bootstrap: str, **conf: Any) -> Iterator[kafka.KafkaProducer]:
    producer = kafka.KafkaProducer(bootstrap_servers=bootstrap, **{"retry_backoff_ms": 20, **conf})
    try:
        yield producer
    finally:
        producer.close(timeout=5)


@contextlib.contextmanager
def kp_consumer(bootstrap: str, *topics: str, **conf: Any) -> Iterator[kafka.KafkaConsumer]:
    consumer = kafka.KafkaConsumer(
        *topics,
        **{
            "bootstrap_servers": bootstrap,
            **CONSUMING,
            # A consumer that joins before it has its topic's metadata gets it only at this
            # interval.
            "metadata_max_age_ms": 300,
            **conf,
        },
    )
    try:
        yield consumer
    finally:
        consumer.close()


@contextlib.contextmanager
def kp_admin(bootstrap: str) -> Iterator[kafka.KafkaAdminClient]:
    admin = kafka.KafkaAdminClient(bootstrap_servers=bootstrap, retry_backoff_ms=20)
    try:
        yield admin
    finally:
        admin.close()


def drain(consumer: confluent_kafka.Consumer, count: int) -> list[confluent_kafka.Message]:
    """Poll until ``count`` messages have arrived; an error in place of one fails the test."""
    got: list[confluent_kafka.Message] = []

    def probe() -> bool:
        for message in consumer.consume(count - len(got), timeout=0.2):
            assert message.error() is None, message.error()
            got.append(message)
        return len(got) >= count

    until(probe, f"{count} messages", poll_s=0)
    return got


def poll_until(
    consumers: list[confluent_kafka.Consumer], condition: Callable[[], object], what: str
) -> None:
    """Poll every consumer in turn, so that each can rebalance, until ``condition`` holds."""

    def probe() -> bool:
        for consumer in consumers:
            consumer.poll(0.01)
        return bool(condition())

    until(probe, what, poll_s=0)
