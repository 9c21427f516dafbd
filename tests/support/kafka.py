"""Apache Kafka from Maven Central's jars: KRaft nodes on loopback, and their tools."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from fencepost.tools.ports import hold_port
from tests.support.processes import Child
from tests.support.targets import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
POM = ROOT / "tests" / "oracle" / "pom.xml"
CACHE = ROOT / ".cache" / "oracle"
LOG4J_FILE = CACHE / "log4j2.xml"
START_S = 120.0
MAVEN_PAUSES_S = (5, 20, 60)
"""Pauses before each retry after a failed download."""

CLUSTER_ID = "AAAAAAAAQACAAAAAAAAAAQ"
"""The cluster id with which storage is formatted."""

# Apache Kafka shares the machine with Fencepost: small heap, one collector thread, quick warm-up.
JAVA_OPTIONS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")

LOG4J = """\
<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="error">
  <Appenders>
    <Console name="out"><PatternLayout pattern="%d{HH:mm:ss.SSS} %p %c{1} %m%n"/></Console>
  </Appenders>
  <Loggers>
    <Logger name="kafka.server.KafkaRaftServer" level="info"/>
    <Root level="warn"><AppenderRef ref="out"/></Root>
  </Loggers>
</Configuration>
"""


class Server(Protocol):
    """A server that can be started and stopped."""

    def start(self) -> object: ...
    def stop(self) -> None: ...


S = TypeVar("S", bound=Server)


class OracleMissingError(Exception):
    """Apache Kafka cannot run here, because something that it needs is missing."""


def unavailable(missing: str, judge: str = "Apache Kafka") -> None:
    """Skip the test because something is missing; with REQUIRE_ORACLE=1 fail the test."""
    reason = f"{judge} cannot judge here: {missing}"
    if os.environ.get("REQUIRE_ORACLE") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@contextmanager
def required(judge: str = "Apache Kafka") -> Iterator[None]:
    """Call :func:`unavailable` if the block raises OracleMissingError."""
    try:
        yield
    except OracleMissingError as missing:
        unavailable(str(missing), judge)


def served(server: S, judge: str = "Apache Kafka") -> Iterator[S]:
    """Start a server for a fixture, yield it, and stop it; skip if it is unavailable."""
    with required(judge):
        server.start()
    yield server
    server.stop()


Libs = Callable[[], Path]
"""Returns the folder with the jars of one release; OracleMissingError says what is missing."""


def jars() -> Path:
    """Return the folder of the jars, resolved at first use; raise OracleMissingError."""
    libs = CACHE / "libs"
    resolve(
        POM, {libs: "-DincludeScope=runtime"}, CACHE / "resolved.pom.xml", "kafka_2.13-4.4.*.jar"
    )
    return libs


def resolve(pom: Path, folders: Mapping[Path, str], stamp: Path, jar: str) -> None:
    """Download a pom's jars, unless they are present; raise OracleMissingError.

    ``folders`` maps each folder to the Maven option that selects its jars; ``jar`` is a pattern of
    their names. ``stamp`` is the file to which the pom is copied after a download.
    """
    with lock_cache():
        _resolved(pom, folders, stamp, jar)


@contextmanager
def lock_cache() -> Iterator[None]:
    """Lock the cache against other test workers and runs; raise OracleMissingError.

    Another process must neither use an incomplete folder, nor overwrite a jar that a JVM has
    mapped.
    """
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            raise OracleMissingError(f"`{tool}` is not on the PATH")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def maven(*goal: str) -> None:
    """Run Maven, with retries because a registry sometimes fails for a short time.

    OracleMissingError has the output of the last attempt.
    """
    for pause_s in (*MAVEN_PAUSES_S, None):
        # Without -U Maven would not retry a failed download.
        done = subprocess.run(
            ["mvn", "-q", "-B", "-U", *goal],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode == 0:
            return
        if pause_s is not None:
            time.sleep(pause_s)
    raise OracleMissingError(f"mvn could not resolve the jars: {done.stdout[-800:]}")


def _resolved(pom: Path, folders: Mapping[Path, str], stamp: Path, jar: str) -> None:
    # The pom determines the folder's contents, so its text identifies the folder's state.
    if not LOG4J_FILE.exists() or LOG4J_FILE.read_text() != LOG4J:
        LOG4J_FILE.write_text(LOG4J)
    are_there = all(any(folder.glob(jar)) for folder in folders)
    if stamp.exists() and stamp.read_bytes() == pom.read_bytes() and are_there:
        return
    stamp.unlink(missing_ok=True)  # an incomplete folder must not look complete
    for folder, scope in folders.items():
        shutil.rmtree(folder, ignore_errors=True)  # it may hold the jars of another release
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={folder}", scope]
        maven("-f", str(pom), *goal)
    stamp.write_bytes(pom.read_bytes())


def java_command(
    main: str,
    *arguments: str,
    options: Sequence[str] = JAVA_OPTIONS,
    class_path: Sequence[Path] = (),
    libs: Libs = jars,
) -> list[str]:
    """Return the command line of a Java tool; its class path is ``class_path``, then ``libs``."""
    return [
        "java",
        *options,
        f"-Dlog4j2.configurationFile={LOG4J_FILE}",
        "-cp",
        ":".join(str(path) for path in (*class_path, libs() / "*")),
        main,
        *arguments,
    ]


def run_tool(main: str, *arguments: str, deadline_s: float = 240, libs: Libs = jars) -> str:
    """Run a tool to its end and return its output. A non-zero exit is an AssertionError."""
    return run_to_end(java_command(main, *arguments, libs=libs), deadline_s=deadline_s)


def run_to_end(command: Sequence[str], *, deadline_s: float, stdin: str = "") -> str:
    """Run a command with the input ``stdin``; return its output.

    A non-zero exit status is an AssertionError.
    """
    done = subprocess.run(
        command,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@dataclass(frozen=True)
class Quorum:
    """The address of a controller that is not a :class:`Kafka`."""

    node_id: int
    controller: str
    """The controller's address as HOST:PORT."""


class Kafka:
    """One Apache Kafka, by default broker and controller in one process.

    With ``controller`` it is only a broker, in that controller's cluster; without ``is_broker`` it
    is only a controller.
    """

    name = "kafka"

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str] = SETTINGS,
        *,
        java_options: Sequence[str] = JAVA_OPTIONS,
        node_id: int = 1,
        controller: Kafka | Quorum | None = None,
        replicas: int = 1,
        is_broker: bool = True,
        format_words: Sequence[str] = (),
        libs: Libs = jars,
    ) -> None:
        """``format_words`` are further arguments of ``kafka-storage format``.

        ``libs`` is a function that returns the folder of the release's jars.
        """
        self._libs = libs
        self._java_options = java_options
        self.format_words = list(format_words)
        self._is_broker = is_broker
        self.node_id = node_id
        self._active = controller or self
        self._replicas = replicas
        """Number of replicas of the coordinators' topics."""
        self.data_dir = directory / "data"
        self.cluster_id = CLUSTER_ID
        """The cluster id with which ``kafka-storage`` formats the directory."""

        self.bootstrap = ""
        self.child: Child | None = None
        self._directory = directory
        self._settings = dict(settings)
        held = [hold_port(), hold_port()]
        for port in held:
            weakref.finalize(self, port.close)
        self._ports = [port.getsockname()[1] for port in held]

    def start(self) -> Kafka:
        """Format the storage, start, wait until it serves."""
        self.launch()
        return self.wait()

    def launch(self) -> None:
        """Format the storage, and start the process."""
        properties = self.format()
        command = java_command(
            "kafka.Kafka", str(properties), options=self._java_options, libs=self._libs
        )
        self.child = Child(command)

    def format(self) -> Path:
        """Format the storage if necessary; return the path of the properties file."""
        properties = self._directory / "server.properties"
        properties.write_text(
            "".join(f"{key}={value}\n" for key, value in self._properties().items())
        )
        if not (self.data_dir / "meta.properties").exists():
            run_tool(
                "kafka.tools.StorageTool",
                "format",
                "-t",
                self.cluster_id,
                "-c",
                str(properties),
                *self.format_words,
                libs=self._libs,
            )
        return properties

    def wait(self) -> Kafka:
        """Wait until it serves."""
        assert self.child is not None
        self.child.wait_for_line(r"Kafka Server started", deadline_s=START_S)
        self.bootstrap = self.address
        return self

    @property
    def address(self) -> str:
        """HOST:PORT of the broker's listener for clients, also while the broker does not run."""
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def controller(self) -> str:
        """HOST:PORT of the node's controller listener."""
        return f"127.0.0.1:{self._ports[1]}"

    def _properties(self) -> dict[str, str]:
        is_controller = self._active is self
        listeners = f"PLAINTEXT://{self.address}"
        many = dict.fromkeys(
            (
                "offsets.topic.replication.factor",
                "transaction.state.log.replication.factor",
                "transaction.state.log.min.isr",
                "share.coordinator.state.topic.replication.factor",
                "share.coordinator.state.topic.min.isr",
                "share.coordinator.state.topic.num.partitions",
            ),
            str(self._replicas),
        )
        role = {"process.roles": "controller", "listeners": f"CONTROLLER://{self.controller}"}
        if self._is_broker:
            more = f",CONTROLLER://{self.controller}" if is_controller else ""
            role = {
                "process.roles": "broker,controller" if is_controller else "broker",
                "listeners": listeners + more,
                "advertised.listeners": listeners,
                "inter.broker.listener.name": "PLAINTEXT",
            }
        voter = f"{self._active.node_id}@{self._active.controller}"
        is_dynamic = "controller.quorum.bootstrap.servers" in self._settings
        return {
            **role,
            "node.id": str(self.node_id),
            **({} if is_dynamic else {"controller.quorum.voters": voter}),
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": str(self.data_dir),
            "log.cleaner.dedupe.buffer.size": "4194304",
            "log.cleaner.threads": "1",
            "num.io.threads": "4",
            "num.network.threads": "2",
            **many,
            **self._settings,
        }

    def add_settings(self, settings: Mapping[str, str]) -> None:
        """Add settings, which apply when the node next starts."""
        self._settings.update(settings)

    def upgrade(self, libs: Libs) -> None:
        """Stop the node cleanly, and start the release with these jars on the same data."""
        assert self.child is not None
        self.child.terminate(deadline_s=START_S)
        self._libs = libs
        self.start()

    def kill(self) -> None:
        """Kill the process by SIGKILL."""
        assert self.child is not None
        self.child.kill()

    def stop(self) -> None:
        """Kill the process. A clean stop would be slow, and no test needs the data."""
        self.kill()


class KafkaCluster:
    """Brokers of Apache Kafka on loopback, numbered from 1; the first is also the controller.

    Like a single broker, the cluster is a target: any test of one broker can run against it.
    """

    name = "kafka"

    def __init__(
        self,
        directory: Path,
        count: int = 3,
        settings: Mapping[str, str] = SETTINGS,
        *,
        java_options: Sequence[str] = JAVA_OPTIONS,
    ) -> None:
        self.nodes: list[Kafka] = []
        for node_id in range(1, count + 1):
            room = directory / f"kafka-{node_id}"
            room.mkdir(parents=True, exist_ok=True)
            node_settings = {"broker.rack": f"rack-{node_id}", **settings}
            self.nodes.append(
                Kafka(
                    room,
                    node_settings,
                    java_options=java_options,
                    node_id=node_id,
                    controller=self.nodes[0] if self.nodes else None,
                    replicas=min(3, count),
                )
            )
        self.data_dir = self.nodes[0].data_dir

    @property
    def bootstrap(self) -> str:
        """The addresses of all brokers."""
        return ",".join(node.bootstrap for node in self.nodes)

    def node(self, node_id: int) -> Kafka:
        """Return a broker by its node id."""
        return self.nodes[node_id - 1]

    def start(self) -> KafkaCluster:
        """Start all brokers at once, and wait until they serve."""
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.wait()
        return self

    def stop(self) -> None:
        """Kill all brokers."""
        for node in self.nodes:
            if node.child is not None:
                node.kill()


def quorum_of_three(
    directory: Path,
    settings: Mapping[str, str] = SETTINGS,
    *,
    is_broker: bool = True,
    is_dynamic: bool = False,
    libs: Libs = jars,
) -> list[Kafka]:
    """Start three nodes of Apache Kafka, each a voter of the quorum and a broker.

    Without ``is_broker`` they are controllers only. A dynamic quorum (KIP-853) has its voters in
    the metadata, a static one in the properties files. ``libs`` returns the jars of the release.
    """
    nodes = []
    for node_id in (1, 2, 3):
        room = directory / f"voter-{node_id}"
        room.mkdir(parents=True)
        nodes.append(
            Kafka(room, settings, node_id=node_id, replicas=3, is_broker=is_broker, libs=libs)
        )
    voters = ",".join(f"{node.node_id}@{node.controller}" for node in nodes)
    voter_settings = {"controller.quorum.voters": voters}
    words: list[str] = []
    if is_dynamic:
        voter_settings = {
            "controller.quorum.bootstrap.servers": ",".join(node.controller for node in nodes)
        }
        rooms = ("AAAAAAAAQACAAAAAAAAAA" + letter for letter in "gwA")
        named = (
            f"{node.node_id}@{node.controller}:{room}"
            for node, room in zip(nodes, rooms, strict=True)
        )
        words = ["--initial-controllers", ",".join(named)]
    for node in nodes:
        node.format_words = words
        node.add_settings(voter_settings)
        node.launch()
    for node in nodes:
        node.wait()
    return nodes
