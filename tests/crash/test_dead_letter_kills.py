"""The daemon is killed while records wait in ARCHIVING for their dead-letter queue (KIP-1191).

The daemon is killed when it writes to the queue: before the write, during the write, or when the
batch is on disk but its outcome is not. The next leader must send the records. Then the queue has
each record at least once, and no member may get the records again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.groups.share.state_records import decode
from fencepost.groups.share.states import RecordState
from fencepost.logcore.machine import Record
from tests.crash.test_every_step import CrashingDaemon, cut_at
from tests.support.batches import batches
from tests.support.cluster import GROUP, Cluster, unique
from tests.support.quick import only
from tests.support.raw import ConnectionLostError
from tests.support.share import ACCEPT, REJECT, RELEASE, Member
from tests.support.waits import until
from tests.wire.test_dead_letters import (
    COPY,
    LEVEL,
    LIMIT,
    NAME,
    UPGRADE,
    Queue,
    set_share_version,
)

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

QUEUE = "dlq.queue"
LOG_OF_QUEUE = f"{QUEUE}-0/0"
"""A part of the path of the queue's log. It is in the path of no file that is written earlier."""
WHOLE = 1 << 20
KEPT = (0, 61, WHOLE)
"""Bytes of the batch that reach the queue's log: none, its header, or all."""
DEAD = (1, 2)
"""Offsets of records that members reject, or release at the delivery limit."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[CrashingDaemon]:
    daemon = CrashingDaemon(tmp_path / "data")
    yield daemon
    assert daemon.child is not None
    daemon.child.kill()


def states_on_disk(daemon: CrashingDaemon) -> dict[int, RecordState]:
    """Return the last written state of each offset of the only share partition."""
    states: dict[int, RecordState] = {}
    for path in sorted(daemon.data_dir.glob("__share_group_state-*/*.log")):
        for batch in batches(path.read_bytes()):
            for key, value in zip(batch.keys, batch.values, strict=True):
                found = decode(Record(key or b"", value))
                assert found is not None
                assert found.value is not None
                for first, last, state, _ in found.value.batches:
                    states |= dict.fromkeys(range(first, last + 1), RecordState(state))
    return states


def delivered(cluster: Cluster, queue: Queue) -> set[int]:
    """Accept everything as a new member until all deliveries are complete; return the offsets."""
    queue.cluster, queue.member = cluster, Member(cluster, queue.group)
    offsets: set[int] = set()

    def is_over() -> bool:
        topics = {queue.topic_id: {0: []}} if queue.member.epoch == 0 else {}
        answer = queue.member.fetch(topics, max_wait=200)
        for topic in answer["responses"]:
            for part in topic["partitions"]:
                for row in part["acquired_records"]:
                    first, last = row["first_offset"], row["last_offset"]
                    offsets.update(range(first, last + 1))
                    queue.acknowledge(0, first, last, ACCEPT)
        return queue.is_done(0)

    until(is_over, "every record has ended")
    return offsets


@pytest.mark.parametrize("kept", only(KEPT, 61))
@pytest.mark.parametrize(
    "kind",
    [pytest.param(REJECT, id="reject"), pytest.param(RELEASE, id="limit", marks=pytest.mark.slow)],
)
def test_record_in_archiving_survives_a_kill(daemon: CrashingDaemon, kind: int, kept: int) -> None:
    daemon.start(env=cut_at(1, LOG_OF_QUEUE, kept))
    with Cluster(daemon.bootstrap) as cluster:
        cluster.coordinator(unique("g"), GROUP)
        set_share_version(cluster, LEVEL, UPGRADE)
        queue = Queue(cluster, **{NAME: QUEUE, COPY: "true", LIMIT: "2"})
        queue.name = QUEUE
        queue.create()
        cluster.produce(queue.source, [b"%d" % number for number in range(4)])
        for count in (1, 2) if kind == RELEASE else (1,):
            # Only records that become dead letters are released; the last release reaches the
            # limit.
            assert queue.fetch(0)[-1][2] == count
            if count == 1:
                queue.acknowledge(0, 0, 0, ACCEPT)
            if kind == RELEASE and count == 1:
                queue.acknowledge(0, *DEAD, RELEASE)
        daemon.arm()
        with contextlib.suppress(ConnectionLostError):  # the outcome is unknown
            queue.acknowledge(0, *DEAD, kind)
        until(lambda: daemon.is_dead, "the write to the queue")
    assert {states_on_disk(daemon).get(offset) for offset in DEAD} == {RecordState.ARCHIVING}
    daemon.start()
    with Cluster(daemon.bootstrap) as cluster:
        offsets = delivered(cluster, queue)
        assert offsets == {3}, "a record with an end was delivered again"
        found = queue.records(cluster.offset(queue.name))
    # The next leader does not know that a batch is in the queue, so it sends the batch again.
    expected = [(offset, None, b"%d" % offset) for offset in DEAD]
    assert found == expected * (2 if kept == WHOLE else 1)
