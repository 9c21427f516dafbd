"""One worker of the exactly-once pipeline: ``flights`` → ``delays`` and ``carrier-totals``.

A transaction holds the delay events of one batch, the carriers' totals after it, and the group's
offsets. All of them become visible together or not at all. The totals are kept in memory while
the worker owns a partition, and read back from their compacted topic whenever it restarts.

``examples.flights.demo`` runs it. A worker writes one JSON object per line to standard output, and
reads commands from standard input: ``hold`` (stop inside the next transaction, when its records are
on the broker but nothing is committed), ``go`` (continue), ``stop``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

from aiokafka import TopicPartition

from examples.flights.data import Reference, Totals, enrich, no_totals
from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.producers import read_committed
from fencepost.pipelines.records import Batch, Output
from fencepost.pipelines.serde import BYTES, MSGPACK

GROUP = "delay-pipeline"
INPUT, OUTPUT, TOTALS = "flights", "delays", "carrier-totals"
TRANSACTION = Limits(max_records=6_000, max_ms=100)


def report(event: str, **fields: object) -> None:
    """Report an event to the parent process."""
    print(json.dumps({"event": event, **fields}), flush=True)


class Worker:
    """The pipeline's handler and hooks, with the totals in memory."""

    def __init__(self, bootstrap: str, name: str, directory: Path) -> None:
        self.bootstrap = bootstrap
        self.name = name
        self.reference = Reference.load(directory)
        self.totals: dict[int, dict[bytes, Totals]] = {}
        """Totals by partition and carrier."""
        self._hold = False
        self._go = asyncio.Event()
        self.pipeline = ExactlyOnce(
            bootstrap,
            group=GROUP,
            topics=[INPUT],
            handler=self.transform,
            transactional_id=f"delays-{name}",
            options=Options(
                limits=TRANSACTION,
                value_serde=MSGPACK,
                key_serde=BYTES,
                restore=self.restore,
                before_commit=self.before_commit,
                after_commit=self.after_commit,
                session_timeout_ms=6_000,
                consumer={"max_partition_fetch_bytes": 512 * 1024},
            ),
        )

    async def restore(self, assigned: frozenset[TopicPartition]) -> None:
        """Read back the committed totals of the carriers in the assigned partitions."""
        self.totals = {}
        for source in assigned:
            totals = self.totals[source.partition] = {}
            place = TopicPartition(TOTALS, source.partition)
            async for record in read_committed(self.bootstrap, place):
                totals[record.key] = MSGPACK.load(record.value)
        report("opened", partitions=sorted(source.partition for source in assigned))

    def transform(self, batch: Batch) -> list[Output]:
        """Return the delay event of each flight, and the totals of the carriers seen in it."""
        label = f"{self.name}.{os.getpid()}/{time.monotonic_ns()}"
        headers = (("txn", label.encode()),)
        outputs: list[Output] = []
        seen: defaultdict[int, set[bytes]] = defaultdict(set)
        for record in batch:
            row, where = record.value, record.partition
            totals = self.totals[where].setdefault(record.key, no_totals())
            event = enrich(row.pop("id"), row, self.reference, totals)
            seen[where].add(record.key)
            outputs.append(Output(OUTPUT, event, record.key, where, headers))
        for where, carriers in seen.items():
            for carrier in sorted(carriers):
                final = dict(self.totals[where][carrier])
                outputs.append(Output(TOTALS, final, carrier, where, headers))
        return outputs

    async def before_commit(self, batch: Batch) -> None:
        """Pause here, inside the transaction, if the parent asked for it."""
        if self._hold:
            self._hold = False
            report("holding", records=len(batch))
            await self._go.wait()
            self._go.clear()

    def after_commit(self, batch: Batch) -> None:
        """Report the batch."""
        report("committed", records=len(batch))

    def command(self, line: str) -> None:
        """Execute one line of standard input."""
        if line == "hold":
            self._hold = True
        elif line == "go":
            self._go.set()
        elif line == "stop":
            self.pipeline.stop()

    async def run(self) -> None:
        """Work until a ``stop`` command."""
        async with self.pipeline:
            report("started")
            await self.pipeline.run()
        report("stopped", **self.pipeline.metrics.snapshot())


async def main() -> None:
    """Parse the command line, and run."""
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
