"""The two brokers of the benchmark start, stop and restart, and a run prints figures."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.brokers import FENCEPOST, KAFKA, KFAKE, SIDES, cpu_seconds, open_files, resident_mib
from bench.clients import create_topic
from bench.plot import curves, draw
from bench.report import STALL
from bench.suite import DEFAULTS
from bench.suites.growth import at
from tests.support.cluster import Cluster
from tests.support.daemon import ROOT


def test_curves_of_figures_by_count_are_drawn(tmp_path: Path) -> None:
    measured = {
        f"groups: {at(what, count, 'members', unit)}": {FENCEPOST: [1.0 * count, 3.0 * count]}
        for what, unit in (("a join", "µs"), ("a heartbeat", "µs"), ("memory", "MiB"))
        for count in (10, 1_000)
    }
    found = curves({**measured, STALL: {FENCEPOST: [1.0]}})
    points = [(10, 20.0), (1_000, 2_000.0)]
    assert found == {
        ("members", "µs"): {"a join": points, "a heartbeat": points},
        ("members", "MiB"): {"memory": points},
    }
    pictures = draw(found, tmp_path)
    assert [picture.name for picture in pictures] == ["members-time.png", "members-memory.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.parametrize("side", [FENCEPOST, KAFKA])
def test_benchmark_broker_restarts_at_its_address_with_its_topics(
    tmp_path: Path, side: str
) -> None:
    broker = SIDES[side](tmp_path, DEFAULTS)
    try:
        broker.start()
        address = broker.bootstrap
        topic = create_topic(address, 2)
        assert cpu_seconds(broker) > 0
        assert resident_mib(broker) > 1
        assert open_files(broker) > 3
        broker.kill()
        broker.start()
        assert broker.bootstrap == address
        with Cluster(address) as cluster:
            assert cluster.leaders(topic) == 2
    finally:
        broker.kill()


def test_kfake_serves_a_topic_until_it_is_killed(tmp_path: Path) -> None:
    broker = SIDES[KFAKE](tmp_path, DEFAULTS)
    broker.start()
    try:
        topic = create_topic(broker.bootstrap, 2)
        with Cluster(broker.bootstrap) as cluster:
            assert cluster.leaders(topic) == 2
        assert cpu_seconds(broker) >= 0
    finally:
        broker.kill()
    with (
        pytest.raises(ConnectionRefusedError),
        socket.create_connection(("127.0.0.1", int(broker.bootstrap.rpartition(":")[2]))),
    ):
        pass


def test_benchmark_run_writes_positive_figures(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    command = [sys.executable, "-m", "bench", "start", "--without-kafka", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--json", str(told)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(told.read_text(encoding="utf-8"))["start"]["figures"]
    assert figures
    for sides in figures.values():
        assert all(value > 0 for value in sides[FENCEPOST])
