"""Stopped brokers leave nothing in the process, and cost little."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from fencepost.testing import Kafka

FEW, MANY = 50, 1_000

MOST_OBJECTS = 100
"""How many more tracked objects the garbage collector may have; a broker has thousands."""

MOST_MEMORY_BYTES = 16 << 20
"""By how many bytes the process may grow, whatever the number of brokers."""


def objects() -> int:
    for _ in range(3):  # objects freed by a finalizer are collected in the next round
        gc.collect()
    return len(gc.get_objects())


def memory_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> set[str]:
    """Return the open descriptors with inode numbers, which show whether one was reused."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{path.name} {path.readlink()}")
        except FileNotFoundError:  # the descriptor that listed the directory
            continue
    return found


def live() -> float:
    """Start, use and stop a broker; return the seconds until it had started."""
    kafka = Kafka()
    begun = time.perf_counter()
    kafka.start()
    took = time.perf_counter() - begun
    kafka.produce(kafka.topic("orders", partitions=2), "one", "two")
    assert len(kafka.records("orders")) == 2
    assert kafka.transactions() == []
    kafka.stop()
    return took


def start_and_stop(count: int) -> None:
    """Start and stop brokers, and check that they leave nothing in this process.

    The process runs no other tests, because their background work would change the counts.
    """
    home = Path(tempfile.gettempdir())
    for _ in range(10):  # the first brokers create one-time objects
        live()
    found, before, threads = objects(), descriptors(), set(threading.enumerate())
    held = memory_bytes()
    took = [live() for _ in range(count)]
    assert set(threading.enumerate()) == threads
    assert descriptors() == before
    assert list(home.iterdir()) == []
    more, grown = objects() - found, memory_bytes() - held
    print(
        f"{count} brokers: {statistics.median(took) * 1000:.1f} ms to start (longest"
        f" {max(took) * 1000:.1f}), {more} objects and {grown >> 10} KiB more than before"
    )
    assert more < MOST_OBJECTS
    assert grown < MOST_MEMORY_BYTES


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_many_brokers_leave_no_resources_in_the_process(count: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(count)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout


if __name__ == "__main__":
    start_and_stop(int(sys.argv[1]))
