"""The sides: a Fencepost daemon, an Apache Kafka and a kfake, each in a process of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from fencepost.tools.ports import hold_port
from tests.support.daemon import START_S, Daemon
from tests.support.go_build import built
from tests.support.kafka import Kafka, KafkaCluster
from tests.support.member import MemberCluster
from tests.support.mixed import JAVA, PYTHON, MixedCluster
from tests.support.processes import Child

FENCEPOST, KAFKA, KFAKE = "fencepost", "kafka", "kfake"

JAVA_OPTIONS = ("-Xmx1g", "-Xms1g", "-XX:+UseG1GC")
"""The options that Kafka's own start script sets for a broker on a small machine."""


class Broker(Protocol):
    """A broker under test."""

    name: str

    @property
    def bootstrap(self) -> str: ...
    @property
    def child(self) -> Child | None: ...
    def start(self) -> object: ...
    def kill(self) -> None: ...


class Kfake:
    """franz-go's broker in memory (``pkg/kfake``), which has no settings and no files."""

    name = KFAKE

    def __init__(self) -> None:
        self.child: Child | None = None
        self._port = hold_port()
        self.bootstrap = f"127.0.0.1:{self._port.getsockname()[1]}"

    def start(self) -> None:
        """Build the program, start it, and wait until it listens; RuntimeError without Go."""
        try:
            program = built(".", "bench-kfake", Path(__file__).with_name("kfake"))
        except (pytest.skip.Exception, pytest.fail.Exception) as missing:
            raise RuntimeError(str(missing)) from missing  # a run of the bench goes on without it
        self.child = Child([str(program), self.bootstrap.rpartition(":")[2]])
        self.child.wait_for_line("^listening", deadline_s=START_S)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._port.close()
        if self.child is not None:
            self.child.kill()


Make = Callable[[Path, Mapping[str, str]], Broker]

SIDES: Mapping[str, Make] = {
    FENCEPOST: lambda home, settings: Daemon(home / "data", settings),
    KAFKA: lambda home, settings: Kafka(home, settings, java_options=JAVA_OPTIONS),
    KFAKE: lambda _, __: Kfake(),
}


class Members(MemberCluster):
    """Our cluster as one :class:`Broker`, whose address lists all nodes."""

    child = None

    @property
    def processes(self) -> Sequence[Broker]:
        """The brokers in order of their numbers, and then the controller."""
        return [*self.nodes, self.controller]

    @property
    def last_the_controller(self) -> Sequence[Broker]:
        """The nodes in the order in which they are stopped."""
        return self.processes

    def kill(self) -> None:
        """Kill all nodes at once with SIGKILL."""
        self.stop()


class Kafkas(KafkaCluster):
    """Apache Kafka's cluster as one :class:`Broker`."""

    child = None

    @property
    def processes(self) -> Sequence[Broker]:
        """The brokers in order of their numbers; the first is the controller too."""
        return self.nodes

    @property
    def last_the_controller(self) -> Sequence[Broker]:
        """The nodes in the order in which they are stopped."""
        return self.nodes[::-1]

    def kill(self) -> None:
        """Kill all nodes at once with SIGKILL."""
        self.stop()


class Mixed(MixedCluster):
    """Both products under Apache Kafka's controller; brokers of the kind ``leads`` lead."""

    child = None

    def __init__(self, home: Path, layout: str, settings: Mapping[str, str], leads: str) -> None:
        super().__init__(home, layout, settings, java_options=JAVA_OPTIONS)
        self._leaders = self.numbers(leads)

    @property
    def processes(self) -> Sequence[Broker]:
        """The brokers in order of their numbers, and then the controller."""
        return self.all_nodes

    @property
    def last_the_controller(self) -> Sequence[Broker]:
        """The nodes in the order in which they are stopped."""
        return self.all_nodes

    def assignment(self, partitions: int) -> list[list[int]]:
        """Return the replicas of partitions; the brokers of the kind ``leads`` lead in turn."""
        numbers = sorted(self.numbers(JAVA) + self.numbers(PYTHON))
        first = [self._leaders[index % len(self._leaders)] for index in range(partitions)]
        return [[leader, *(other for other in numbers if other != leader)] for leader in first]

    def kill(self) -> None:
        """Kill all nodes at once with SIGKILL."""
        self.stop()


CLUSTERS: Mapping[str, Make] = {
    FENCEPOST: lambda home, settings: Members(home, settings=settings),
    KAFKA: lambda home, settings: Kafkas(home, settings=settings, java_options=JAVA_OPTIONS),
}
"""Clusters of three brokers, by product."""


def led_by_each(layout: str) -> Mapping[str, Make]:
    """Return the mixed cluster of each side, in which the side's brokers lead all partitions."""
    return {
        FENCEPOST: lambda home, settings: Mixed(home, layout, settings, PYTHON),
        KAFKA: lambda home, settings: Mixed(home, layout, settings, JAVA),
    }


def pid_of(broker: Broker) -> int:
    """Return the broker's process id."""
    if broker.child is None:
        raise RuntimeError(f"{broker.name} is not started")
    return broker.child.pid


def resident_mib(broker: Broker) -> float:
    """Return the resident memory of the broker's process, MiB."""
    status = Path(f"/proc/{pid_of(broker)}/status").read_text(encoding="ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found.group(1)) / 1024 if found else float("nan")


def cpu_seconds(broker: Broker) -> float:
    """Return the processor time so far of the broker's process, or of a cluster's processes."""
    if isinstance(broker, Members | Kafkas | Mixed):
        return sum(map(cpu_seconds, broker.processes))
    fields = Path(f"/proc/{pid_of(broker)}/stat").read_text(encoding="ascii").rpartition(")")[2]
    user, system = fields.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def open_files(broker: Broker) -> int:
    """Return the number of file descriptors of the broker's process."""
    return len(list(Path(f"/proc/{pid_of(broker)}/fd").iterdir()))
