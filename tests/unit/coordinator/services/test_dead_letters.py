"""Dead-letter queues of share groups on real logs, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from fencepost.cluster.controller.features import FeatureUpdate, UpgradeType
from fencepost.coordinator.runtime.background import Pace
from fencepost.coordinator.services.dead_letter_records import SourceRecords
from fencepost.coordinator.services.dead_letters import DeadLetterQueues
from fencepost.coordinator.services.share_persister import JITTER, MAX_ATTEMPTS
from fencepost.groups.share.dead_letters import LeaderUnreachableError, NotProducedError
from fencepost.groups.share.events import EventKind
from fencepost.groups.share.session import SessionKey
from fencepost.groups.share.states import AcknowledgeType, RecordState
from fencepost.logcore.batch import LogRecord, decode_records, encode_batch, iter_headers
from fencepost.logcore.compression import Codec
from fencepost.logcore.machine import Event
from fencepost.logcore.partition import Partition
from tests.support.clock import ManualClock
from tests.support.metadata_changes import (
    create_topic,
    decide,
    set_broker_configs,
    set_group_configs,
)
from tests.support.quick import only
from tests.support.stalls import watched_loop
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import Services
from tests.unit.coordinator.services.test_share_partitions import (
    CONFIG,
    GROUP,
    LOCK_MS,
    MEMBER,
    Shares,
)

QUEUE = "dlq.queue"
REJECT, RELEASE = (int(AcknowledgeType.REJECT),), (int(AcknowledgeType.RELEASE),)
TOPIC, COPY = "errors.deadletterqueue.topic.name", "errors.deadletterqueue.copy.record.enable"
ENABLE = {"errors.deadletterqueue.group.enable": "true"}
NOW_MS = 1_700_000_000_000


class Queues(Shares):
    """A group whose dead-letter queue is a topic of the same broker, and its history events."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.events: list[Event] = []
        self.pauses: list[int] = []
        remember = services.history.remember

        def heard(scope: str, place: Any, event: Event, *rest: Any) -> None:
            self.events.append(event)
            remember(scope, place, event, *rest)

        services.history.remember = heard  # type: ignore[method-assign]
        self.queues._pause = self.pause

    @property
    def queues(self) -> DeadLetterQueues:
        return self.shares.dead_letters

    async def pause(self, pause_ms: int) -> None:
        self.pauses.append(pause_ms)

    def configure(self, **own: str) -> None:
        names = {"topic": TOPIC, "copy": COPY, "limit": "share.delivery.count.limit"}
        values = {"topic": QUEUE, **own}
        settings = {names[name]: value for name, value in values.items()}
        set_group_configs(self.services.metadata, GROUP, settings)

    def queue_topic(self, configs: Mapping[str, str] = ENABLE, partitions: int = 1) -> None:
        create_topic(self.services.metadata, QUEUE, partitions, {**ENABLE, **configs})

    def batches(self) -> list[list[LogRecord]]:
        log = self.services.replicas.leader(QUEUE, 0)
        return [list(decode_records(bytes(data))) for _, data in log.reader.read_all()]

    def records(self) -> list[LogRecord]:
        return [record for batch in self.batches() for record in batch]

    async def settled(self, end_offset: int) -> None:
        """Wait until everything below ``end_offset`` is archived."""
        (served,) = self.shares
        await until_true(lambda: served.share.start_offset == end_offset, "records are archived")

    def kinds(self, kind: EventKind) -> list[Mapping[str, Any]]:
        return [dict(event.detail) for event in self.events if event.kind == kind]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
async def dlq(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Queues]:
    services = await Services(tmp_path, CONFIG, clock=clock).start()
    raise_level(services)
    services.topic("queue")
    queues = Queues(services)
    await queues.initialize()
    yield queues
    queues.check()
    await services.stop()


def raise_level(
    services: Services, level: int = 2, kind: UpgradeType = UpgradeType.UPGRADE
) -> None:
    update = FeatureUpdate("share.version", level, kind)
    decide(services.metadata, lambda controller: controller.update_features((update,)))


def headers_of(record: LogRecord) -> dict[str, str]:
    return {name: (value or b"").decode() for name, value in record.headers}


async def test_rejected_records_are_in_the_queue_with_the_reason(dlq: Queues) -> None:
    dlq.queue_topic()
    dlq.configure()
    dlq.produce(3)
    await dlq.fetch()
    await dlq.acknowledge(0, 2, REJECT)
    await dlq.settled(3)
    (batch,) = dlq.batches()
    assert [headers_of(record) for record in batch] == [
        {
            "__dlq.errors.topic": "queue",
            "__dlq.errors.partition": "0",
            "__dlq.errors.offset": str(offset),
            "__dlq.errors.group": GROUP,
            "__dlq.errors.delivery.count": "1",
            "__dlq.errors.message": "Offset rejected by client.",
        }
        for offset in range(3)
    ]
    assert {(record.key, record.value, record.timestamp_ms) for record in batch} == {
        (None, None, NOW_MS)
    }
    (told,) = dlq.kinds(EventKind.SHARE_RECORDS_DEAD_LETTERED)
    assert (told["first"], told["last"], told["queue"]) == (0, 2, QUEUE)
    queues = dlq.queues
    assert (queues.records[GROUP], queues.requests[GROUP], queues.failures[GROUP]) == (3, 1, 0)


async def test_records_at_delivery_limit_are_in_the_queue_after_lock_timeout(
    dlq: Queues, clock: ManualClock
) -> None:
    dlq.queue_topic()
    dlq.configure(limit="2", copy="true")
    dlq.produce(1)
    for _ in range(2):
        assert (await dlq.fetch()).acquired
        clock.advance(LOCK_MS)
        dlq.shares.timers.run_due()
    await dlq.settled(1)
    (record,) = dlq.records()
    found = headers_of(record)
    assert found["__dlq.errors.message"] == "Offset delivery count exceeded the threshold."
    assert found["__dlq.errors.delivery.count"] == "2"
    assert (record.key, record.value, record.timestamp_ms) == (b"k", b"x", NOW_MS + 2 * LOCK_MS)


async def test_queue_gets_no_records_without_a_name_or_below_share_version_2(dlq: Queues) -> None:
    dlq.queue_topic()
    dlq.produce(2)
    await dlq.fetch()
    await dlq.acknowledge(0, 0, REJECT)
    dlq.configure()
    raise_level(dlq.services, 1, UpgradeType.SAFE_DOWNGRADE)
    await dlq.acknowledge(1, 1, REJECT)
    await dlq.settled(2)
    assert dlq.records() == []
    raise_level(dlq.services)
    dlq.produce(1)
    await dlq.fetch()
    await dlq.acknowledge(2, 2, REJECT)
    await dlq.settled(3)
    assert len(dlq.records()) == 1


@pytest.mark.parametrize(
    ("topic", "configs", "reason"),
    [
        ("dlq.nowhere", {}, "there is no topic dlq.nowhere"),
        (QUEUE, {"errors.deadletterqueue.group.enable": "false"}, "of topic dlq.queue is false"),
        ("plain", {}, "does not begin with dlq."),
        ("__dlq", {}, "begins with __"),
    ],
)
async def test_unusable_queue_topic_loses_and_logs_the_records(
    dlq: Queues, topic: str, configs: Mapping[str, str], reason: str
) -> None:
    dlq.queue_topic(configs)
    create_topic(dlq.services.metadata, "plain", 1, ENABLE)
    dlq.configure(topic=topic)
    dlq.produce(5)
    await dlq.fetch()
    with capture_logs() as logs:
        await dlq.acknowledge(0, 1, REJECT)
        await dlq.settled(2)
    assert dlq.records() == []
    (line,) = [line for line in logs if line["event"].startswith("records did not reach")]
    assert (line["group"], line["partition"], line["offsets"]) == (GROUP, "queue-0", "0-1")
    assert (line["queue"], dlq.pauses, dlq.queues.failures[GROUP]) == (topic, [], 0)
    assert reason in line["cause"]
    (told,) = dlq.kinds(EventKind.SHARE_DEAD_LETTER_FAILED)
    assert (told["first"], told["last"], reason in told["reason"]) == (0, 1, True)


async def test_queue_topic_is_created_if_auto_creation_is_enabled(dlq: Queues) -> None:
    auto = "errors.deadletterqueue.auto.create.topics.enable"
    set_broker_configs(dlq.services.metadata, "", {auto: "true"})
    dlq.configure()
    dlq.produce(1)
    await dlq.fetch()
    await dlq.acknowledge(0, 0, REJECT)
    await dlq.settled(1)
    assert len(dlq.records()) == 1
    assert dlq.services.metadata.topic_configs(QUEUE) == {
        **ENABLE,
        "message.timestamp.type": "CreateTime",
    }


async def test_batches_are_split_at_max_message_bytes_of_the_queue(dlq: Queues) -> None:
    dlq.queue_topic({"max.message.bytes": "1000"})
    dlq.configure()
    dlq.produce(50)
    await dlq.fetch()
    await dlq.acknowledge(0, 49, REJECT)
    await dlq.settled(50)
    log = dlq.services.replicas.leader(QUEUE, 0)
    sizes = [header.size for header, _ in log.reader.read_all()]
    assert len(sizes) > 5
    assert max(sizes) <= 1000 < sizes[0] + 200
    offsets = [headers_of(record)["__dlq.errors.offset"] for record in dlq.records()]
    assert offsets == [str(offset) for offset in range(50)]
    assert dlq.queues.requests[GROUP] == len(sizes)


async def test_record_body_above_max_message_bytes_is_left_out(dlq: Queues) -> None:
    dlq.queue_topic({"max.message.bytes": "1000"})
    dlq.configure(copy="true")
    values = [b"a" * 200, b"b" * 900, b"c" * 200]
    source(dlq.log, values)
    await dlq.fetch()
    await dlq.acknowledge(0, 2, REJECT)
    await dlq.settled(3)
    assert [record.value for record in dlq.records()] == [values[0], None, values[2]]


def source(log: Partition, values: list[bytes], codec: Codec = Codec.NONE) -> None:
    rows = [LogRecord(at, NOW_MS, b"k%d" % at, value) for at, value in enumerate(values)]
    log.append_batch(encode_batch(rows, codec=codec), NOW_MS)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
async def test_compressed_records_are_copied_up_to_max_message_bytes(
    dlq: Queues, codec: Codec
) -> None:
    """As in Kafka, a batch that inflates beyond the limit is sent without bodies (KAFKA-20723)."""
    dlq.queue_topic({"max.message.bytes": "10000"})
    dlq.configure(copy="true")
    source(dlq.log, [b"small"] * 3, codec)
    source(dlq.log, [b"0" * 4000] * 3, codec)
    await dlq.fetch()
    await dlq.acknowledge(0, 5, REJECT)
    await dlq.settled(6)
    assert [record.value for record in dlq.records()] == [b"small"] * 3 + [None] * 3


@pytest.mark.parametrize(
    "codec", only((Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD), Codec.GZIP, Codec.ZSTD)
)
@pytest.mark.parametrize(("size", "copied"), [(15 << 20, True), (40 << 20, False)])
async def test_decompressing_a_large_batch_does_not_block_the_event_loop(
    dlq: Queues, codec: Codec, size: int, copied: bool
) -> None:
    dlq.queue_topic({"max.message.bytes": str(1 << 30)})
    dlq.configure(copy="true")
    source(dlq.log, [bytes(size)], codec)
    await dlq.fetch(max_bytes=1 << 26)
    with watched_loop() as watch:
        await dlq.acknowledge(0, 0, REJECT)
        await dlq.settled(1)
    assert [record.value for record in dlq.records()] == [bytes(size) if copied else None]
    watch.check()


@pytest.mark.parametrize("copy", only(("true", "false"), "true"))
async def test_rejecting_many_records_does_not_block_the_event_loop(dlq: Queues, copy: str) -> None:
    dlq.queue_topic()
    dlq.configure(copy=copy)
    dlq.produce(20_000)
    assert (await dlq.fetch(max_bytes=1 << 26)).acquired[0].size == 20_000
    with watched_loop() as watch:
        await dlq.acknowledge(0, 19_999, REJECT)
        await dlq.settled(20_000)
    batches = dlq.batches()
    assert (len(batches) > 1, sum(map(len, batches))) == (True, 20_000)
    watch.check()


async def test_body_of_deleted_record_is_none(dlq: Queues) -> None:
    dlq.produce(1, 1)
    reader = SourceRecords(dlq.log, 1 << 20, Pace())
    assert await reader.body(1) == (b"k", b"x")
    assert await reader.body(7) == (None, None)


class OtherLeader:
    """The broker that leads the queue's partition."""

    def __init__(self, *results: Exception | None) -> None:
        self.results = list(results)
        self.produced: list[bytes] = []

    async def produce(
        self, broker_id: int, topic: str, topic_id: UUID, index: int, batch: bytes
    ) -> None:
        result = self.results.pop(0) if self.results else None
        if result is not None:
            raise result
        self.produced.append(batch)


@pytest.fixture
def elsewhere(dlq: Queues, monkeypatch: pytest.MonkeyPatch) -> OtherLeader:
    """Let another broker lead the queue's partition."""
    other = OtherLeader()
    dlq.queue_topic()
    dlq.configure()
    dlq.queues._others = other
    monkeypatch.setattr(dlq.queues, "_node_id", 2)
    return other


async def test_produce_is_retried_after_leader_change_or_no_response(
    dlq: Queues, elsewhere: OtherLeader
) -> None:
    elsewhere.results = [
        NotProducedError("NOT_LEADER_OR_FOLLOWER", is_final=False),
        LeaderUnreachableError("broker 1"),
    ]
    dlq.produce(2)
    await dlq.fetch()
    await dlq.acknowledge(0, 1, REJECT)
    await dlq.settled(2)
    assert dlq.pauses == pytest.approx([2_000, 4_000], rel=JITTER)
    (batch,) = elsewhere.produced
    assert [header.record_count for _, header in iter_headers(batch)] == [2]
    assert (dlq.queues.requests[GROUP], dlq.queues.failures[GROUP]) == (3, 0)


async def test_records_are_archived_after_the_last_attempt(
    dlq: Queues, elsewhere: OtherLeader
) -> None:
    elsewhere.results = [LeaderUnreachableError("broker 1")] * MAX_ATTEMPTS
    dlq.produce(2)
    await dlq.fetch()
    await dlq.acknowledge(0, 1, REJECT)
    await dlq.settled(2)
    assert dlq.pauses == pytest.approx([2_000, 4_000, 8_000, 16_000], rel=JITTER)
    assert (elsewhere.results, elsewhere.produced) == ([], [])
    assert (dlq.queues.records[GROUP], dlq.queues.failures[GROUP]) == (0, 1)


async def test_final_produce_error_is_not_retried(dlq: Queues, elsewhere: OtherLeader) -> None:
    elsewhere.results = [NotProducedError("RECORD_LIST_TOO_LARGE", is_final=True)]
    dlq.produce(2)
    await dlq.fetch()
    await dlq.acknowledge(0, 1, REJECT)
    await dlq.settled(2)
    assert (dlq.pauses, dlq.queues.failures[GROUP]) == ([], 1)


async def test_next_leader_sends_records_in_archiving_state_to_the_queue(
    dlq: Queues, elsewhere: OtherLeader
) -> None:
    """KAFKA-20672: a share partition is fenced while records are in state ARCHIVING."""
    elsewhere.results = [LeaderUnreachableError("broker 1")]
    dlq.produce(2)
    await dlq.fetch()
    fenced = asyncio.Event()

    async def lost(_pause_ms: int) -> None:
        dlq.shares._fence_all(tuple(dlq.shares), "test")
        await dlq.fetch()
        fenced.set()

    dlq.queues._pause = lost
    await dlq.acknowledge(0, 1, REJECT)
    await fenced.wait()
    await dlq.settled(2)
    await until_true(lambda: not dlq.queues._lines, "both have ended")
    (batch,) = elsewhere.produced
    found = [headers_of(record) for record in decode_records(batch)]
    assert [headers["__dlq.errors.offset"] for headers in found] == ["0", "1"]
    assert {headers["__dlq.errors.message"] for headers in found} == {"Offset rejected by client."}


async def test_records_of_the_last_member_go_to_the_queue(
    dlq: Queues, elsewhere: OtherLeader
) -> None:
    """The share partition is removed with the group's last session, and may never be recreated."""
    elsewhere.results = [LeaderUnreachableError("broker 1")]
    dlq.produce(2)
    await dlq.fetch()

    async def left(_pause_ms: int) -> None:
        dlq.shares._fence_all(tuple(dlq.shares), "the group has no share session")

    dlq.queues._pause = left
    await dlq.acknowledge(0, 1, REJECT)
    await until_true(lambda: not dlq.queues._lines, "the task has ended")
    assert len(dlq.shares) == 0
    (batch,) = elsewhere.produced
    assert [header.record_count for _, header in iter_headers(batch)] == [2]
    assert await dlq.fetch()
    await dlq.settled(2)
    assert elsewhere.produced == [batch]


async def test_record_at_delivery_limit_is_in_the_queue_after_disconnect(
    dlq: Queues, elsewhere: OtherLeader
) -> None:
    dlq.configure(limit="2")
    dlq.produce(1)
    for _ in range(2):
        key = SessionKey(GROUP, MEMBER)
        dlq.shares.sessions.fetch(key, 0, "c1", additions=[dlq.where])
        assert (await dlq.fetch()).acquired
        dlq.shares.connection_closed("c1")
        await until_true(lambda: len(dlq.shares) == 0, "the share partition is removed")
    await until_true(lambda: elsewhere.produced, "the record is in the queue")
    await dlq.fetch()
    await dlq.settled(1)
    assert len(elsewhere.produced) == 1


async def test_stopped_broker_leaves_the_records_for_the_next_leader(
    dlq: Queues, elsewhere: OtherLeader
) -> None:
    elsewhere.results = [LeaderUnreachableError("broker 1")]
    dlq.produce(1)
    await dlq.fetch()
    waits = asyncio.Event()

    async def pause(_pause_ms: int) -> None:
        waits.set()
        await asyncio.Event().wait()

    dlq.queues._pause = pause
    await dlq.acknowledge(0, 0, REJECT)
    (served,) = dlq.shares
    await waits.wait()
    dlq.queues.close()
    await until_true(lambda: not dlq.queues._lines, "the task has ended")
    assert [held.state for held in served.share.in_flight()] == [RecordState.ARCHIVING]


async def test_killed_broker_sends_the_records_after_its_restart(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is killed after writing ARCHIVING, while the queue's leader does not respond."""
    killed = await Services(tmp_path, CONFIG, clock=clock).start()
    raise_level(killed)
    killed.topic("queue")
    killed_dlq = Queues(killed)
    await killed_dlq.initialize()
    killed_dlq.queue_topic()
    killed_dlq.configure(copy="true")
    killed_dlq.queues._others = OtherLeader(LeaderUnreachableError("broker 1"))
    monkeypatch.setattr(killed_dlq.queues, "_node_id", 2)
    waits = asyncio.Event()

    async def pause(_pause_ms: int) -> None:
        waits.set()
        await asyncio.Event().wait()

    killed_dlq.queues._pause = pause
    killed_dlq.produce(2)
    await killed_dlq.fetch()
    await killed_dlq.acknowledge(0, 1, REJECT)
    await waits.wait()
    killed_dlq.queues.close()
    await killed.kill()
    started = await Services(tmp_path, CONFIG, clock=clock).start()
    again = Queues(started)
    assert again.records() == []
    await again.fetch()
    await again.settled(2)
    assert [(record.key, record.value) for record in again.records()] == [(b"k", b"x")] * 2
    assert {headers_of(record)["__dlq.errors.delivery.count"] for record in again.records()} == {
        "1"
    }
    again.check()
    await started.stop()
