"""Connections and the server: order, isolation, limits, and reasons to close a connection."""

from __future__ import annotations

import asyncio
import os
import resource
import struct
import tracemalloc
from asyncio import selector_events
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from structlog.testing import capture_logs

from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.handlers import CloseConnection, Context, Registry, handles, request_ms
from fencepost.coordinator.handlers.api_versions import run as api_versions
from fencepost.coordinator.runtime.rate_limited_log import LINES_PER_SECOND
from fencepost.coordinator.server import connection
from fencepost.coordinator.server.connection import SENT_TOGETHER, SENT_TOGETHER_BYTES, Connection
from fencepost.coordinator.server.listener import OWN_FILES, first_reserved_file
from fencepost.coordinator.server.request_stream import WRITE_BYTES
from fencepost.coordinator.server.server import Server
from fencepost.logcore.file_range import FileRange
from fencepost.logcore.fs import held_handles
from fencepost.logcore.machine import DomainError
from fencepost.logcore.reading import Isolation
from fencepost.protocol.api import ApiKey
from fencepost.protocol.codec import decode_response, encode_request
from fencepost.protocol.limits import ConnectionLimits
from fencepost.protocol.messages import request_factory
from tests.support.waits import until_true
from tests.unit.logcore.partition_driver import append, open_partition, read_log

FEATURES = {"group.version": (0, 1, 0), "transaction.version": (0, 2, 2), "odd.version": (1, 3, 1)}


class RefusedError(DomainError):
    pass


class Service:
    """Handlers of a minimal broker."""

    def __init__(self, **limits: int) -> None:
        self.features = FEATURES
        self.features_epoch = 7
        self.seen: list[tuple[int, Any]] = []
        self.records: FileRange | None = None
        self.gate: asyncio.Event = asyncio.Event()
        self.registry = Registry(modules={})
        for run in (self.heartbeat(), self.produce(), self.fetch(), api_versions):
            self.registry.add(run)
        self.server = Server(
            self,
            registry=self.registry,
            limits=ConnectionLimits(**limits),
            error_code=lambda error: 25 if isinstance(error, RefusedError) else -1,
        )

    def heartbeat(self) -> Callable[..., Any]:
        @handles(ApiKey.HEARTBEAT, versions=(0, 4), permission="READ Group")
        async def run(ctx: Context) -> Any:
            group = ctx.body.group_id
            self.seen.append((ctx.correlation_id, group))
            if group == "slow":
                await self.gate.wait()
            elif group == "yield":
                await asyncio.sleep(0)
            elif group == "refused":
                raise RefusedError("no such member")
            elif group == "broken":
                raise ZeroDivisionError
            elif group == "hang up":
                raise CloseConnection("asked to")
            elif group == "unwritable":
                return ctx.respond.HeartbeatResponse(error_code="a word")
            return ctx.respond.HeartbeatResponse(error_code=0, throttle_time_ms=ctx.correlation_id)

        return run

    def produce(self) -> Callable[..., Any]:
        @handles(ApiKey.PRODUCE, versions=(3, 13), permission="WRITE Topic")
        def run(ctx: Context) -> Any:
            self.seen.append((ctx.correlation_id, request_ms(ctx.body.timeout)))
            if not ctx.body.topic_data:
                raise ZeroDivisionError
            if ctx.body.acks == 0:
                return None
            records = ctx.body.topic_data[0].partition_data[0].records
            part = ctx.respond.PartitionProduceResponse(index=0, base_offset=sum(records))
            topic = ctx.respond.TopicProduceResponse(name="t", partition_responses=[part])
            return ctx.respond.message(responses=[topic])

        return run

    def fetch(self) -> Callable[..., Any]:
        @handles(ApiKey.FETCH, versions=(4, 18), permission="READ Topic")
        def run(ctx: Context) -> Awaitable[Any]:
            self.seen.append((ctx.correlation_id, "fetch"))
            future = asyncio.get_running_loop().create_future()
            records = self.records or bytes(ctx.body.max_bytes)
            part = ctx.respond.PartitionData(partition_index=0, records=records)
            topic = ctx.respond.FetchableTopicResponse(topic="t", partitions=[part])
            future.set_result(ctx.respond.message(responses=[topic]))
            return future

        return run


@asynccontextmanager
async def serving(**limits: int) -> AsyncIterator[Service]:
    service = Service(**limits)
    await service.server.start(ListenerConfig())
    try:
        yield service
    finally:
        service.gate.set()
        await service.server.stop()


class Peer:
    """The client's end of a connection, in raw frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, service: Service) -> Peer:
        return cls(*await asyncio.open_connection(*service.server.address))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def frame(self) -> bytes:
        async with asyncio.timeout(30):
            size = int.from_bytes(await self.reader.readexactly(4), "big")
            return await self.reader.readexactly(size)

    async def answer(self, key: int, version: int) -> tuple[int, Any]:
        return decode_response(key, version, await self.frame())

    async def closed(self) -> bool:
        try:
            async with asyncio.timeout(30):
                return await self.reader.read() == b""
        except ConnectionResetError:
            return True


def heartbeat(correlation_id: int, group: str = "g", version: int = 4) -> bytes:
    body = request_factory(ApiKey.HEARTBEAT, version).message(group_id=group, member_id="m")
    return b"".join(encode_request(ApiKey.HEARTBEAT, version, correlation_id, "test", body))


def produce(correlation_id: int, records: bytes = b"", acks: int = -1, topics: int = 1) -> bytes:
    make = request_factory(ApiKey.PRODUCE, 9)
    part = make.PartitionProduceData(index=0, records=records)
    topic = make.TopicProduceData(name="t", partition_data=[part])
    body = make.message(acks=acks, timeout_ms=1234, topic_data=[topic] * topics)
    return b"".join(encode_request(ApiKey.PRODUCE, 9, correlation_id, "test", body))


def fetch(correlation_id: int, max_bytes: int) -> bytes:
    body = request_factory(ApiKey.FETCH, 11).message(max_bytes=max_bytes)
    return b"".join(encode_request(ApiKey.FETCH, 11, correlation_id, "test", body))


# --- order and fragmentation ---


async def test_pipelined_requests_are_answered_one_by_one_in_order() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(b"".join(heartbeat(n, "yield" if n % 3 else "g") for n in range(1, 200)))
        for n in range(1, 200):
            correlation_id, body = await peer.answer(12, 4)
            assert (correlation_id, request_ms(body.throttle_time)) == (n, n)
        assert [n for n, _ in service.seen] == list(range(1, 200))


@pytest.mark.parametrize(
    ("ahead", "most_bytes", "writes"),
    [
        (1, SENT_TOGETHER_BYTES, 1),
        (SENT_TOGETHER, SENT_TOGETHER_BYTES, 1),
        (SENT_TOGETHER + 1, SENT_TOGETHER_BYTES, 2),
        (SENT_TOGETHER, 10, SENT_TOGETHER),
    ],
)
async def test_small_responses_to_pipelined_requests_are_written_together(
    ahead: int, most_bytes: int, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = selector_events._SelectorSocketTransport.write

    def counted(transport: Any, piece: bytes) -> None:
        if isinstance(transport.get_protocol(), Connection):
            written.append(len(piece))
        write(transport, piece)

    monkeypatch.setattr(selector_events._SelectorSocketTransport, "write", counted)
    monkeypatch.setattr(connection, "SENT_TOGETHER_BYTES", most_bytes)
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(b"".join(produce(n, b"r") for n in range(1, ahead + 1)))
        for n in range(1, ahead + 1):
            assert (await peer.answer(0, 9))[0] == n
        assert len(written) == writes


async def test_next_request_waits_for_response_of_previous_one() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(heartbeat(1, "slow"))
        await until_true(lambda: service.seen)
        peer.send(heartbeat(2))
        await asyncio.sleep(0.05)
        assert [n for n, _ in service.seen] == [1]
        service.gate.set()
        assert [(await peer.answer(12, 4))[0] for _ in range(2)] == [1, 2]


async def test_data_after_a_request_in_progress_is_not_read_from_the_socket() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(heartbeat(1, "slow"))
        await until_true(lambda: service.seen)
        peer.send(produce(2, bytes(8 << 20)))
        await asyncio.sleep(0.1)
        (connection,) = service.server.connections
        assert connection._frames.pending <= 64 << 10
        service.gate.set()
        assert [(await peer.answer(12, 4))[0], (await peer.answer(0, 9))[0]] == [1, 2]


async def test_responses_are_equal_for_requests_sent_whole_or_byte_by_byte() -> None:
    requests = heartbeat(1) + produce(2, b"\1" * 3000) + heartbeat(3, "refused") + fetch(4, 10)
    answers = []
    async with serving() as service:
        for step in (len(requests), 1):
            peer = await Peer.of(service)
            for at in range(0, len(requests), step):
                peer.send(requests[at : at + step])
                await peer.writer.drain()
                if step == 1 and at % 50 == 0:
                    await asyncio.sleep(0)
            answers.append([await peer.frame() for _ in range(4)])
    assert answers[0] == answers[1]


async def test_large_requests_and_responses_arrive_whole() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        size = 3 << 20
        peer.send(produce(1, b"\1" * size) + heartbeat(2) + produce(3, b"\2" * size))
        peer.send(fetch(4, size) + heartbeat(5))
        topics = (await peer.answer(0, 9))[1].responses
        assert topics[0].partition_responses[0].base_offset == size
        assert (await peer.answer(12, 4))[0] == 2
        topics = (await peer.answer(0, 9))[1].responses
        assert topics[0].partition_responses[0].base_offset == 2 * size
        fetched = (await peer.answer(1, 11))[1].responses[0].partitions[0].records
        assert fetched == bytes(size)
        assert (await peer.answer(12, 4))[0] == 5


async def test_request_with_many_topics_yields_and_is_answered_in_order() -> None:
    async with serving() as service:
        many, other = await Peer.of(service), await Peer.of(service)
        rest = produce(3, b"\1" * 200_000)
        many.send(produce(1, b"\1", topics=49_000) + heartbeat(2) + rest)
        await until_true(lambda: service.server.turns._queue)
        other.send(heartbeat(4))
        assert (await other.answer(12, 4))[0] == 4
        answer = (await many.answer(0, 9))[1]
        assert answer.responses[0].partition_responses[0].base_offset == 1
        assert (await many.answer(12, 4))[0] == 2
        assert (await many.answer(0, 9))[1].responses[0].partition_responses[
            0
        ].base_offset == 200_000


async def test_produce_with_acks_0_gets_no_response_and_next_request_is_served() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(produce(1, b"x", acks=0) + heartbeat(2))
        assert (await peer.answer(12, 4))[0] == 2
        assert service.seen == [(1, 1234), (2, "g")]


async def test_client_that_does_not_read_is_not_served_further() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        count = 30
        peer.send(b"".join(fetch(n, 1 << 20) for n in range(count)))
        await until_true(lambda: len(service.seen) > 1)
        await asyncio.sleep(0.2)
        assert len(service.seen) < count
        for n in range(count):
            assert (await peer.answer(1, 11))[0] == n


@pytest.mark.parametrize("size", [WRITE_BYTES - 1, WRITE_BYTES, WRITE_BYTES + 1, 30_000_000])
async def test_response_of_any_size_arrives_whole(size: int) -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(fetch(1, size) + heartbeat(2))
        fetched = (await peer.answer(1, 11))[1].responses[0].partitions[0].records
        assert fetched == bytes(size)
        assert (await peer.answer(12, 4))[0] == 2


async def stuck(service: Service, size: int) -> Peer:
    """Return a client that has requested ``size`` bytes and does not read the response."""
    before = len(service.seen)
    peer = await Peer.of(service)
    peer.writer.transport.pause_reading()
    peer.send(fetch(1, size))
    await until_true(lambda: len(service.seen) > before)
    return peer


async def test_unsent_responses_stay_within_one_budget() -> None:
    size = 20 << 20  # more than the buffers of a socket
    async with serving(max_queued_response_bytes=2 * size) as service:
        budget = service.server.responses
        held = [await stuck(service, size) for _ in range(2)]
        assert 2 * size > budget.held_bytes > size
        held.append(await stuck(service, size))  # accepted, because the budget had room before
        assert 3 * size > budget.held_bytes > 2 * size
        waiting, small = await Peer.of(service), await Peer.of(service)
        waiting.send(fetch(2, 1) + heartbeat(3))
        await until_true(lambda: budget.contended)
        small.send(heartbeat(4))  # small responses are served
        assert (await small.answer(12, 4))[0] == 4
        assert budget.contended
        held[0].writer.transport.resume_reading()
        assert (await held[0].answer(1, 11))[0] == 1
        assert (await waiting.answer(1, 11))[0] == 2
        assert (await waiting.answer(12, 4))[0] == 3
        for peer in held:
            peer.writer.transport.abort()
        await until_true(lambda: budget.held_bytes == 0)


async def test_closed_connection_gives_up_its_turn_for_response_budget() -> None:
    size = 20 << 20
    async with serving(max_queued_response_bytes=1) as service:
        budget = service.server.responses
        held = await stuck(service, size)
        gone, waiting = await Peer.of(service), await Peer.of(service)
        for number, peer in enumerate((gone, waiting), 2):
            peer.send(fetch(number, 1))
            await until_true(lambda number=number: len(budget._for_room) == number - 1)
        gone.writer.transport.abort()
        await until_true(lambda: len(budget._for_room) == 1)
        held.writer.transport.abort()
        assert (await waiting.answer(1, 11))[0] == 3


async def test_slow_reader_is_disconnected_only_when_others_wait() -> None:
    size = 20 << 20
    limits = {"slow_frame_grace_ms": 100, "frame_timeout_ms": 200}
    async with serving(max_queued_response_bytes=size // 2, **limits) as service:
        slow = await stuck(service, size)
        await asyncio.sleep(0.5)  # longer than grace period plus sweep interval
        assert len(service.server.connections) == 1
        other = await Peer.of(service)
        other.send(fetch(2, 1))
        assert (await other.answer(1, 11))[0] == 2
        slow.writer.transport.resume_reading()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await slow.answer(1, 11)


async def test_idle_connection_with_unread_response_is_closed() -> None:
    async with serving(max_idle_ms=200) as service:
        peer = await stuck(service, 20 << 20)
        await until_true(lambda: not service.server.connections)
        assert service.server.responses.held_bytes == 0
        peer.writer.transport.resume_reading()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await peer.answer(1, 11)


@pytest.mark.parametrize("cut", [False, True])
async def test_file_range_arrives_whole_or_closes_connection_if_truncated(
    cut: bool, tmp_path: Path
) -> None:
    partition = open_partition(tmp_path)
    for _ in range(40):
        append(partition, 1, size=500_000)
    asked = 0, 1 << 30, Isolation.READ_UNCOMMITTED
    records = partition.reader.fetch(*asked, at_least_one=True).records
    expected = b"".join(data for _, data in read_log(partition))
    assert isinstance(records, FileRange)
    if cut:
        partition.truncate_to(20)
    async with serving() as service:
        service.records = records
        peer = await Peer.of(service)
        peer.send(fetch(1, 0) + heartbeat(2))
        if cut:
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await peer.answer(1, 11)
        else:
            fetched = (await peer.answer(1, 11))[1].responses[0].partitions[0].records
            assert fetched == expected
            assert (await peer.answer(12, 4))[0] == 2


async def test_client_with_unread_large_fetches_costs_little_memory(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    for _ in range(60):
        append(partition, 1, size=1_000_000)
    asked = 0, 1 << 30, Isolation.READ_UNCOMMITTED
    async with serving() as service:
        service.records = partition.reader.fetch(*asked, at_least_one=True).records
        size = len(service.records)
        assert size > 50 << 20
        peer = await Peer.of(service)
        peer.writer.transport.pause_reading()
        tracemalloc.start()
        try:
            peer.send(fetch(1, 0) * 1_000)
            budget = service.server.responses
            await until_true(lambda: budget.held_bytes > 0)
            (connection,) = service.server.connections
            await until_true(lambda: not connection._reading)
            assert 0 < budget.held_bytes <= WRITE_BYTES
            assert tracemalloc.get_traced_memory()[1] < 4 * WRITE_BYTES
        finally:
            tracemalloc.stop()
        assert len(service.seen) == 1
        assert len(service.records) > size // 2


async def test_server_stop_waits_for_response_to_slow_client() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(fetch(1, 30_000_000))
        await until_true(lambda: service.seen)
        stopping = asyncio.create_task(service.server.stop())
        fetched = (await peer.answer(1, 11))[1].responses[0].partitions[0].records
        assert fetched == bytes(30_000_000)
        await stopping


# --- failures stay local ---


async def test_domain_error_becomes_top_level_error_code() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(heartbeat(1, "refused") + heartbeat(2))
        assert (await peer.answer(12, 4))[1].error_code == 25
        assert (await peer.answer(12, 4))[1].error_code == 0


async def test_failed_handler_returns_unknown_server_error_and_connection_stays() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(heartbeat(1, "broken") + heartbeat(2))
        assert (await peer.answer(12, 4))[1].error_code == -1
        assert (await peer.answer(12, 4))[1].error_code == 0


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(produce(1, topics=0), id="failure without an error field"),
        pytest.param(heartbeat(1, "hang up"), id="the handler asks for it"),
        pytest.param(heartbeat(1, "unwritable"), id="the response cannot be written"),
        pytest.param(b"\xff\xff\xff\xff", id="negative size"),
        pytest.param(struct.pack(">i", 2_000_001), id="size over the limit"),
        pytest.param(struct.pack(">i", 0), id="empty frame"),
        pytest.param(struct.pack(">ihhih", 10, 12, 5, 1, -1), id="unsupported version"),
        pytest.param(struct.pack(">ihhih", 10, 0, 2, 1, -1), id="Produce below 3"),
        pytest.param(struct.pack(">ihhih", 10, 999, 0, 1, -1), id="unknown API"),
        pytest.param(struct.pack(">ihhih", 10, 3, 1, 1, -1), id="an API nobody handles"),
        pytest.param(heartbeat(1)[:3] + b"\x12" + heartbeat(1)[4:], id="truncated"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="another protocol"),
    ],
)
async def test_request_that_cannot_be_answered_closes_only_its_connection(bad: bytes) -> None:
    async with serving(max_request_bytes=2_000_000) as service:
        bystander, culprit = await Peer.of(service), await Peer.of(service)
        bystander.send(heartbeat(7, "slow"))
        await until_true(lambda: service.seen)
        culprit.send(bad + heartbeat(2))
        assert await culprit.closed()
        service.gate.set()
        assert (await bystander.answer(12, 4))[0] == 7
        bystander.send(heartbeat(8))
        assert (await bystander.answer(12, 4))[0] == 8
        assert len(service.server.connections) == 1


@pytest.mark.parametrize(
    ("key", "version", "client", "told"),
    [
        (12, 5, b"app", {"api": "Heartbeat", "version": 5, "lowest": 0, "highest": 4}),
        (0, 2, b"app", {"api": "Produce", "version": 2, "lowest": 3, "highest": 13}),
        (78, 1, b"app", {"api": "ShareFetch", "version": 1, "lowest": None, "highest": None}),
        (999, 7, None, {"api": "API key 999", "version": 7, "lowest": None, "highest": None}),
        (12, 5, b"\xff", {"api": "Heartbeat", "client_id": None}),
    ],
)
async def test_unsupported_request_is_logged_with_its_client(
    key: int, version: int, client: bytes | None, told: dict[str, object]
) -> None:
    name = b"" if client is None else client
    size = -1 if client is None else len(name)
    frame = struct.pack(">hhih", key, version, 1, size) + name
    with capture_logs() as lines:
        async with serving() as service:
            peer = await Peer.of(service)
            peer.send(struct.pack(">i", len(frame)) + frame)
            assert await peer.closed()
    (line,) = [text for text in lines if text["event"] == "request not served"]
    expected = {"client_id": None if client is None else "app", "log_level": "warning", **told}
    assert expected.items() <= line.items()
    assert line["peer"]


async def test_log_lines_of_unsupported_requests_are_rate_limited() -> None:
    frame = struct.pack(">ihhih", 10, 12, 5, 1, -1)
    with capture_logs() as lines:
        async with serving() as service:
            for _ in range(3 * LINES_PER_SECOND):
                peer = await Peer.of(service)
                peer.send(frame)
                assert await peer.closed()
    assert 0 < sum(line["event"] == "request not served" for line in lines) < 3 * LINES_PER_SECOND


async def test_request_of_exactly_max_bytes_is_served_larger_closes_connection() -> None:
    async with serving(max_request_bytes=len(heartbeat(1)) - 4) as service:
        peer = await Peer.of(service)
        peer.send(heartbeat(1))
        assert (await peer.answer(12, 4))[0] == 1
        peer.send(heartbeat(2, "gg"))
        assert await peer.closed()


async def test_size_prefix_alone_reserves_no_memory() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(struct.pack(">i", 100_000_000) + bytes(1000))
        await until_true(lambda: service.server.connections)
        (connection,) = service.server.connections
        await until_true(lambda: connection._frames.pending > 1000)
        assert len(connection._frames._buffer) <= 64 << 10


def large(correlation_id: int, size: int) -> bytes:
    """Return a Produce frame of exactly ``size`` bytes, including the length field."""
    return produce(
        correlation_id, bytes(size - len(produce(correlation_id, bytes(1 << 20))) + (1 << 20))
    )


async def test_request_frames_of_all_connections_stay_within_one_budget() -> None:
    size = 1 << 20
    async with serving(max_queued_request_bytes=2 * size) as service:
        budget = service.server.budget
        first, second, third = [await Peer.of(service) for _ in range(3)]
        for count, peer in enumerate((first, second), 1):
            peer.send(large(count, size)[:-1])
            await until_true(lambda count=count: budget.held_bytes == count * size)
        third.send(large(3, size))
        await until_true(lambda: budget.contended)
        assert budget.held_bytes == 2 * size
        waiting = next(c for c in service.server.connections if c._waiting)
        assert waiting._frames.pending <= 128 << 10
        small = await Peer.of(service)
        small.send(heartbeat(9))  # requests without a large buffer are served meanwhile
        assert (await small.answer(12, 4))[0] == 9
        first.send(large(1, size)[-1:])
        assert (await first.answer(0, 9))[0] == 1
        first.writer.close()
        assert (await third.answer(0, 9))[0] == 3
        assert not budget.contended


async def test_frame_is_admitted_while_budget_has_one_byte_left() -> None:
    size = 1 << 20
    async with serving(max_queued_request_bytes=size + 1) as service:
        budget = service.server.budget
        first, second, third = [await Peer.of(service) for _ in range(3)]
        first.send(large(1, size)[:-1])
        await until_true(lambda: budget.held_bytes == size)
        second.send(large(2, size)[:-1])
        await until_true(lambda: budget.held_bytes == 2 * size)
        third.send(large(3, size)[:-1])
        await until_true(lambda: budget.contended)


async def test_idle_frame_buffer_is_released_when_another_connection_needs_it() -> None:
    size = 1 << 20
    async with serving(max_queued_request_bytes=size) as service:
        first, second = await Peer.of(service), await Peer.of(service)
        for n, peer in enumerate((first, second, first, second)):
            peer.send(large(n, size))
            assert (await peer.answer(0, 9))[0] == n
        assert service.server.budget.held_bytes == size


async def test_very_large_frame_buffer_is_released_after_its_request() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(large(1, 5 << 20))
        assert (await peer.answer(0, 9))[0] == 1
        (connection,) = service.server.connections
        assert (service.server.budget.held_bytes, len(connection._frames._buffer)) == (0, 8192)


async def test_slow_large_frame_is_dropped_only_when_others_wait() -> None:
    size = 1 << 20
    limits = {"slow_frame_grace_ms": 100, "frame_timeout_ms": 1_500}
    async with serving(max_queued_request_bytes=size, **limits) as service:
        slow, other = await Peer.of(service), await Peer.of(service)
        frame = large(1, size)
        slow.send(frame[: 200 << 10])
        for at in range(200 << 10, 218 << 10, 1 << 10):  # longer than grace period plus timeout
            slow.send(frame[at : at + (1 << 10)])
            await asyncio.sleep(0.1)
        assert len(service.server.connections) == 2
        other.send(large(2, size))
        assert await slow.closed()
        assert (await other.answer(0, 9))[0] == 2


async def test_request_of_exactly_max_objects_is_served_more_closes_connection() -> None:
    def topics(count: int) -> bytes:
        make = request_factory(ApiKey.PRODUCE, 9)
        part = make.PartitionProduceData(index=0, records=b"")
        rest = [make.TopicProduceData(name="t") for _ in range(count - 2)]
        first = make.TopicProduceData(name="t", partition_data=[part])
        body = make.message(acks=1, topic_data=[first, *rest])
        return b"".join(encode_request(ApiKey.PRODUCE, 9, 1, None, body))

    async with serving(max_request_objects=1000) as service:
        peer = await Peer.of(service)
        peer.send(topics(1000))
        assert (await peer.answer(0, 9))[0] == 1
        peer.send(topics(1001))
        assert await peer.closed()


async def test_disconnect_during_a_request_does_not_affect_other_clients() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(heartbeat(1, "slow"))
        await until_true(lambda: service.seen)
        peer.writer.close()
        await until_true(lambda: not service.server.connections)
        service.gate.set()
        await asyncio.sleep(0.01)
        other = await Peer.of(service)
        other.send(heartbeat(2))
        assert (await other.answer(12, 4))[0] == 2


async def test_waiting_handler_may_fail_and_is_cancelled_on_disconnect() -> None:
    async with serving() as service:
        waits: list[asyncio.Future[None]] = []

        @handles(ApiKey.HEARTBEAT, versions=(0, 4), permission="READ Group")
        def run(_ctx: Context) -> Any:
            waits.append(asyncio.get_running_loop().create_future())
            yield waits[-1]
            raise ZeroDivisionError

        service.registry.add(run)
        staying, leaving = await Peer.of(service), await Peer.of(service)
        staying.send(heartbeat(1))
        await until_true(lambda: waits)
        leaving.send(heartbeat(2))
        await until_true(lambda: len(waits) == 2)
        leaving.writer.close()
        await until_true(waits[1].cancelled)
        waits[0].set_result(None)
        assert (await staying.answer(12, 4))[1].error_code == ErrorCode.unknown_server_error


# --- limits on time and number ---


async def test_idle_connection_is_closed_and_busy_one_is_not() -> None:
    async with serving(max_idle_ms=150) as service:
        busy = await Peer.of(service)
        busy.send(heartbeat(1, "slow"))
        await until_true(lambda: service.seen)
        assert await (await Peer.of(service)).closed()
        await asyncio.sleep(0.2)
        service.gate.set()
        assert (await busy.answer(12, 4))[0] == 1


async def test_incomplete_frame_times_out_and_closes_connection() -> None:
    async with serving(frame_timeout_ms=150) as service:
        idle, stuck = await Peer.of(service), await Peer.of(service)
        stuck.send(heartbeat(1)[:20])
        assert await stuck.closed()
        idle.send(heartbeat(2))
        assert (await idle.answer(12, 4))[0] == 2


def _highest_descriptor() -> int:
    return max(int(path.name) for path in Path("/proc/self/fd").iterdir())


async def test_connections_are_refused_before_logs_run_out_of_file_descriptors() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 400 + _highest_descriptor()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    peers, files = [], []
    try:
        async with serving() as service:
            while not service.server.refused:
                peers.append(await Peer.of(service))
                peers[-1].send(heartbeat(1))
                await asyncio.wait([asyncio.ensure_future(peers[-1].reader.read(1))])
            assert service.server.connections
            first = first_reserved_file()
            # The reserve does not include descriptors that the logs already hold.
            reserve = limit // 4
            assert limit - first == max(reserve - held_handles(), min(OWN_FILES, reserve // 4))
            # Half of the connections' descriptors belong to the clients, which run in the same
            # process.
            files = [os.open(os.devnull, os.O_RDONLY) for _ in range(limit - first - 2)]
            for peer in peers:
                peer.writer.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_connections_per_ip_are_limited_until_one_closes() -> None:
    async with serving(max_connections_per_ip=2) as service:
        peers = [await Peer.of(service) for _ in range(2)]
        for peer in peers:
            peer.send(heartbeat(1))
            await peer.answer(12, 4)
        assert service.server.refused == 0
        assert await (await Peer.of(service)).closed()
        assert service.server.refused == 1
        peers[0].writer.close()
        await until_true(lambda: len(service.server.connections) == 1)
        again = await Peer.of(service)
        again.send(heartbeat(2))
        assert (await again.answer(12, 4))[0] == 2


async def test_connection_above_max_connections_waits_until_one_closes() -> None:
    async with serving(max_connections=2) as service:
        peers = [await Peer.of(service) for _ in range(2)]
        for peer in peers:
            peer.send(heartbeat(1))
            await peer.answer(12, 4)
        waiting = [await Peer.of(service) for _ in range(2)]
        for peer in waiting:
            peer.send(heartbeat(2))
        acceptor = service.server.acceptor
        assert acceptor is not None
        await until_true(lambda: acceptor.waiting == 1)
        peers[0].writer.close()
        assert (await waiting[0].answer(12, 4))[0] == 2
        assert acceptor.waiting == 1
        assert len(service.server.connections) == 2
        peers[1].writer.close()
        assert (await waiting[1].answer(12, 4))[0] == 2
        assert service.server.refused == 0


async def test_server_stop_waits_for_requests_in_progress() -> None:
    service = Service()
    await service.server.start(ListenerConfig())
    peer = await Peer.of(service)
    peer.send(heartbeat(1, "slow"))
    await until_true(lambda: service.seen)
    stopping = asyncio.create_task(service.server.stop())
    await asyncio.sleep(0.05)
    assert not stopping.done()
    service.gate.set()
    await stopping
    assert (await peer.answer(12, 4))[0] == 1
    assert await peer.closed()


async def test_server_stop_closes_connections_after_drain_timeout() -> None:
    service = Service(drain_timeout_ms=100)
    await service.server.start(ListenerConfig())
    peer = await Peer.of(service)
    peer.send(heartbeat(1, "slow"))
    await until_true(lambda: service.seen)
    await asyncio.wait_for(service.server.stop(), 30)
    assert await peer.closed()


# --- ApiVersions ---


def versions_request(version: int, name: str = "test", software: str = "1.0") -> bytes:
    body = request_factory(18, min(version, 5)).message(
        client_software_name=name, client_software_version=software
    )
    frame = bytearray(b"".join(encode_request(18, min(version, 5), 5, "c", body)))
    frame[6:8] = struct.pack(">h", version)
    return bytes(frame)


async def test_api_versions_of_an_unknown_version_is_answered_with_v0() -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(versions_request(99) + versions_request(4))
        correlation_id, body = await peer.answer(18, 0)
        assert (correlation_id, body.error_code) == (5, 35)
        assert [(k.api_key, k.min_version, k.max_version) for k in body.api_keys] == [(18, 0, 5)]
        assert (await peer.answer(18, 4))[1].error_code == 0


@pytest.mark.parametrize("version", range(6))
async def test_api_versions_response_lists_apis_and_features_by_version(version: int) -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(versions_request(version))
        body = (await peer.answer(18, version))[1]
        ranges = {k.api_key: (k.min_version, k.max_version) for k in body.api_keys}
        assert ranges == {0: (0, 13), 1: (4, 18), 12: (0, 4), 18: (0, 5)}
        if version >= 3:
            supported = {f.name: (f.min_version, f.max_version) for f in body.supported_features}
            finalized = {f.name: f.max_version_level for f in body.finalized_features}
            assert finalized == {"transaction.version": 2, "odd.version": 1}
            assert supported["odd.version"] == (1, 3)
            assert ("group.version" in supported) is (version >= 4)
            assert body.finalized_features_epoch == 7


@pytest.mark.parametrize(
    ("name", "software", "fine"),
    [
        ("a", "1", True),
        ("apache-kafka.java", "4.0.0-rc-1", True),
        ("", "1", False),
        ("a", "", False),
        ("-a", "1", False),
        ("a", "1.", False),
        ("a b", "1", False),
        ("ä", "1", False),
        ("a\n", "1", False),
    ],
)
async def test_invalid_client_software_name_or_version_is_invalid_request(
    name: str, software: str, fine: bool
) -> None:
    async with serving() as service:
        peer = await Peer.of(service)
        peer.send(versions_request(3, name, software))
        body = (await peer.answer(18, 3))[1]
        assert body.error_code == (0 if fine else 42)
        (connection,) = service.server.connections
        assert connection.client_software == ((name, software) if fine else None)


# --- the registry ---


def test_only_apis_with_a_module_are_served() -> None:
    registry = Registry(modules={18: "api_versions"})
    assert list(registry.advertised()) == [(18, 0, 5)]
    assert registry.handler(18).api.name == "ApiVersions"
    assert [handler.api.key for handler in registry.handlers()] == [18]
    assert ApiKey.API_VERSIONS in Registry().versions


def test_unstable_versions_are_served_on_demand_only() -> None:
    for unstable, highest in ((False, 5), (True, 6)):
        modules = {22: "init_producer_id"}
        registry = Registry(modules=modules, unstable_versions=unstable)
        assert list(registry.advertised()) == [(22, 0, highest)]
        apis = [ApiKey.INIT_PRODUCER_ID] if unstable else [ApiKey.PRODUCE]
        registry = Registry(modules=modules, unstable_apis=apis)
        assert list(registry.advertised()) == [(22, 0, highest)]


def test_handler_with_other_versions_than_served_is_an_error() -> None:
    with pytest.raises(ValueError, match="0-4"):
        handles(ApiKey.HEARTBEAT, versions=(0, 3), permission="NONE")


def test_module_without_handler_for_its_api_is_an_error() -> None:
    with pytest.raises(ValueError, match="ApiVersions"):
        Registry(modules={12: "api_versions"}).handler(12)


def test_request_ms_returns_milliseconds_of_any_int32() -> None:
    from datetime import timedelta

    for value in (-1, 0, 1, 999, 2**31 - 1, -(2**31)):
        assert request_ms(timedelta(milliseconds=value)) == value
