"""The program with confluent-kafka: see the package."""

from __future__ import annotations

import functools
import logging
import time

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.oracle.failover import program
from tests.oracle.failover.program import NAME, PARTITIONS, SOURCE, TARGET, at, say, seen, tell

CLASSIC = "classic"
"""The classic group protocol."""

LIMIT_S = 30.0
"""Timeout of a transactional call."""


class Told(logging.Handler):
    """Reports the library's log lines of level error."""

    def __init__(self, role: str) -> None:
        super().__init__(logging.ERROR)
        self.role = role

    def emit(self, record: logging.LogRecord) -> None:
        tell(self.role, f"log: {record.getMessage()}")


def settings(role: str, **more: object) -> dict[str, object]:
    logger = logging.getLogger(role)
    logger.propagate = False
    logger.handlers = [Told(role)]

    def failed(error: KafkaError) -> None:
        tell(role, f"error_cb: {described(error)}")

    found = {key.replace("_", "."): value for key, value in more.items()}
    return {"bootstrap.servers": program.BOOTSTRAP, "error_cb": failed, "logger": logger, **found}


def described(error: KafkaError) -> str:
    flags = {
        "fatal": error.fatal(),
        "retriable": error.retriable(),
        "to be aborted": error.txn_requires_abort(),
    }
    return ", ".join([error.name(), *(name for name, is_so in flags.items() if is_so)])


def raised(role: str, where: str, error: KafkaException) -> None:
    tell(role, f"{where}: {described(error.args[0])}")


def write() -> None:
    producer = Producer(settings("writer", enable_idempotence=True, acks="all", linger_ms=5))

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is None:
            at["acknowledged"] += 1
        else:
            tell("writer", f"delivery: {described(error)}")

    while not program.STOP.exists():
        for index in range(PARTITIONS):
            producer.produce(SOURCE, b"%d" % at["sent"], partition=index, on_delivery=delivered)
            at["sent"] += 1
        producer.poll(0)
        time.sleep(0.06)
    producer.flush()
    say(f"SENT {at['sent']}")


def consumer(role: str, protocol: str) -> Consumer:
    return Consumer(
        settings(
            role,
            group_protocol=protocol,
            group_id=f"{role}-{NAME}",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        )
    )


def found(role: str, reader: Consumer) -> list[Message]:
    """Return the records that arrive within 100 ms, and report errors."""
    messages = []
    for message in reader.consume(500, 0.1):
        if error := message.error():
            tell(role, f"poll: {described(error)}")
        else:
            messages.append(message)
    return messages


def read(protocol: str = CLASSIC) -> None:
    reader = consumer("reader", protocol)
    reader.subscribe([SOURCE])
    while True:
        messages = found("reader", reader)
        seen.update(int(message.value()) for message in messages)
        at["read"] = len(seen)
        if messages:
            try:
                reader.commit(asynchronous=False)
            except KafkaException as error:
                raised("reader", "commit", error)


def copy() -> None:
    while True:
        # With the consumer protocol librdkafka 2.16 once hung forever on Apache Kafka, after a
        # consumer had been closed and another created while the only broker was down.
        reader = consumer("copier", CLASSIC)
        reader.subscribe([SOURCE])
        # See tests/support/pipeline.py: without the idle time librdkafka may wait forever.
        idle = {"transactional_id": f"copier-{NAME}", "connections_max_idle_ms": 3000}
        producer = Producer(settings("copier", **idle))
        where = "init_transactions"
        try:
            producer.init_transactions(LIMIT_S)
            while True:
                messages = found("copier", reader)
                if not messages:
                    producer.poll(0)
                    continue
                where = "begin_transaction"
                producer.begin_transaction()
                ends = {}
                for message in messages:
                    producer.produce(TARGET, message.value(), partition=message.partition())
                    ends[message.partition()] = message.offset() + 1
                where = "send_offsets_to_transaction"
                producer.send_offsets_to_transaction(
                    [TopicPartition(SOURCE, index, end) for index, end in ends.items()],
                    reader.consumer_group_metadata(),
                    LIMIT_S,
                )
                where = "commit_transaction"
                producer.commit_transaction(LIMIT_S)
                at["copied"] += len(messages)
        except KafkaException as error:
            raised("copier", where, error)
        reader.close()


if __name__ == "__main__":
    protocol = program.MORE[0] if program.MORE else CLASSIC
    program.work(write, functools.partial(read, protocol), copy)
