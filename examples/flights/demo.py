"""The main job: exactly-once over 336,776 real flights while the daemon and the workers are killed.

1. start ``fencepost serve`` and load the flights into a topic of six partitions (idempotent);
2. run two workers of ``examples.flights.worker`` in one group;
3. meanwhile kill -9 a worker, the daemon, and the other worker, each inside an open transaction;
4. read the output with read_committed and compare it with the truth from the file; then once more
   with read_uncommitted, to show what read_committed hid.

The exit status is 0 only if every flight is in the output exactly once, in order, totals right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
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

from examples.flights.data import FLIGHTS, fetch
from examples.flights.load import TOPIC, load
from examples.flights.verify import Truth, Verdict, read
from examples.flights.worker import GROUP, OUTPUT, TOTALS
from fencepost.coordinator.tools.ports import hold_port

PARTITIONS = 6
START_S = 60
"""Patience with the start of the daemon, in seconds."""

DEADLINE_S = 300
"""After so long without an end the demo gives up, in seconds."""


class Daemon:
    """A real ``fencepost serve`` in a process of its own."""

    def __init__(self, data_dir: Path, log: Path) -> None:
        self._data_dir = data_dir
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._port = hold_port()  # another process could take it while the daemon is dead
        self.bootstrap = f"127.0.0.1:{self._port.getsockname()[1]}"

    async def start(self) -> None:
        """Start it (again, on the same port) and wait for its ``listening`` line."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fencepost", "serve"),
                *("--data-dir", str(self._data_dir), "--listen", self.bootstrap),
                *("--config", "group.initial.rebalance.delay.ms=0"),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        stdout = self._process.stdout
        line = await asyncio.wait_for(stdout.readline(), START_S) if stdout is not None else b""
        if not line.startswith(b"listening "):
            raise RuntimeError(f"the daemon did not start, see {self._log}")

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it with signal ``how`` and wait until it is gone."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(how)
            await self._process.wait()


class WorkerProcess:
    """A real worker, what it said, and the means to stop it inside a transaction."""

    def __init__(self, name: str, data: Path, log: Path, tally: Counter[str]) -> None:
        self.name = name
        self._data = data
        self._log = log
        self._tally = tally
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._holding = asyncio.Event()

    async def start(self, bootstrap: str) -> None:
        """Start it and follow what it reports."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "examples.flights.worker"),
                *("--bootstrap", bootstrap, "--name", self.name, "--data", str(self._data)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        self._reader = asyncio.create_task(self._follow(self._process))

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        while process.stdout is not None and (line := await process.stdout.readline()):
            said = json.loads(line)
            self._tally[said["event"]] += 1
            if said["event"] == "holding":
                self._holding.set()

    async def hold(self) -> None:
        """Wait until it stands inside a transaction, its records written, nothing committed."""
        self._holding.clear()
        self.say("hold")
        await self._holding.wait()

    def say(self, command: str) -> None:
        """Send it a command."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{command}\n".encode())

    async def stop(self, how: signal.Signals | None = None) -> None:
        """Ask it to stop, or end it with signal ``how``; wait until it is gone."""
        if self._process is None:
            return
        if how is None:
            self.say("stop")
        elif self._process.returncode is None:
            self._process.send_signal(how)
        await self._process.wait()
        if self._reader is not None:
            await self._reader


class Demo:
    """One run, from an empty data directory to the verdict."""

    def __init__(self, data: Path, home: Path, console: Console) -> None:
        self.data = data
        self.console = console
        self.tally: Counter[str] = Counter()
        self.daemon = Daemon(home / "data", home / "daemon.log")
        self.workers = [
            WorkerProcess(f"worker-{n}", data, home / f"worker-{n}.log", self.tally) for n in (1, 2)
        ]
        self.load_seconds = 0.0
        self.pipeline_seconds = 0.0

    async def run(self) -> tuple[Verdict, Verdict]:
        """Do everything; returns the verdicts of read_committed and read_uncommitted."""
        await self.daemon.start()
        self.console.print(f"fencepost serves on [bold]{self.daemon.bootstrap}[/]")
        try:
            await self._create_topics()
            with Progress(
                TextColumn("{task.description:<24}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self.console,
            ) as progress:
                await self._load(progress)
                async with asyncio.timeout(DEADLINE_S):
                    await self._pipeline(progress)
            return await self._verify()
        finally:
            await asyncio.gather(*(worker.stop(signal.SIGKILL) for worker in self.workers))
            await self.daemon.stop()

    async def _create_topics(self) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.daemon.bootstrap)
        await admin.start()
        try:
            compact = {"cleanup.policy": "compact"}
            await admin.create_topics(
                [
                    NewTopic(TOPIC, PARTITIONS, 1),
                    NewTopic(OUTPUT, PARTITIONS, 1),
                    NewTopic(TOTALS, PARTITIONS, 1, topic_configs=compact),
                ]
            )
        finally:
            await admin.close()

    async def _load(self, progress: Progress) -> None:
        task = progress.add_task("loading flights", total=FLIGHTS)
        begin = time.monotonic()
        await load(
            self.daemon.bootstrap, self.data, lambda sent: progress.update(task, completed=sent)
        )
        self.load_seconds = time.monotonic() - begin

    async def _pipeline(self, progress: Progress) -> None:
        task = progress.add_task("exactly-once pipeline", total=FLIGHTS)
        begin = time.monotonic()
        first, second = self.workers
        for worker in self.workers:
            await worker.start(self.daemon.bootstrap)
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
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def _reach(self, records: int, progress: Progress, task: TaskID) -> None:
        """Wait until the group has committed ``records`` of the input, as the broker counts it."""
        sources = [TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
        async with AIOKafkaConsumer(
            bootstrap_servers=self.daemon.bootstrap, group_id=GROUP, enable_auto_commit=False
        ) as observer:
            observer.assign(sources)
            done = 0
            while done < records:
                done = sum([await observer.committed(source) or 0 for source in sources])
                progress.update(task, completed=done)
                await asyncio.sleep(0.2)  # the pace of the progress bar

    async def _kill_worker(self, worker: WorkerProcess) -> None:
        await worker.hold()
        await worker.stop(signal.SIGKILL)
        self.tally["kills"] += 1
        await worker.start(self.daemon.bootstrap)
        self.tally["restarts"] += 1

    async def _kill_daemon(self, holder: WorkerProcess) -> None:
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
    """Run the demo; 0 if the output is exact."""
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
