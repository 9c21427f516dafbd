"""Power loss during transactions over two partitions and a group's offsets.

A broker's services with their real coordinators run once on a disk that records every step. Then
they start on states that a power loss could leave after each step. With ``flush.messages=1``, they
must keep these promises:

* the effects of an acknowledged commit are in both partitions and in the group's offset;
* a transaction has effects in all three places or in none, at every stage of its end;
* no reader sees an aborted or unfinished transaction, and no transaction hangs after a restart;
* a group's offset is never below an offset whose commit was acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS
from fencepost.coordinator.runtime.flusher import Flusher
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.groups.commands import CommitOffsets, OffsetToCommit, TxnCommitOffsets
from fencepost.logcore.batch import LogRecord, decode_records, encode_batch, iter_headers
from fencepost.logcore.flush import Flush
from fencepost.logcore.machine import ProducerStamp
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from fencepost.protocol.steps import finish
from fencepost.txn.commands import (
    AddPartitions,
    EndTxn,
    EndTxnResult,
    InitProducerId,
    InitProducerIdResult,
)
from tests.support.memory_disk import MemoryDisk, Skip
from tests.support.partitions import append_batch, fetch_bytes
from tests.unit.coordinator.services.coordinators import Services
from tests.unit.coordinator.services.test_groups import committed

STATES = int(os.environ.get("POWER_STATES", "10500")) // 7
"""Number of states on which the services start. One start takes as long as several of the
recoveries that POWER_STATES counts.
"""

SEED = int(os.environ.get("POWER_SEED", "1"))

ROOT = Path("/data")
GROUP = "in transactions"
PLAIN = "plain"
IDS = ("one", "two")
DATA = (("t", 0), ("t", 1))
SETTINGS = {
    "flush.messages": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
}
TRANSACTIONS = 12

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(1800)]


class InlineFlusher(Flusher):
    """Group commit without threads, so that a run has the same steps every time."""

    async def _run(self, flushes: Sequence[Flush]) -> list[OSError | None]:
        return [flush.run() for flush in flushes]


@dataclass
class Run:
    """The promises of a run, with the steps of the disk at which they were made."""

    disk: MemoryDisk
    committed: list[tuple[int, int]] = field(default_factory=list)
    """(step, number) of each transaction whose commit was acknowledged."""
    ending: dict[int, int] = field(default_factory=dict)
    """Number of a transaction → step at which its commit was requested."""
    plain: list[tuple[int, int]] = field(default_factory=list)
    """(step, offset) of each plain offset commit that was acknowledged."""


async def start(disk: MemoryDisk) -> Services:
    services = Services(ROOT, SETTINGS, fs=disk, flusher=InlineFlusher)
    await services.start()
    while any(  # noqa: ASYNC110 - the end of loading is a state and no event
        shard.state in {ShardState.INITIAL, ShardState.LOADING}
        for coordinator in (services.groups, services.txns)
        for shard in coordinator._shards.shards
    ):
        await asyncio.sleep(0)
    await services.flusher.drain()
    return services


async def durable(services: Services, partition: Partition) -> None:
    commit = services.commits.committed([partition])
    if commit is not None:
        await commit


async def init(services: Services, name: str) -> tuple[int, int]:
    finish(services.txns.open_in_steps())
    result = await services.txns.submit(name, InitProducerId(name, 60_000))
    assert isinstance(result, InitProducerIdResult)
    return result.producer_id, result.producer_epoch


async def produce(
    services: Services, name: str, producer: tuple[int, int], key: tuple[str, int], number: int
) -> None:
    """Produce as the handler does: add the partition to the transaction, and wait for the disk."""
    while True:
        verdicts = services.txns.verify("Produce", 12, name, *producer, [key])
        if not isinstance(verdicts, asyncio.Future):
            break
        await verdicts
    assert verdicts == {key: None}
    partition = services.logs.partition(*key)
    now_ms = services.clock.now_ms()
    batch = encode_batch(
        [LogRecord(0, now_ms, None, b"%d" % number)],
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=0,
        transactional=True,
    )
    append_batch(partition, batch, now_ms=now_ms, transaction_verified=True, transaction_version=2)
    await durable(services, partition)


async def transaction(
    services: Services, run: Run, name: str, producer: tuple[int, int], number: int
) -> tuple[int, int]:
    """Run a transaction; every third transaction is aborted, and every fifth is left open.

    Each batch is produced twice, as if on two connections; either of the two requests may append
    it.
    """
    for key in DATA:
        twice = [produce(services, name, producer, key, number) for _ in range(2)]
        await asyncio.gather(*twice)
    offsets_partition = CONSUMER_OFFSETS, services.groups.partition_for(GROUP)
    await services.txns.submit(name, AddPartitions(name, *producer, (offsets_partition,)))
    command = TxnCommitOffsets(
        GROUP, -1, "", None, (OffsetToCommit("t", 0, number),), ProducerStamp(*producer)
    )
    await services.groups.submit(GROUP, command)
    if number % 5 == 4:
        return await init(services, name)
    commits = number % 3 != 2
    if commits:
        run.ending[number] = len(run.disk.steps)
    result = await services.txns.submit(name, EndTxn(name, *producer, commits, 2))
    if commits:
        run.committed.append((len(run.disk.steps), number))
    assert isinstance(result, EndTxnResult)
    return result.producer_id, result.producer_epoch


async def recorded(skip: Skip | None = None) -> Run:
    disk = MemoryDisk(skip)
    disk.make_directory(str(ROOT))
    disk.sync_directory("")
    run = Run(disk)
    services = await start(disk)
    services.topic("t", 2)
    finish(services.groups.open_in_steps())
    producers = {name: await init(services, name) for name in IDS}
    for number in range(1, TRANSACTIONS + 1):
        name = IDS[number % 2]
        producers[name] = await transaction(services, run, name, producers[name], number)
        command = CommitOffsets(PLAIN, -1, "", None, (OffsetToCommit("t", 0, number),))
        await services.groups.submit(PLAIN, command)
        run.plain.append((len(disk.steps), number))
        if number == TRANSACTIONS // 2:
            services.logs.checkpoint()
            await services.flusher.drain()
            await services.kill()
            services = await start(disk)
            producers = {name: await init(services, name) for name in IDS}
    await services.kill()
    return run


def values(partition: Partition) -> list[int]:
    """Return the values that a read_committed consumer sees."""
    seen, offset = [], 0
    while True:
        read = fetch_bytes(partition, offset, 1 << 20, Isolation.READ_COMMITTED)
        if not read.records:
            return seen
        hidden = {(producer, first) for producer, first in read.aborted or ()}
        waiting = sorted((first, producer) for producer, first in hidden)
        aborting: set[int] = set()
        for at, header in iter_headers(read.records):
            while waiting and waiting[0][0] <= header.last_offset:
                aborting.add(waiting.pop(0)[1])
            if header.is_control:
                aborting.discard(header.producer_id)
            elif header.producer_id not in aborting:
                seen += [
                    int(record.value or b"") for record in decode_records(read.records, at, header)
                ]
            offset = header.next_offset


async def judge(run: Run, step: int, disk: MemoryDisk) -> None:
    """Start the services on a state after a power loss at ``step``, and check the promises."""
    services = await start(disk)
    try:
        must = [number for at, number in run.committed if at <= step]
        may = {number for number, at in run.ending.items() if at <= step}
        if services.metadata.topic("t") is None:
            assert not may, "a topic is gone that was written to"
            return
        for name in IDS:
            await init(services, name)
        await services.flusher.drain()
        seen = [values(services.logs.partition(*place)) for place in DATA]
        assert seen[0] == seen[1], "a transaction is in one partition and not in the other"
        assert set(must) <= set(seen[0]), f"acknowledged: {must}, there: {seen[0]}"
        assert set(seen[0]) <= may, f"commits asked for: {may}, there: {seen[0]}"
        assert len(set(seen[0])) == len(seen[0])
        finish(services.groups.open_in_steps())
        offset = await committed(services, GROUP, stable=True)
        assert offset == max(seen[0], default=-1), f"offset {offset}, records {seen[0]}"
        acknowledged = max((number for at, number in run.plain if at <= step), default=-1)
        found = await committed(services, PLAIN)
        assert found >= acknowledged, f"offset {found}, acknowledged {acknowledged}"
        for place in DATA:
            partition = services.logs.partition(*place)
            assert partition.last_stable_offset == partition.log_end_offset
    finally:
        await services.kill()


async def first_broken(count: int, skip: Skip | None = None) -> str | None:
    """Judge ``count`` states; return the first broken promise, None if all hold."""
    run = await recorded(skip)
    assert len(run.committed) >= TRANSACTIONS // 2
    steps, loss = run.disk.steps, MemoryDisk().base()
    for step in loss.walk(steps):
        first, behind = count * step // (len(steps) + 1), count * (step + 1) // (len(steps) + 1)
        for number in range(first, behind):
            state = loss.state(random.Random(f"coordinators {SEED} {number}"))
            if state.names.get(str(ROOT)) is None:
                state.make_directory(str(ROOT))
            try:
                with capture_logs():
                    await judge(run, step, state)
            except Exception as error:  # noqa: BLE001 - an exception at startup is a failure
                return f"step {step}, state {number}: {type(error).__name__}: {error}"
    return None


async def test_no_power_loss_breaks_a_transaction_or_an_offset() -> None:
    broken = await first_broken(STATES)
    assert broken is None, f"{broken}\nagain: POWER_STATES={STATES * 7} POWER_SEED={SEED}"


@pytest.mark.parametrize("topic", ["t-0", "t-1", "__consumer_offsets-0", "__transaction_state-0"])
async def test_missing_sync_of_a_coordinator_log_is_found(topic: str) -> None:
    def skip(kind: str, path: str) -> bool:
        return kind == "sync" and f"/{topic}/" in path and path.endswith(".log")

    assert await first_broken(1_500, skip) is not None
