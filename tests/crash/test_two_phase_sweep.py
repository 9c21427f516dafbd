"""Two-phase commit of Kafka and PostgreSQL while broker, database or worker are killed.

The broker, the database and the worker are each killed at each of their steps and restarted, and
the worker or its successor completes the work. Then the table and each partition of the target must
have every value once, and the group's offset must be at the end. No transaction may be open in
Kafka or prepared in PostgreSQL. TWO_PHASE_POINTS is ``all``, or the number of points to try for
each process and mode, near the steps that decide the outcome.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.test_every_step import CrashingDaemon
from tests.support.cluster import READ_COMMITTED, Cluster
from tests.support.daemon import ROOT
from tests.support.postgres import PostgresServer
from tests.support.processes import Child
from tests.support.waits import until

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(3_600)]

SOURCE, TARGET, GROUP, TABLE = "source", "target", "copier", "copied"
VALUES = 3
"""The new values of a run: two transactions of at most two values."""

POINTS = os.environ.get("TWO_PHASE_POINTS", "3")
DECIDING = ("tpc_prepare", "tpc_commit", "EndTxn")
WORK_S = 120.0


@dataclass(frozen=True)
class Fault:
    """A kill: of which process, and at which moment of the worker or step of the daemon."""

    party: str = ""
    at: int = 0


class Bench:
    """A broker, a database, and workers that copy between them, one after another."""

    def __init__(self, home: Path, server: PostgresServer, *, prepare: bool, bug: str = "") -> None:
        self.server, self.prepare, self.bug = server, prepare, bug
        self.daemon = CrashingDaemon(home)
        self.daemon.settings["transaction.two.phase.commit.enable"] = "true"
        self.daemon.start()
        self.count = 0
        with Cluster(self.daemon.bootstrap) as cluster:
            cluster.create_topic(SOURCE)
            cluster.create_topic(TARGET, 2)
        self.sql(f"drop table if exists {TABLE}")
        self.sql(f"create table {TABLE} (value bigint)")

    def sql(self, text: str) -> list[Any]:
        import psycopg

        with psycopg.connect(self.server.conninfo, autocommit=True) as connection:
            cursor = connection.execute(text)
            return cursor.fetchall() if cursor.description else []

    def worker(self, fault: Fault) -> Child:
        told = {
            "BOOTSTRAP": self.daemon.bootstrap,
            "CONNINFO": self.server.conninfo,
            "POSTMASTER": str(self.server.postmaster),
            "PREPARE": str(int(self.prepare)),
            "BUG": self.bug,
            "FAULT": fault.party,
            "AT": str(fault.at),
        }
        command = [sys.executable, "-m", "tests.crash.two_phase_worker"]
        return Child(command, env={**os.environ, **told}, cwd=ROOT)

    def turn(self, *faults: Fault) -> list[str]:
        """Write new values, and let workers copy them."""
        self.fill()
        return self.work(*faults)

    def fill(self) -> None:
        with Cluster(self.daemon.bootstrap) as cluster:
            values = [b"%d" % (self.count + number) for number in range(VALUES)]
            cluster.produce(SOURCE, values)
        self.count += VALUES

    def work(self, *faults: Fault) -> list[str]:
        """Run workers until the input is copied, with one fault for each worker except the last.

        Return the steps of the last worker.
        """
        waiting = [*faults, Fault()]
        while waiting:
            fault = waiting.pop(0)
            worker = self.worker(fault)
            until(lambda worker=worker: self.has_ended(worker), "its end", deadline_s=WORK_S)
            if worker.returncode == 0:
                break
            assert worker.returncode == -9, worker.tail()
        return worker.lines[worker.lines.index("steps") + 2 :]

    def has_ended(self, worker: Child) -> bool:
        self.revive()
        return worker.returncode is not None

    def revive(self) -> None:
        """Start the broker and the database again if they were killed."""
        if self.server.is_dead:
            self.server.start()
        if self.daemon.is_dead:
            self.daemon.start()

    def check(self, when: object) -> None:
        wanted = [*range(self.count)]
        rows = [row[0] for row in self.sql(f"select value from {TABLE} order by 1")]
        assert rows == wanted, f"rows {when}"
        assert not self.sql("select gid from pg_prepared_xacts"), when
        with Cluster(self.daemon.bootstrap) as cluster:
            for partition in range(2):
                found = cluster.values(TARGET, partition=partition, isolation=READ_COMMITTED)
                assert [int(value) for value in found] == wanted, f"partition {partition} {when}"
                assert cluster.lso(TARGET, partition) == cluster.offset(TARGET, partition), when
            assert cluster.committed(GROUP, SOURCE, stable=True) == self.count, when

    def close(self) -> None:
        self.daemon.kill()


@pytest.fixture(params=[False, True], ids=["row", "prepared"])
def bench(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresServer
) -> Iterator[Bench]:
    opened = Bench(tmp_path, postgres, prepare=request.param)
    opened.turn()  # the first claim of the transactional id finds no row
    yield opened
    opened.close()


def spread(points: Sequence[int]) -> list[int]:
    """Return as many points as TWO_PHASE_POINTS says, including the first and the last."""
    if POINTS == "all" or int(POINTS) >= len(points):
        return [*points]
    step = (len(points) - 1) / (int(POINTS) - 1)
    return [points[round(index * step)] for index in range(int(POINTS))]


def moments(steps: Sequence[str]) -> list[int]:
    """Return the moments before and after each step, or only around the steps that decide."""
    every = range(1, 2 * len(steps) + 1)
    if POINTS == "all":
        return [*every]
    # After the COMMIT PREPARED of the first transaction the same steps are repeated.
    end = 2 * steps.index("EndTxn") + 4
    deciding = [
        moment for moment in every if steps[(moment - 1) // 2] in DECIDING and moment <= end
    ]
    return spread(deciding)


def sweep(bench: Bench, steps: Sequence[str], faults: Callable[[int], Sequence[Fault]]) -> None:
    """Try a fault before and after each step."""
    for moment in moments(steps):
        bench.turn(*faults(moment))
        bench.check(f"after {faults(moment)}: {steps[(moment - 1) // 2]}")


def test_worker_killed_at_each_step_tears_no_transaction(bench: Bench) -> None:
    steps = bench.turn()
    assert {"InitProducerId", "ProduceRequest", "TxnOffsetCommit", "EndTxn"} <= set(steps)
    assert "tpc_commit" in steps
    assert ("tpc_prepare" in steps) is bench.prepare
    sweep(bench, steps, lambda moment: [Fault("app", moment)])


def test_recovery_killed_at_each_step_tears_no_transaction(bench: Bench) -> None:
    """The first worker is killed between the decision about its first transaction and EndTxn."""
    steps = bench.turn()
    first = 2 * steps.index("EndTxn") + 1
    recovery = bench.turn(Fault("app", first))
    # The decided transaction is ended under its own producer id, before InitProducerId fences it.
    assert recovery.index("EndTxn") < recovery.index("InitProducerId")
    recovery = recovery[: recovery.index("ProduceRequest")]
    sweep(bench, recovery, lambda moment: [Fault("app", first), Fault("app", moment)])


def test_database_killed_at_each_step_tears_no_transaction(bench: Bench) -> None:
    """A database that is killed after one of its steps sends the worker no response."""
    sweep(bench, bench.turn(), lambda moment: [Fault("database", moment)])


def test_broker_killed_at_each_durable_step_tears_no_transaction(bench: Bench) -> None:
    bench.fill()
    bench.daemon.arm()
    bench.work()
    count = bench.daemon.disarm()
    assert count is not None
    for step in spread(range(1, count + 1)):
        bench.daemon.stop()
        bench.daemon.start(env={"CRASH_AT": str(step)})
        bench.fill()
        bench.daemon.arm()
        bench.work()
        bench.daemon.disarm()
        bench.revive()
        bench.check(f"after the broker's step {step}")


def test_wrong_order_of_decisions_is_found(tmp_path: Path, postgres: PostgresServer) -> None:
    """A worker that commits in Kafka first and is then killed loses its rows."""
    bench = Bench(tmp_path, postgres, prepare=False, bug="kafka-first")
    try:
        steps = bench.turn()
        bench.check("without a fault")
        bench.turn(Fault("app", 2 * steps.index("EndTxn") + 2))
        with pytest.raises(AssertionError, match="rows after the kill"):
            bench.check("after the kill")
    finally:
        bench.close()
