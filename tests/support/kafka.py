"""Apache Kafka from Maven Central's jars: a single KRaft node on loopback, and its tools."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fencepost.coordinator.tools.ports import hold_port
from tests.support.processes import Child
from tests.support.targets import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
POM = ROOT / "tests" / "oracle" / "pom.xml"
CACHE = ROOT / ".cache" / "oracle"
TESTS = CACHE / "tests"
"""The jars of Kafka's own tests, and of what runs them: apart from those of its broker."""

LOG4J_FILE = CACHE / "log4j2.xml"
START_S = 120.0

# The judge shares the machine with what it judges: small heap, one collector thread, quick warm-up.
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


class OracleMissingError(Exception):
    """Something that the judge needs is not on this machine."""


def unavailable(missing: str, judge: str = "Apache Kafka") -> None:
    """Skip for the named reason; with REQUIRE_ORACLE=1 a missing judge is a failure."""
    reason = f"{judge} cannot judge here: {missing}"
    if os.environ.get("REQUIRE_ORACLE") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def jars() -> Path:
    """The folder of the jars, resolved on first use. OracleMissingError says what is missing."""
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            raise OracleMissingError(f"`{tool}` is not on the PATH")
    CACHE.mkdir(parents=True, exist_ok=True)
    # The workers of one run, and runs side by side, come here at the same time: one of them
    # resolves, the others must not see half of it, let alone write over what a JVM has mapped.
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _resolved()


def _resolved() -> Path:
    # The pom decides what is in the folder, so its content names the folder's state.
    libs, stamp = CACHE / "libs", CACHE / "resolved.pom.xml"
    folders = {libs: "-DincludeScope=runtime", TESTS: "-DexcludeScope=runtime"}
    if not LOG4J_FILE.exists() or LOG4J_FILE.read_text() != LOG4J:
        LOG4J_FILE.write_text(LOG4J)
    are_there = all(any(folder.glob("kafka_*.jar")) for folder in folders)
    if stamp.exists() and stamp.read_bytes() == POM.read_bytes() and are_there:
        return libs
    stamp.unlink(missing_ok=True)  # what is half done must not look done
    for folder, scope in folders.items():
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={folder}", scope]
        resolved = subprocess.run(
            ["mvn", "-q", "-B", "-f", str(POM), *goal],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if resolved.returncode != 0:
            raise OracleMissingError(f"mvn could not resolve the jars: {resolved.stdout[-800:]}")
    stamp.write_bytes(POM.read_bytes())
    return libs


def java_command(
    main: str,
    *arguments: str,
    options: Sequence[str] = JAVA_OPTIONS,
    class_path: Sequence[Path] = (),
) -> list[str]:
    """The command line of a Java tool on the judge's class path, behind ``class_path``."""
    libs = jars()
    return [
        "java",
        *options,
        f"-Dlog4j2.configurationFile={LOG4J_FILE}",
        "-cp",
        ":".join(str(one) for one in (*class_path, libs / "*")),
        main,
        *arguments,
    ]


def run_tool(main: str, *arguments: str, deadline_s: float = 240) -> str:
    """Run a tool to its end and return all it said. A non-zero exit is an AssertionError."""
    done = subprocess.run(
        java_command(main, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, f"{main} {arguments} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


class Kafka:
    """One Apache Kafka, broker and controller in one process."""

    name = "kafka"

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str] = SETTINGS,
        *,
        java_options: Sequence[str] = JAVA_OPTIONS,
    ) -> None:
        self._java_options = java_options
        self.data_dir = directory / "data"
        self.bootstrap = ""
        self.child: Child | None = None
        self._directory = directory
        self._settings = dict(settings)
        held = [hold_port(), hold_port()]
        for one in held:
            weakref.finalize(self, one.close)
        self._ports = [one.getsockname()[1] for one in held]

    def start(self) -> Kafka:
        """Format the storage, start, wait until it serves."""
        port, controller = self._ports
        properties = self._directory / "server.properties"
        properties.write_text(
            "".join(f"{key}={value}\n" for key, value in self._properties(port, controller).items())
        )
        if not (self.data_dir / "meta.properties").exists():
            run_tool(
                "kafka.tools.StorageTool",
                "format",
                "-t",
                "AAAAAAAAQACAAAAAAAAAAQ",
                "-c",
                str(properties),
            )
        self.child = Child(java_command("kafka.Kafka", str(properties), options=self._java_options))
        self.child.wait_for_line(r"Kafka Server started", deadline_s=START_S)
        self.bootstrap = f"127.0.0.1:{port}"
        return self

    def _properties(self, port: int, controller: int) -> dict[str, str]:
        one = dict.fromkeys(
            (
                "offsets.topic.replication.factor",
                "transaction.state.log.replication.factor",
                "transaction.state.log.min.isr",
                "share.coordinator.state.topic.replication.factor",
                "share.coordinator.state.topic.min.isr",
                "share.coordinator.state.topic.num.partitions",
            ),
            "1",
        )
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "inter.broker.listener.name": "PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": str(self.data_dir),
            "log.cleaner.dedupe.buffer.size": "4194304",
            "log.cleaner.threads": "1",
            "num.io.threads": "4",
            "num.network.threads": "2",
            **one,
            **self._settings,
        }

    def kill(self) -> None:
        """Kill -9."""
        assert self.child is not None
        self.child.kill()

    def stop(self) -> None:
        """End it; a judge has no data worth a slow farewell."""
        self.kill()
