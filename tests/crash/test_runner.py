"""The consume-transform-produce runner, while workers and the daemon are killed by kill -9.

``RUNNER_KILLS`` sets the number of kills, ``RUNNER_SEED`` the seed, and ``RUNNER_POINTS`` the
number of points of the sweep.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crash.copier import TARGET
from tests.support.cluster import READ_COMMITTED, Cluster
from tests.support.daemon import ROOT, Daemon
from tests.support.processes import Child
from tests.support.waits import until

KILLS = int(os.environ.get("RUNNER_KILLS", "5"))
SEED = int(os.environ.get("RUNNER_SEED", "2013"))
POINTS = int(os.environ.get("RUNNER_POINTS", "6"))

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.timeout(120 + 20 * KILLS + 20 * POINTS),
]

RECORDS_PER_KILL, SOURCES = 100, 3
WORKERS = ("one", "two")
RUNNER = f"{sys.executable} -m tests.crash.runner"


class Fleet:
    """A daemon, and two workers of one group."""

    def __init__(self, home: Path, records: int) -> None:
        self._home = home
        self.daemon = Daemon(home / "data").start()
        self._env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "FENCEPOST_BOOTSTRAP": self.daemon.bootstrap,
            "FENCEPOST_SWEEP_DIR": str(home),
            "RUNNER_RECORDS": str(records),
            "RUNNER_SOURCES": str(SOURCES),
        }
        self._attempts = 0
        self.workers: dict[str, Child] = {}

    def do(self, what: str) -> None:
        subprocess.run([*RUNNER.split(), what], cwd=ROOT, env=self._env, check=True, timeout=60)

    def start(self, name: str) -> None:
        self._attempts += 1
        env = {**self._env, "FENCEPOST_SWEEP_ATTEMPT": str(self._attempts)}
        self.workers[name] = Child([*RUNNER.split(), "work", name], cwd=ROOT, env=env)

    def kill(self, name: str) -> None:
        if name == "daemon":
            self.daemon.kill()
            self.daemon.start()
        else:
            self.workers[name].kill()
            self.start(name)

    def wait_until_ready(self) -> None:
        for worker in self.workers.values():
            worker.wait_for_line("^ready$", deadline_s=60)

    def copied(self) -> int:
        with Cluster(self.daemon.bootstrap) as cluster:
            return sum(
                len(cluster.values(TARGET, partition=index, isolation=READ_COMMITTED))
                for index in (0, 1)
            )

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
        self.daemon.kill()


def test_pipeline_is_exactly_once_through_random_kills(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    records = RECORDS_PER_KILL * KILLS
    fleet = Fleet(tmp_path, records)
    try:
        fleet.do("fill")
        for name in WORKERS:
            fleet.start(name)
        for number in range(KILLS):
            # Most kills happen during work, some during the recovery from the previous kill.
            goal = RECORDS_PER_KILL * number * chance.random()
            until(lambda goal=goal: fleet.copied() >= goal, f"{goal:.0f} copied", deadline_s=60)
            time.sleep(chance.uniform(0, 0.2))  # vary the moment of the kill
            fleet.kill(chance.choice([*WORKERS, "daemon"]))
        until(lambda: fleet.copied() >= records, f"all {records} copied", deadline_s=60)
        fleet.wait_until_ready()
        for worker in fleet.workers.values():
            assert worker.terminate() == 0, worker.tail()
        fleet.do("verify")
    except TimeoutError as error:
        said = {name: worker.tail(20) for name, worker in fleet.workers.items()}
        raise TimeoutError(f"seed {SEED}: {error}; workers: {said}") from error
    finally:
        fleet.close()


def test_pipeline_is_exactly_once_after_a_kill_at_every_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fencepost", "crash-sweep", "--format", "json"),
            *("--directory", str(tmp_path / "sweep"), "--setup", f"{RUNNER} fill"),
            *("--config", "offsets.topic.num.partitions=2"),
            *("--config", "transaction.state.log.num.partitions=2"),
            *("--config", "group.initial.rebalance.delay.ms=0"),
            *("--config", "group.min.session.timeout.ms=500"),
            *("--points", str(POINTS), "--jobs", "3", "--verify", f"{RUNNER} verify"),
            *("--", *RUNNER.split(), "copy"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100 + 20 * POINTS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    verdict = json.loads(done.stdout)
    assert verdict["points"] == POINTS
    assert verdict["failures"] == verdict["skipped"] == 0
    assert verdict["kills"] >= POINTS * 0.8
    # No kill of the daemon may end or hang the worker.
    assert [row["ended"] for row in verdict["results"] if row["ended"]] == []
