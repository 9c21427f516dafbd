"""Runs the programs of this package, collects their errors, and checks the records."""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from confluent_kafka import Message, TopicPartition

from tests.support.daemon import ROOT
from tests.support.go_build import built
from tests.support.kafka import java_command
from tests.support.pipeline import Clients
from tests.support.processes import Child
from tests.support.waits import until

PROGRAMS: Final = Path(__file__).parent
PARTITIONS: Final = 3
COUNTS: Final = "sent", "acknowledged", "read", "copied"
LOOK_S: Final = 0.05

START_S: Final = 600.0
GO_ON_S: Final = 240.0
"""Deadline for programs to start, and to make progress after a step."""

TOLD: Final = re.compile(r"(?:\d\d:\d\d:\d\d\.\d+ )?ERROR (.*)")
"""An error line of a program, or an error in the log of Java's clients."""

NO_CONNECTION: Final = re.compile(
    r"^([\w ]+):.*(Connect to .* failed|ConnectionRefused|KafkaConnectionError|NodeNotReadyError|"
    r"connection refused|connection reset|closed the connection|broken pipe|EOF|"
    r"_TRANSPORT|_ALL_BROKERS_DOWN).*"
)
"""Errors that only say that a broker is unreachable; their wording depends on timing."""

GONE: Final = "no connection"


def python_command(module: str) -> list[str]:
    """Return the command line of a Python program of this package."""
    return [sys.executable, "-m", f"{__package__}.{module}"]


def java_program() -> list[str]:
    """Return the command line of the program with Java's clients."""
    return java_command(str(PROGRAMS / "Failover.java"))


def franz_go_program() -> list[str]:
    """Build the program with franz-go, and return its command line."""
    return [str(built("./failover", "franz-go-failover"))]


class Client:
    """One of the programs, with its name, its stop file and its further arguments."""

    def __init__(
        self, name: str, command: Sequence[str], bootstrap: str, stop: Path, *more: str
    ) -> None:
        self.name = name
        self.child = Child([*command, bootstrap, name, str(stop), *more], cwd=ROOT)
        self._stop = stop
        self._looked_at = 0

    @property
    def at(self) -> tuple[int, ...]:
        """Return the counts of sent, acknowledged, read and copied records; empty at the start."""
        # A library may log a thousand refused connections between two of these lines.
        last = next((line for line in reversed(self.child.lines) if line.startswith("AT ")), "")
        return tuple(int(number) for number in last.split()[1:])

    def new_errors(self) -> Counter[str]:
        """Return the errors reported since the last call, with their counts."""
        begin, self._looked_at = self._looked_at, len(self.child.lines)
        told = (TOLD.match(line) for line in self.child.lines[begin : self._looked_at])
        return Counter(plain(match[1]) for match in told if match)

    def end(self) -> None:
        """Kill the program, and write its output to a file next to its stop file."""
        self.child.kill()
        said = self._stop.with_name(f"{self._stop.name}-{self.name}.txt")
        said.write_text("\n".join(self.child.lines), encoding="utf-8")


def plain(text: str) -> str:
    """Return an error without addresses and numbers, which differ in each run."""
    if gone := NO_CONNECTION.match(text):
        return f"{gone[1]}: {GONE}"
    return re.sub(r"\d+", "#", re.sub(r"(\w+://)?[\w.]+:\d+(/\w+)?", "…", text))


def are_at_work(clients: Sequence[Client]) -> None:
    """Wait until all clients have copied a record; AssertionError if a client ends before."""

    def probe() -> bool:
        for client in clients:
            assert client.child.returncode is None, client.child.tail()
        return all(client.at[3:] > (0,) for client in clients)

    until(probe, "all clients are at work", deadline_s=START_S)


def go_on(clients: Sequence[Client], what: str) -> None:
    """Wait until every client has written, read and copied more."""
    goals = {client.name: [then + 12 for then in client.at] for client in clients}
    behind: list[str] = []

    def probe() -> bool:
        behind[:] = [
            f"{client.name} at {client.at}, not at {goals[client.name]}"
            for client in clients
            if any(now < goal for now, goal in zip(client.at, goals[client.name], strict=True))
        ]
        return not behind

    try:
        until(probe, what, deadline_s=GO_ON_S)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {behind}") from None


Errors = dict[str, Counter[str]]
"""Step → number of times that each error was reported."""

END: Final = "the end"


def lead(
    where: str,
    clients: Sequence[Client],
    steps: Mapping[str, Callable[[], object]],
    stop: Path,
    bootstrap: str,
) -> dict[str, Errors]:
    """Run the steps with all clients, :func:`check` the records, and return each client's errors.

    The consumers that read the records at the end use ``bootstrap``. Also print the errors and the
    longest pauses.
    """
    errors: dict[str, Errors] = {client.name: {} for client in clients}
    pauses: dict[str, dict[str, tuple[float, ...]]] = {}
    watch = Watch(clients)
    try:
        are_at_work(clients)
        watch.start()
        for step, act in steps.items():
            begin = time.monotonic()
            watch.longest()
            act()
            go_on(clients, f"{where}, after: {step}")
            pauses[step] = watch.longest()
            print(f"{where}: {step}: {time.monotonic() - begin:.1f} s", flush=True)
            for client in clients:
                errors[client.name][step] = client.new_errors()
        stop.touch()
        for client in clients:
            check(client, Clients(bootstrap))
            errors[client.name][END] = client.new_errors()
    finally:
        watch.stopping.set()
        for client in clients:
            client.end()
        show_pauses(where, pauses)
    return errors


def show_pauses(where: str, pauses: Mapping[str, Mapping[str, tuple[float, ...]]]) -> None:
    """Print the longest pauses of acknowledgements, reads and copies, by client and step."""
    for step, found in pauses.items():
        for name, longest in found.items():
            told = "".join(f"{pause_s:7.1f}" for pause_s in longest[1:])
            print(f"{where}: longest pauses{told} s  {name:<11} {step}", flush=True)


def show(name: str, ours: Errors, theirs: Errors) -> None:
    """Print the count of each error with Fencepost and with Apache Kafka."""
    for step, found in ours.items():
        other = theirs.get(step, Counter())
        for what in sorted(found | other):
            print(f"{found[what]:4} {other[what]:4}  {name}: {step}: {what}")


def check(client: Client, readers: Clients) -> None:
    """Check that a client wrote, read and copied all numbers once and in order.

    Both groups of the client must have committed the end offsets.
    """
    sent = int(client.child.wait_for_line(r"^SENT (\d+)$", deadline_s=GO_ON_S)[1])
    until(lambda: client.at[2] == sent, f"{client.name} has read all", deadline_s=GO_ON_S)
    ends: dict[int, int] = {}
    for topic in (f"out-{client.name}", f"in-{client.name}"):
        probe = functools.partial(_all_of, readers, topic, sent)
        found = until(probe, f"{topic} has all", deadline_s=GO_ON_S)
        for index in range(PARTITIONS):
            part = [message for message in found if message.partition() == index]
            values = [int(message.value()) for message in part]
            assert values == list(range(index, sent, PARTITIONS)), f"{topic}-{index}"
            ends[index] = part[-1].offset() + 1
    for role in ("reader", "copier"):
        until(
            functools.partial(_is_at, readers, f"{role}-{client.name}", f"in-{client.name}", ends),
            f"{client.name}: the offsets of its {role}",
            deadline_s=GO_ON_S,
            poll_s=0.2,
        )


def _all_of(readers: Clients, topic: str, count: int) -> list[Message] | None:
    """Return a topic's committed records, None while there are fewer than ``count``."""
    found = readers.messages(topic, PARTITIONS)
    return found if len(found) >= count else None


def _is_at(readers: Clients, group: str, topic: str, ends: dict[int, int]) -> bool:
    """Return whether a group has committed at least the offsets ``ends``."""
    consumer = readers.consumer(group)
    found = consumer.committed([TopicPartition(topic, index) for index in ends], 60)
    consumer.close()
    return all(position.offset >= ends[position.partition] for position in found)


class Watch(threading.Thread):
    """Measures the pauses of each client's acknowledgements, reads and copies."""

    def __init__(self, clients: Sequence[Client]) -> None:
        super().__init__(name="watch", daemon=True)
        self.stopping = threading.Event()
        self._clients = clients
        self._moved: dict[tuple[str, str], tuple[int, float]] = {}
        self._longest: dict[tuple[str, str], float] = {}

    def run(self) -> None:
        """Measure until ``stopping`` is set."""
        while not self.stopping.wait(LOOK_S):
            now = time.monotonic()
            for client in self._clients:
                for what, count in zip(COUNTS, client.at, strict=False):
                    key = client.name, what
                    if count > self._moved.get(key, (-1, now))[0]:
                        self._moved[key] = count, now
                    still = now - self._moved[key][1]
                    self._longest[key] = max(still, self._longest.get(key, 0.0))

    def longest(self) -> dict[str, tuple[float, ...]]:
        """Return each client's longest pauses in seconds since the last call, by COUNTS."""
        taken, self._longest = self._longest, {}
        return {
            client.name: tuple(taken.get((client.name, what), 0.0) for what in COUNTS)
            for client in self._clients
        }
