"""The cost of metrics to a producer: one append at a time, with a scrape each second.

Two daemons run side by side, one without metrics and one with. A client appends to one of them for
some seconds at a time, in random order; in half of the turns of the second daemon a child process
scrapes it. So a drift of the machine's speed affects all figures alike.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

from bench.brokers import cpu_seconds
from bench.clients import create_topic
from bench.suite import Figures, Local, Suite
from fencepost.tools.ports import hold_port
from tests.support.batches import batch
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon

TURN_S = 4.0
TURNS = 6
"""Turns of each kind."""

SCRAPE_EVERY_S = 1.0
WARM_UP_S = 1.0

OFF, ON, SCRAPED = "without metrics", "with metrics", "with a scrape each second"


def _scrape(url: str, wanted: Event) -> None:
    """Scrape like a frequent Prometheus, while ``wanted`` is set."""
    while True:
        wanted.wait()
        with urllib.request.urlopen(url) as answer:
            answer.read()
        time.sleep(SCRAPE_EVERY_S)


@contextmanager
def _scraper(url: str) -> Iterator[Event]:
    wanted = multiprocessing.Event()
    child = multiprocessing.Process(target=_scrape, args=(url, wanted), daemon=True)
    child.start()
    try:
        yield wanted
    finally:
        child.terminate()
        child.join()


def _appends(cluster: Cluster, topic: str, seconds: float) -> list[float]:
    """Return the milliseconds of appends, one after the other."""
    data, took = batch([bytes(1024)]), []
    end = time.perf_counter() + seconds
    while (since := time.perf_counter()) < end:
        cluster.produce(topic, data)
        took.append((time.perf_counter() - since) * 1000)
    return took


def watched(partitions: int) -> Callable[[Path], Figures]:
    def run(home: Path) -> Figures:
        with closing(hold_port()) as held:
            address = f"127.0.0.1:{held.getsockname()[1]}"
            off = Daemon(home / "off").start()
            on = Daemon(home / "on", {"fencepost.metrics.listen": address}).start()
            try:
                return _measure(off, on, f"http://{address}/metrics", partitions)
            finally:
                off.kill()
                on.kill()

    return run


def _measure(off: Daemon, on: Daemon, url: str, partitions: int) -> Figures:
    took: dict[str, list[float]] = {OFF: [], ON: [], SCRAPED: []}
    spent: dict[str, float] = {}
    with Cluster(off.bootstrap) as plain, Cluster(on.bootstrap) as told, _scraper(url) as wanted:
        topics = {}
        for daemon, cluster in ((off, plain), (on, told)):
            topics[daemon] = topic = create_topic(daemon.bootstrap, partitions)
            for index in range(partitions):
                cluster.produce(topic, [b"x"], partition=index)
            _appends(cluster, topic, WARM_UP_S)
        kinds = [kind for kind in took for _ in range(TURNS)]
        random.Random(7).shuffle(kinds)
        for kind in kinds:
            if kind == SCRAPED:
                wanted.set()
            daemon, cluster = (off, plain) if kind == OFF else (on, told)
            before = cpu_seconds(daemon)
            took[kind] += _appends(cluster, topics[daemon], TURN_S)
            spent[kind] = spent.get(kind, 0.0) + cpu_seconds(daemon) - before
            wanted.clear()
        with urllib.request.urlopen(url) as answer:
            text = answer.read().decode()
    figures: Figures = {}
    for kind, times in took.items():
        cuts = statistics.quantiles(times, n=1000)
        figures |= {f"{kind}, median (ms)": cuts[499], f"{kind}, p99 (ms)": cuts[989]}
        figures[f"{kind}, p99.9 (ms)"] = cuts[998]
        figures[f"{kind}, CPU time of the broker (µs)"] = spent[kind] / len(times) * 1e6
    (last,) = (line for line in text.splitlines() if line.startswith("fencepost_scrape_seconds "))
    return {
        **figures,
        "time of one scrape (ms)": float(last.split()[1]) * 1000,
        "lines of one scrape (lines)": text.count("\n"),
    }


METRICS = Suite(
    "metrics",
    "Appends of 1 KiB, one after the other: without metrics, with metrics, and with a scrape each "
    "second.",
    tuple(
        Local(f"append to one of {partitions:,} partitions", watched(partitions))
        for partitions in (100, 1_000)
    ),
)
