"""One worker of the exactly-once pipeline: ``flights`` → ``delays`` and ``carrier-totals``.

Each input partition has a transactional producer of its own, named after the partition. Whoever
owns the partition calls ``init_transactions`` first, which fences the former owner and settles its
last transaction; only then are the committed offset and the carrier totals read. So a worker that
was taken for dead can do no harm, whatever it still has in flight. (aiokafka sends no group
metadata with its offsets, so fencing by the group alone would not be enough.)

A transaction holds the delay events of one batch, the carriers' totals after it, and the input
offset. All three become visible together or not at all.

Run by ``examples.flights.demo``. It writes one JSON object a line to standard output, and reads
commands from standard input: ``hold`` (stop inside the next transaction, when its records are on
the broker but nothing is committed), ``go`` (carry on), ``stop``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path

import msgpack
from aiokafka import (
    AIOKafkaConsumer,
    AIOKafkaProducer,
    ConsumerRebalanceListener,
    ConsumerRecord,
    TopicPartition,
)
from aiokafka.errors import KafkaError

from examples.flights.data import Reference, Totals, enrich, no_totals

GROUP = "delay-pipeline"
INPUT, OUTPUT, TOTALS = "flights", "delays", "carrier-totals"
POLL_RECORDS = 6_000


def report(event: str, **fields: object) -> None:
    """Tell the parent process what happened."""
    print(json.dumps({"event": event, **fields}), flush=True)


class Lane:
    """Everything one input partition needs: its producer, its totals, its next offset."""

    def __init__(self, worker: Worker, partition: int) -> None:
        self.worker = worker
        self.source = TopicPartition(INPUT, partition)
        self.totals: dict[bytes, Totals] = {}
        self.next_offset = 0
        self.producer: AIOKafkaProducer | None = None

    async def open(self) -> None:
        """Fence whoever had the partition before, then find out how far he came."""
        self.producer = AIOKafkaProducer(
            bootstrap_servers=self.worker.bootstrap,
            transactional_id=f"delays-{self.source.partition}",
            transaction_timeout_ms=30_000,
            linger_ms=5,
            max_batch_size=256 * 1024,
        )
        await self.producer.start()
        self.totals = await read_totals(self.worker.bootstrap, self.source.partition)
        self.next_offset = await self.worker.consumer.committed(self.source) or 0
        self.rewind()
        report("opened", partition=self.source.partition, offset=self.next_offset)

    def rewind(self) -> None:
        """Read on from the first record that no transaction of this lane holds."""
        self.worker.consumer.seek(self.source, self.next_offset)

    async def close(self) -> None:
        """Give the producer up; an open transaction is left to be aborted by the next owner."""
        producer, self.producer = self.producer, None
        if producer is not None:
            with contextlib.suppress(TimeoutError, KafkaError):
                await asyncio.wait_for(producer.stop(), 5)

    async def process(self, records: list[ConsumerRecord]) -> None:
        """Run one transaction over ``records``."""
        if self.producer is None:
            await self.open()
            return  # the position was set anew: these records come again
        producer, after = self.producer, records[-1].offset + 1
        label = f"{self.worker.name}.{os.getpid()}/{self.source.partition}/{time.monotonic_ns()}"
        async with producer.transaction():
            await self._send(producer, records, label)
            await producer.flush()
            await self.worker.maybe_hold(label)
            await producer.send_offsets_to_transaction({self.source: after}, GROUP)
        self.next_offset = after
        report("committed", records=len(records), label=label)

    async def _send(
        self, producer: AIOKafkaProducer, records: list[ConsumerRecord], label: str
    ) -> None:
        """Send the events of ``records`` and the totals of the carriers seen in them."""
        partition, headers = self.source.partition, [("txn", label.encode())]
        seen: set[bytes] = set()
        for record in records:
            row = msgpack.unpackb(record.value)
            totals = self.totals.setdefault(record.key, no_totals())
            event = enrich(row.pop("id"), row, self.worker.reference, totals)
            seen.add(record.key)
            value = msgpack.packb(event)
            await producer.send(OUTPUT, value, record.key, partition=partition, headers=headers)
        for carrier in sorted(seen):
            value = msgpack.packb(self.totals[carrier])
            await producer.send(TOTALS, value, carrier, partition=partition, headers=headers)


async def read_totals(bootstrap: str, partition: int) -> dict[bytes, Totals]:
    """Rebuild the carriers' totals of one partition from what was committed."""
    source = TopicPartition(TOTALS, partition)
    totals: dict[bytes, Totals] = {}
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False
    ) as consumer:
        consumer.assign([source])
        end = (await consumer.end_offsets([source]))[source]
        consumer.seek(source, 0)
        while await consumer.position(source) < end:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                for record in records:
                    totals[record.key] = msgpack.unpackb(record.value)
    return totals


class Worker(ConsumerRebalanceListener):  # type: ignore[misc]
    """A member of the group, with a lane for each partition it owns."""

    def __init__(self, bootstrap: str, name: str, directory: Path) -> None:
        self.bootstrap = bootstrap
        self.name = name
        self.reference = Reference.load(directory)
        self.lanes: dict[TopicPartition, Lane] = {}
        self.busy = asyncio.Lock()
        self.generation = 0
        self.stopping = False
        self._hold = False
        self._go = asyncio.Event()
        self.consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            group_id=GROUP,
            client_id=name,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            session_timeout_ms=6_000,
            heartbeat_interval_ms=500,
            max_partition_fetch_bytes=512 * 1024,
        )

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Let the running transactions end before anyone else may own the partitions."""
        async with self.busy:
            self.generation += 1
            for source in revoked:
                lane = self.lanes.pop(source, None)
                if lane is not None:
                    await lane.close()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Open a lane for each new partition."""
        async with self.busy:
            for source in assigned:
                self.lanes[source] = Lane(self, source.partition)
            await asyncio.gather(
                *(self._guarded(lane.open(), lane) for lane in self.lanes.values())
            )

    async def maybe_hold(self, label: str) -> None:
        """Stop here, inside the transaction, if the parent asked for it."""
        if self._hold:
            self._hold = False
            report("holding", label=label)
            await self._go.wait()
            self._go.clear()

    def command(self, line: str) -> None:
        """Obey one line of standard input."""
        if line == "hold":
            self._hold = True
        elif line == "go":
            self._go.set()
        elif line == "stop":
            self.stopping = True

    async def _guarded(self, step: Awaitable[None], lane: Lane) -> None:
        """Run one step of a lane; after a failure its next step starts from what is committed."""
        try:
            await step
        except (TimeoutError, KafkaError) as error:
            report("reopening", partition=lane.source.partition, error=repr(error)[:200])
            await lane.close()

    async def run(self) -> None:
        """Work until told to stop."""
        await self.consumer.start()
        self.consumer.subscribe([INPUT], listener=self)
        report("started")
        try:
            while not self.stopping:
                generation = self.generation
                batches = await self.consumer.getmany(timeout_ms=300, max_records=POLL_RECORDS)
                async with self.busy:
                    if generation != self.generation:
                        # A rebalance came between: these records may be the former owner's.
                        for lane in self.lanes.values():
                            lane.rewind()
                        continue
                    await asyncio.gather(
                        *(
                            self._guarded(lane.process(records), lane)
                            for source, records in batches.items()
                            if (lane := self.lanes.get(source)) is not None
                        )
                    )
                    idle = [lane for lane in self.lanes.values() if lane.producer is None]
                    await asyncio.gather(*(self._guarded(lane.open(), lane) for lane in idle))
        finally:
            for lane in self.lanes.values():
                await lane.close()
            await self.consumer.stop()
        report("stopped")


async def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    worker = Worker(arguments.bootstrap, arguments.name, arguments.data)
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: worker.command(sys.stdin.readline().strip()))
    await worker.run()


if __name__ == "__main__":
    asyncio.run(main())
