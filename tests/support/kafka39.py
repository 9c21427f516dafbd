"""Apache Kafka 3.9, the last release with ZooKeeper: its brokers on loopback, and its tools."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Mapping
from pathlib import Path

from fencepost.tools.ports import hold_port
from tests.support.kafka import CACHE, JAVA_OPTIONS, ROOT, START_S, resolve, run_to_end
from tests.support.processes import Child

POM = ROOT / "tests" / "oracle" / "kafka39.pom.xml"
LIBS = CACHE / "kafka39"
LOG4J_FILE = CACHE / "kafka39.log4j.properties"

# `state.change.logger` logs the controller's requests to a broker; its errors are useful.
LOG4J = """\
log4j.rootLogger=WARN, out
log4j.logger.kafka.server.KafkaServer=INFO
log4j.logger.kafka.controller=INFO
log4j.logger.state.change.logger=WARN
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d{HH:mm:ss.SSS} %p %c{1} %m%n
"""

BROKER_OPTIONS = ("-Xmx256m", *JAVA_OPTIONS[1:])
TOOL_OPTIONS = ("-Xmx128m", *JAVA_OPTIONS[1:])

TOPICS = "org.apache.kafka.tools.TopicCommand"
REASSIGN = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"
ELECT = "org.apache.kafka.tools.LeaderElectionCommand"
CONFIGS = "kafka.admin.ConfigCommand"
ACLS = "kafka.admin.AclCommand"
API_VERSIONS = "kafka.admin.BrokerApiVersionsCommand"
LOG_DIRS = "org.apache.kafka.tools.LogDirsCommand"
GROUPS = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
ZOOKEEPER_SHELL = "org.apache.zookeeper.ZooKeeperMainWithTlsSupportForKafka"
"""Main classes of Kafka's scripts."""


def jars() -> Path:
    """Return the folder of the jars. OracleMissingError says what is missing."""
    resolve(
        POM, {LIBS: "-DincludeScope=runtime"}, CACHE / "kafka39.pom.xml", "kafka_2.13-3.9.*.jar"
    )
    return LIBS


def java_command(main: str, *arguments: str, options: tuple[str, ...] = TOOL_OPTIONS) -> list[str]:
    """Return the command line of a Java tool of Kafka 3.9; raise OracleMissingError."""
    jars()
    if not LOG4J_FILE.exists() or LOG4J_FILE.read_text() != LOG4J:
        LOG4J_FILE.write_text(LOG4J)
    logs = f"-Dlog4j.configuration=file:{LOG4J_FILE}"
    return ["java", *options, logs, "-cp", f"{LIBS}/*", main, *arguments]


def run_tool(main: str, *arguments: str, stdin: str = "", deadline_s: float = 240) -> str:
    """Run a tool to its end, and return its output; AssertionError for a non-zero exit status.

    ``stdin`` is its input, for example of ZooKeeper's shell.
    """
    return run_to_end(java_command(main, *arguments), stdin=stdin, deadline_s=deadline_s)


class Kafka39:
    """One broker of Apache Kafka 3.9 whose controller is elected on ``zookeeper``, HOST:PORT/PATH.

    The broker keeps its port across restarts. It has Kafka's defaults except for ``settings``, few
    threads, and internal topics of one replica.
    """

    name = "kafka39"

    def __init__(
        self,
        home: Path,
        zookeeper: str,
        *,
        node_id: int = 1,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.node_id = node_id
        self.data_dir = home / "logs"
        self.child: Child | None = None
        held = hold_port()
        weakref.finalize(self, held.close)
        self.bootstrap = f"127.0.0.1:{held.getsockname()[1]}"
        """The broker's address as HOST:PORT, also while the broker does not run."""
        home.mkdir(parents=True, exist_ok=True)
        self._file = home / "server.properties"
        self._settings = {
            "broker.id": str(node_id),
            "zookeeper.connect": zookeeper,
            "listeners": f"PLAINTEXT://{self.bootstrap}",
            "log.dirs": str(self.data_dir),
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "log.cleaner.dedupe.buffer.size": "4194304",
            "num.io.threads": "4",
            "num.network.threads": "2",
            "background.threads": "2",
            **(settings or {}),
        }

    def add_settings(self, settings: Mapping[str, str]) -> None:
        """Add settings, which apply when the broker next starts."""
        self._settings.update(settings)

    def start(self) -> Kafka39:
        """Start, and wait until it serves."""
        self.launch()
        return self.wait_until_listening()

    def launch(self) -> Child:
        """Start without waiting."""
        self._file.write_text("".join(f"{key}={value}\n" for key, value in self._settings.items()))
        command = java_command("kafka.Kafka", str(self._file), options=BROKER_OPTIONS)
        self.child = Child(command)
        return self.child

    def wait_until_listening(self, deadline_s: float = START_S) -> Kafka39:
        """Wait until it serves."""
        assert self.child is not None
        started = rf"\[KafkaServer id={self.node_id}\] started"
        self.child.wait_for_line(started, deadline_s=deadline_s)
        return self

    def stop(self) -> int:
        """Stop with a controlled shutdown; return the exit status, which is 143 for a JVM."""
        assert self.child is not None
        return self.child.terminate(deadline_s=START_S)

    def kill(self) -> None:
        """Kill the process by SIGKILL."""
        assert self.child is not None
        self.child.kill()

    def pause(self) -> None:
        """Suspend the process by SIGSTOP, until :meth:`resume` or :meth:`kill`."""
        assert self.child is not None
        os.kill(self.child.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the process by SIGCONT."""
        assert self.child is not None
        os.kill(self.child.pid, signal.SIGCONT)
