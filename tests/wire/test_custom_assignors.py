"""A daemon with valid and faulty custom assignors, used by real consumers."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, unique
from tests.support.custom_assignors import install
from tests.support.daemon import ROOT, Daemon
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.test_cli import fencepost, rows
from tests.wire.test_consumer_protocol import member, owned

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment with the installed assignors, for daemon and command line."""
    place = install(tmp_path / "site")
    path = os.pathsep.join((str(place), str(ROOT)))
    return {"PYTHONPATH": path, "SLOW_ASSIGNOR_NOTE": str(tmp_path / "note")}


@pytest.fixture
def daemon(tmp_path: Path, environment: dict[str, str]):
    names = "uniform,reversed,slow,raising,hanging,doubling"
    settings = {**SETTINGS, "group.consumer.assignors": names}
    broker = Daemon(tmp_path / "data", settings, env=environment).start()
    yield broker
    broker.stop()


def test_failing_custom_assignor_does_not_disturb_other_groups(daemon: Daemon) -> None:
    bootstrap = daemon.bootstrap
    with Cluster(bootstrap) as cluster, ExitStack() as stack:
        topic = cluster.create_topic(unique("custom"), 6)
        groups = {name: unique(name) for name in ("hanging", "raising", "doubling")}
        for name, group in groups.items():
            conf = {"group_remote_assignor": name}
            stack.enter_context(member(bootstrap, group, topic, **conf)).poll(0.1)
        good = unique("good")
        pair = [
            stack.enter_context(member(bootstrap, good, topic, group_remote_assignor="reversed"))
            for _ in range(2)
        ]
        until(lambda: owned(*pair) == [3, 3], "the good assignor's target")
        for name in ("raising", "doubling"):
            until(lambda name=name: failures(bootstrap, groups[name]), f"{name} to be told of")
        plain = stack.enter_context(member(bootstrap, unique("plain"), topic))
        until(lambda: owned(plain) == [6], "a group with the broker's own assignor")
        state = rows(fencepost("groups", "list", "--format", "json", bootstrap=bootstrap))
        assert set(groups.values()) <= {row["group"] for row in state}


def failures(bootstrap: str, group: str) -> list[dict[str, object]]:
    done = fencepost("groups", "history", group, "--format", "json", bootstrap=bootstrap)
    return [row for row in rows(done) if row["what"] == "assignor-failed"]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie process, which was not reaped, does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_assignment_is_computed_again_after_a_kill_during_it(
    daemon: Daemon, environment: dict[str, str]
) -> None:
    note = Path(environment["SLOW_ASSIGNOR_NOTE"])
    with Cluster(daemon.bootstrap) as cluster:
        topic = cluster.create_topic(unique("custom"), 6)
    group = unique("slow")
    with member(daemon.bootstrap, group, topic, group_remote_assignor="slow") as consumer:
        until(lambda: (consumer.poll(0.02), note.exists() and note.read_text())[1], "it computes")
        computing = int(note.read_text())
        daemon.kill()
        until(lambda: not is_alive(computing), "the assignor's process ends with its daemon")
        daemon.start()
        until(lambda: owned(consumer) == [6], "the target, from a process of the new daemon")
        assert int(note.read_text()) != computing


def test_plan_uses_a_locally_installed_assignor(
    daemon: Daemon, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(daemon.bootstrap) as cluster:
        topic = cluster.create_topic(unique("custom"), 6)
    group = unique("planned")
    asked = ("groups", "plan", group, "--add", "1", "--format", "json", "--assignor")
    with ExitStack() as stack:
        conf = {"group_remote_assignor": "reversed"}
        first = stack.enter_context(member(daemon.bootstrap, group, topic, **conf))
        until(lambda: owned(first) == [6], "the first member's share")
        unknown = fencepost(*asked, "reversed", bootstrap=daemon.bootstrap, status=1)
        assert "range, uniform" in unknown.stderr
        monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
        planned = rows(fencepost(*asked, "reversed", bootstrap=daemon.bootstrap))
        assert sorted((row["now"], row["then"]) for row in planned) == [(0, 3), (6, 3)]
        for name, says in (("raising", "no idea"), ("unimportable", "cannot be loaded")):
            failed = fencepost(*asked, name, bootstrap=daemon.bootstrap, status=1)
            assert says in failed.stderr
        second = stack.enter_context(member(daemon.bootstrap, group, topic, **conf))
        until(lambda: owned(first, second) == [3, 3], "the plan comes true")
