"""The consumers' decoder can read every batch that a log accepts, to the end of the batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.daemon.broker import Broker
from fencepost.logcore.batch import decode_records, iter_headers, verify_crc
from tests.support.broken_batches import draw_batch
from tests.support.cluster import Cluster
from tests.support.raw import errors_in

BATCHES = 3_000

TOPICS = {
    "plain": {},
    "compacted": {"cleanup.policy": "compact"},
    "stamped": {"message.timestamp.type": "LogAppendTime"},
    "packed": {"compression.type": "gzip"},
    "bounded": {"message.timestamp.before.max.ms": "86400000"},
}
ANSWERS = {
    *("none", "invalid_record", "invalid_timestamp", "unsupported_compression_type"),
    "transactional_id_authorization_failed",
}


@pytest.mark.slow
def test_every_accepted_batch_can_be_read_to_the_end(tmp_path: Path) -> None:
    rng = random.Random(1)
    seen: dict[str, int] = {}
    with (
        capture_logs() as said,
        Broker.in_thread(tmp_path) as broker,
        Cluster(broker.bootstrap) as cluster,
    ):
        for topic, configs in TOPICS.items():
            cluster.create_topic(topic, configs=configs)
        for _ in range(BATCHES):
            (code,) = errors_in(cluster.produce(rng.choice(list(TOPICS)), draw_batch(rng)))
            seen[code] = seen.get(code, 0) + 1
        for topic in TOPICS:
            assert read_to_the_end(cluster, topic) == cluster.offset(topic) > 100
    assert seen.keys() == ANSWERS
    assert min(seen["none"], seen["invalid_record"]) > BATCHES / 10
    assert not [
        line for line in said if line["event"] in {"handler failed", "background work failed"}
    ]


def read_to_the_end(cluster: Cluster, topic: str) -> int:
    """Read all records, check that their offsets are consecutive, and return the end offset."""
    expected = 0
    while part := cluster.fetch(topic, offset=expected)["records"]:
        for position, header in iter_headers(part):
            verify_crc(part, position, header)
            offsets = [record.offset for record in decode_records(part, position, header)]
            assert offsets == list(range(expected, expected + len(offsets)))
            expected = header.next_offset
            assert expected == offsets[-1] + 1
    return expected
