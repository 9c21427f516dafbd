"""Workloads of other suites beside kfake, a broker so light that the client is often the limit."""

from __future__ import annotations

from dataclasses import replace

from bench.brokers import FENCEPOST, KFAKE
from bench.suite import BESIDE_KFAKE, Suite
from bench.suites.data import LATENCY_AT_1000, LIBRDKAFKA_16
from bench.suites.groups import SYNCHRONOUS_COMMITS
from bench.suites.txn import ONE_RECORD, PIPELINE_OF_100

REPEATED = (LIBRDKAFKA_16, LATENCY_AT_1000, SYNCHRONOUS_COMMITS, ONE_RECORD, PIPELINE_OF_100)

KFAKE_SUITE = Suite(
    "kfake",
    "confluent-kafka on Fencepost and on kfake, franz-go's broker for tests, which is compiled Go "
    "and keeps everything in memory. Where kfake is no faster, the client is the limit.",
    tuple(replace(workload, sides=BESIDE_KFAKE, is_pinged=False) for workload in REPEATED),
    sides={FENCEPOST: "Fencepost", KFAKE: "kfake"},
)
