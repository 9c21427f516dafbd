"""Share consumers of confluent-kafka that work while brokers fail, with checks of their results.

Until an acknowledgement of a record has succeeded, the record may be delivered again, because its
broker was killed or the acknowledgement was lost. Two acknowledgements of one record must not both
succeed, and no acknowledged record may be missing at the end.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from confluent_kafka import AcknowledgeType, KafkaException, Message, Producer, ShareConsumer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from tests.support.waits import until

COMMIT_S = 40
"""The timeout of ``commit_sync``: the leader tries for half a minute to persist an outcome."""
ENDED_S = 120
"""Deadline for the remaining deliveries after the last fault: a lock duration, a few writes."""


def starts_at_the_beginning(bootstrap: str, group: str, **settings: str) -> None:
    """Let a group begin with the first record of each partition, and give it settings."""
    all_settings = {"share.auto.offset.reset": "earliest", **settings}
    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in all_settings.items()
    ]
    resource = ConfigResource(ConfigResource.Type.GROUP, group, incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(30)


def share_consumer(bootstrap: str, group: str) -> ShareConsumer:
    """Return a consumer with explicit acknowledgements."""
    return ShareConsumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "share.acknowledgement.mode": "explicit",
            "log_level": 0,
        }
    )


@dataclass
class Work:
    """The records of a topic, and the results of their acknowledgements."""

    written: set[bytes] = field(default_factory=set)
    delivered: Counter[bytes] = field(default_factory=Counter)
    accepted: Counter[bytes] = field(default_factory=Counter)
    """Record → number of successful acknowledgements."""
    doubtful: set[bytes] = field(default_factory=set)
    """Records with an acknowledgement that may have succeeded."""
    failures: list[BaseException] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: threading.Event = field(default_factory=threading.Event)
    """Set when no further records are written."""
    is_drained: threading.Event = field(default_factory=threading.Event)
    """Set when the consumers may stop."""

    @property
    def missing(self) -> set[bytes]:
        """Written records that were never delivered."""
        return self.written - self.delivered.keys()

    @property
    def unfinished(self) -> set[bytes]:
        """Written records without an acknowledgement that has succeeded or may have succeeded."""
        return self.written - self.accepted.keys() - self.doubtful

    @property
    def accepted_twice(self) -> list[bytes]:
        """Records with two successful acknowledgements."""
        return [value for value, count in self.accepted.items() if count > 1]

    def check(self) -> None:
        """Raise the first failure of a thread."""
        for failure in self.failures:
            raise failure

    def progress(self, count: int) -> None:
        """Wait until ``count`` further records are accepted."""
        goal = len(self.accepted) + count

        def is_reached() -> bool:
            self.check()
            return len(self.accepted) >= goal

        until(is_reached, f"{count} more records are accepted", deadline_s=120)


def _produce(work: Work, bootstrap: str, topic: str) -> None:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": 5,
            "log_level": 0,
        }
    )

    def written(error: object, message: Message) -> None:
        value = message.value()
        assert error is None, error
        assert value is not None
        with work.lock:
            work.written.add(value)

    number = 0
    while not work.is_over.is_set():
        producer.produce(topic, b"%d" % number, on_delivery=written)
        number += 1
        producer.poll(0.02)
    assert producer.flush(120) == 0


def _consume(work: Work, bootstrap: str, group: str, topic: str) -> None:
    consumer = share_consumer(bootstrap, group)
    consumer.subscribe([topic])
    try:
        while not work.is_drained.is_set() and not work.failures:
            _turn(work, consumer)
    finally:
        consumer.close()


def _turn(work: Work, consumer: ShareConsumer) -> None:
    """Poll and accept once."""
    got: dict[tuple[str, int], list[bytes]] = {}
    for message in consumer.poll(0.2):
        value, topic, partition = message.value(), message.topic(), message.partition()
        assert message.error() is None, message.error()
        assert value is not None
        assert topic is not None
        assert partition is not None
        with work.lock:
            work.delivered[value] += 1
        consumer.acknowledge(message, AcknowledgeType.ACCEPT)
        got.setdefault((topic, partition), []).append(value)
    if not got:
        return
    try:
        results = consumer.commit_sync(COMMIT_S)
    except KafkaException:
        results = {}
    with work.lock:
        for place, error in results.items():
            if error is None:
                work.accepted.update(got.pop((place.topic, place.partition), ()))
        for values in got.values():
            work.doubtful.update(values)


@contextmanager
def at_work(
    bootstrap: str, group: str, topic: str, lag: Callable[[], int], *, consumers: int = 2
) -> Iterator[Work]:
    """Write and consume in threads within the block.

    At the end of the block, wait until every record is acknowledged. ``lag`` returns the group's
    lag, and a number above 0 while the lag is unknown.
    """
    work = Work()

    def run(function: Callable[..., None], *arguments: object) -> None:
        try:
            function(work, *arguments)
        except BaseException as failure:
            work.failures.append(failure)
            raise

    producer = threading.Thread(target=run, args=(_produce, bootstrap, topic), daemon=True)
    readers = [
        threading.Thread(target=run, args=(_consume, bootstrap, group, topic), daemon=True)
        for _ in range(consumers)
    ]
    threads = [producer, *readers]
    for thread in threads:
        thread.start()
    try:
        yield work
        work.is_over.set()

        def has_ended() -> bool:
            work.check()
            return not producer.is_alive() and not work.unfinished and lag() == 0

        until(has_ended, "every record has ended", deadline_s=ENDED_S, poll_s=0.5)
        work.is_drained.set()
        until(lambda: not any(thread.is_alive() for thread in threads), "all clients have closed")
        work.check()
    finally:
        work.is_over.set()
        work.is_drained.set()
