"""Runs unmodified programs of Kafka's ecosystem, and checks the records that they copy."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Producer

from tests.support.cluster import Cluster
from tests.support.kafka import (
    CACHE,
    JAVA_OPTIONS,
    LOG4J_FILE,
    OracleMissingError,
    lock_cache,
    required,
    resolve,
)
from tests.support.pipeline import QUIET, Clients
from tests.support.processes import Child
from tests.support.waits import until

HERE = Path(__file__).parent
PARTITIONS = 2
KILLS = 2
FEED_PAUSE_S = 0.05
"""A feeder's pause between two portions, so that kills happen while a program works."""
PORTION = 50
"""Number of records in one portion of a feeder."""
DEADLINE_S = 120
"""Deadline on a busy machine. On an idle machine, a program takes less than a minute."""


def jars(name: str, jar: str) -> Path:
    """Return the folder of the jars of ``NAME.pom.xml``; ``jar`` is a pattern of a jar's name."""
    folder = CACHE / name
    with required(name):
        resolve(
            HERE / f"{name}.pom.xml",
            {folder: "-DincludeScope=runtime"},
            CACHE / f"{name}.resolved.pom.xml",
            jar,
        )
    return folder


def java(libs: Path, main: str, *arguments: str, classes: Path | None = None) -> Child:
    """Start a Java program with a folder of jars as its class path."""
    class_path = [*([str(classes)] if classes else []), f"{libs}/*"]
    return Child(
        [
            "java",
            *JAVA_OPTIONS,
            f"-Dlog4j2.configurationFile={LOG4J_FILE}",
            "-cp",
            ":".join(class_path),
            main,
            *arguments,
        ]
    )


def compiled(source: str, libs: Path, folder: Path) -> Path:
    """Compile one Java file of this folder and return the folder of its classes."""
    subprocess.run(
        ["javac", "-nowarn", "-d", folder, "-cp", f"{libs}/*", HERE / source], check=True
    )
    return folder


def environment(name: str, *packages: str) -> Path:
    """Return the Python of a virtual environment that has ``packages``, but not Fencepost."""
    folder = CACHE / name
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    with required(name), lock_cache():
        if not stamp.exists() or stamp.read_text() != repr(packages):
            commands = (
                [sys.executable, "-m", "venv", "--clear", folder],
                [python, "-m", "pip", "install", "--quiet", *packages],
            )
            for command in commands:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise OracleMissingError(done.stderr[-800:])
            stamp.write_text(repr(packages))
    return python


@contextmanager
def fed(bootstrap: str, topic: str, total: int) -> Iterator[None]:
    """During the block, write the numbers below ``total`` to a topic, portion by portion."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, **QUIET})
    leave = threading.Event()

    def feed() -> None:
        for number in range(total):
            producer.produce(
                topic, str(number).encode(), str(number).encode(), partition=number % PARTITIONS
            )
            if number % PORTION == 0 and leave.wait(FEED_PAUSE_S):
                return
        producer.flush(60)

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    try:
        yield
        thread.join(60)
    finally:
        leave.set()
        thread.join()


def committed(bootstrap: str, topic: str) -> Counter[bytes]:
    """Return the count of each value of a topic that a ``read_committed`` consumer sees."""
    return Counter(
        bytes(message.value() or b"") for message in Clients(bootstrap).messages(topic, PARTITIONS)
    )


def is_amid_transaction(cluster: Cluster, topic: str) -> bool:
    """Return whether a transaction is open in a partition of ``topic``."""
    return any(
        cluster.lso(topic, index) < cluster.offset(topic, index) for index in range(PARTITIONS)
    )


def killed_amid_transactions(
    cluster: Cluster, start: Callable[[], Child], target: str, total: int
) -> Child:
    """Kill a program by SIGKILL while transactions are open; return its last, running process.

    Before each kill, a further share of ``total`` must have arrived in ``target``, which shows that
    the program has recovered from the previous kill.
    """

    def written() -> int:
        return sum(cluster.offset(target, index) for index in range(PARTITIONS))

    for kill in range(KILLS):
        child, least = start(), total * (kill + 1) // (KILLS + 2)
        try:
            until(
                lambda least=least: written() > least and is_amid_transaction(cluster, target),
                f"an open transaction beyond record {least}: {child.tail(20)}",
                deadline_s=DEADLINE_S,
                poll_s=0.001,
            )
        finally:
            child.kill()
    return start()


def assert_exactly_once(
    bootstrap: str, topic: str, total: int, child: Child, *, spare: int = 0
) -> None:
    """Wait until the topic has every number, and assert that it has each number once.

    The numbers from ``total`` to ``total + spare`` may be missing, but not duplicated.
    """
    wanted = {str(number).encode() for number in range(total)}
    allowed = {str(number).encode() for number in range(total + spare)}
    found: Counter[bytes] = Counter()

    def is_complete() -> bool:
        nonlocal found
        found = committed(bootstrap, topic)
        with Cluster(bootstrap) as cluster:
            return found.keys() >= wanted and not is_amid_transaction(cluster, topic)

    try:
        until(is_complete, f"all of {topic}", deadline_s=DEADLINE_S, poll_s=0.5)
    except TimeoutError as error:
        missing = sorted(map(int, wanted - found.keys()))
        error.add_note(f"missing {len(missing)}: {missing[:5]} … {missing[-5:]}\n{child.tail()}")
        raise
    found = committed(bootstrap, topic)  # including the last transactions
    duplicated = {value: count for value, count in found.items() if count > 1}
    assert (found.keys() - allowed, duplicated) == (set(), {})
