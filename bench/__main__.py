"""Run every workload on Fencepost and on Apache Kafka in turn, and print the ratios.

``python -m bench`` measures; ``python -m bench --write README.md`` puts the table into the README.
The brokers run one at a time, each workload on both before the next one, so that a drift of the
machine's speed hits both. Rounds are repeated and the median is quoted.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bench.workloads import WORKLOADS, Figures
from coordinator.readme import between
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka

SETTINGS = {"group.initial.rebalance.delay.ms": "0"}
"""Both brokers run with their defaults but for the wait before a group's first rebalance."""

JAVA_OPTIONS = ("-Xmx1g", "-Xms1g", "-XX:+UseG1GC")
"""What Kafka's own start script gives a broker on a small machine."""

LOWER_IS_BETTER = (" ms", "MiB")


class Broker(Protocol):
    """A broker under test."""

    bootstrap: str
    child: object

    def start(self) -> object: ...
    def stop(self) -> None: ...


def resident_mib(broker: Broker) -> float:
    """The resident memory of the broker's process, MiB."""
    pid = broker.child.pid  # type: ignore[attr-defined]
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found.group(1)) / 1024 if found else float("nan")


def measure(make: Callable[[Path], Broker], name: str, run: Callable[[str], Figures]) -> Figures:
    """Start a fresh broker, run one workload on it, stop it."""
    with tempfile.TemporaryDirectory(prefix="fencepost-bench-") as home:
        broker = make(Path(home))
        begin = time.perf_counter()
        broker.start()
        figures = {"start ms": (time.perf_counter() - begin) * 1e3}
        figures["memory at rest MiB"] = resident_mib(broker)
        try:
            figures |= {f"{name}: {key}": value for key, value in run(broker.bootstrap).items()}
        finally:
            broker.stop()
    return figures


def table(samples: dict[str, dict[str, list[float]]], rounds: int) -> str:
    """The figures of both brokers and their ratio, as a Markdown table."""
    cores, system = os.cpu_count(), f"{platform.machine()}, CPython {platform.python_version()}"
    lines = [
        (
            f"{cores} cores, {system}, Apache Kafka 4.3.0; median of {rounds} rounds,"
            " taken in turn in one run (`make bench`); a ratio above 1 is in favour of Fencepost."
        ),
        "",
        "| figure | Fencepost | Apache Kafka | ratio |",
        "|---|---|---|---|",
    ]
    for figure, sides in samples.items():
        ours, theirs = (statistics.median(sides[side]) for side in ("fencepost", "kafka"))
        better = theirs / ours if figure.endswith(LOWER_IS_BETTER) else ours / theirs
        lines.append(f"| {figure} | {ours:,.1f} | {theirs:,.1f} | {better:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="run only the workloads whose name contains this")
    parser.add_argument("--write", type=Path, metavar="README.md")
    arguments = parser.parse_args()
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    brokers: dict[str, Callable[[Path], Broker]] = {
        "fencepost": lambda home: Daemon(home / "data", SETTINGS),
        "kafka": lambda home: Kafka(home, SETTINGS, java_options=JAVA_OPTIONS),
    }
    for number in range(arguments.rounds):
        for name, run in WORKLOADS.items():
            if arguments.only and arguments.only not in name:
                continue
            for side, make in brokers.items():
                print(f"round {number + 1}: {name} on {side}", file=sys.stderr, flush=True)
                for figure, value in measure(make, name, run).items():
                    samples[figure][side].append(value)
    text = table(samples, arguments.rounds)
    print(text)
    if arguments.write:
        page = arguments.write.read_text(encoding="utf-8")
        arguments.write.write_text(between(page, "bench", text), encoding="utf-8")


if __name__ == "__main__":
    main()
