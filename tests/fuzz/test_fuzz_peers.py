"""A controller's or leader's responses are corrupted; afterwards the broker must recover.

A proxy corrupts responses for a while: random bytes, truncation, absurd lengths and numbers,
responses to other requests. The choices are drawn from the seed. ``--inputs 20 --seed 7 -o
timeout=0`` makes more runs.
"""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.logcore.machine import Record
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.waits import until_true
from tests.unit.coordinator.daemon.test_cluster_broker import (
    controller,
    create,
    fenced,
    leads,
    member,
)
from tests.unit.coordinator.daemon.test_controller_part import append, isr

pytestmark = pytest.mark.slow

SPOILED = 150
"""The number of responses that a run corrupts, unless SPOILED_S seconds pass earlier."""
SPOILED_S = 3

MAX_A_SECOND = 400
"""The maximum requests per second of one broker to a peer that sends invalid responses."""

MAX_GROWTH_BYTES = 64 << 20

PATIENCE = {"replica.fetch.backoff.ms": "20", "replica.socket.timeout.ms": "1000"}

ABSURD = (b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + bytes(7), bytes(8), b"\xff" * 4)


def _noise(rng: random.Random, frame: bytes) -> bytes:
    return frame[:4] + rng.randbytes(len(frame) - 4)


def _cut(rng: random.Random, frame: bytes) -> bytes:
    left = frame[4 : rng.randrange(4, len(frame))]
    return len(left).to_bytes(4, "big") + left


def _endless(rng: random.Random, frame: bytes) -> bytes:
    return rng.choice((b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x3f\xff\xff\xff")) + frame[4:]


def _of_another(rng: random.Random, frame: bytes) -> bytes:
    return frame[:4] + rng.randbytes(4) + frame[8:]


def _flipped(rng: random.Random, frame: bytes) -> bytes:
    spoiled = bytearray(frame)
    for _ in range(rng.randrange(1, 4)):
        spoiled[rng.randrange(8, len(frame))] ^= 1 << rng.randrange(8)
    return bytes(spoiled)


def _absurd(rng: random.Random, frame: bytes) -> bytes:
    number = rng.choice(ABSURD)
    at = rng.randrange(8, max(9, len(frame) - len(number)))
    return (frame[:at] + number + frame[at + len(number) :])[: len(frame)]


SPOILERS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _noise, _cut, _endless, _of_another, _flipped, _flipped, _absurd, _absurd, _absurd, _absurd,
)  # fmt: skip


class SpoilingProxy:
    """A proxy to ``target`` that corrupts responses while ``spoils`` is set."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.target = "", 0
        self.spoils = False
        self.spoiled = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return host, port

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(OSError, asyncio.CancelledError):
            there, requests = await asyncio.open_connection(*self.target)
            asked = asyncio.ensure_future(self._copy(client, requests))
            try:
                await self._answer(there, answers)
            finally:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                requests.close()
                answers.close()

    @staticmethod
    async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
        sink.close()

    async def _answer(self, there: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await there.readexactly(4)
                frame = head + await there.readexactly(int.from_bytes(head, "big"))
                if self.spoils:
                    self.spoiled += 1
                    if self._rng.random() < 0.7:
                        frame = self._rng.choice(SPOILERS)(self._rng, frame)
                answers.write(frame)
                await answers.drain()


@asynccontextmanager
async def proxy(seed: int) -> AsyncIterator[SpoilingProxy]:
    spoiling = SpoilingProxy(random.Random(seed))
    try:
        yield spoiling
    finally:
        await spoiling.close()


async def spoil(through: SpoilingProxy, meanwhile: Callable[[], Awaitable[object]]) -> None:
    """Corrupt responses until ``SPOILED`` or ``SPOILED_S`` is reached; check resource usage."""
    loop, kept = asyncio.get_running_loop(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, through.spoils = loop.time(), True
    while through.spoiled < SPOILED and loop.time() < began + SPOILED_S:
        await meanwhile()
        await asyncio.sleep(0.05)
    through.spoils = False
    assert through.spoiled / (loop.time() - began) < MAX_A_SECOND
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - kept
    assert grown * 1024 < MAX_GROWTH_BYTES


def content(log: Partition, start: int) -> bytes:
    read = log.reader.fetch(
        start, 1 << 24, Isolation.LOG_END, at_least_one=True, min_range_bytes=1 << 62
    )
    return bytes(read.records)  # type: ignore[arg-type]


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range:
    first = int(request.config.getoption("--seed") or 0)
    return range(first, first + int(request.config.getoption("--inputs") or 1))


def test_broker_recovers_from_corrupt_controller_responses(tmp_path: Path, seeds: range) -> None:
    async def work(home: Path, seed: int) -> None:
        async with proxy(seed) as between:
            address = await between.open()
            told = {"advertised.listeners": f"CONTROLLER://{address[0]}:{address[1]}"}
            async with controller(home / "c", **told) as decides:
                between.target = next(iter(decides.server.addresses.values()))
                async with member(home, address) as broker:
                    lost: list[BrokerError] = []
                    broker.on_lost = lost.append

                    await spoil(between, lambda: asyncio.sleep(0))
                    assert not lost
                    await until_true(lambda: fenced(decides) == {101: False}, "it is heard again")
                    await create(broker, "t", [101])
                    await until_true(lambda: leads(broker, "t")() == 101, "what was decided after")
                    assert await append(broker, "t", b"v") == 0

    for seed in seeds:
        asyncio.run(work(tmp_path / f"{seed}", seed))


def test_follower_recovers_from_corrupt_leader_responses(tmp_path: Path, seeds: range) -> None:
    async def work(home: Path, seed: int) -> None:
        async with proxy(seed) as between, controller(home / "c") as decides:
            address = await between.open()
            told = {
                "listeners": "PLAINTEXT://127.0.0.1:0",
                "advertised.listeners": f"PLAINTEXT://{address[0]}:{address[1]}",
            }
            broker = member(home, decides.address, **told)
            other = member(home, decides.address, 102, **PATIENCE)
            await broker.start()
            between.target = next(iter(broker.server.addresses.values()))
            await other.start()
            try:
                lost: list[BrokerError] = []
                other.on_lost = lost.append
                await create(other, "t", [101, 102])
                await until_true(lambda: isr(broker, "t")() == {101, 102}, "a replica")
                log = broker.services.logs.partition("t", 0)
                count = 0

                async def more() -> None:
                    nonlocal count
                    log.append_records([Record(b"k", b"v" * 100)], now_ms=broker.clock.now_ms())
                    count += 1

                await spoil(between, more)
                assert not lost
                copy = other.services.logs.partition("t", 0)
                await until_true(lambda: copy.log_end_offset == count, "all of it there")
                await until_true(lambda: isr(broker, "t")() == {101, 102}, "it is in sync")
                # A follower takes the log start offset from any response, even from a corrupted
                # one.
                start = copy.log_start_offset
                assert content(copy, start) == content(log, start)
            finally:
                await other.stop()
                await broker.stop()

    for seed in seeds:
        asyncio.run(work(tmp_path / f"{seed}", seed))
