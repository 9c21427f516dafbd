"""An ordinary batch does not wait for earlier large batches of other connections."""

from __future__ import annotations

import os
import random
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.coordinator.runtime.fair_threads import CREDIT_S
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.compression import Codec
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.waits import until
from tests.support.worst_batches import FIRST_MS, most_records
from tests.wire.test_batch_stalls import produce

HOSTILE = 6
RECORDS = 700_000
"""Number of records of each hostile batch: one check takes nearly a second, all take about five."""

WAIT_S = 300


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    started = Daemon(tmp_path).start()
    yield started
    started.stop()


def cpu_s(daemon: Daemon) -> float:
    assert daemon.child is not None
    fields = Path(f"/proc/{daemon.child.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ordinary_batch() -> bytes:
    """Return 400 KB of incompressible data, too much to be checked in one turn of the loop."""
    noise = random.Random(7)
    records = [LogRecord(at, FIRST_MS, None, noise.randbytes(1_000)) for at in range(400)]
    batch = encode_batch(records, codec=Codec.SNAPPY)
    assert 400_000 < len(batch) < 500_000
    return batch


@pytest.mark.slow
def test_ordinary_batch_is_not_delayed_by_large_batches_of_others(
    daemon: Daemon,
) -> None:
    with Cluster(daemon.bootstrap) as admin:
        topics = [admin.create_topic(unique("t")) for _ in range(HOSTILE + 1)]
    host, port = daemon.bootstrap.split(":")
    clients = [socket.create_connection((host, int(port)), WAIT_S) for _ in topics]
    *hostile, ordinary = clients
    large, small = most_records(Codec.ZSTD, RECORDS), ordinary_batch()
    begun_s = cpu_s(daemon)
    for client, topic in zip(hostile, topics, strict=False):
        client.sendall(produce(topic, large))
    # The usage of a new connection starts at the lowest usage of the other connections, minus the
    # credit. Wait until each large batch has used more than the credit.
    until(
        lambda: cpu_s(daemon) - begun_s > 2 * HOSTILE * CREDIT_S,
        "the large ones are under way",
        deadline_s=WAIT_S,
    )
    ordinary.sendall(produce(topics[-1], small))
    order: list[object] = []
    with selectors.DefaultSelector() as answers:
        for client in clients:
            answers.register(client, selectors.EVENT_READ)
        while ordinary not in order:
            for key, _ in answers.select(WAIT_S):
                answers.unregister(key.fileobj)
                order.append(key.fileobj)
    for client in clients:
        client.close()
    assert order == [ordinary]
