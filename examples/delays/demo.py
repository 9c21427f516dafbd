"""The whole chain: flights from MQTT and a loader pass through PySpark exactly once, despite kills.

1. start ``fencepost serve`` and load eleven months of flights into a topic;
2. start the Spark driver of ``examples.delays.job``; meanwhile December comes in over MQTT;
3. kill -9 the Spark driver, the MQTT bridge, the daemon, and the driver again, each inside an open
   transaction of the sink;
4. read both outputs with read_committed and compare them with the expected output, computed from
   the files; read them again with read_uncommitted to show the hidden records; draw the delays.

The exit status is 0 only if every flight and every hour is there exactly once and right.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from aiokafka import AIOKafkaConsumer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from examples.broker import create_topics, everything, produce
from examples.delays.chart import chart
from examples.delays.feed import (
    ENRICHED,
    FLIGHTS,
    HOURS,
    PARTITIONS,
    ROUTES,
    close_windows,
    encoded,
    publish,
    split,
)
from examples.delays.truth import Record, Truth, judge
from examples.flights.data import Reference, fetch
from examples.flights.demo import bars
from examples.flights.verify import Verdict
from examples.mqtt_broker import mqtt_broker
from examples.processes import Daemon, Process
from fencepost.client.client import WireClient

DEADLINE_S = 1_800
"""The time limit of the demo, in seconds."""
LOOK_S = 0.1


class Watcher:
    """A read_committed consumer of both outputs; it runs during the faults."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self.seen: Counter[str] = Counter()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with AIOKafkaConsumer(
            *(ENRICHED, HOURS),
            bootstrap_servers=self._bootstrap,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        ) as reader:
            while True:
                for source, found in (await reader.getmany(timeout_ms=200)).items():
                    self.seen[source.topic] += len(found)

    def check(self) -> None:
        """Raise the error that ended the watcher, if there is one."""
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Stop reading."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def read(bootstrap: str, topic: str, isolation_level: str) -> list[tuple[str, bytes]]:
    """Return all records that a consumer gets from a topic, with keys as text."""
    return [
        (record.key.decode(), record.value)
        async for record in everything(bootstrap, topic, isolation_level)
    ]


async def supervise(process: Process) -> None:
    """Start a process now, and again whenever it has ended, by a kill or otherwise."""
    while True:
        if not process.is_running:
            await process.start()
        await asyncio.sleep(LOOK_S)


class Demo:
    """One run, from an empty data directory to the verdict."""

    def __init__(self, data: Path, home: Path, console: Console) -> None:
        self.data = data
        self.home = home
        self.console = console
        self.daemon = Daemon(home)
        self.services: dict[str, Process] = {}
        self.batches: Counter[str] = Counter()
        self.java = ""
        self.kills: Counter[str] = Counter()
        self.seconds = 0.0

    async def run(self) -> bool:
        """Run all steps; return whether the outputs are exact."""
        await self.daemon.start()
        self.console.print(f"fencepost serves on [bold]{self.daemon.bootstrap}[/]")
        history, live = split(self.data)
        try:
            topics = ((topic, PARTITIONS) for topic in (FLIGHTS, ENRICHED, HOURS))
            await create_topics(self.daemon.bootstrap, *topics)
            with bars(self.console) as progress:
                loading = progress.add_task("loading January–November", total=len(history))
                await produce(
                    self.daemon.bootstrap,
                    FLIGHTS,
                    (
                        (str(flight["carrier"]).encode(), encoded(flight), None)
                        for flight in history
                    ),
                    lambda sent: progress.update(loading, completed=sent),
                )
                progress.update(loading, completed=len(history))
                async with asyncio.timeout(DEADLINE_S):
                    truth = await asyncio.to_thread(Truth.of, self.data)
                    await self._pipeline(progress, truth, live)
            return await self._verify(truth)
        finally:
            for service in self.services.values():
                await service.stop(signal.SIGKILL)
            await self.daemon.stop()

    async def _pipeline(self, progress: Progress, truth: Truth, live: list[Record]) -> None:
        begin = time.monotonic()
        wanted = {ENRICHED: len(truth.flights), HOURS: len(truth.hours)}
        bars = {topic: progress.add_task(topic, total=total) for topic, total in wanted.items()}
        watcher = Watcher(self.daemon.bootstrap)
        async with mqtt_broker() as port, asyncio.TaskGroup() as group:
            routes = self.home / "routes.toml"
            routes.write_text(ROUTES, encoding="utf-8")
            common = ("--bootstrap", self.daemon.bootstrap)
            self.services = {
                "the Spark driver": Process(
                    self.home / "driver.log",
                    *("examples.delays.job", *common, "--data", str(self.data)),
                    *("--checkpoint", str(self.home / "checkpoint")),
                ),
                "the MQTT bridge": Process(
                    self.home / "bridge.log",
                    *("fencepost.pipelines.mqtt", *common, "--mqtt", f"127.0.0.1:{port}"),
                    *("--mqtt-version", "3.1.1", "--config", str(routes)),
                ),
            }
            background = [group.create_task(supervise(s)) for s in self.services.values()]
            background.append(group.create_task(self._count_batches()))
            arriving = group.create_task(self._live(progress, port, live))
            try:
                await self._under_fire(progress, bars, watcher, wanted, arriving)
            finally:
                self.seconds = time.monotonic() - begin
                for task in (*background, arriving):
                    task.cancel()
                await watcher.stop()
                for service in self.services.values():
                    await service.stop()

    async def _under_fire(
        self,
        progress: Progress,
        bars: dict[str, TaskID],
        watcher: Watcher,
        wanted: dict[str, int],
        arriving: asyncio.Task[None],
    ) -> None:
        """Kill every process once (Spark twice), then wait for the end of the run."""
        for share, victim in (
            (0.10, "the Spark driver"),
            (0.25, "the MQTT bridge"),
            (0.40, "the daemon"),
            (0.65, "the Spark driver"),
        ):
            at = {ENRICHED: round(share * wanted[ENRICHED])}
            await self._reach(at, watcher, progress, bars)
            await asyncio.to_thread(self._inside_a_transaction, watcher.seen, wanted[ENRICHED])
            progress.update(bars[ENRICHED], description=f"kill -9 {victim}")
            if victim in self.services:
                await self.services[victim].stop(signal.SIGKILL)
            else:
                await self.daemon.stop(signal.SIGKILL)
                await self.daemon.start()
            self.kills[victim] += 1
            progress.update(bars[ENRICHED], description=ENRICHED)
        await arriving
        await self._reach({ENRICHED: wanted[ENRICHED]}, watcher, progress, bars)
        await close_windows(self.daemon.bootstrap)
        await self._reach(wanted, watcher, progress, bars)

    async def _live(self, progress: Progress, port: int, live: list[Record]) -> None:
        """Publish December once the bridge has subscribed: before that, messages are dropped."""
        task = progress.add_task("December, over MQTT", total=len(live))
        while b"bridge at work" not in await self.services["the MQTT bridge"].lines.get():
            pass
        await publish(port, live, lambda sent: progress.update(task, completed=sent))
        progress.update(task, completed=len(live))

    async def _count_batches(self) -> None:
        while True:
            line = await self.services["the Spark driver"].lines.get()
            said = json.loads(line or '{"event": "ended"}')
            if said["event"] == "started":
                self.java = said["java"]
            elif said["event"] == "batch":
                self.batches[said["query"]] += 1

    async def _reach(
        self,
        wanted: dict[str, int],
        watcher: Watcher,
        progress: Progress,
        bars: dict[str, TaskID],
    ) -> None:
        """Wait until the watcher has seen this many records."""
        while any(watcher.seen[topic] < count for topic, count in wanted.items()):
            for topic, task in bars.items():
                progress.update(task, completed=watcher.seen[topic])
            watcher.check()
            await asyncio.sleep(LOOK_S)
        for topic, task in bars.items():
            progress.update(task, completed=watcher.seen[topic])

    def _inside_a_transaction(self, seen: Counter[str], wanted: int) -> None:
        """Wait until the sink's transaction holds output, or until all output is seen."""
        with WireClient(self.daemon.bootstrap) as client:
            while seen[ENRICHED] < wanted:
                (state,) = client.call(
                    "DescribeTransactions", to_transaction=ENRICHED, transactional_ids=(ENRICHED,)
                ).transaction_states
                if any(topic.topic == ENRICHED for topic in state.topics):
                    return

    async def _verify(self, truth: Truth) -> bool:
        self.console.print("comparing both outputs with the truth from the files …")
        expected = {
            ENRICHED: {str(flight_id): record for flight_id, record in truth.flights.items()},
            HOURS: truth.hours,
        }
        verdicts: dict[tuple[str, str], Verdict] = {}
        found: list[tuple[str, bytes]] = []
        for topic in (ENRICHED, HOURS):
            for isolation_level in ("read_committed", "read_uncommitted"):
                seen = await read(self.daemon.bootstrap, topic, isolation_level)
                verdicts[topic, isolation_level] = judge(expected[topic], seen)
                if (topic, isolation_level) == (HOURS, "read_committed"):
                    found = seen
        self._show(verdicts)
        self.console.print(chart(found, Reference.load(self.data).airlines))
        return all(
            verdict.exact for (_, level), verdict in verdicts.items() if level == "read_committed"
        )

    def _show(self, verdicts: dict[tuple[str, str], Verdict]) -> None:
        table = Table(title="336,776 flights of 2013 through MQTT, Fencepost and Spark")
        table.add_column("")
        for topic, level in verdicts:
            table.add_column(f"{topic}\n{level}", justify="right")
        for name in ("records", "missing", "duplicated", "wrong"):
            table.add_row(name, *(f"{getattr(verdict, name):,}" for verdict in verdicts.values()))
        self.console.print(table)
        hidden = sum(
            verdict.records * (1 if level == "read_uncommitted" else -1)
            for (_, level), verdict in verdicts.items()
        )
        kills = ", ".join(f"{victim} {n} ×" for victim, n in self.kills.items())
        batches = ", ".join(f"{n} of {query}" for query, n in sorted(self.batches.items()))
        self.console.print(
            f"kill -9: {kills}\nmicro-batches done: {batches}; on Java {self.java};"
            f" {self.seconds:.0f} s\nread_committed hid {hidden:,} records of aborted transactions"
        )


def main() -> None:
    """Parse the command line, run, and exit with 0 only after an exact result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(".cache/flights"))
    parser.add_argument("--home", type=Path, help="keep logs and data here")
    arguments = parser.parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # the daemon is killed on purpose
    console = Console(width=max(110, Console().width))
    fetch(arguments.data)
    with tempfile.TemporaryDirectory(prefix="fencepost-demo-") as scratch:
        home = arguments.home or Path(scratch)
        home.mkdir(parents=True, exist_ok=True)
        exact = asyncio.run(Demo(arguments.data, home, console).run())
    word = "[bold green]EXACTLY ONCE" if exact else "[bold red]NOT EXACT"
    console.print(f"{word}[/]: " + ("missing 0, duplicated 0" if exact else "see the table"))
    sys.exit(0 if exact else 1)


if __name__ == "__main__":
    main()
