"""Copies a topic to another exactly once, on librdkafka, through all failures of brokers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from tests.support.cluster import unique

GIVE_UP_S = 15
QUIET = {"log_level": 0}


class Clients:
    """Makes clients of one cluster with the common ``settings``."""

    def __init__(self, bootstrap: str, settings: Mapping[str, object] = QUIET) -> None:
        self._common = {"bootstrap.servers": bootstrap, **settings}

    def producer(self, transactional_id: str) -> Producer:
        """Return a producer that is ready for its first transaction.

        librdkafka 2.16 may wait for ever in ``send_offsets_to_transaction`` once Metadata no longer
        names the group's coordinator (docs/works-with.md). It checks again when any connection
        opens or closes, so idle connections are closed soon.
        """
        made = Producer(
            {
                **self._common,
                "transactional.id": transactional_id,
                "transaction.timeout.ms": 30_000,
                "connections.max.idle.ms": 3_000,
            }
        )
        made.init_transactions(60)
        return made

    def consumer(self, group: str, *, protocol: str = "classic") -> Consumer:
        """Return a read_committed consumer without automatic commits."""
        return Consumer(
            {
                **self._common,
                "group.id": group,
                "group.protocol": protocol,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )

    def messages(self, topic: str, partitions: int) -> list[Message]:
        """Return all committed records up to the last stable offsets."""
        consumer = self.consumer("reader")
        consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
        messages: list[Message] = []
        ended: set[int] = set()
        deadline = time.monotonic() + 60
        while len(ended) < partitions:
            assert time.monotonic() < deadline, f"{topic} does not end: {ended}"
            for message in consumer.consume(1_000, 0.1):
                if message.error():
                    ended.add(message.partition())
                else:
                    messages.append(message)
        consumer.close()
        return messages


class Pipeline(threading.Thread):
    """Copies ``source`` to ``target`` in transactions that include the offsets.

    Partitions are kept. Each record has headers with its transaction's name and size in records.
    """

    def __init__(self, clients: Clients, name: str, source: str, target: str) -> None:
        super().__init__(name=name, daemon=True)
        self.clients, self.stopping = clients, threading.Event()
        self.source, self.target = source, target
        self.failures: list[str] = []

    def run(self) -> None:
        while not self.stopping.is_set():
            consumer = self.clients.consumer("pipeline")
            try:
                producer = self.clients.producer(self.name)
                consumer.subscribe([self.source])
                while not self.stopping.is_set():
                    messages = [
                        message for message in consumer.consume(1_000, 0.2) if not message.error()
                    ]
                    if messages:
                        self.copy(producer, consumer, messages)
            except KafkaException as error:
                self.failures.append(str(error))
            finally:
                consumer.close()

    def copy(self, producer: Producer, consumer: Consumer, messages: Sequence[Message]) -> None:
        """Run one transaction."""
        producer.begin_transaction()
        headers = [("txn", unique(self.name)), ("size", str(len(messages)))]
        ends: dict[int, int] = {}
        for message in messages:
            producer.produce(
                self.target, message.value(), partition=message.partition(), headers=headers
            )
            ends[message.partition()] = message.offset() + 1
        offsets = [TopicPartition(self.source, index, end) for index, end in ends.items()]
        # After an error, start again: InitProducerId ends the open transaction.
        group = consumer.consumer_group_metadata()
        producer.send_offsets_to_transaction(offsets, group, GIVE_UP_S)
        producer.commit_transaction(GIVE_UP_S)
