"""The main job: exactly-once over 336,776 real flights while the daemon and the workers are killed.

1. start ``fencepost serve`` and load the flights into a topic of six partitions (idempotent);
2. run two workers of ``examples.flights.worker`` in one group;
3. meanwhile kill -9 a worker, the daemon, and the other worker, each inside an open transaction;
4. read the output with read_committed and compare it with the expected output, computed from the
   file; then read it with read_uncommitted, to show the records that read_committed hid.

The exit status is 0 only if every flight is in the output exactly once, in order, with the right
totals.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgpack
from aiokafka import AIOKafkaConsumer, TopicPartition
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from examples.broker import create_topics, produce
from examples.flights.data import FLIGHTS, fetch, flights
from examples.flights.verify import Truth, Verdict, read
from examples.flights.worker import GROUP, INPUT, OUTPUT, TOTALS
from examples.processes import Daemon, Process

PARTITIONS = 6
DEADLINE_S = 300
"""The time limit of the demo, in seconds."""


class Worker(Process):
    """A real worker process with its output; the process can be stopped inside a transaction."""

    def __init__(self, name: str, bootstrap: str, data: Path, home: Path) -> None:
        super().__init__(
            home / f"{name}.log",
            *("examples.flights.worker", "--bootstrap", bootstrap),
            *("--name", name, "--data", str(data)),
        )

    async def hold(self) -> None:
        """Wait until the worker is inside a transaction with written, uncommitted records."""
        self.say("hold")
        while b'"holding"' not in await self.lines.get():
            pass


def bars(console: Console) -> Progress:
    """Return progress bars."""
    return Progress(
        TextColumn("{task.description:<26}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


class Demo:
    """One run, from an empty data directory to the verdict."""

    def __init__(self, data: Path, home: Path, console: Console) -> None:
        self.data = data
        self.console = console
        self.tally: Counter[str] = Counter()
        self.daemon = Daemon(home)
        self.workers = [Worker(f"worker-{n}", self.daemon.bootstrap, data, home) for n in (1, 2)]
        self.load_seconds = 0.0
        self.pipeline_seconds = 0.0

    async def run(self) -> tuple[Verdict, Verdict]:
        """Run all steps; return the verdicts of read_committed and read_uncommitted."""
        await self.daemon.start()
        self.console.print(f"fencepost serves on [bold]{self.daemon.bootstrap}[/]")
        try:
            await create_topics(self.daemon.bootstrap, (INPUT, PARTITIONS), (OUTPUT, PARTITIONS))
            compact = {"cleanup.policy": "compact"}
            await create_topics(self.daemon.bootstrap, (TOTALS, PARTITIONS), configs=compact)
            with bars(self.console) as progress:
                await self._load(progress)
                async with asyncio.timeout(DEADLINE_S):
                    await self._pipeline(progress)
            return await self._verify()
        finally:
            await asyncio.gather(*(worker.stop(signal.SIGKILL) for worker in self.workers))
            await self.daemon.stop()

    async def _load(self, progress: Progress) -> None:
        task = progress.add_task("loading flights", total=FLIGHTS)
        begin = time.monotonic()
        records = (
            (row["carrier"].encode(), msgpack.packb({"id": flight_id, **row}), None)
            for flight_id, row in enumerate(flights(self.data))
        )
        await produce(
            self.daemon.bootstrap,
            INPUT,
            records,
            lambda sent: progress.update(task, completed=sent),
        )
        progress.update(task, completed=FLIGHTS)
        self.load_seconds = time.monotonic() - begin

    async def _pipeline(self, progress: Progress) -> None:
        task = progress.add_task("exactly-once pipeline", total=FLIGHTS)
        begin = time.monotonic()
        first, second = self.workers
        for worker in self.workers:
            await worker.start()
        for share, what, strike, worker in (
            (0.20, "kill -9 a worker", self._kill_worker, first),
            (0.45, "kill -9 the daemon", self._kill_daemon, second),
            (0.70, "kill -9 a worker", self._kill_worker, second),
        ):
            await self._reach(int(share * FLIGHTS), progress, task)
            progress.update(task, description=what)
            await strike(worker)
            progress.update(task, description="exactly-once pipeline")
        await self._reach(FLIGHTS, progress, task)
        self.pipeline_seconds = time.monotonic() - begin
        for worker in self.workers:
            worker.say("stop")
            await worker.stop(None)

    async def _reach(self, records: int, progress: Progress, task: TaskID) -> None:
        """Wait until the group has committed ``records`` of the input, according to the broker."""
        sources = [TopicPartition(INPUT, partition) for partition in range(PARTITIONS)]
        async with AIOKafkaConsumer(
            bootstrap_servers=self.daemon.bootstrap, group_id=GROUP, enable_auto_commit=False
        ) as observer:
            observer.assign(sources)
            done = 0
            while done < records:
                done = sum([await observer.committed(source) or 0 for source in sources])
                progress.update(task, completed=done)
                await asyncio.sleep(0.2)  # the pace of the progress bar

    async def _kill_worker(self, worker: Worker) -> None:
        await worker.hold()
        await worker.stop(signal.SIGKILL)
        self.tally["kills"] += 1
        await worker.start()
        self.tally["restarts"] += 1

    async def _kill_daemon(self, holder: Worker) -> None:
        await holder.hold()
        await self.daemon.stop(signal.SIGKILL)
        self.tally["kills"] += 1
        await self.daemon.start()
        self.tally["restarts"] += 1
        holder.say("go")

    async def _verify(self) -> tuple[Verdict, Verdict]:
        self.console.print("reading the output and computing the truth from the file …")
        truth = Truth(self.data)
        verdicts = []
        for isolation_level in ("read_committed", "read_uncommitted"):
            delays = await read(self.daemon.bootstrap, OUTPUT, isolation_level)
            totals = await read(self.daemon.bootstrap, TOTALS, isolation_level)
            verdicts.append(truth.judge(delays, totals))
        return verdicts[0], verdicts[1]

    def show(self, committed: Verdict, uncommitted: Verdict) -> None:
        """Print the short table at the end."""
        table = Table("", "read_committed", "read_uncommitted", title="336,776 flights of 2013")
        for name in ("records", "missing", "duplicated", "wrong", "out_of_order", "wrong_totals"):
            row = (getattr(committed, name), getattr(uncommitted, name))
            table.add_row(name.replace("_", " "), *(f"{value:,}" for value in row))
        table.add_section()
        aborted = len(uncommitted.transactions - committed.transactions)
        for name, value in (
            ("transactions committed", f"{len(committed.transactions):,}"),
            ("transactions aborted", f"{aborted:,}"),
            ("transactions torn", f"{committed.torn:,}"),
            ("kills (-9)", f"{self.tally['kills']}"),
            ("restarts", f"{self.tally['restarts']}"),
            ("loaded, records per second", f"{FLIGHTS / self.load_seconds:,.0f}"),
            ("exactly once, records per second", f"{FLIGHTS / self.pipeline_seconds:,.0f}"),
        ):
            table.add_row(name, value, "")
        self.console.print(table)


def main() -> int:
    """Run the demo; return 0 if the output is exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".cache/flights"))
    arguments = parser.parse_args()
    console = Console(width=min(100, int(os.environ.get("COLUMNS", "100"))))
    fetch(arguments.cache)
    with tempfile.TemporaryDirectory(prefix="fencepost-demo-") as home:
        demo = Demo(arguments.cache.resolve(), Path(home), console)
        try:
            committed, uncommitted = asyncio.run(demo.run())
        except (TimeoutError, RuntimeError) as error:
            console.print(f"[red]the demo failed: {error!r}[/]")
            for log in sorted(Path(home).glob("*.log")):
                console.print(f"--- {log.name}", log.read_text(errors="replace")[-3000:])
            return 1
    demo.show(committed, uncommitted)
    hidden = uncommitted.records - committed.records
    proven = committed.exact and committed.records == FLIGHTS and hidden > 0
    console.print(
        f"missing {committed.missing}, duplicated {committed.duplicated}: "
        + ("[green]every flight exactly once[/]" if proven else "[red]NOT exactly once[/]")
        + f"; read_committed hid {hidden:,} records of aborted transactions"
    )
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
