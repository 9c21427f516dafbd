"""Apache Kafka 4.4 replaces 4.3: a rolling upgrade, and brokers under Fencepost's controller.

Clients of all kinds work throughout; at the end nothing is lost, duplicated or reordered, and the
replicas of both brokers are equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.crash.test_cluster_faults import check_records, check_replicas
from tests.oracle.test_joining_levels import LATEST, levels
from tests.oracle.tool_scenes import FEATURES
from tests.support import kafka43
from tests.support.failover import (
    LONGER_THAN_SESSIONS_S,
    OFFSETS,
    SETTINGS,
    SOURCE,
    TARGET,
    TRANSACTIONS,
    AtWork,
    Nodes,
    at_work,
    settled,
)
from tests.support.kafka import Kafka, Libs, jars, required, run_tool
from tests.support.mixed import FIRST_CONTROLLER, MixedCluster

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

KAFKA, OURS = 1, 2
ASSIGNED = {
    SOURCE: [[KAFKA, OURS], [OURS, KAFKA], [KAFKA, OURS]],
    TARGET: [[OURS, KAFKA], [KAFKA, OURS], [OURS, KAFKA]],
    OFFSETS: [[OURS, KAFKA]],
    TRANSACTIONS: [[KAFKA, OURS]],
}
"""Replicas of each partition; the first one leads. Each broker leads partitions of both topics.
Fencepost coordinates the groups and Apache Kafka the transactions, until the coordinator stops."""

ONE_SUFFICES = {
    **SETTINGS,
    "min.insync.replicas": "1",
    "transaction.state.log.min.isr": "1",
    "broker.session.timeout.ms": "6000",
    "replica.lag.time.max.ms": "30000",
}
"""Settings with which clients need not wait until a broker has restarted.

A broker must leave an ISR only when its session expires, not because it is slow. With the times in
SETTINGS, a :func:`pause` would leave the other broker alone in an ISR. If that broker is killed
next, the partition would have no leader until the broker restarts.
"""


@contextmanager
def working(directory: Path, controllers: str, libs: Libs) -> Iterator[tuple[Nodes, AtWork]]:
    """Yield a broker of either kind with active clients; at the end, check their records."""
    cluster = MixedCluster(directory, "JP", ONE_SUFFICES, controllers=controllers, libs=libs)
    nodes = None
    try:
        with required():
            cluster.start()
        nodes = Nodes(cluster)
        with at_work(nodes, ASSIGNED) as work:
            yield nodes, work
            work.finish()
        assert work.writer.refused == []
        check_records(nodes, work.clients, work.writer, turns=len(ASSIGNED))
        check_replicas(nodes)
    finally:
        (nodes or cluster).stop()


def whole(nodes: Nodes, work: AtWork, after: str) -> None:
    """Wait until all replicas are in sync, and elect the preferred leaders."""
    settled(nodes.has_isr, f"all in sync after {after}")
    settled(
        lambda: nodes.is_led_as_preferred() or nodes.elect_preferred(), f"leaders after {after}"
    )
    work.writer.goes_on(f"producing after {after}")
    settled(nodes.has_isr, f"all still in sync after {after}")


def pause(nodes: Nodes, node_id: int) -> None:
    """Freeze a broker for less than its session timeout."""
    nodes.inject_fault(node_id, "freeze")
    end = time.monotonic() + LONGER_THAN_SESSIONS_S
    settled(lambda: time.monotonic() > end, f"the pause of {node_id}")
    nodes.recover(node_id, "freeze")


def upgraded(nodes: Nodes, node_id: int) -> None:
    node = nodes.cluster.node(node_id)
    assert isinstance(node, Kafka)
    node.upgrade(jars)


def finalize(nodes: Nodes, *level: str) -> None:
    """Raise feature levels with kafka-features of release 4.4."""
    address = nodes.cluster.node(KAFKA).bootstrap
    run_tool(FEATURES, "--bootstrap-server", address, "upgrade", *level)


def test_rolling_upgrade_from_4_3_to_4_4_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    with working(tmp_path, "J", kafka43.jars) as (nodes, work):
        for node_id in (FIRST_CONTROLLER, KAFKA):
            upgraded(nodes, node_id)
            whole(nodes, work, f"the upgrade of {node_id}")
        ours = nodes.cluster.node(OURS).bootstrap
        assert levels(ours) == {"metadata.version": 30, "share.version": 1}
        finalize(nodes, "--release-version", "4.4")
        settled(lambda: levels(ours) == LATEST, "the broker knows the new levels")
        nodes.inject_fault(OURS, "stop")
        nodes.recover(OURS, "stop")
        whole(nodes, work, "the start in a cluster finalized at 4.4")


def test_broker_of_4_4_serves_and_fails_over_under_our_controller(tmp_path: Path) -> None:
    with working(tmp_path, "P", jars) as (nodes, work):
        for node_id in (KAFKA, OURS):
            whole(nodes, work, "the start")
            if node_id == OURS:
                pause(nodes, KAFKA)
            nodes.inject_fault(node_id, "kill")
            work.writer.goes_on(f"producing without {node_id}")
            nodes.recover(node_id, "kill")
        whole(nodes, work, "both kills")
        finalize(nodes, "--feature", "metadata.version=33")
        for node in nodes.cluster.nodes:
            settled(
                lambda node=node: (
                    levels(node.bootstrap) == {"metadata.version": 33, "share.version": 1}
                ),
                "both know the new level",
            )
        nodes.inject_fault(KAFKA, "stop")
        nodes.recover(KAFKA, "stop")
        whole(nodes, work, "the start in a cluster finalized at 4.4")
