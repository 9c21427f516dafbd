"""Writing markers of many, large, superseded and refused transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.runtime.background import SLICE_MS
from fencepost.coordinator.services import marker_writer
from fencepost.coordinator.services.marker_writer import MAX_RETRY_MS, MarkerWriter
from fencepost.logcore.errors import StorageError
from fencepost.logcore.machine import EndMarker, ProducerStamp
from fencepost.txn.commands import MarkersWritten, TopicPartition, WriteMarkers
from fencepost.txn.marker_queues import (
    MAX_PARTITIONS_PER_REQUEST,
    Codes,
    NoDestination,
    SendMarkers,
)
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import Services

HERE, THERE = 1, 7
SHARD = 0


class Bench:
    """The marker writer of a broker whose only shard has the coordinator epoch ``epoch``."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.writer: MarkerWriter = services.txns.markers
        self.epoch = 5
        self.leaders: dict[TopicPartition, int | NoDestination] = {}
        self.asked: dict[str, int] = {}
        self.reported: dict[str, int] = {}
        """Transactional id → number of reported partitions."""
        self.answered: list[str] = []
        self.writer._leader_of = lambda partition: self.leaders.get(partition, HERE)
        self.writer._epoch_of = lambda _shard: self.epoch

    def write(
        self,
        name: str,
        *partitions: TopicPartition,
        report: Callable[[MarkersWritten], None] | None = None,
    ) -> None:
        self.asked[name] = len(partitions)
        stamp = ProducerStamp(sum(name.encode()), 0)
        request = WriteMarkers(name, stamp, True, self.epoch, 0, partitions, 1)
        self.writer.write(request, SHARD, report or self.report, lambda: self.answered.append(name))

    def report(self, written: MarkersWritten) -> None:
        name = written.transactional_id
        told = self.asked[name] if written.partitions is None else len(written.partitions)
        self.reported[name] = self.reported.get(name, 0) + told


class Time:
    """The marker writer's clock, in seconds; only simulated work advances it."""

    now = 0.0


class Turns:
    """Measures the longest turn of the loop by the clock ``time``, in milliseconds."""

    def __init__(self, time: Time) -> None:
        self._time, self._since = time, time.now
        self.longest_ms = 0.0
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(0)

    def look(self) -> None:
        self.longest_ms = max(self.longest_ms, 1000 * (self._time.now - self._since))
        self._since = self._time.now

    def end(self) -> float:
        self._task.cancel()
        return self.longest_ms


MARKER_MS, LOOKUP_MS, REPORT_MS = 0.1, 0.01, 0.1
ALLOWED_MS = SLICE_MS + 4
"""The maximum turn: a slice, and the work that began within the slice."""


def with_costs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
) -> Time:
    """Let markers and leader lookups take time; markers are written, or fail with ``error``."""
    time = Time()

    def write(_partition: TopicPartition, _marker: EndMarker) -> bool:
        time.now += MARKER_MS / 1000
        if error is not None:
            raise error
        return True

    def leader_of(partition: TopicPartition) -> int | NoDestination:
        time.now += LOOKUP_MS / 1000
        return bench.leaders.get(partition, HERE)

    monkeypatch.setattr(marker_writer, "monotonic_s", lambda: time.now)
    monkeypatch.setattr(bench.writer, "write_one", write)
    monkeypatch.setattr(bench.writer, "_leader_of", leader_of)
    return time


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    few = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}
    services = await Services(tmp_path, few).start()
    services.topic("t", 60)
    yield Bench(services)
    await services.stop()


class Others:
    """Other brokers, which write all markers as soon as ``may_answer`` is set."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.sends: list[SendMarkers] = []

    async def send(self, send: SendMarkers) -> Codes | None:
        self.sends.append(send)
        await self.may_answer.wait()
        return {
            marker.end.stamp.producer_id: dict.fromkeys(marker.partitions, "NONE")
            for marker in send.markers
        }

    def hang_up(self, broker_id: int) -> None:
        raise AssertionError(f"broker {broker_id} is alive")


async def test_failed_report_does_not_lose_the_next_one(bench: Bench) -> None:
    others = Others()
    bench.writer.join(others)
    bench.leaders["t", 0] = THERE

    def fail(written: MarkersWritten) -> None:
        raise RuntimeError(f"no turn for {written.transactional_id}")

    bench.write("first", ("t", 0))
    bench.write("second", ("t", 0), report=fail)
    bench.write("third", ("t", 0))
    others.may_answer.set()
    await until_true(lambda: not len(bench.writer.queues), "all markers are written")
    assert [len(send.markers) for send in others.sends] == [1, 2]
    assert bench.reported == {"first": 1, "third": 1}


async def test_no_marker_of_former_epoch_follows_markers_of_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard is loaded again in the next epoch while markers are being written."""
    writer, partitions = bench.writer, [("t", index) for index in range(60)]
    epochs: list[int] = []
    append = writer.write_one

    def slow(partition: TopicPartition, marker: EndMarker) -> bool:
        epochs.append(marker.coordinator_epoch)
        time.now += SLICE_MS / 1000 / 10
        return append(partition, marker)

    time = Time()
    monkeypatch.setattr(marker_writer, "monotonic_s", lambda: time.now)
    monkeypatch.setattr(writer, "write_one", slow)
    bench.write("t", *partitions)
    assert 0 < epochs.count(5) < len(partitions)
    bench.epoch = 6
    bench.write("t", *partitions)
    await until_true(lambda: len(bench.answered) == 2, "both requests are answered")
    await until_true(lambda: writer._worker is None, "nothing is written any more")
    assert epochs == sorted(epochs)
    assert epochs.count(6) == len(partitions), "none is left out, none is written twice"
    assert bench.reported == {"t": len(partitions)}


async def test_transaction_does_not_wait_for_replication_of_another_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The markers of both transactions are due for a retry at the same time."""
    writer, logs = bench.writer, bench.services.logs
    append = writer.write_one

    def with_replicas(partition: TopicPartition, marker: EndMarker) -> bool:
        written = append(partition, marker)
        logs.partition(*partition).marks.replicate(0)
        return written

    def is_replicated(index: int) -> None:
        marks = logs.partition("t", index).marks
        marks.move_high_watermark(1)
        marks.notify()

    monkeypatch.setattr(writer, "write_one", with_replicas)
    bench.services.storage.commits.has_replicated = True
    bench.leaders = {("t", 0): THERE, ("t", 1): THERE}
    bench.write("waits", ("t", 0))
    bench.write("goes on", ("t", 1))
    bench.leaders.clear()
    writer.leaders_changed()
    await until_true(lambda: bench.services.storage.commits.waiting == 2, "both are appended")
    is_replicated(1)
    await until_true(lambda: "goes on" in bench.reported, "one is committed")
    assert "waits" not in bench.reported
    is_replicated(0)
    await until_true(lambda: "waits" in bench.reported, "both are committed")


async def test_markers_of_a_large_transaction_are_written_in_slices(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = with_costs(bench, monkeypatch)
    count = 10_000
    turns = Turns(time)
    bench.write("large", *(("t", index) for index in range(count)))
    assert not bench.answered
    bench.write("small", ("t", 0))
    assert bench.answered == ["small"], "it waits for no other one"
    await until_true(lambda: "large" in bench.answered, "all markers are written")
    assert turns.end() <= ALLOWED_MS
    assert bench.reported == {"small": 1, "large": count}
    assert not len(bench.writer.queues)
    assert not bench.writer._transactions


@pytest.mark.parametrize("why", ["one response", "a deleted topic"])
async def test_reports_of_many_ended_transactions_run_in_slices(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    time, others, place = with_costs(bench, monkeypatch), Others(), ("t", 0)
    bench.writer.join(others)

    def report(written: MarkersWritten) -> None:
        time.now += REPORT_MS / 1000
        bench.report(written)

    is_deleted = why == "a deleted topic"
    bench.leaders[place] = NoDestination.NO_LEADER if is_deleted else THERE
    names = [f"x{number}" for number in range(MAX_PARTITIONS_PER_REQUEST)]
    for name in ("first", *names):
        bench.write(name, place, report=report)
    turns = Turns(time)
    if is_deleted:
        bench.leaders[place] = NoDestination.NO_PARTITION
        bench.writer.leaders_changed()
    else:
        await until_true(lambda: others.sends, "a request")
        others.may_answer.set()
    await until_true(lambda: len(bench.reported) == 1 + len(names), "all reports")
    assert turns.end() <= ALLOWED_MS
    assert set(bench.answered) == {"first", *names}


@pytest.mark.parametrize("how", ["retry", "leaders changed"])
async def test_retries_of_many_refused_markers_run_in_slices(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    error = StorageError("the disk is gone")
    time = with_costs(bench, monkeypatch, error)
    names, partitions = (
        [f"x{number}" for number in range(20)],
        [("t", index) for index in range(200)],
    )
    for name in names:
        bench.write(name, *partitions)
    await until_true(lambda: len(bench.answered) == len(names), "all have been tried")
    assert bench.reported == {}
    tried_at, turns = time.now, Turns(time)
    if how == "retry":
        bench.services.clock.advance(MAX_RETRY_MS)  # type: ignore[attr-defined]
        bench.services.txns._shards.timers.run_due()
    else:
        bench.writer.leaders_changed()
    await until_true(lambda: bench.writer._worker is None, "all have been tried again")
    assert turns.end() <= ALLOWED_MS
    assert time.now - tried_at >= MARKER_MS / 1000 * len(names) * len(partitions)


async def test_refused_markers_of_a_topic_are_logged_once_per_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_costs(bench, monkeypatch, StorageError("the disk is gone"))
    with capture_logs() as lines:
        bench.write("t", *(("t", index) for index in range(300)))
        await until_true(lambda: bool(bench.answered), "all have been tried")
    assert [(line["event"], line["to"], line["partitions"]) for line in lines] == [
        ("marker not written", "t-0", 300)
    ]


async def test_unloaded_shard_answers_requests_with_unwritten_markers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_costs(bench, monkeypatch)
    bench.write("t", *(("t", index) for index in range(10_000)))
    assert not bench.answered
    bench.writer.unload(SHARD)
    await until_true(lambda: bool(bench.answered), "the request is answered")
    assert not len(bench.writer.queues)
    assert not bench.writer._transactions


@pytest.mark.parametrize(("leader", "longest_ms"), [(HERE, 5_000), (THERE, 1_000)])
async def test_retry_backoff_of_markers_doubles_per_transaction_up_to_a_limit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, leader: int, longest_ms: int
) -> None:
    with_costs(bench, monkeypatch, StorageError("the disk is gone"))
    bench.leaders = {("t", 0): leader}
    clock, timers = bench.services.clock, bench.services.txns._shards.timers
    retries = bench.writer._retries

    async def wait_ms(name: str) -> int:
        await until_true(lambda: retries.deadline_ms(name) is not None, f"{name} waits")
        deadline_ms = retries.deadline_ms(name)
        assert deadline_ms is not None
        return deadline_ms - clock.now_ms()

    bench.write("old", ("t", 0))
    waits = []
    for _ in range(10):
        waits.append(await wait_ms("old"))
        clock.advance(waits[-1])  # type: ignore[attr-defined]
        timers.run_due()
    assert waits == [min(20 * 2**number, longest_ms) for number in range(10)]
    bench.write("new", ("t", 0))
    assert await wait_ms("new") == 20, "it does not wait as long as the other one"
    assert await wait_ms("old") == longest_ms
    bench.writer.leaders_changed()
    assert await wait_ms("old") == 20
