"""A small exactly-once pipeline on librdkafka that keeps a journal of all its operations.

    python -m tests.crash.copier fill | copy | sloppy | forget | verify

``fill`` makes the topics and the input. ``copy`` is the consume-transform-produce loop with two
output partitions. ``verify`` reads everything back and checks the whole journal for anomalies.
``sloppy`` copies without transactions, and ``forget`` leaves a transaction open; the sweep must
detect both. Each mode gets the broker's address and directory from environment variables, which
``fencepost crash-sweep`` sets.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.history import (
    Begin,
    CommitOffset,
    End,
    Fence,
    FetchOffset,
    Isolation,
    Operation,
    Outcome,
    Read,
    Send,
    Watermarks,
    dump,
    load_all,
)

SOURCE, TARGET, GROUP = "source", "target", "copier"
RECORDS, BATCH = 12, 4
IN = (SOURCE, 0)


class Journal:
    """The journal of one process; each line is written before the next operation begins."""

    def __init__(self, directory: Path, attempt: str) -> None:
        self.process = f"copier-{attempt}"
        self.epoch = int(attempt)
        self._file = (directory / f"history-{attempt}.jsonl").open("a", encoding="utf-8")

    def note(self, kind: type[Operation], begin: float, **fields: Any) -> None:
        operation = kind(process=self.process, begin=begin, end=time.monotonic(), **fields)
        self._file.write(dump(operation) + "\n")
        self._file.flush()


RECONNECTING: dict[str, Any] = {
    "reconnect.backoff.ms": 10,
    "reconnect.backoff.max.ms": 50,
    # Rebootstrapping drops the broker that the client still uses as the group's coordinator, and
    # send_offsets_to_transaction then waits for ever (librdkafka issue 5511).
    "metadata.recovery.strategy": "none",
    "log_level": 2,
}


def producer(bootstrap: str) -> confluent_kafka.Producer:
    return confluent_kafka.Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": GROUP,
            "linger.ms": 0,
            "retry.backoff.ms": 20,
            **RECONNECTING,
        }
    )


def consumer(bootstrap: str) -> confluent_kafka.Consumer:
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": GROUP,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 20,
            **RECONNECTING,
        }
    )


def fill(bootstrap: str, records: int = RECORDS, sources: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    topics = [NewTopic(SOURCE, sources, 1), NewTopic(TARGET, 2, 1)]
    for future in admin.create_topics(topics).values():
        future.result(10)
    writer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
    for number in range(records):
        writer.produce(SOURCE, b"%d" % number, partition=number % sources)
    if writer.flush(10):
        raise SystemExit("the input was not written")


def copy(bootstrap: str, journal: Journal) -> None:
    """Copy BATCH records per transaction, until the end of the input."""
    begin = time.monotonic()
    writer = producer(bootstrap)
    writer.init_transactions(30)
    fenced = {"subject": GROUP, "epoch": journal.epoch}
    journal.note(Fence, begin, **fenced)
    reader = consumer(bootstrap)
    asked = time.monotonic()
    (committed,) = reader.committed([confluent_kafka.TopicPartition(*IN)], 30)
    position = max(committed.offset, 0)
    journal.note(FetchOffset, asked, group=GROUP, partition=IN, offset=max(committed.offset, -1))
    # Fetch the metadata now, because the client would do so only a second after the assignment.
    reader.list_topics(SOURCE, 30)
    reader.assign([confluent_kafka.TopicPartition(*IN, position)])
    while position < RECORDS:
        values: list[str] = []
        while len(values) < BATCH:
            message = reader.poll(10)
            if message is None or message.error():
                continue
            values.append(message.value().decode())
        txn = f"{journal.process}@{position}"
        transact(writer, reader, journal, fenced, txn, values, position + len(values))
        position += len(values)
    reader.close()


def transact(
    writer: confluent_kafka.Producer,
    reader: confluent_kafka.Consumer,
    journal: Journal,
    fenced: dict[str, Any],
    txn: str,
    values: list[str],
    upto: int,
) -> None:
    """Run one transaction with the offset and the values; even values go to partition 0."""
    writer.begin_transaction()
    journal.note(Begin, time.monotonic(), txn=txn, **fenced)
    unit = [("fencepost-txn", f"upto-{upto}"), ("fencepost-txn-size", str(len(values)))]

    def acknowledged(value: str, began: float) -> Any:
        def note(error: Any, message: confluent_kafka.Message) -> None:
            journal.note(
                Send,
                began,
                txn=txn,
                value=f"{value}*2",
                partition=(TARGET, message.partition()),
                offset=message.offset() if error is None else None,
                outcome=Outcome.OK if error is None else Outcome.UNKNOWN,
                **fenced,
            )

        return note

    for value in values:
        partition = int(value) % 2
        journaled = acknowledged(value, time.monotonic())
        writer.produce(
            TARGET, f"{value}*2", partition=partition, headers=unit, on_delivery=journaled
        )
    began = time.monotonic()
    offsets = [confluent_kafka.TopicPartition(*IN, upto)]
    writer.send_offsets_to_transaction(offsets, reader.consumer_group_metadata(), 30)
    writer.flush(30)
    journal.note(
        CommitOffset,
        began,
        txn=txn,
        group=GROUP,
        partition=IN,
        offset=upto,
        outcome=Outcome.OK,
        **fenced,
    )
    began = time.monotonic()
    # Write the commit to the journal first: the process may be killed before the response.
    asked = {"txn": txn, "commit": True, **fenced}
    journal.note(End, began, outcome=Outcome.UNKNOWN, **asked)
    writer.commit_transaction(30)
    journal.note(End, began, outcome=Outcome.OK, **asked)


def sloppy(bootstrap: str) -> None:
    """Copy at least once: after a restart, writes without a committed offset are repeated."""
    reader = consumer(bootstrap)
    (committed,) = reader.committed([confluent_kafka.TopicPartition(*IN)], 30)
    writer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, **RECONNECTING})
    for start in range(max(committed.offset, 0), RECORDS, BATCH):
        upto = start + BATCH
        unit = [("fencepost-txn", f"upto-{upto}"), ("fencepost-txn-size", str(BATCH))]
        for value in range(start, upto):
            writer.produce(TARGET, f"{value}*2", partition=value % 2, headers=unit)
        writer.flush(30)
        offsets = [confluent_kafka.TopicPartition(*IN, upto)]
        reader.commit(offsets=offsets, asynchronous=False)
    reader.close()


def forget(bootstrap: str) -> None:
    """Exit without ending the transaction."""
    writer = producer(bootstrap)
    writer.init_transactions(30)
    writer.begin_transaction()
    writer.produce(TARGET, "open", partition=0)
    writer.flush(30)
    # If the client library is closed properly, it aborts the transaction.
    os._exit(0)


def verify(bootstrap: str, directory: Path, records: int = RECORDS, sources: int = 1) -> None:
    """Read everything and check it: the output must have each value of the input once."""
    # Import here, as a sweep starts hundreds of processes, most of which need none of these.
    from fencepost.coordinator import light_imports  # noqa: F401 - before anything that imports kio
    from tests.support.checker import check
    from tests.support.cluster import READ_COMMITTED, READ_UNCOMMITTED, Cluster

    history = load_all(sorted(directory.glob("history-*.jsonl")))
    found: list[str] = []
    with Cluster(bootstrap) as cluster:
        for index in (0, 1):
            begin = time.monotonic()
            place = (TARGET, index)
            stable, end = cluster.lso(*place), cluster.offset(*place)
            here = {"process": "judge", "begin": begin, "partition": place}
            for isolation, number in (
                (Isolation.READ_COMMITTED, READ_COMMITTED),
                (Isolation.READ_UNCOMMITTED, READ_UNCOMMITTED),
            ):
                values = tuple(
                    (batch.base_offset + delta, (value or b"").decode())
                    for batch in cluster.read(TARGET, partition=index, isolation=number)
                    for delta, value in enumerate(batch.values)
                )
                history.append(
                    Read(
                        **here,
                        end=time.monotonic(),
                        isolation=isolation,
                        position=0,
                        next=end,
                        values=values,
                        final=True,
                    )
                )
                if isolation is Isolation.READ_COMMITTED:
                    found += [value for _, value in values]
            history.append(
                Watermarks(**here, end=time.monotonic(), stable=stable, end_offset=end, final=True)
            )
        offsets = []
        for index in range(sources):
            begin = time.monotonic()
            offsets.append(cluster.committed(GROUP, SOURCE, partition=index, stable=True))
            history.append(
                FetchOffset(
                    process="judge",
                    begin=begin,
                    end=time.monotonic(),
                    group=GROUP,
                    partition=(SOURCE, index),
                    offset=offsets[-1],
                    final=True,
                )
            )
    complaints = [str(anomaly) for anomaly in check(history)]
    if sorted(found) != sorted(f"{number}*2" for number in range(records)):
        complaints.append(f"the copy is not the input: {sorted(found)}")
    if offsets != [len(range(index, records, sources)) for index in range(sources)]:
        complaints.append(f"the group is at {offsets}")
    if complaints:
        raise SystemExit("\n".join(complaints))


def main() -> None:
    bootstrap = os.environ["FENCEPOST_BOOTSTRAP"]
    directory = Path(os.environ["FENCEPOST_SWEEP_DIR"])
    match sys.argv[1]:
        case "fill":
            fill(bootstrap)
        case "copy":
            copy(bootstrap, Journal(directory, os.environ["FENCEPOST_SWEEP_ATTEMPT"]))
        case "sloppy":
            sloppy(bootstrap)
        case "forget":
            forget(bootstrap)
        case "verify":
            verify(bootstrap, directory)
        case other:
            raise SystemExit(f"what is {other}?")


if __name__ == "__main__":
    main()
