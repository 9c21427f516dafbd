from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import fencepost
from fencepost.coordinator.config.broker_config import ConfigError
from fencepost.coordinator.daemon.broker import Broker, split_address
from fencepost.coordinator.daemon.errors import BrokerError
from tests.support.cluster import LATEST, Cluster
from tests.support.metadata_changes import create_topic
from tests.support.quick import only
from tests.support.raw import RawClient
from tests.support.waits import until_true

ROOT = Path(__file__).resolve().parents[4]


def test_broker_class_is_exported_lazily():
    assert fencepost.Broker is Broker
    assert fencepost.BrokerThread.__name__ == "BrokerThread"
    with pytest.raises(AttributeError):
        fencepost.Nothing  # noqa: B018 - the access is the test


async def test_restarted_broker_keeps_its_cluster_id_and_topics(tmp_path):
    async with Broker(tmp_path) as broker:
        host, port = broker.address
        assert broker.bootstrap == f"{host}:{port}"
        identity = broker.services.cluster_id
        assert not broker.services.logs.was_clean
        create_topic(broker.services.metadata, "a", partitions=2)
    with pytest.raises(RuntimeError):
        _ = broker.address
    async with Broker(tmp_path) as broker:
        assert broker.services.logs.was_clean
        assert broker.services.cluster_id == identity
        assert list(broker.services.metadata.topics) == ["a"]
        assert broker.services.metadata.epoch == 2


async def test_broker_object_can_be_started_again_after_a_stop(tmp_path):
    broker = Broker(tmp_path)
    for _ in range(2):
        await broker.start()
        await broker.stop()
    await broker.stop()


async def test_brokers_in_one_process_are_independent(tmp_path):
    async with Broker(tmp_path / "1") as one, Broker(tmp_path / "2") as two:
        assert one.bootstrap != two.bootstrap
        assert one.services.cluster_id != two.services.cluster_id
        create_topic(one.services.metadata, "a")
        assert not two.services.metadata.topics


async def test_data_directory_in_use_is_refused(tmp_path):
    async with Broker(tmp_path):
        with pytest.raises(BrokerError, match="in use by another process"):
            await Broker(tmp_path).start()
    async with Broker(tmp_path):
        pass


async def test_failed_start_releases_the_data_directory(tmp_path):
    async with Broker(tmp_path / "1") as other:
        blocked = Broker(tmp_path / "2", other.bootstrap)
        with pytest.raises(BrokerError, match="cannot listen"):
            await blocked.start()
    async with Broker(tmp_path / "2"):
        pass


async def test_broker_with_another_node_id_than_the_data_directory_is_refused(tmp_path):
    async with Broker(tmp_path, config={"node.id": "7"}) as broker:
        assert broker.services.node_id == 7
    with pytest.raises(BrokerError, match=r"belongs to node\.id 7"):
        await Broker(tmp_path).start()
    (tmp_path / "meta.properties").write_text("version=9\n")
    with pytest.raises(BrokerError, match="damaged"):
        await Broker(tmp_path, config={"node.id": "7"}).start()


async def test_data_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerError, match="cannot be used"):
        await Broker(tmp_path / "file").start()


@pytest.mark.parametrize(
    ("present", "named"),
    [
        (["python-3/", "photos-0/"], "photos-0"),
        (["notes.txt"], "notes.txt"),
        # A directory without meta.properties, and a directory without the metadata log.
        (["__cluster_metadata-0/", "orders-0/"], "__cluster_metadata-0"),
        (["meta.properties", "orders-0/"], "orders-0"),
    ],
)
async def test_directory_with_foreign_files_is_refused_and_left_unchanged(tmp_path, present, named):
    for name in present:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_text("")
    with pytest.raises(BrokerError, match=f"contains {named}: it does not belong to this"):
        await Broker(tmp_path).start()
    assert {path.name for path in tmp_path.iterdir()} == {name.rstrip("/") for name in present}


async def test_directory_of_apache_kafka_is_refused_and_left_unchanged(tmp_path):
    (tmp_path / "meta.properties").write_text(
        "node.id=1\nversion=1\n"
        "directory.id=E5bkw9uqbzsbPhu48LDzmg\ncluster.id=AAAAAAAAQACAAAAAAAAAAQ\n"
    )
    for name in ("__cluster_metadata-0", "orders-0"):
        (tmp_path / name).mkdir()
    (tmp_path / "__cluster_metadata-0" / "quorum-state").write_text("{}")
    with pytest.raises(BrokerError, match="belongs to Apache Kafka"):
        await Broker(tmp_path).start()
    assert {path.name for path in tmp_path.iterdir()} == {
        "meta.properties",
        "__cluster_metadata-0",
        "orders-0",
    }


async def test_interrupted_first_start_is_completed_by_the_next(tmp_path):
    (tmp_path / "lost+found").mkdir()
    for name in (".lock", "meta.properties.tmp"):
        (tmp_path / name).write_text("")
    async with Broker(tmp_path) as broker:
        assert broker.services.metadata.epoch == 1


@pytest.mark.parametrize(
    ("text", "address"),
    [("h:1", ("h", 1)), ("[::1]:65535", ("::1", 65535)), ("127.0.0.1:0", ("127.0.0.1", 0))],
)
def test_address_is_split_into_host_and_port(text, address):
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["", "h", ":1", "h:", "h:x", "h:65536", "h:-1"])
def test_invalid_address_is_refused(text):
    with pytest.raises(BrokerError, match="HOST:PORT"):
        split_address(text)


async def test_bootstrap_address_is_the_advertised_listener(tmp_path):
    config = {"advertised.listeners": "PLAINTEXT://kafka.example:19092"}
    async with Broker(tmp_path, config=config) as broker:
        assert broker.bootstrap == "kafka.example:19092"
        assert broker.address[1] != 19092
    async with Broker(tmp_path, "0.0.0.0:0", insecure=True) as broker:
        assert broker.advertised[0] != "0.0.0.0"
    for bad in ("INSIDE://h:1", "h:1", "PLAINTEXT://h"):
        with pytest.raises(ConfigError, match=r"advertised\.listeners"):
            Broker(tmp_path, config={"advertised.listeners": bad})


async def test_broker_stop_answers_delayed_fetches_at_once(tmp_path):
    async with Broker(tmp_path) as broker:
        create_topic(broker.services.metadata, "a")

        def poll() -> None:
            with Cluster(broker.bootstrap) as client:
                client.fetch("a", max_wait_ms=600_000)

        waiting = asyncio.get_running_loop().run_in_executor(None, poll)
        await until_true(lambda: len(broker.services.fetches.delayed) == 1)
    await waiting  # the broker responded; the client's timeout is 20 s


async def test_delayed_fetch_of_a_disconnected_client_is_removed(tmp_path):
    async with Broker(tmp_path) as broker:
        create_topic(broker.services.metadata, "a")

        def leave() -> None:
            with RawClient(broker.bootstrap) as client:
                client.send(
                    "fetch", 11, max_wait=60_000, min_bytes=1, max_bytes=1000,
                    topics=[{"topic": "a", "partitions": [
                        {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]}],
                )  # fmt: skip
                waiting.wait(30)

        waiting = threading.Event()
        leaving = asyncio.create_task(asyncio.to_thread(leave))
        await until_true(lambda: len(broker.services.fetches.delayed) == 1)
        waiting.set()
        await leaving
        await until_true(lambda: len(broker.services.fetches.delayed) == 0)


def test_broker_in_a_thread_serves_and_ends_its_threads_on_stop(tmp_path):
    before = set(threading.enumerate())
    with Broker.in_thread(tmp_path) as broker:
        assert broker.address[1] > 0
        with Cluster(broker.bootstrap) as client:
            client.create_topic("a")
            client.produce("a", [b"1", b"2"])
    assert set(threading.enumerate()) <= before
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        assert client.values("a") == [b"1", b"2"]
        with pytest.raises(BrokerError, match="in use"):
            Broker.in_thread(tmp_path).start()


# --- the daemon ----------------------------------------------------------------------------------


class Serving:
    """``fencepost serve`` as a process."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fencepost", "serve", "--data-dir", str(data_dir),
             "--listen", "127.0.0.1:0", *options],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()

    @property
    def bootstrap(self) -> str:
        return self.first_line.split()[1]

    def end(self, number: int | None = None) -> tuple[int, str, str]:
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def serve(tmp_path) -> Iterator[object]:
    started: list[Serving] = []

    def start(*options: str) -> Serving:
        started.append(Serving(tmp_path, *options))
        return started[-1]

    yield start
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_daemon_prints_its_address_and_stops_cleanly_on_a_signal(serve, tmp_path, number):
    daemon = serve()
    assert re.fullmatch(r"listening 127\.0\.0\.1:\d+\n", daemon.first_line)
    with Cluster(daemon.bootstrap) as client:
        client.create_topic("a")
        client.produce("a", [b"x"])
        status, out, err = daemon.end(number)
    assert (status, out) == (0, "")
    events = [json.loads(line) for line in err.splitlines()]
    assert events[0]["event"] == "broker started"
    assert events[-1]["event"] == "broker stopped"
    assert (tmp_path / ".kafka_cleanshutdown").exists()


SERVED_AND_LEFT = (
    "import sys; from pathlib import Path\n"
    "from fencepost.coordinator.daemon.process import serve\n"
    "status = serve(Path(sys.argv[1]), listen='127.0.0.1:0')\n"
    "print('served', flush=True); sys.stdin.read(); sys.exit(status)"
)


@pytest.mark.parametrize(
    "number", only((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), signal.SIGTERM)
)
def test_signal_after_the_stop_does_not_change_the_exit_status(tmp_path, number):
    """When the signal arrives, the loop is closed and its signal handlers are removed."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVED_AND_LEFT, str(tmp_path)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("listening ")
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "served\n"
            process.send_signal(number)
            process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0


def test_killed_daemon_keeps_all_acknowledged_records(serve):
    daemon = serve()
    with Cluster(daemon.bootstrap) as client:
        client.create_topic("a", partitions=2)
        for number in range(20):
            client.produce("a", [b"%d" % number], partition=number % 2)
    daemon.end(signal.SIGKILL)
    two = serve()
    with Cluster(two.bootstrap) as client:
        found = [client.values("a", partition=index) for index in (0, 1)]
        assert sorted(int(value) for values in found for value in values) == list(range(20))
        assert client.offset("a", 0, LATEST) == 10
    assert two.end(signal.SIGTERM)[0] == 0


def test_second_daemon_on_a_data_directory_exits_with_the_reason(serve):
    serve()
    second = serve()
    status, out, err = second.end()
    assert (status, second.first_line, out) == (1, "", "")
    assert "in use by another process" in err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--config", "no.such.key=1"), "no.such.key"),
        pytest.param(("--config", "num.partitions=zero"), "num.partitions", marks=pytest.mark.slow),
        (("--listen", "nowhere"), "HOST:PORT"),
    ],
)
def test_daemon_with_invalid_config_exits_with_status_2(serve, options, reason):
    daemon = serve(*options)
    status, _, err = daemon.end()
    assert (status, daemon.first_line) == (2, "")
    assert reason in err


def processor_s(*command: str) -> float:
    """Run a command and return the command's processor time in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_daemon_start_stays_within_processor_time_and_memory_limits(serve):
    """The time is usually five times the time of an interpreter that only imports asyncio."""
    serve().end(signal.SIGTERM)

    def is_small() -> bool:
        bare_s = processor_s(sys.executable, "-c", "import asyncio, json, logging")
        daemon = serve()
        stat = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        daemon.end(signal.SIGTERM)
        rss = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert rss is not None
        assert int(rss.group(1)) / 1024 < 60
        return cpu_s < 10 * bare_s

    assert any(is_small() for _ in range(3))


REFUSED_COMMAND = (
    "from contextlib import suppress; from fencepost.cli import main, output\n"
    "with suppress(output.Unreachable):\n"
    "    main(['topics', 'list', '-b', '127.0.0.1:1'], standalone_mode=False)"
)


@pytest.mark.parametrize(
    ("start", "loaded"),
    [("import fencepost.coordinator.daemon.process", []), (REFUSED_COMMAND, ["click"])],
)
def test_daemon_and_commands_do_not_import_unused_modules(start, loaded):
    code = (
        f"import sys; {start}\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules}"
        " & {'rich', 'click', 'hypothesis', 'aiokafka', 'requests', 'pygments'}"
        " | sys.modules.keys() & {'fencepost.groups.machine', 'fencepost.txn.machine'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(loaded)
