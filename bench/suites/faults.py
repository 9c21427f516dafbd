"""The faults of tests/crash/test_cluster_faults.py, on three brokers of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.brokers import FENCEPOST, JAVA_OPTIONS, KAFKA
from bench.suite import Figures, Pair, Suite
from tests.support.failover import SETTINGS, TURNS, AtWork, Nodes, at_work, turn
from tests.support.kafka import KafkaCluster
from tests.support.member import MemberCluster

TAKEN = {"kill": "kill -9", "stop": "SIGTERM", "freeze": "SIGSTOP"}


def faults(home: Path) -> Iterator[tuple[str, Figures]]:
    """Take leaders away in three ways, on each side in turn: both live all the time."""
    clusters: dict[str, MemberCluster | KafkaCluster] = {
        FENCEPOST: MemberCluster(home / FENCEPOST, settings=SETTINGS),
        KAFKA: KafkaCluster(
            home / KAFKA, settings=SETTINGS, java_options=JAVA_OPTIONS, has_controller=True
        ),
    }
    with ExitStack() as end:
        sides: list[tuple[str, AtWork]] = []
        for side, cluster in clusters.items():
            end.callback(cluster.stop)
            sides.append((side, end.enter_context(at_work(Nodes(cluster.start())))))
        for way, topic in TURNS:
            sides.reverse()
            for side, work in sides:
                took = turn(work.nodes, work.writer, way, topic)
                yield (
                    side,
                    {
                        f"{TAKEN[way]}, longest pause of producing s": took.pause_s,
                        f"{TAKEN[way]}, from its return to full ISRs s": took.full_s,
                    },
                )


FAULTS = Suite(
    "faults",
    "Three brokers, of which one is killed, stopped or frozen in turn, and comes back: the leader "
    "of a topic's first partition, of the groups' and of the transactions' topic. An idempotent "
    "producer (acks=all), a transactional pipeline and a group of two go on meanwhile. "
    "broker.session.timeout.ms=2000, replica.lag.time.max.ms=2000, min.insync.replicas=2.",
    (Pair("a leader goes", faults),),
)
