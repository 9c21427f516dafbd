"""Metrics of share groups: in-flight records, expired locks, acknowledgements and causes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fencepost.coordinator.daemon.broker import Broker
from fencepost.testing.clock import TestClock
from tests.support.cluster import Cluster
from tests.support.share import ACCEPT, RELEASE, Member, acquired, initialize, parts_of
from tests.unit.coordinator.handlers.test_share_fetch import SHARE_CONFIG
from tests.unit.coordinator.metrics.test_families import SETTINGS, scraped, value

SHARE = "kafka_server_sharepartitionmetrics_"
INVALID_RECORD_STATE = 121
"""The error's number; kio has no name for this error."""
PLACE = {"group": "g", "topic": "queue", "partition": "0"}


class Worker:
    """A member that has acquired four records in two batches."""

    def __init__(self, bootstrap: str) -> None:
        self.client = Cluster(bootstrap).__enter__()
        self.topic_id = self.client.topic_id(self.client.create_topic("queue"))
        initialize(self.client, "g", self.topic_id)
        self.member = Member(self.client, "g")
        self.member.fetch({self.topic_id: {0: []}}, max_wait=0)
        for _ in range(2):
            self.client.produce("queue", [b"a", b"b"])
        (part,) = parts_of(self.member.fetch({}, batch_size=1)).values()
        assert acquired(part) == [(0, 1, 1), (2, 3, 1)]

    def acknowledge(self) -> None:
        batches = [(0, 1, ACCEPT), (2, 2, RELEASE)]
        answer = self.member.acknowledge({self.topic_id: {0: batches}})
        assert parts_of(answer)[0]["error_code"] == "none"

    def fail(self) -> None:
        """Send a fetch with an acknowledgement that fails and a partition that does not exist."""
        answer = self.member.fetch({self.topic_id: {0: [(2, 2, ACCEPT)], 7: []}}, max_wait=0)
        assert parts_of(answer)[0]["acknowledge_error_code"] == INVALID_RECORD_STATE
        assert parts_of(answer)[7]["error_code"] == "unknown_topic_or_partition"

    def close(self) -> None:
        self.client.__exit__(None, None, None)


async def test_share_group_metrics_follow_fetches_acknowledgements_and_lock_timeouts(
    tmp_path: Path,
) -> None:
    clock = TestClock()
    config = {**SETTINGS, **SHARE_CONFIG}
    async with Broker(tmp_path, config=config, clock=clock) as broker:
        worker = await asyncio.to_thread(Worker, broker.bootstrap)
        values = await scraped(broker)
        assert value(values, "fencepost_share_in_flight_records", group="g") == 4
        assert value(values, "fencepost_share_in_flight_batches", group="g") == 2
        assert value(values, f"{SHARE}inflightmessagecount", **PLACE) == 4
        assert value(values, f"{SHARE}inflightbatchcount", **PLACE) == 2
        assert value(values, "kafka_server_sharesessioncache_sharesessionscount") == 1
        assert value(values, "kafka_server_sharesessioncache_sharepartitionscount") == 1
        await asyncio.to_thread(worker.acknowledge)
        await asyncio.to_thread(clock.advance, seconds=31)
        values = await scraped(broker)
        assert value(values, "fencepost_share_in_flight_records", group="g") == 2
        assert value(values, "fencepost_share_lock_timeouts_total") == 1
        assert value(values, f"{SHARE}acquisitionlocktimeout_total", **PLACE) == 1
        for kind, count in (("accept", 2), ("release", 1), ("reject", 0)):
            name = "fencepost_share_acknowledgements_total"
            assert value(values, name, type=kind) == count
            name = "kafka_server_sharegroupmetrics_recordacknowledgements_total"
            assert value(values, name, ackType=kind.title()) == count
        for cause in ("released", "lock-expired"):
            event = {"event": "share-records-returned", "cause": cause}
            assert value(values, "fencepost_share_events_total", **event) == 1
        names = "kafka_server_brokertopicmetrics_"
        for name, count in (
            ("totalsharefetch", 2),
            ("failedsharefetch", 0),
            ("totalshareacknowledgement", 1),
            ("failedshareacknowledgement", 0),
        ):
            assert value(values, f"{names}{name}requests_total") == count
        await asyncio.to_thread(worker.fail)
        values = await scraped(broker)
        for name, count in (
            ("totalsharefetch", 3),
            ("failedsharefetch", 1),
            ("totalshareacknowledgement", 2),
            ("failedshareacknowledgement", 1),
        ):
            assert value(values, f"{names}{name}requests_total") == count
        groups = "kafka_server_sharegroupmetrics_"
        assert value(values, f"{groups}partitionloadtimems_count") == 1
        assert value(values, f"{groups}partitionloadtimems", quantile="0.99") > 0
        taken = value(values, f"{groups}topicpartitionsacquiretimems_count", group="g")
        assert taken == value(values, f"{SHARE}fetchlocktimems_count", **PLACE) == 3
        assert value(values, f"{SHARE}fetchlocktimems", quantile="0.50", **PLACE) > 0
        await asyncio.to_thread(worker.close)
