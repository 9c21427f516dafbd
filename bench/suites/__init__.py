"""All suites, in the order in which they run and are reported."""

from __future__ import annotations

from bench.suite import Suite
from bench.suites.cleaner import CLEANER
from bench.suites.cluster import CLUSTER
from bench.suites.data import DATA, JAVA, START
from bench.suites.faults import FAULTS
from bench.suites.groups import GROUPS
from bench.suites.growth import GROWTH
from bench.suites.kfake import KFAKE_SUITE
from bench.suites.log import LOG
from bench.suites.metrics import METRICS
from bench.suites.mqtt import MQTT
from bench.suites.partitions import PARTITIONS_SUITE
from bench.suites.pipelines import PIPELINES
from bench.suites.security import SECURITY
from bench.suites.share import SHARE
from bench.suites.sockets import SOCKETS
from bench.suites.spark import SPARK
from bench.suites.txn import TXN

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        START,
        DATA,
        JAVA,
        GROUPS,
        TXN,
        SHARE,
        KFAKE_SUITE,
        LOG,
        CLEANER,
        PARTITIONS_SUITE,
        CLUSTER,
        FAULTS,
        GROWTH,
        SOCKETS,
        METRICS,
        SECURITY,
        PIPELINES,
        MQTT,
        SPARK,
    )
}
