"""A broker of Fencepost joins a new Apache Kafka cluster, and leaves it, under load.

One producer writes and one group member reads from start to end. The steps are the commands in
docs/growing.md. Needs Java, and Apache Kafka 4.4 unpacked at ``--kafka``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Message, Producer

from fencepost.tools.ports import hold_port

TOPIC, PARTITIONS, GROUP = "orders", 3, "billing"
PATIENCE_S = 120.0
QUIET = {"log_level": 0}

Command = Callable[..., Sequence[str]]
"""Returns the command line of one of Apache Kafka's scripts, by its name and arguments."""


class Places(NamedTuple):
    """The addresses of our broker, the controller and the broker of Apache Kafka."""

    ours: str
    controller: str
    theirs: str


class Load:
    """An idempotent producer and a member of a group, on threads of their own."""

    def __init__(self, bootstrap: str) -> None:
        self.sent: list[list[int]] = [[] for _ in range(PARTITIONS)]
        """Acknowledged numbers, by partition."""
        self.read: list[list[int]] = [[] for _ in range(PARTITIONS)]
        self.errors: list[str] = []
        self.longest_s = 0.0
        """The longest time without an acknowledgement."""
        self._last_s = 0.0
        self._end, self._drained = threading.Event(), threading.Event()
        self._bootstrap = bootstrap
        self._threads = [
            threading.Thread(target=target) for target in (self._produce, self._consume)
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop writing, and read to the end."""
        self._end.set()
        self._threads[0].join()
        self._drained.set()
        self._threads[1].join()

    @property
    def progress(self) -> tuple[int, int]:
        """The numbers of records written and read so far."""
        return sum(map(len, self.sent)), sum(map(len, self.read))

    def _produce(self) -> None:
        producer = Producer(
            {"bootstrap.servers": self._bootstrap, "enable.idempotence": True, **QUIET}
        )

        def acknowledged(error: object, message: Message) -> None:
            if error is not None:
                self.errors.append(str(error))
            else:
                now_s = time.monotonic()
                self.longest_s = max(self.longest_s, now_s - (self._last_s or now_s))
                self._last_s = now_s
                self.sent[message.partition() or 0].append(int(message.value() or b""))

        number = 0
        while not self._end.wait(0.01):
            producer.produce(
                TOPIC, b"%d" % number, partition=number % PARTITIONS, on_delivery=acknowledged
            )
            producer.poll(0)
            number += 1
        if producer.flush(PATIENCE_S):
            self.errors.append("the producer could not write all")

    def _consume(self) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": GROUP,
                "auto.offset.reset": "earliest",
                **QUIET,
            }
        )
        consumer.subscribe([TOPIC])
        quiet = 0
        while quiet < 5 or not self._drained.is_set() or self.progress[1] < self.progress[0]:
            message = consumer.poll(0.5)
            quiet = quiet + 1 if message is None else 0
            if message is not None and message.error() is None:
                self.read[message.partition() or 0].append(int(message.value() or b""))
            if quiet > PATIENCE_S:
                self.errors.append("the group could not read all")
                break
        consumer.close()


def fencepost(*words: str | Path, bootstrap: str = "") -> str:
    """Run a command of Fencepost, and return its output."""
    print("$ fencepost", *words)
    done = subprocess.run(
        [sys.executable, "-m", "fencepost", *map(str, words)],
        env={**os.environ, "FENCEPOST_BOOTSTRAP": bootstrap},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


class Processes:
    """Started processes, which are stopped in reverse order at the end."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, log: str, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        """Start a process, which logs to a file of that name."""
        print("$", *command[-3:])
        with (self._home / log).open("ab") as file:
            process = subprocess.Popen([*map(str, command)], stdout=file, stderr=file)
        self._all.append(process)
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Stop a process with SIGTERM; kill it if it does not end."""
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()

    def close(self) -> None:
        """Stop all processes, the last one first."""
        for process in reversed(self._all):
            self.stop(process)


def until(what: str, is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"waited in vain for: {what}")
        time.sleep(0.5)


def described(bootstrap: str) -> Any:
    """Return the output of ``cluster describe``; an empty cluster if no broker answers."""
    try:
        return json.loads(fencepost("cluster", "describe", "--format", "json", bootstrap=bootstrap))
    except RuntimeError:
        return {"brokers": [], "health": {}}


def row_of(broker: int, bootstrap: str) -> dict[str, Any]:
    """Return the row of one broker."""
    found = [row for row in described(bootstrap)["brokers"] if row["broker"] == broker]
    return found[0] if found else {"state": "unknown", "leads": 0, "in_sync": 0}


def moving(bootstrap: str) -> Any:
    """Return the reassignments in progress."""
    verify = ("topics", "reassign", "--verify", "--format", "json")
    return json.loads(fencepost(*verify, bootstrap=bootstrap))


def java_broker(home: Path, node_id: int, address: str, controller: str) -> Path:
    """Write the settings of a new Apache Kafka broker, and return their file."""
    file = home / f"kafka-{node_id}.properties"
    file.write_text(
        "process.roles=broker\n"
        f"node.id={node_id}\n"
        f"listeners=PLAINTEXT://{address}\n"
        f"controller.quorum.bootstrap.servers={controller}\n"
        "controller.listener.names=CONTROLLER\n"
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n"
        f"log.dirs={file.parent / 'kafka-data'}\n"
        "offsets.topic.replication.factor=1\n"
        "transaction.state.log.replication.factor=1\n"
        "transaction.state.log.min.isr=1\n"
    )
    return file


def grow(kafka: Command, home: Path, processes: Processes, load: Load, at: Places) -> None:
    """Move from a standalone broker to one of Apache Kafka, step by step."""
    data, output = home / "data", home / "cluster"
    serve = (sys.executable, "-m", "fencepost", "serve")
    alone = ("--listen", at.ours, "--config", "offsets.topic.num.partitions=3")
    broker = processes.start("alone.log", (*serve, "--data-dir", data, *alone))
    until("it serves", lambda: bool(described(at.ours)["brokers"]))
    fencepost("topics", "create", TOPIC, "--partitions", str(PARTITIONS), bootstrap=at.ours)
    load.start()
    moved_on(load)

    processes.stop(broker)
    promote = ("cluster", "promote", data, "--controller", f"100@{at.controller}")
    print(fencepost(*promote, "--output", output, *alone))
    settings = output / "controller-100" / "controller.properties"
    processes.start("controller.log", kafka("kafka-server-start", settings))
    broker = processes.start("member.log", (*serve, "--config-file", output / "broker.properties"))
    moved_on(load)

    file = java_broker(home, 2, at.theirs, at.controller)
    cluster_id = described(at.ours)["cluster_id"]
    how = ("format", "-t", cluster_id, "-c", file, "--no-initial-controllers")
    subprocess.run(kafka("kafka-storage", *how), check=True, timeout=PATIENCE_S)
    processes.start("kafka.log", kafka("kafka-server-start", file))
    until("it has joined", lambda: row_of(2, at.ours)["state"] == "up")
    move = ("topics", "reassign", "--all", "--to-brokers", "2", "--execute")
    fencepost(*move, bootstrap=at.ours)
    until("it has everything", lambda: not moving(at.ours))
    moved_on(load)

    processes.stop(broker)
    until("it is gone", lambda: row_of(1, at.theirs)["state"] == "fenced")
    fencepost("cluster", "unregister", "1", "--execute", bootstrap=at.theirs)
    moved_on(load)
    brokers = [row["broker"] for row in described(at.theirs)["brokers"]]
    print(f"the cluster has the brokers {brokers}")


def moved_on(load: Load) -> None:
    """Check that the clients, which were not restarted, keep writing and reading."""
    written, read = load.progress
    until(
        "the clients go on",
        lambda: load.progress[0] > written + 100 and load.progress[1] > read + 100,
    )


def example(kafka: Command, home: Path) -> str | None:
    """Run all steps; return a complaint, or None if the result is right."""
    held = [hold_port() for _ in range(3)]
    at = Places(*(f"127.0.0.1:{port.getsockname()[1]}" for port in held))
    processes, load = Processes(home), Load(at.ours)
    try:
        try:
            grow(kafka, home, processes, load, at)
        finally:
            load.stop()
    finally:
        processes.close()
        for port in held:
            port.close()
    print(
        f"{load.progress[0]} records written, {load.progress[1]} read by the group;"
        f" the longest wait of the producer was {load.longest_s:.1f} s"
    )
    if load.errors:
        return load.errors[0]
    if load.read != load.sent:
        return "the group has not read each record once, in the order of its partition"
    every = sorted(number for part in load.sent for number in part)
    return None if every == [*range(len(every))] else "a record was lost"


def unpacked(home: Path) -> Command:
    """Return the commands of an unpacked Apache Kafka."""
    return lambda script, *words: [str(home / "bin" / f"{script}.sh"), *map(str, words)]


def main() -> int:
    """Run the example with the given Apache Kafka."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kafka", type=Path, required=True, help="where Apache Kafka is unpacked")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        complaint = example(unpacked(arguments.kafka), Path(home))
    print(f"WRONG: {complaint}" if complaint else "checked: as it should be")
    return 1 if complaint else 0


if __name__ == "__main__":
    sys.exit(main())
