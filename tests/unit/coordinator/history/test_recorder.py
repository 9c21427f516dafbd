"""The history of decisions in a separate log: complete, bounded, and never blocking."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgpack
import pytest
from structlog.testing import capture_logs

from fencepost.cli.history_view import row_of
from fencepost.coordinator.config import logs
from fencepost.coordinator.errors import InvalidTopicError
from fencepost.coordinator.history import recorder as history_module
from fencepost.coordinator.history.entries import (
    GROUP,
    MAX_ITEMS,
    MAX_TEXT_CHARACTERS,
    TRANSACTION,
    Entry,
    decode_value,
    encode_key,
    encode_value,
    keys_of,
)
from fencepost.coordinator.history.recorder import (
    COMPLAINT_INTERVAL_MS,
    HistoryLimits,
    HistoryRecorder,
)
from fencepost.coordinator.metadata.names import (
    HISTORY_TOPIC,
    TRANSACTION_STATE,
    check_name,
    is_internal,
)
from fencepost.coordinator.runtime.origin import Origin
from fencepost.logcore.batch import decode_records
from fencepost.logcore.errors import StorageError
from fencepost.logcore.machine import Event
from fencepost.protocol.steps import finish
from fencepost.txn.commands import AddPartitions, EndTxn, InitProducerId
from tests.support.clock import ManualClock
from tests.support.metadata_changes import internal_topic
from tests.support.partitions import retain
from tests.unit.coordinator.services.coordinators import Services, storage

ME = Origin("importer", "10.0.0.7")
EVENT = Event("member-joined", "g", {"member": "m-1"})


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    started = await Services(tmp_path).start()
    yield started
    await started.stop()


def entries(services: Services) -> list[Entry]:
    if services.metadata.topic(HISTORY_TOPIC) is None:
        return []
    found = []
    for header, data in services.logs.partition(HISTORY_TOPIC, 0).reader.read_all():
        for record in decode_records(data, 0, header):
            assert record.value is not None
            entry = decode_value(record.value)
            assert entry is not None
            assert record.key == encode_key(entry.scope, entry.subject)
            found.append(entry)
    return found


async def written(services: Services, count: int) -> list[Entry]:
    async with asyncio.timeout(30):
        while len(found := entries(services)) < count:  # noqa: ASYNC110 - a timer, not an event
            await asyncio.sleep(0.005)
    return found


def remember(services: Services, event: Event = EVENT, origin: Origin | None = ME) -> None:
    services.history.remember("__consumer_offsets", "__consumer_offsets-3", event, origin)


async def test_history_entry_has_the_time_client_and_shard_of_its_event(services: Services) -> None:
    assert isinstance(services.clock, ManualClock)
    now_ms = services.clock.now_ms()
    remember(services)
    assert entries(services) == []
    (entry,) = await written(services, 1)
    assert entry == Entry(
        at_ms=now_ms,
        scope=GROUP,
        subject="g",
        what="member-joined",
        shard="__consumer_offsets-3",
        client_id="importer",
        client_host="10.0.0.7",
        detail={"member": "m-1"},
    )


@pytest.fixture
def everything_logged() -> Iterator[None]:
    before = logs.level()
    logs.set_level("DEBUG")
    yield
    logs.set_level(before)


@pytest.mark.usefixtures("everything_logged")
async def test_first_init_producer_id_is_logged_only_at_debug_level(services: Services) -> None:
    finish(services.txns.open_in_steps())
    with capture_logs() as told:
        await services.txns.submit("id", InitProducerId("id", 60_000), ME)
        assert [line["log_level"] for line in told] == ["debug"]
        await services.txns.submit("id", InitProducerId("id", 60_000), Origin("rival", "h"))
    assert [line["log_level"] for line in told] == ["debug", "info"], "somebody is fenced"
    assert len(await written(services, 2)) == 2


async def test_history_records_epoch_bumps_and_refused_producers(services: Services) -> None:
    services.topic("t")
    finish(services.txns.open_in_steps())
    txns = services.txns
    first: Any = await txns.submit("id", InitProducerId("id", 60_000), ME)
    identity = first.producer_id, first.producer_epoch
    await txns.submit("id", AddPartitions("id", *identity, (("t", 0),)), ME)
    await txns.submit("id", EndTxn("id", *identity, True, 2), ME)
    second: Any = await txns.submit("id", InitProducerId("id", 60_000), Origin("rival", "h"))
    with pytest.raises(Exception, match="belongs to"):
        await txns.submit("id", EndTxn("id", *identity, True, 0), ME)
    found = await written(services, 3)
    assert [(entry.what, entry.client_id) for entry in found] == [
        ("epoch-bumped", "importer"),
        ("epoch-bumped", "rival"),
        ("producer-refused", "importer"),
    ], "the bump of each commit is routine"
    assert {(entry.scope, entry.subject) for entry in found} == {(TRANSACTION, "id")}
    assert all(entry.shard.startswith(TRANSACTION_STATE) for entry in found)
    assert row_of(found[1])["change"] == f"epoch 1 → {second.producer_epoch}"
    assert row_of(found[2])["change"] == f"epoch 0 ≠ {second.producer_epoch}"


async def test_history_records_each_commit_if_configured(tmp_path: Path) -> None:
    services = await Services(tmp_path, {"fencepost.history.commits": "true"}).start()
    services.topic("t")
    finish(services.txns.open_in_steps())
    claimed: Any = await services.txns.submit("id", InitProducerId("id", 60_000), ME)
    identity = claimed.producer_id, claimed.producer_epoch
    await services.txns.submit("id", AddPartitions("id", *identity, (("t", 0),)), ME)
    assert isinstance(services.clock, ManualClock)
    services.clock.advance(700)
    await services.txns.submit("id", EndTxn("id", *identity, True, 2), ME)
    _, ended = await written(services, 2)
    assert (ended.what, ended.cause) == ("transaction-committed", "client")
    assert ended.client_id == ME.client_id
    assert (ended.detail["open_ms"], ended.detail["partitions"]) == (700, 1)
    await services.stop()


async def test_history_survives_a_restart(tmp_path: Path) -> None:
    services = await Services(tmp_path).start()
    remember(services)
    await services.stop()
    again = await Services(tmp_path).start()
    assert [entry.subject for entry in entries(again)] == ["g"]
    remember(again)
    await written(again, 2)
    await again.stop()


async def test_disabled_or_stopped_history_queues_no_events(tmp_path: Path) -> None:
    services = await Services(tmp_path, {"fencepost.history.enable": "false"}).start()
    remember(services)
    await services.stop()
    assert services.metadata.topic(HISTORY_TOPIC) is None
    remember(services)
    assert not services.history._queue


async def test_full_history_queue_drops_and_counts_the_newest_events(services: Services) -> None:
    services.history.limits = HistoryLimits(max_queued=2)
    for name in "abc":
        remember(services, Event("group-created", name))
    assert services.history.dropped == 1
    assert [entry.subject for entry in await written(services, 2)] == ["a", "b"]
    remember(services, Event("group-created", "d"))
    assert [entry.subject for entry in await written(services, 3)] == ["a", "b", "d"]


async def test_many_history_events_are_written_in_several_batches(services: Services) -> None:
    services.history.limits = HistoryLimits(max_batch_bytes=1)
    for number in range(20):
        remember(services, Event("group-created", str(number)))
    found = await written(services, 20)
    assert [entry.subject for entry in found] == [str(number) for number in range(20)]
    batches = list(services.logs.partition(HISTORY_TOPIC, 0).reader.read_all())
    assert len(batches) == 20


async def test_failed_history_write_is_logged_and_counted_as_dropped(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []

    class Log:
        def warning(self, event: str, **fields: Any) -> None:
            said.append({"event": event, **fields})

    def fail(*_: object, **__: object) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(history_module, "_log", Log())
    remember(services)
    await written(services, 1)
    partition = services.logs.partition(HISTORY_TOPIC, 0)
    monkeypatch.setattr(type(partition), "append_records", fail)
    for _ in range(3):
        remember(services)
        services.history._flush()
    assert services.history.dropped == 3
    assert [(line["event"], line["events"]) for line in said] == [("history not written", 1)]
    assert "the disk is gone" in said[0]["cause"]


async def test_dropped_history_events_are_logged_periodically_with_their_causes(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("the disk is gone")

    def lost() -> list[tuple[int, str]]:
        return [
            (line["events"], line["cause"])
            for line in said
            if line["event"] == "history not written"
        ]

    remember(services)
    await written(services, 1)
    partition = services.logs.partition(HISTORY_TOPIC, 0)
    with capture_logs() as said:
        with monkeypatch.context() as broken:
            broken.setattr(type(partition), "append_records", fail)
            for _ in range(3):
                remember(services)
                services.history.write_now()
        assert lost() == [(1, "StorageError: the disk is gone")]
        services.clock.advance(COMPLAINT_INTERVAL_MS)  # type: ignore[attr-defined]
        remember(services)
        services.history.write_now()
        assert lost()[1:] == [(2, "StorageError: the disk is gone")]

        services.clock.advance(COMPLAINT_INTERVAL_MS)  # type: ignore[attr-defined]
        services.history.limits = HistoryLimits(max_queued=1)
        for _ in range(4):
            remember(services)
        services.history.write_now()
        assert lost()[2:] == [(3, "too many events at once")]
    assert services.history.dropped == 6


async def test_history_event_with_unencodable_values_is_sanitized_and_written(
    services: Services,
) -> None:
    class Odd(Enum):
        ONE = object()

    odd = {
        "enum": Odd.ONE,
        "large": 1 << 70,
        "bytes": b"\xff\x00",
        "surrogate": "\ud800",
        "text": "x" * (2 * MAX_TEXT_CHARACTERS),
        "items": tuple(range(2 * MAX_ITEMS)),
        "deep": {"a": {"b": {"c": {"d": 1}}}},
        "none": None,
        "number": 1.5,
        "infinite": float("inf"),
        "\ud800": True,
    }
    remember(services, Event("odd", "g\ud800", odd))
    remember(services)
    entry, _ = await written(services, 2)
    assert entry.subject == "g\\ud800"
    assert entry.detail["enum"] == "ONE"
    assert entry.detail["large"] == str(1 << 70)
    assert entry.detail["surrogate"] == "\\ud800"
    assert len(entry.detail["text"]) == MAX_TEXT_CHARACTERS
    assert entry.detail["items"] == list(range(MAX_ITEMS))
    assert (entry.detail["none"], entry.detail["number"]) == (None, 1.5)
    assert (entry.detail["infinite"], entry.detail["\\ud800"]) == ("inf", True)


def test_history_value_of_an_unknown_version_is_skipped_a_broken_one_refused() -> None:
    entry = Entry(1, GROUP, "g", "what", "s")
    value = json.loads(encode_value(entry))
    assert decode_value(json.dumps({**value, "version": 3}).encode()) is None
    old = {**value, "version": 1}
    assert decode_value(msgpack.packb(old)) == entry, "an entry of an earlier release"
    assert msgpack.packb([GROUP, "g"]) in keys_of(GROUP, "g")
    broken = (b"", b"\xc1", b"{", b'{"version":' + b"[" * 100_000, b"[1]")
    for bad in (*broken, msgpack.packb([1]), msgpack.packb({**old, "at_ms": "x"})):
        with pytest.raises(ValueError, match="cannot be read"):
            decode_value(bad)


def test_history_topic_is_internal_and_has_retention_limits(tmp_path: Path) -> None:
    store = storage(
        tmp_path,
        {"fencepost.history.retention.bytes": "16777216", "fencepost.history.retention.ms": "8000"},
    )
    topic = internal_topic(store.metadata, HISTORY_TOPIC)
    assert is_internal(topic.name)
    config = store.logs.partition(HISTORY_TOPIC, 0).log.config
    assert (config.retention_bytes, config.retention_ms) == (16_777_216, 8_000)
    assert (config.segment_bytes, config.segment_ms) == (2_097_152, 1_000)
    assert config.cleanup_policy == {"delete"}
    with pytest.raises(InvalidTopicError):
        check_name(HISTORY_TOPIC)


async def test_history_beyond_its_retention_is_deleted(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    config = {"fencepost.history.retention.ms": "8000"}
    services = await Services(tmp_path, config, clock=clock).start()
    for number in range(4):
        remember(services, Event("group-created", str(number)))
        await written(services, number + 1)
        clock.advance(3_000)
    partition = services.logs.partition(HISTORY_TOPIC, 0)
    retain(partition, clock.now_ms())
    assert [entry.subject for entry in entries(services)] == ["2", "3"]
    await services.stop()


@pytest.mark.parametrize(
    ("detail", "change"),
    [
        ({}, None),
        ({"old_generation": 3}, "generation 3"),
        ({"old_generation": 3, "new_generation": 4}, "generation 3 → 4"),
        ({"former_producer_epoch": -1, "producer_epoch": 0, "producer_id": 7}, "epoch 0"),
        ({"fenced_epoch": 3, "producer_epoch": 4, "producer_id": 7}, "epoch 3 → 4"),
        (
            {
                "former_producer_id": 7,
                "former_producer_epoch": 32_766,
                "producer_id": 8,
                "producer_epoch": 0,
            },
            "producer 7:32766 → 8:0",
        ),
    ],
)
def test_history_row_describes_the_change_of_generation_or_epoch(
    detail: dict[str, Any], change: str | None
) -> None:
    assert row_of(Entry(0, GROUP, "g", "what", "s", detail=detail))["change"] == change


def test_history_row_names_the_member_or_producer_and_its_client() -> None:
    detail = {"member": "m", "client_id": "c", "client_host": "/h", "reason": "late"}
    row = row_of(Entry(0, GROUP, "g", "what", "s", "other", "elsewhere", detail))
    assert (row["who"], row["client"], row["host"], row["why"]) == ("m", "c", "h", "late")
    row = row_of(Entry(0, TRANSACTION, "t", "w", "s", "c", "h", {"producer_id": 7, "cause": "x"}))
    assert (row["who"], row["client"], row["host"], row["why"]) == ("producer 7", "c", "h", "x")
    assert row_of(Entry(0, GROUP, "g", "w", "s"))["time"] == "1970-01-01T00:00:00.000Z"


async def test_history_recorder_uses_the_limits_it_is_given(tmp_path: Path) -> None:
    store = storage(tmp_path)
    limits = HistoryLimits(max_queued=1)
    recorder = HistoryRecorder(store.metadata, store.logs, store.config, store.clock, limits)
    assert recorder.limits is limits
