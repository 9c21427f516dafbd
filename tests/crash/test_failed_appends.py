"""Exactly one append of the daemon's transaction coordinator fails on the disk.

When a write to a log fails, the log and its shard go offline: the clients get retriable errors.
After a restart the log is loaded again, and all clients continue. An epoch bump whose record was
not written has no effect (KAFKA-9666).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.stubborn_client import StubbornClient
from tests.crash.test_every_step import (
    TOPIC,
    CrashingDaemon,
    Ledger,
    failing_at,
    first_transaction,
    is_off_line,
    value_of,
    work,
)
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]

MOST_APPENDS = 12
STATE = "__transaction_state"
ASKED_AGAIN = {"coordinator_load_in_progress", "coordinator_not_available", "not_coordinator"}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[CrashingDaemon]:
    daemon = CrashingDaemon(tmp_path / "data")
    daemon.start()
    yield daemon
    assert daemon.child is not None
    daemon.child.kill()


@pytest.mark.parametrize(
    ("version", "commit"),
    [pytest.param(1, True, id="commit-tv1"), pytest.param(2, False, id="abort-tv2")],
)
def test_transaction_survives_each_failed_append_of_its_coordinator(
    daemon: CrashingDaemon, version: int, commit: bool
) -> None:
    ledger = Ledger("fails")
    first_transaction(daemon, ledger, version)
    for number in range(1, MOST_APPENDS):
        daemon.kill()
        daemon.start(env=failing_at(number, f"{STATE}-"))
        daemon.arm()
        client = StubbornClient(daemon.bootstrap, ledger.group, version=version)
        with daemon.restarted_when(lambda: is_off_line(daemon, STATE)) as starts:
            work(client, number, ledger.group, commit=commit)
            client.close()
        assert len(starts) <= 1, "one append fails, and none after a restart"
        if commit:
            ledger.commit(number)
        ledger.check(daemon.bootstrap, f"after append {number} failed")
        if not starts:
            assert number > 4, "claim, begin, prepare and complete are appends of their own"
            return
    pytest.fail("the appends never come to an end")


def test_takeover_with_a_failed_fence_write_leaves_the_epoch_unchanged(
    daemon: CrashingDaemon,
) -> None:
    ledger = Ledger("fence")
    first_transaction(daemon, ledger, 2)
    zombie = StubbornClient(daemon.bootstrap, ledger.group, version=2)
    zombie.claim()
    zombie.send(TOPIC, 0, value_of(1, 0))
    daemon.kill()
    daemon.start(env=failing_at(1, f"{STATE}-"))
    daemon.arm()
    with Cluster(daemon.bootstrap) as cluster:
        for _ in range(3):
            answer = cluster.call(
                "init_producer_id",
                4,
                transactional_id=ledger.group,
                transaction_timeout=60_000,
                producer_id=-1,
                producer_epoch=-1,
            )
            assert answer["error_code"] in ASKED_AGAIN
        assert cluster.produce(TOPIC, [b"others are served"], partition=1)["error_code"] == "none"
    daemon.kill()
    daemon.start()
    successor = StubbornClient(daemon.bootstrap, ledger.group, version=2)
    successor.claim()
    # The epoch is bumped once by the abort, and once by InitProducerId.
    assert (successor.producer_id, successor.epoch) == (zombie.producer_id, zombie.epoch + 2)
    zombie.close()
    successor.close()
    ledger.values[1].append(b"others are served")
    ledger.check(daemon.bootstrap, "after the takeover")
