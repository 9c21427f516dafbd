"""Responses whose records the kernel sends from files: complete, in order, and in turns."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.server import connection
from fencepost.coordinator.server.request_stream import WRITE_BYTES
from fencepost.coordinator.server.sending import SENT_PER_TURN_BYTES
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from fencepost.protocol.api import ApiKey
from fencepost.protocol.limits import BIG_CHUNK_BYTES
from tests.support.faults import FaultyDisk
from tests.support.waits import until_true
from tests.unit.coordinator.server.test_connection import Peer, Service, fetch, heartbeat, serving
from tests.unit.logcore.partition_driver import append, client_batch, open_partition


class Sends(FaultyDisk):
    """A disk that counts the bytes sent from files, for each turn of the loop and each socket."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.sent: Counter[tuple[int, int]] = Counter()
        self.reads = 0

    def send(self, handle: int, count: int, position: int, target: int) -> int:
        done = super().send(handle, count, position, target)
        self.sent[self.turn, target] += done
        return done

    def read(self, handle: int, count: int, position: int) -> bytes:
        self.reads += 1
        return super().read(handle, count, position)

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


@pytest.fixture
def disk() -> Sends:
    return Sends()


@pytest.fixture
def make(tmp_path: Path, disk: Sends) -> Callable[..., Partition]:
    """Return a function that makes a partition with batches of these sizes."""

    def made(*sizes: int) -> Partition:
        partition = open_partition(tmp_path / str(len(list(tmp_path.iterdir()))), fs=disk)
        for size in sizes:
            append(partition, 1, size=2 * size - len(client_batch(1, size=size)))
        return partition

    return made


def records(partition: Partition) -> Any:
    asked = 0, 1 << 30, Isolation.READ_UNCOMMITTED
    return partition.reader.fetch(*asked, at_least_one=True, min_range_bytes=1).records


def content(partition: Partition) -> bytes:
    taken = records(partition)
    return bytes(taken.read(len(taken)))


def answering(service: Service, partitions: list[Partition]) -> None:
    """Answer every Fetch of ``service`` with all records of ``partitions``."""

    @handles(ApiKey.FETCH, versions=(4, 18), permission="READ Topic")
    def run(ctx: Context) -> Any:
        parts = [
            ctx.respond.PartitionData(partition_index=index, records=records(partition))
            for index, partition in enumerate(partitions)
        ]
        topic = ctx.respond.FetchableTopicResponse(topic="t", partitions=parts)
        return ctx.respond.message(responses=[topic])

    service.registry.add(run)


async def fetched(peer: Peer) -> list[bytes]:
    body = (await peer.answer(1, 11))[1]
    return [bytes(part.records) for part in body.responses[0].partitions]


async def test_file_ranges_of_every_size_arrive_whole_and_in_order(
    make: Callable[..., Partition], disk: Sends
) -> None:
    edges = BIG_CHUNK_BYTES, WRITE_BYTES
    sizes = [200, 5_000, *(edge + more for edge in edges for more in (-1, 0, 1)), 1_000_000]
    partitions = [make(size) for size in (*sizes, *sizes[::-1])]
    expected = [content(partition) for partition in partitions]
    assert [len(data) for data in expected] == [*sizes, *sizes[::-1]]
    async with serving() as service:
        answering(service, partitions)
        peer = await Peer.of(service)
        peer.send((fetch(1, 0) + heartbeat(2)) * 3)
        for _ in range(3):
            assert await fetched(peer) == expected
            assert (await peer.answer(12, 4))[0] == 2
    assert disk.sent.total() > 2 * 3 * 1_000_000


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
async def test_records_are_read_if_sendfile_is_not_supported(
    make: Callable[..., Partition], disk: Sends, error: int
) -> None:
    partition = make(*[1_000_000] * 5, 100)
    expected = content(partition)
    disk.fails["send"] = error
    async with serving() as service:
        answering(service, [partition])
        peer = await Peer.of(service)
        disk.reads = 0
        peer.send(fetch(1, 0) + heartbeat(2))
        assert await fetched(peer) == [expected]
        assert (await peer.answer(12, 4))[0] == 2
        assert disk.reads < 3 * len(expected) / WRITE_BYTES
    assert not disk.sent


async def stuck(service: Service, disk: Sends) -> Peer:
    """Return a client that has sent a Fetch and reads nothing, after its socket is full."""
    peer = await Peer.of(service)
    peer.writer.transport.pause_reading()
    peer.send(fetch(1, 0) + heartbeat(2))
    (accepted,) = service.server.connections
    await until_true(lambda: not accepted._writable)
    assert disk.sent
    return peer


async def test_slow_reader_gets_all_records_and_costs_little_memory(
    make: Callable[..., Partition], disk: Sends
) -> None:
    partition = make(*[1_000_000] * 20)
    expected = content(partition)
    async with serving() as service:
        answering(service, [partition])
        peer = await stuck(service, disk)
        assert 0 < service.server.responses.held_bytes < WRITE_BYTES
        assert disk.sent.total() < len(expected) // 2
        peer.writer.transport.resume_reading()
        assert await fetched(peer) == [expected]
        assert (await peer.answer(12, 4))[0] == 2
        await until_true(lambda: not service.server.responses.held_bytes)


async def test_truncation_below_a_range_in_transfer_closes_connection(
    make: Callable[..., Partition], disk: Sends
) -> None:
    partition = make(*[1_000_000] * 20)
    async with serving() as service:
        answering(service, [partition])
        peer = await stuck(service, disk)
        partition.truncate_to(1)
        with structlog.testing.capture_logs() as logs:
            peer.writer.transport.resume_reading()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await fetched(peer)
        assert [log["event"] for log in logs] == ["records cannot be read"]


async def test_disconnect_during_a_transfer_is_not_logged_as_error(
    make: Callable[..., Partition], disk: Sends
) -> None:
    partition = make(*[1_000_000] * 20)
    async with serving() as service:
        answering(service, [partition])
        peer = await stuck(service, disk)
        with structlog.testing.capture_logs() as logs:
            peer.writer.transport.abort()
            await until_true(lambda: not service.server.connections)
        assert not [log for log in logs if log["log_level"] not in ("debug", "info")]


@pytest.mark.parametrize(
    ("slice_ms", "most_bytes"), [(10_000, SENT_PER_TURN_BYTES + WRITE_BYTES), (0, WRITE_BYTES)]
)
async def test_bytes_sent_to_a_client_per_loop_turn_are_limited(
    make: Callable[..., Partition],
    disk: Sends,
    monkeypatch: pytest.MonkeyPatch,
    slice_ms: int,
    most_bytes: int,
) -> None:
    monkeypatch.setattr(connection, "SLICE_MS", slice_ms)
    partition = make(*[1_000_000] * 8)
    expected = content(partition)
    async with serving() as service:
        answering(service, [partition])
        peers = [await Peer.of(service) for _ in range(5)]
        counting = asyncio.create_task(disk.count_turns())
        for peer in peers:
            peer.send(fetch(1, 0))
        for answer in await asyncio.gather(*map(fetched, peers)):
            assert answer == [expected]
        counting.cancel()
    assert len({target for _, target in disk.sent}) == 5
    assert max(disk.sent.values()) <= most_bytes
