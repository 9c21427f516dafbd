"""A rolling restart of three brokers as docs/cluster.md describes it, with active clients.

``fencepost cluster check-restart`` decides when the next broker may stop.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.test_cluster_faults import PURE, check_records, check_replicas
from tests.support.failover import DEADLINE_S, SETTINGS, Nodes, at_work
from tests.support.kafka import required
from tests.support.mixed import MixedCluster
from tests.wire.command_line import cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    brokers, controllers = PURE.split("/")
    made = MixedCluster(tmp_path, brokers, SETTINGS, controllers=controllers)
    try:
        with required():
            made.start()
        yield Nodes(made)
    finally:
        Nodes(made).stop()


def refusals(nodes: Nodes, broker: int) -> list[dict[str, object]]:
    """Return the problems that the check reports; [] if the broker can be restarted."""
    line = ("cluster", "check-restart", str(broker), "--format", "json")
    done = cli(nodes.bootstrap, *line, status=None)
    told = json.loads(done.stdout)
    assert told["can_restart"] is (done.exit_code == 0)
    problems: list[dict[str, object]] = told["problems"]
    assert bool(problems) is (done.exit_code == 1)
    return problems


def test_rolling_restart_by_the_recipe_loses_and_duplicates_nothing(nodes: Nodes) -> None:
    with at_work(nodes) as work:
        for broker in (1, 2, 3):
            cli(nodes.bootstrap, "cluster", "check-restart", str(broker), "--wait", "2m")
            nodes.inject_fault(broker, "stop")
            # While one broker is down, no other broker may stop: a write needs two replicas.
            others = {1, 2, 3} - {broker}
            assert "is down or fenced" in str(refusals(nodes, broker)[0]["problem"])
            for other in others:
                problems = refusals(nodes, other)
                assert {problem["problem"] for problem in problems} == {"under min ISR without it"}
                assert {problem["min_isr"] for problem in problems} == {2}
            work.writer.goes_on(f"records are written without broker {broker}")
            nodes.recover(broker, "stop")
        cli(nodes.bootstrap, "cluster", "check-restart", "1", "--wait", f"{DEADLINE_S:g}s")
        work.finish()
    assert work.writer.refused == []
    check_records(nodes, work.clients, work.writer, 3)
    check_replicas(nodes)
