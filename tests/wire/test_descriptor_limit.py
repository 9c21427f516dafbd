"""A daemon with a low limit of open files: what it refuses, and its state after a restart."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.verify import verify_data_directory, verify_partition
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.raw import ConnectionLostError, RawClient
from tests.support.targets import SETTINGS
from tests.support.waits import until

MAX_FILES = 128
RESERVE = MAX_FILES // 4
FEW = RESERVE // 4
"""How many clients or partitions the reserve allows, besides the daemon's other open files."""
PARTITIONS = 200
SERVE = (sys.executable, "-m", "fencepost", "serve")
LIMITED = ("/bin/sh", "-c", f'ulimit -n {MAX_FILES} && exec "$@"', "sh", *SERVE)


def test_partitions_past_the_limit_are_refused_without_leftovers(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "data", SETTINGS, command=LIMITED).start()
    assert daemon.child is not None
    pid = daemon.child.pid
    with Cluster(daemon.bootstrap) as cluster:
        assert created(cluster, "wide", PARTITIONS) == "none"
        first = [produced(cluster, index) for index in range(PARTITIONS)]
        taken = [index for index, error in enumerate(first) if error == "none"]
        refused = [index for index, error in enumerate(first) if error != "none"]
        assert taken, "below the limit"
        assert {first[index] for index in refused} == {"kafka_storage_error"}
        # Open partitions accept batches, the other partitions still refuse, and no more files are
        # opened.
        held = open_files(pid)
        assert held <= MAX_FILES
        for _ in range(3):
            assert produced(cluster, taken[0]) == "none"
            assert produced(cluster, refused[0]) == "kafka_storage_error"
        assert open_files(pid) == held
        # A new topic is only a metadata record; its partitions open files when they are first used.
        assert created(cluster, "narrow", 1) == "none"
        assert daemon.child.returncode is None
    assert "partition off line" not in daemon.child.tail(10_000)
    daemon.kill()
    again = Daemon(tmp_path / "data", SETTINGS).start()
    try:
        with Cluster(again.bootstrap) as cluster:
            for index in range(PARTITIONS):
                expected = 0 if index in refused else 4 if index == taken[0] else 1
                assert cluster.offset("wide", index) == expected, index
            assert {produced(cluster, index) for index in refused} == {"none"}
    finally:
        again.stop()
    fs = OsFileSystem()
    directories = sorted(path for path in again.data_dir.iterdir() if path.is_dir())
    assert len(directories) >= PARTITIONS
    assert not [directory for directory in directories if "stray" in directory.name]
    assert not list(verify_data_directory(fs, str(again.data_dir)))
    for directory in directories:
        assert not list(verify_partition(fs, str(directory))), directory


@contextmanager
def limited(data_dir: Path) -> Iterator[Daemon]:
    """Yield a daemon with a low limit of open files; it must stop cleanly."""
    daemon = Daemon(data_dir, SETTINGS, command=LIMITED).start()
    try:
        yield daemon
    finally:
        daemon.stop()


def versions(client: RawClient) -> str:
    """Return the error of ApiVersions, empty if the connection is closed."""
    try:
        error: str = client.call("api_versions", 0)["error_code"]
    except ConnectionLostError:
        return ""
    return error


def test_partitions_leave_descriptors_for_clients(tmp_path: Path) -> None:
    with (
        limited(tmp_path / "data") as daemon,
        Cluster(daemon.bootstrap) as cluster,
        ExitStack() as stack,
    ):
        assert created(cluster, "wide", PARTITIONS) == "none"
        first = [produced(cluster, index) for index in range(PARTITIONS)]
        taken = [index for index, error in enumerate(first) if error == "none"]
        assert MAX_FILES - 2 * RESERVE < len(taken) < MAX_FILES - RESERVE
        # All clients are connected at the same time, and each is served.
        clients = [stack.enter_context(Cluster(daemon.bootstrap)) for _ in range(FEW)]
        for client, index in zip(clients, taken, strict=False):
            assert produced(client, index) == "none"
            assert client.offset("wide", index) == 2


def test_connections_leave_descriptors_for_partitions(tmp_path: Path) -> None:
    with (
        limited(tmp_path / "data") as daemon,
        Cluster(daemon.bootstrap) as cluster,
        ExitStack() as stack,
    ):
        assert created(cluster, "wide", PARTITIONS) == "none"
        clients = [stack.enter_context(RawClient(daemon.bootstrap)) for _ in range(MAX_FILES)]
        answers = [versions(client) for client in clients]
        served = answers.index("")
        assert MAX_FILES - 2 * RESERVE < served < MAX_FILES - FEW
        assert set(answers[:served]) == {"none"}
        assert set(answers[served:]) == {""}
        assert {produced(cluster, index) for index in range(FEW)} == {"none"}


def test_clients_wait_for_a_free_descriptor_and_one_line_is_logged(tmp_path: Path) -> None:
    refusal = "no connection can be accepted"
    with (
        limited(tmp_path / "data") as daemon,
        Cluster(daemon.bootstrap) as cluster,
        ExitStack() as stack,
    ):
        child = daemon.child
        assert child is not None
        assert created(cluster, "wide", 1) == "none"
        assert produced(cluster, 0) == "none"
        # Wait until all open files stay open: closing one of them would free a descriptor.
        held = until(lambda: held_for_good(child.pid, tmp_path), "no module is being loaded")
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (held, MAX_FILES))
        clients = [stack.enter_context(RawClient(daemon.bootstrap)) for _ in range(FEW)]
        child.wait_for_line(refusal, deadline_s=60)
        for client in clients:
            client.send("api_versions", 0)
        # Meanwhile connected clients are served.
        for _ in range(20):
            assert produced(cluster, 0) == "none"
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
        for client in clients:
            assert client.receive()["error_code"] == "none"
        child.wait_for_line("connections are accepted again", deadline_s=60)
        told = child.tail(10_000)
        assert told.count(refusal) == 1
        assert "socket.accept()" not in told, "asyncio's own line, and a traceback"


def produced(cluster: Cluster, index: int) -> str:
    error: str = cluster.produce("wide", [b"x" * 100], partition=index)["error_code"]
    return error


def created(cluster: Cluster, topic: str, partitions: int) -> str:
    """Create a topic without opening its partitions, unlike ``Cluster.create_topic``."""
    creation = {"name": topic, "num_partitions": partitions, "replication_factor": 1, "configs": []}
    answer = cluster.call("create_topics", 5, timeout=10_000, topics=[creation])
    error: str = answer["topics"][0]["error_code"]
    return error


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def held_for_good(pid: int, data: Path) -> int | None:
    """Return the number of open files; None while any is a folder or outside ``data``."""
    targets = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            targets.append(path.readlink())
    files = [target for target in targets if target.is_absolute() and target.parts[1] != "dev"]
    passing = [file for file in files if file.is_dir() or not file.is_relative_to(data)]
    return None if passing else len(targets)
