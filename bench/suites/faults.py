"""The faults of tests/crash/test_cluster_faults.py, on clusters of each product and of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.brokers import FENCEPOST, JAVA_OPTIONS, KAFKA
from bench.suite import Figures, Pair, Suite
from tests.support import failover
from tests.support.failover import ASSIGNED, SETTINGS, SOURCE, TURNS, WAYS, AtWork, Nodes, at_work
from tests.support.mixed import JAVA, PYTHON, MixedCluster

TAKEN = {"kill": "kill -9", "stop": "SIGTERM", "freeze": "SIGSTOP"}
MAKERS = {JAVA: KAFKA, PYTHON: FENCEPOST}
MIXTURES = "JPP", "JJP"


def _at_work(home: Path, layout: str, controllers: str, end: ExitStack) -> AtWork:
    """Return the clients of a new cluster, which runs until ``end`` is closed."""
    cluster = MixedCluster(
        home / layout, layout, SETTINGS, controllers=controllers, java_options=JAVA_OPTIONS
    )
    end.callback(cluster.stop)
    return end.enter_context(at_work(Nodes(cluster.start())))


def _turn(work: AtWork, way: str, topic: str, index: int = 0) -> Figures:
    took = failover.turn(work.nodes, work.writer, way, topic, index)
    return {
        f"{TAKEN[way]} of a leader, pause of the partition that it led (s)": took.led_pause_s,
        f"{TAKEN[way]} of a leader, longest pause of any partition (s)": took.pause_s,
        f"{TAKEN[way]} of a leader, time from the broker's return to full ISRs (s)": took.full_s,
    }


def faults(home: Path) -> Iterator[tuple[str, Figures]]:
    """Make leaders fail in three ways, on each side in turn; both clusters run all the time."""
    with ExitStack() as end:
        sides = [
            (FENCEPOST, _at_work(home, "PPP", PYTHON, end)),
            (KAFKA, _at_work(home, "JJJ", JAVA, end)),
        ]
        for way, topic in TURNS:
            sides.reverse()
            for side, work in sides:
                yield side, _turn(work, way, topic)


def both_ways(home: Path) -> Iterator[tuple[str, Figures]]:
    """Make leaders of each product fail over to the other's broker, under Java's controller."""
    for layout in MIXTURES:
        with ExitStack() as end:
            work = _at_work(home, layout, JAVA, end)
            makers = [[layout[number - 1] for number in numbers] for numbers in ASSIGNED[SOURCE]]
            for way in WAYS:
                for leader, heir in ((JAVA, PYTHON), (PYTHON, JAVA)):
                    index = next(
                        at for at, replicas in enumerate(makers) if replicas[:2] == [leader, heir]
                    )
                    yield MAKERS[leader], _turn(work, way, SOURCE, index)


FAULTS = Suite(
    "faults",
    "One of three brokers is killed, stopped or frozen, and comes back. It leads the first "
    "partition of a topic, of `__consumer_offsets` or of `__transaction_state`. In mixed clusters, "
    "under Apache Kafka's controller, it is a broker of the column's product, and a broker of the "
    "other product takes over. Meanwhile an idempotent producer (acks=all), a transactional "
    "pipeline and groups of both protocols are at work. broker.session.timeout.ms=2000, "
    "replica.lag.time.max.ms=2000, min.insync.replicas=2.",
    (
        Pair("cluster of one product", faults),
        Pair("mixed cluster", both_ways),
    ),
)
