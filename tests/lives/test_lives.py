"""Random requests: no client request may fail a shard, in any state of the broker.

``pytest tests/lives/test_lives.py --seed 7 --requests 20000`` sends that many requests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.protocol.api import APIS
from tests.lives.judge import foreign, lost, topics, unlike
from tests.lives.life import Life
from tests.lives.race import LifeError, Race
from tests.support.daemon import Daemon
from tests.support.targets import SETTINGS
from tests.support.telemetry import ENABLED

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(7200)]

REQUESTS = 20_000
CHAPTER = 5_000
"""Number of requests between two kills; each restart toggles transaction verification."""

VERIFIES = "transaction.partition.verification.enable"

TELLING = (sys.executable, "-m", "tests.lives.telling_daemon")
EXPIRING = {
    **SETTINGS,
    **ENABLED,
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.session.timeout.ms": "1000",
}
"""Session timeouts are short, so that silent members expire; all APIs are enabled."""


@pytest.fixture
def telling(tmp_path: Path) -> Iterator[Daemon]:
    env = {"TELL": str(tmp_path / "told")}
    daemon = Daemon(tmp_path / "data", EXPIRING, command=TELLING, env=env).start()
    yield daemon
    assert daemon.child is not None
    daemon.child.kill()


class Complaints:
    """Log lines of the daemon that no client request may cause."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._seen = 0

    def began_anew(self) -> None:
        self._seen = 0

    def __call__(self) -> list[str]:
        assert self._daemon.child is not None
        lines = self._daemon.child.lines[self._seen :]
        self._seen += len(lines)
        return [line for line in lines if '"level": "error"' in line or "Traceback" in line]


def test_no_request_fails_a_shard(
    telling: Daemon, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    asked = request.config.getoption("--seed")
    seed = 1 if asked is None else asked
    requests = request.config.getoption("--requests") or REQUESTS
    repeat = f"pytest tests/lives/test_lives.py --seed {seed} --requests {requests}"

    def wrong(what: str) -> None:
        raise LifeError(what)

    complaints = Complaints(telling)
    race = Race(Life(seed), telling.bootstrap, wrong=wrong, watch=complaints)
    try:
        while race.report.sent < requests:
            race.run(min(CHAPTER, requests - race.report.sent))
            is_on = telling.settings.get(VERIFIES, "true") == "true"
            telling.settings[VERIFIES] = str(not is_on).lower()
            killed_and_read_again(telling, tmp_path / "told", race)
            complaints.began_anew()
            race.reconnect()
        race.close()
        before = topics(telling.bootstrap)
        telling.stop()
        assert foreign(telling.data_dir) == []
        assert topics(telling.start().bootstrap) == before != []
    except BaseException as broke:
        log = tmp_path / "requests.log"
        log.write_text("\n".join(race.report.last))
        raise AssertionError(
            f"{broke}\nafter {race.report.sent} requests; the last of them: {log}\n{repeat}"
        ) from broke
    print(f"\n{race.report.summary()}")
    missing = {(a.module, v) for a in APIS.values() for v in range(a.min_version, a.stable_max + 1)}
    missing -= {(api, version) for api, version, _ in race.report.answers}
    assert requests < REQUESTS or not missing, missing


def killed_and_read_again(daemon: Daemon, told: Path, race: Race) -> None:
    """Kill the daemon by SIGKILL and restart it; digests and records must not change."""
    child = daemon.child
    assert child is not None
    os.kill(child.pid, signal.SIGUSR1)
    assert child.wait(60) == -signal.SIGKILL, child.tail()
    shards, partitions = json.loads(told.read_text())
    daemon.start()
    assert daemon.child is not None
    daemon.child.wait_for_line('"every shard is loaded"', deadline_s=60)
    assert unlike(shards, daemon.child.lines) == []
    assert lost(partitions, daemon.bootstrap, rewritten=race.rewritten) == []
