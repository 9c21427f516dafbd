"""A shard on a replicated partition: its responses and effects wait for the high watermark."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost.coordinator.runtime.background import Pace
from fencepost.coordinator.runtime.errors import (
    CoordinatorNotAvailableError,
    NotCoordinatorError,
)
from fencepost.coordinator.runtime.shard import POSTPONE_MS, ShardRuntime
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.logcore.machine import EndMarker, ProducerStamp
from tests.unit.coordinator.runtime.test_shard import (
    COMMIT_TIMEOUT_MS,
    Bench,
    Get,
    Later,
    Put,
    PutAndTell,
    RefusedError,
    Tell,
    Wait,
)

pytestmark = pytest.mark.usefixtures("killed_logs_are_closed")


class Replicated(Bench):
    """A shard whose partition has other replicas; ``replicate`` simulates the replicas' fetches."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.commits.has_replicated = True
        self.partition.marks.replicate(0)  # type: ignore[attr-defined]

    async def replicate(self, offset: int) -> None:
        marks = self.partition.inner.marks
        marks.move_high_watermark(offset)
        marks.notify()
        await asyncio.sleep(0)

    async def lose(self) -> None:
        """Let another broker become leader; the shard learns of the change later."""
        self.partition.inner.marks.leader_epoch += 1
        self.commits.give_up(self.partition)  # type: ignore[arg-type]
        await asyncio.sleep(0)


@pytest.fixture
async def bench(tmp_path: Path) -> Replicated:
    return Replicated(tmp_path)


async def test_responses_wait_until_records_they_depend_on_are_committed(bench: Replicated) -> None:
    shard = await bench.load()
    first = shard.submit(Put("a", "1"))
    second = shard.submit(Put("a", "2"))
    read = shard.submit(Get("a"))
    await asyncio.sleep(0)
    assert not first.done()
    await bench.replicate(1)
    assert first.done()
    assert not second.done()
    assert not read.done()
    await bench.replicate(2)
    assert second.done()
    assert read.result() == ("2", 1)
    assert shard.submit(Get("a")).done(), "nothing is held any more"


async def test_error_that_depends_on_uncommitted_records_waits_as_well(bench: Replicated) -> None:
    shard = await bench.load()
    shard.submit(Put("a", "1"))
    refused = shard.submit(Get("b"))
    assert not refused.done()
    await bench.replicate(1)
    with pytest.raises(RefusedError):
        refused.result()


async def test_effect_waits_until_its_decision_is_committed(bench: Replicated) -> None:
    """A marker must not be sent for a decision that may still be lost."""
    shard = await bench.load()
    done = shard.submit(PutAndTell("a"))
    await asyncio.sleep(0)
    assert bench.effects == []
    await bench.replicate(1)
    assert bench.effects == [Tell("a")]
    assert bench.table() == {"a": "complete"}
    # The report of the effect appends a record; the response waits until this record is committed
    # too.
    assert not done.done()
    await bench.replicate(2)
    assert done.result() == "done"


async def test_effect_of_loading_waits_until_replayed_records_are_committed(
    bench: Replicated,
) -> None:
    """A new leader loads up to its log end offset, which may be above the high watermark."""
    shard = await bench.load()
    bench.answer = lambda _shard, _effect: None
    shard.submit(PutAndTell("a"))
    bench.shard = bench.new_shard()
    await bench.load()
    assert bench.effects == []
    read = bench.shard.submit(Get("a"))
    assert not read.done()
    await bench.replicate(1)
    assert bench.effects == [Tell("a")] * 2  # the former shard was not stopped
    assert read.result() == ("prepared", 0)


async def test_response_times_out_after_commit_timeout_and_record_stays(bench: Replicated) -> None:
    shard = await bench.load()
    first = shard.submit(Put("a", "1"))
    bench.clock.advance(COMMIT_TIMEOUT_MS - 1)
    second = shard.submit(Put("b", "2"))
    bench.timers.run_due()
    assert not first.done()
    bench.clock.advance(1)
    bench.timers.run_due()
    with pytest.raises(CoordinatorNotAvailableError):
        first.result()
    assert not second.done()
    await bench.replicate(2)
    assert second.done()
    assert shard.state is ShardState.ACTIVE
    assert bench.table() == {"a": "1", "b": "2"}
    third = shard.submit(Put("c", "3"))
    bench.clock.advance(COMMIT_TIMEOUT_MS)
    bench.timers.run_due()
    with pytest.raises(CoordinatorNotAvailableError):
        third.result()


async def test_commit_timeout_covers_decision_effect_and_report(bench: Replicated) -> None:
    """An EndTxn whose decision is not committed times out; markers are sent after the commit.

    One deadline covers the decision, the effect, and the effect's report.
    """
    shard = await bench.load()
    first = shard.submit(PutAndTell("a"))
    bench.clock.advance(1)
    second = shard.submit(PutAndTell("b"))
    bench.clock.advance(COMMIT_TIMEOUT_MS - 2)
    await bench.replicate(1)  # commits the first decision, but not the report
    bench.timers.run_due()
    assert not first.done()
    bench.clock.advance(1)
    bench.timers.run_due()
    with pytest.raises(CoordinatorNotAvailableError):
        first.result()
    assert not second.done()
    assert bench.effects == [Tell("a")]
    bench.clock.advance(1)
    bench.timers.run_due()
    with pytest.raises(CoordinatorNotAvailableError):
        second.result()
    await bench.replicate(bench.partition.log_end_offset)
    assert bench.effects == [Tell("a"), Tell("b")]
    assert bench.table() == {"a": "complete", "b": "complete"}


async def test_pending_responses_are_not_coordinator_after_leadership_loss(
    bench: Replicated,
) -> None:
    """KAFKA-20115: pending requests get NOT_COORDINATOR, and pending effects do not run."""
    shard = await bench.load()
    waiting = [
        shard.submit(Put("a", "1")),
        shard.submit(PutAndTell("b")),
        shard.submit(Wait("c")),
    ]
    await bench.lose()
    for future in waiting[:2]:
        with pytest.raises(NotCoordinatorError):
            future.result()
    with pytest.raises(RefusedError):
        waiting[2].result()
    assert shard.state is ShardState.CLOSED
    assert bench.effects == []
    with pytest.raises(NotCoordinatorError):
        await shard.submit(Get("a"))


@pytest.mark.parametrize(
    "write",
    [
        lambda shard: shard.submit(Put("b", "2")).result(),
        lambda shard: shard.complete_transaction(EndMarker(ProducerStamp(7, 0), commit=True)),
    ],
)
async def test_shard_appends_nothing_under_another_leader_epoch(
    bench: Replicated, write: Callable[[ShardRuntime], object]
) -> None:
    """The broker lost and regained leadership before the shard learned of the loss."""
    shard = await bench.load()
    shard.submit(Put("a", "1"))
    bench.partition.inner.marks.leader_epoch += 2
    with pytest.raises(NotCoordinatorError):
        write(shard)
    assert bench.partition.log_end_offset == 1
    assert shard.state is ShardState.CLOSED


async def test_shard_is_closed_if_leader_epoch_changes_while_loading(bench: Replicated) -> None:
    loading = asyncio.create_task(bench.shard.load(Pace()))
    bench.partition.inner.marks.leader_epoch += 1
    await loading
    assert bench.shard.state is ShardState.CLOSED


async def test_command_is_refused_and_report_postponed_without_enough_replicas(
    bench: Replicated,
) -> None:
    """A request fails with NOT_ENOUGH_REPLICAS, while a report or timer is retried."""
    shard = await bench.load()
    bench.answer = lambda _shard, _effect: None
    await asyncio.sleep(0)
    shard.submit(PutAndTell("a"))
    shard.submit(Later("late", 10))
    await bench.replicate(1)
    bench.too_few_replicas = True
    with pytest.raises(RefusedError):
        shard.submit(Put("b", "2")).result()
    assert shard.submit(Get("a")).result() == ("prepared", 0)
    bench.report(shard, Tell("a"))
    bench.clock.advance(10)
    bench.timers.run_due()
    assert bench.table() == {"a": "prepared"}
    bench.clock.advance(POSTPONE_MS)
    bench.timers.run_due()
    assert bench.table() == {"a": "prepared"}
    bench.too_few_replicas = False
    bench.clock.advance(POSTPONE_MS)
    bench.timers.run_due()
    assert bench.table()["a"] == "complete"
    assert bench.table()["late"].startswith("fired at")


async def test_unreplicated_shard_neither_waits_nor_checks_replicas(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    shard = await bench.load()
    bench.too_few_replicas = True
    assert shard.submit(Put("a", "1")).done()
    assert len(bench.timers) == 0
