"""Workloads of other suites beside kfake, a broker so light that the client is often the limit."""

from __future__ import annotations

from bench.brokers import FENCEPOST, KFAKE
from bench.suite import BESIDE_KFAKE, Suite, Workload
from bench.suites.data import end_to_end, librdkafka
from bench.suites.groups import synchronous_commits
from bench.suites.txn import consume_transform_produce, one_record

KFAKE_SUITE = Suite(
    "kfake",
    "confluent-kafka on Fencepost and on kfake, franz-go's broker for tests, which is compiled Go "
    "and keeps everything in memory. Where kfake is no faster, the client is the limit.",
    tuple(
        Workload(name, run, sides=BESIDE_KFAKE, is_pinged=False)
        for name, run in (
            ("librdkafka, 16 partitions", librdkafka(16)),
            ("end to end, 1,000 records/s", end_to_end(1_000)),
            ("one consumer, synchronous", synchronous_commits),
            ("one-record transactions", one_record),
            ("consume-transform-produce, 100 a transaction", consume_transform_produce(100)),
        )
    ),
    sides={FENCEPOST: "Fencepost", KFAKE: "kfake"},
)
