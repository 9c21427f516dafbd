"""If two brokers have the same data directory, the second broker cannot start.

Apache Kafka locks ``.lock`` with Java's ``FileChannel.tryLock``, but only after it has checked the
metadata log. Kafka refuses a data directory that contains Fencepost's metadata log, even if Kafka's
own ``metadata.log.dir`` is another directory. Therefore the test of Fencepost's lock starts no
daemon, but a process that only takes the lock, as a daemon does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fencepost.logcore.checkpoints import LOCK
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.verify import verify_data_directory, verify_partition
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka
from tests.support.processes import Child
from tests.support.targets import SETTINGS

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("java_tools"),
    pytest.mark.timeout(240),
]

DEADLINE_S = 60.0
NODE = {**SETTINGS, "node.id": "1"}
HOLDER = """\
import signal, sys
from fencepost.logcore.fs import OsFileSystem
OsFileSystem().lock(sys.argv[1])
print("locked", flush=True)
signal.pause()
"""


def test_kafkas_lock_keeps_fencepost_from_starting(tmp_path: Path) -> None:
    kafka = Kafka(tmp_path, SETTINGS)
    kafka.start()
    before = names(kafka.data_dir)
    daemon = Daemon(kafka.data_dir, NODE)
    with killed(kafka), Cluster(kafka.bootstrap) as cluster:
        assert daemon.launch().wait(DEADLINE_S) == 1
        assert daemon.child is not None
        said = daemon.child.tail()
        assert f"the data directory {kafka.data_dir} is in use by another process" in said
        assert names(kafka.data_dir) == before
        cluster.create_topic("topic")
    # After a kill the lock file remains, but the lock is released.
    OsFileSystem().close(OsFileSystem().lock(str(kafka.data_dir / LOCK)))


def test_fenceposts_lock_keeps_kafka_from_starting(tmp_path: Path) -> None:
    kafka = Kafka(tmp_path, SETTINGS)
    kafka.start()
    assert kafka.child is not None
    kafka.child.kill()
    holder = Child([sys.executable, "-c", HOLDER, str(kafka.data_dir / LOCK)])
    try:
        holder.wait_for_line("^locked$", deadline_s=DEADLINE_S)
        expected = f"Failed to acquire lock on file .lock in {kafka.data_dir}"
        with pytest.raises(RuntimeError, match=re.escape(expected)):
            kafka.start()
    finally:
        holder.kill()
    kafka.start()
    with killed(kafka), Cluster(kafka.bootstrap) as cluster:
        cluster.create_topic("topic")


@pytest.mark.parametrize("metadata", ["elsewhere", "in the same directory"])
def test_kafka_does_not_start_beside_a_running_fencepost(tmp_path: Path, metadata: str) -> None:
    own = {"metadata.log.dir": str(tmp_path / "metadata")} if metadata == "elsewhere" else {}
    kafka = Kafka(tmp_path, {**SETTINGS, **own})
    if own:
        # Both directories are formatted when the broker starts.
        kafka.start()
        assert kafka.child is not None
        kafka.child.kill()
    daemon = Daemon(kafka.data_dir, NODE).start()
    try:
        with Cluster(daemon.bootstrap) as cluster:
            cluster.create_topic("before")
            with killed(kafka):
                refused = "unexpected metadata location" if own else "data_version"
                with pytest.raises(RuntimeError, match=refused):
                    kafka.start()
                assert kafka.child is not None
                assert kafka.child.returncode not in {None, 0}
            cluster.create_topic("after")
    finally:
        daemon.stop()
    daemon.start()
    with Cluster(daemon.bootstrap) as cluster:
        assert cluster.offset("before", 0) == cluster.offset("after", 0) == 0
    daemon.stop()
    fs = OsFileSystem()
    assert not list(verify_data_directory(fs, str(kafka.data_dir)))
    assert not list(verify_partition(fs, str(kafka.data_dir / "__cluster_metadata-0")))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def killed(kafka: Kafka) -> Iterator[None]:
    """Kill the broker at the end of the block, even after a failure."""
    try:
        yield
    finally:
        if kafka.child is not None:
            kafka.child.kill()
