"""The daemon is killed at each durable step of one transaction in turn.

After every kill the daemon is restarted on the same directory, and the client continues in one of
two ways. Either it *repeats* the unanswered request, as a client library does. Or it *restarts* and
derives the remaining work from its committed offset, as a new process does. After each of the
steps, a read_committed reader must find every committed value once and no aborted value, and no
transaction may be open.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.stubborn_client import StubbornClient
from tests.support.cluster import READ_COMMITTED, Cluster
from tests.support.daemon import Daemon
from tests.support.raw import ConnectionLostError
from tests.support.targets import SETTINGS
from tests.support.waits import until

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(900)]

TOPIC = "target"

ONE_PARTITION = {
    **SETTINGS,
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
}
"""Settings with few logs, whose recovery has few steps."""

MOST_STEPS = 200
"""A limit above the steps of any transaction, within which the loop must end."""

FEWEST_STEPS = 8
"""A limit below the steps of a transaction: claim, two batches, an offset, Prepare, three markers,
Complete."""

RECOVERY_STRIDE = 2
"""Recovery has about fifty steps. The daemon is killed at every second step, and each process
recovers from the kill of the previous process.
"""

SIGNAL_S = 60.0


class CrashingDaemon(Daemon):
    """The daemon on a file system that kills it."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(
            data_dir, ONE_PARTITION, command=(sys.executable, "-m", "tests.crash.crashing_daemon")
        )

    def arm(self) -> None:
        """Start counting durable steps."""
        self._signal(signal.SIGUSR1, r"^armed$")

    def disarm(self) -> int | None:
        """Stop counting; return the number of steps, None if the last step killed the daemon.

        The broker's background work has steps as well, so the broker may die after the client's
        last response.
        """
        if not self.is_listening:
            return None  # before the process has a handler for the signal, the signal would kill it
        try:
            return int(self._signal(signal.SIGUSR2, r"^steps (\d+)$"))
        except (ProcessLookupError, RuntimeError):
            return None

    def _signal(self, number: signal.Signals, answer: str) -> str:
        assert self.child is not None
        since = len(self.child.lines)
        os.kill(self.child.pid, number)
        match = self.child.wait_for_line(answer, deadline_s=SIGNAL_S, since=since)
        return match.group(match.lastindex or 0)

    @property
    def is_dead(self) -> bool:
        assert self.child is not None
        return self.child.returncode is not None


class Ledger:
    """The expected final state: the values by partition, and the group's offset."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.offset = -1
        self.values: tuple[list[bytes], list[bytes]] = ([], [])
        self.aborted: set[bytes] = set()

    def commit(self, number: int) -> None:
        for partition, values in enumerate(self.values):
            values.append(value_of(number, partition))
        self.offset = number

    def check(self, bootstrap: str, when: str) -> None:
        """Wait for the last stable offset, and compare everything. Fails if a transaction hangs."""
        with Cluster(bootstrap) as cluster:
            for partition, wanted in enumerate(self.values):
                until(
                    lambda partition=partition: (
                        cluster.lso(TOPIC, partition) == cluster.offset(TOPIC, partition)
                    ),
                    f"LSO = LEO in partition {partition} {when}",
                    deadline_s=60,
                )
                found = cluster.values(TOPIC, partition=partition, isolation=READ_COMMITTED)
                assert found == wanted, f"partition {partition} {when}"
            assert cluster.committed(self.group, TOPIC, stable=True) == self.offset, when
            until(
                lambda: (
                    {
                        t["transaction_state"]
                        for t in cluster.call("list_transactions", 0)["transaction_states"]
                    }
                    <= {"Empty", "CompleteCommit", "CompleteAbort"}
                ),
                f"no transaction in between {when}",
                deadline_s=60,
            )


def value_of(number: int, partition: int) -> bytes:
    return b"%d in %d" % (number, partition)


def work(client: StubbornClient, number: int, group: str, *, commit: bool) -> None:
    """Run the transaction under test."""
    client.claim()
    for partition in range(2):
        client.send(TOPIC, partition, value_of(number, partition))
    client.send_offset(group, TOPIC, number)
    client.end(commit=commit)


def work_anew(client: StubbornClient, ledger: Ledger, number: int, *, commit: bool) -> bool:
    """Continue as a restarted process does; return whether the transaction is committed."""
    client.claim()
    with Cluster(client.bootstrap) as cluster:
        done = cluster.committed(ledger.group, TOPIC, stable=True) == number
    if not done and commit:
        work(client, number, ledger.group, commit=True)
    return done or commit


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[CrashingDaemon]:
    daemon = CrashingDaemon(tmp_path / "data")
    daemon.start()
    yield daemon
    assert daemon.child is not None
    daemon.child.kill()


def first_transaction(daemon: CrashingDaemon, ledger: Ledger, version: int) -> None:
    """Create the topics and internal topics by a transaction, before steps are counted."""
    with Cluster(daemon.bootstrap) as cluster:
        cluster.create_topic(TOPIC, 2)
    client = StubbornClient(daemon.bootstrap, ledger.group, version=version)
    work(client, 0, ledger.group, commit=True)
    client.close()
    ledger.commit(0)
    ledger.check(daemon.bootstrap, "before any kill")


def counted(daemon: CrashingDaemon) -> tuple[int] | None:
    """Return the counted steps in a tuple, so that 0 differs from None."""
    steps = daemon.disarm()
    return None if steps is None else (steps,)


def crash_at(step: int, *, torn: bool = False) -> dict[str, str]:
    return {"CRASH_AT": str(step), "CRASH_TORN": str(int(torn))}


def failing_at(number: int, path: str) -> dict[str, str]:
    """Return the environment in which the write ``number`` to a file named like ``path`` fails."""
    return {"CRASH_AT": str(number), "CRASH_FAILS": path}


def cut_at(number: int, path: str, keeps: int) -> dict[str, str]:
    """Return the environment in which a kill cuts the write ``number`` to ``path``."""
    return {"CRASH_AT": str(number), "CRASH_CUTS": path, "CRASH_KEEPS": str(keeps)}


def is_off_line(daemon: CrashingDaemon, topic: str) -> bool:
    """Return whether a shard of an internal topic has failed because its log is offline."""
    assert daemon.child is not None
    failed = rf"shard failed shard={topic}-\d+ .*is off line"
    return any(re.search(failed, line) for line in daemon.child.lines)


@pytest.mark.parametrize(
    ("commit", "version", "torn"),
    [
        pytest.param(True, 1, False, id="commit-tv1"),
        pytest.param(True, 2, True, id="commit-tv2-torn"),
        pytest.param(False, 1, True, id="abort-tv1-torn"),
        pytest.param(False, 2, False, id="abort-tv2"),
    ],
)
def test_retrying_client_is_exactly_once_after_a_kill_at_any_step(
    daemon: CrashingDaemon, commit: bool, version: int, torn: bool
) -> None:
    ledger = Ledger("repeats")
    first_transaction(daemon, ledger, version)
    daemon.kill()
    daemon.start(env=crash_at(1, torn=torn))
    for step in range(1, MOST_STEPS):
        daemon.arm()
        client = StubbornClient(daemon.bootstrap, ledger.group, version=version)
        with daemon.restarted_when(
            lambda: daemon.is_dead, env=crash_at(step + 1, torn=torn)
        ) as starts:
            work(client, step, ledger.group, commit=commit)
            client.close()
            (steps,) = until(lambda: counted(daemon), "a daemon that lives")
        if commit:
            ledger.commit(step)
        ledger.check(daemon.bootstrap, f"after a kill at step {step}")
        if not starts:
            assert step > steps >= FEWEST_STEPS
            return
    pytest.fail("the transaction never ran to its end")


@pytest.mark.parametrize(
    ("commit", "version"),
    [
        pytest.param(True, 1, id="commit-tv1"),
        pytest.param(True, 2, id="commit-tv2"),
        pytest.param(False, 2, id="abort-tv2"),
    ],
)
def test_restarted_client_is_exactly_once_after_a_kill_at_any_step(
    daemon: CrashingDaemon, commit: bool, version: int
) -> None:
    ledger = Ledger("anew")
    first_transaction(daemon, ledger, version)
    daemon.kill()
    daemon.start(env=crash_at(1))
    for step in range(1, MOST_STEPS):
        daemon.arm()
        steps = None
        client = StubbornClient(daemon.bootstrap, ledger.group, version=version, mortal=True)
        try:
            work(client, step, ledger.group, commit=commit)
            committed = commit
            steps = daemon.disarm()
        except ConnectionLostError:
            committed = None
        client.close()
        if steps is None:
            until(lambda: daemon.is_dead, "the death")
            daemon.start(env=crash_at(step + 1))
        if committed is None:
            anew = StubbornClient(daemon.bootstrap, ledger.group, version=version)
            committed = work_anew(anew, ledger, step, commit=commit)
            anew.close()
        assert committed == commit, f"step {step}: an abort was a commit"
        if commit:
            ledger.commit(step)
        ledger.check(daemon.bootstrap, f"after a kill at step {step}")
        if steps is not None:
            assert step > steps >= FEWEST_STEPS
            return
    pytest.fail("the transaction never ran to its end")


def test_transaction_survives_repeated_kills_during_recovery(daemon: CrashingDaemon) -> None:
    """The daemon is killed in a transaction, and then repeatedly during recovery."""
    ledger = Ledger("recovery")
    first_transaction(daemon, ledger, 2)
    client = StubbornClient(daemon.bootstrap, ledger.group, version=2)
    client.claim()
    client.send(TOPIC, 0, value_of(1, 0))
    daemon.kill()
    for step in range(1, MOST_STEPS, RECOVERY_STRIDE):
        child = daemon.launch(env={**crash_at(step, torn=True), "CRASH_ARMED": "1"})
        try:
            daemon.wait_until_listening()
        except RuntimeError:
            assert child.returncode == -signal.SIGKILL, child.tail()
            continue
        break
    daemon.kill()
    daemon.start()
    client.send(TOPIC, 1, value_of(1, 1))
    client.send_offset(ledger.group, TOPIC, 1)
    client.end(commit=True)
    client.close()
    ledger.commit(1)
    ledger.check(daemon.bootstrap, f"after {step} kills in recovery")
