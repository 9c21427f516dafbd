"""Apicurio Registry with its schemas in Fencepost's topics, killed together with the broker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fencepost.tools.ports import hold_port
from tests.ecosystem.programs import DEADLINE_S, HERE, environment
from tests.support.cluster import Cluster, unique
from tests.support.daemon import ROOT, Daemon
from tests.support.kafka import CACHE, JAVA_OPTIONS, lock_cache, maven, required
from tests.support.pages import Page
from tests.support.processes import Child
from tests.support.waits import until

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

RELEASE = "3.0.9"
ARCHIVE = f"io.apicurio:apicurio-registry-app:{RELEASE}:tar.gz:all"
CLIENT = "confluent-kafka[avro,schemaregistry]==2.16.1"
API = "/apis/ccompat/v7"
RECORDS = 100
"""Number of records in one transaction of ``schema_copy.py``."""
START_S = 300
"""Deadline of a start; on a busy machine a start took from half a minute to over two minutes."""
REGISTERED = 20
"""Number of schemas that are acknowledged before the kill."""


def apicurio() -> Path:
    """Return the folder of the unpacked archive."""
    folder = CACHE / f"apicurio-{RELEASE}"
    jar = folder / f"apicurio-registry-app-{RELEASE}-runner.jar"
    with required("Apicurio Registry"), lock_cache():
        if not jar.exists():
            maven("dependency:copy", f"-Dartifact={ARCHIVE}", f"-DoutputDirectory={CACHE}")
            archive = CACHE / f"apicurio-registry-app-{RELEASE}-all.tar.gz"
            unpacked = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(unpacked, ignore_errors=True)
            with tarfile.open(archive) as files:
                files.extractall(unpacked, filter="data")
            unpacked.rename(folder)
            archive.unlink()
    return folder


class Registry:
    """One registry, which keeps its port across restarts."""

    def __init__(self, bootstrap: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}{API}"
        self._env = {
            **os.environ,
            "APICURIO_STORAGE_KIND": "kafkasql",
            "APICURIO_KAFKASQL_BOOTSTRAP_SERVERS": bootstrap,
            "QUARKUS_HTTP_HOST": "127.0.0.1",
            "QUARKUS_HTTP_PORT": str(port),
        }
        (jar,) = apicurio().glob("*-runner.jar")
        self._command = ["java", *JAVA_OPTIONS, "-jar", str(jar)]
        self.child: Child | None = None

    def start(self) -> None:
        self.child = child = Child(self._command, env=self._env)

        def answers() -> bool:
            assert child.returncode is None, child.tail()
            try:
                with urllib.request.urlopen(f"{self.url}/subjects", timeout=10) as response:
                    return bool(response.status == 200)
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                return False

        until(answers, "the registry answers", deadline_s=START_S, poll_s=0.1)

    def kill(self) -> None:
        assert self.child is not None
        self.child.kill()


@contextmanager
def stage(tmp_path: Path) -> Iterator[tuple[Daemon, Registry]]:
    """Yield a broker and a registry beside it."""
    daemon = Daemon(tmp_path / "data").start()
    with hold_port() as held:
        registry = Registry(daemon.bootstrap, held.getsockname()[1])
        try:
            registry.start()
            yield daemon, registry
        finally:
            if registry.child is not None:
                registry.kill()
            daemon.kill()


def program(action: str, registry: Registry, daemon: Daemon, topic: str) -> Child:
    python = environment("schema-registry", CLIENT)
    script = str(HERE / "schema_copy.py")
    return Child([str(python), script, action, registry.url, daemon.bootstrap, topic])


def finished(child: Child) -> list[list[str]]:
    """Wait until a program has ended, and return the words of its lines."""
    assert child.wait(DEADLINE_S) == 0, child.tail()
    return [line.split() for line in child.lines]


def test_schemas_survive_a_kill_of_registry_and_broker(tmp_path: Path) -> None:
    topic = unique("numbers")
    with stage(tmp_path) as (daemon, registry):
        with Cluster(daemon.bootstrap) as cluster:
            cluster.create_topic(topic)
        finished(program("write", registry, daemon, topic))
        registering = program("register", registry, daemon, topic)
        try:
            registering.wait_for_line(rf"{topic}-{REGISTERED - 1}-value", deadline_s=DEADLINE_S)
            registry.kill()
            daemon.kill()
        finally:
            registering.kill()
        acknowledged = {
            words[1]: words[2]
            for words in map(str.split, registering.lines)
            if words[:1] == ["registered"]
        }
        assert len(acknowledged) >= REGISTERED
        daemon.start()
        registry.start()
        told = finished(program("read", registry, daemon, topic))
        schemas = {words[1]: words[2] for words in told if words[0] == "schema"}
        assert acknowledged.items() <= schemas.items()
        assert len(set(schemas.values())) == len(schemas)
        assert f"{topic}-value" in schemas
        numbers = [int(words[1]) for words in told if words[0] == "record"]
        assert numbers == list(range(RECORDS))
        # A schema that is known already keeps its id, and a new schema gets a new id.
        again = program("register", registry, daemon, topic)
        try:
            last = again.wait_for_line(
                rf"{topic}-{len(schemas)}-value (\d+)", deadline_s=DEADLINE_S
            )
        finally:
            again.kill()
        repeated = {
            words[1]: words[2]
            for words in map(str.split, again.lines)
            if words[:1] == ["registered"]
        }
        assert acknowledged.items() <= repeated.items()
        assert last[1] not in schemas.values()


def test_the_fixtures_of_the_page_work(tmp_path: Path) -> None:
    page = Page(ROOT / "docs" / "schema-registry.md")
    files = {block.words["file"]: block.text for block in page.blocks if "file" in block.words}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    python = environment("schema-registry", CLIENT)
    (packages,) = python.parent.parent.glob("lib/python3*/site-packages")
    env = {**os.environ, "APICURIO": str(apicurio()), "PYTHONPATH": str(packages)}
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "test_orders.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
