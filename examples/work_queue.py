"""A work queue: a share group accepts, retries and rejects jobs, with a dead-letter queue.

It raises the feature share.version to 2, the first level with dead-letter queues.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter

from aiokafka import ConsumerRecord
from confluent_kafka import AcknowledgeType, KafkaException, Message, ShareConsumer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from examples.broker import KEEP, create_topics, fresh, produce, read_topic, run

JOBS = 300
WORKERS = 3
DELIVERIES = 3
"""The delivery limit of the group: a job that has failed so often is given up."""
PATIENCE_S = 120
"""The time limit for all jobs."""


class Ledger:
    """The outcome of every job; the workers share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.deliveries: Counter[int] = Counter()
        self.done: dict[int, str] = {}
        self.repeated: list[int] = []
        """Jobs that were delivered although they were done."""
        self.is_complete = threading.Event()

    def work(self, message: Message) -> AcknowledgeType:
        """Do a job, and return its acknowledgement.

        Every seventh job is not a number, every tenth fails at its first delivery, and every
        twenty-fifth always.
        """
        job = int(message.key())
        with self._lock:
            self.deliveries[job] += 1
            if job in self.done:
                self.repeated.append(job)
            if not message.value().isdigit():
                outcome, acknowledgement = "rejected", AcknowledgeType.REJECT
            elif job % 25 == 0 and message.delivery_count() == DELIVERIES:
                outcome, acknowledgement = "given up", AcknowledgeType.RELEASE
            elif job % 25 == 0 or (job % 10 == 0 and message.delivery_count() == 1):
                return AcknowledgeType.RELEASE  # the broker delivers it again
            else:
                outcome, acknowledgement = "accepted", AcknowledgeType.ACCEPT
            self.done[job] = outcome
            if len(self.done) == JOBS:
                self.is_complete.set()
            return acknowledgement


def worker(bootstrap: str, group: str, topic: str, ledger: Ledger) -> None:
    """Take jobs until all are done. A consumer belongs to one thread."""
    consumer = ShareConsumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "share.acknowledgement.mode": "explicit",
            "max.poll.records": 20,
        }
    )
    try:
        consumer.subscribe([topic])
        while not ledger.is_complete.is_set():
            for message in consumer.poll(0.5):
                if message.error():
                    raise KafkaException(message.error())
                consumer.acknowledge(message, ledger.work(message))
            # Without a commit the acknowledgements are sent with the next poll.
            for partition, error in consumer.commit_sync(30).items():
                if error is not None:
                    raise RuntimeError(f"{partition}: {error}")
    finally:
        consumer.close()


def configure(bootstrap: str, group: str, dead_letters: str) -> None:
    """Set the configuration of the group, which need not exist yet."""
    settings = {
        "share.auto.offset.reset": "earliest",
        "share.delivery.count.limit": str(DELIVERIES),
        "errors.deadletterqueue.topic.name": dead_letters,
        "errors.deadletterqueue.copy.record.enable": "true",  # without it, headers only
    }
    resource = ConfigResource(
        ResourceType.GROUP,
        group,
        incremental_configs=[
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ],
    )
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(30)


async def enable_dead_letters(bootstrap: str) -> None:
    """Raise share.version to 2, unless it already is 2."""
    command = ("features", "set", "share.version=2", "--execute", "--bootstrap", bootstrap)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fencepost", *command), stdout=asyncio.subprocess.DEVNULL
    )
    if await process.wait():
        raise RuntimeError("the broker has no dead-letter queues")


async def letters(bootstrap: str, topic: str, count: int) -> list[ConsumerRecord]:
    """Return the dead-letter queue's records, which the broker writes after acknowledgements."""
    found: list[ConsumerRecord] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            found = await read_topic(bootstrap, topic)
    return found


async def example(bootstrap: str) -> str | None:
    """Let more workers than partitions process jobs, of which some fail."""
    await enable_dead_letters(bootstrap)
    topic, group, dead_letters = fresh("jobs"), fresh("workers"), fresh("dlq.jobs")
    await create_topics(bootstrap, (topic, 2))
    allowed = {**KEEP, "errors.deadletterqueue.group.enable": "true"}
    await create_topics(bootstrap, (dead_letters, 1), configs=allowed)
    await asyncio.to_thread(configure, bootstrap, group, dead_letters)
    jobs = [(b"%d" % n, b"broken" if n % 7 == 0 else b"%d" % n, None) for n in range(JOBS)]
    await produce(bootstrap, topic, jobs)
    ledger = Ledger()
    work = [asyncio.to_thread(worker, bootstrap, group, topic, ledger) for _ in range(WORKERS)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*work)
    finally:
        ledger.is_complete.set()  # ends the other workers after a failure
    counts = Counter(ledger.done.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))

    def outcome(n: int) -> tuple[str, int]:
        if n % 7 == 0:
            return "rejected", 1
        if n % 25 == 0:
            return "given up", DELIVERIES
        return "accepted", 2 if n % 10 == 0 else 1

    wrong = [n for n in range(JOBS) if (ledger.done[n], ledger.deliveries[n]) != outcome(n)]
    if wrong or ledger.repeated:
        return f"jobs {wrong + ledger.repeated} had another outcome, or more deliveries"
    failed = [n for n in range(JOBS) if ledger.done[n] != "accepted"]
    found = await letters(bootstrap, dead_letters, len(failed))
    print(
        f"{len(found)} in the dead-letter queue, for", *sorted({reason(letter) for letter in found})
    )
    if sorted(int(letter.key) for letter in found) != failed:
        return "the dead-letter queue does not have the jobs that failed"
    return None


def reason(letter: ConsumerRecord) -> str:
    """Return the broker's reason for a record in the dead-letter queue."""
    return repr(dict(letter.headers)["__dlq.errors.message"].decode())


if __name__ == "__main__":
    sys.exit(run(__doc__, example))
