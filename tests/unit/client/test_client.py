"""Both clients with simulated brokers: negotiation, routing, and retries."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from fencepost import Broker
from fencepost.client.channel import AsyncChannel
from fencepost.client.client import (
    ApiError,
    AsyncWireClient,
    BrokerUnreachable,
    WireClient,
)
from fencepost.client.cluster import classify_errors, parse_bootstrap
from fencepost.client.queries.session import ClusterSession
from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.handlers import CloseConnection, Context, Registry, handles
from fencepost.coordinator.handlers.api_versions import run as api_versions
from fencepost.coordinator.server.server import Server
from fencepost.protocol.api import ApiKey
from fencepost.protocol.errors import UnsupportedVersion
from fencepost.protocol.messages import request_factory
from fencepost.tools.ports import hold_port


class Cluster:
    """Two brokers on a loop in a thread; broker 2 leads ``t-0`` and is every coordinator."""

    def __init__(self) -> None:
        self.features = {"transaction.version": (0, 2, 2)}
        self.features_epoch = 0
        self.calls: list[tuple[int, str]] = []
        self.answers: list[int] = []
        self.wrong_node = False
        self.controller = 1
        self.addresses: dict[int, tuple[str, int]] = {}
        self._servers: list[Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)

    async def _start(self) -> None:
        for node in (1, 2):
            registry = Registry(modules={})
            registry.add(api_versions)
            for make in (self._metadata, self._find, self._list_offsets, self._end_txn):
                registry.add(make(node))
            server = Server(self, registry=registry)
            self.addresses[node] = await server.start(ListenerConfig())
            self._servers.append(server)

    def stop(self) -> None:
        async def stop() -> None:
            for server in self._servers:
                await server.stop()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def bootstrap(self) -> str:
        host, port = self.addresses[1]
        return f"{host}:{port}"

    def _metadata(self, node: int) -> Callable[..., Any]:
        @handles(ApiKey.METADATA, versions=(0, 13), permission="DESCRIBE Topic")
        def run(ctx: Context) -> Any:
            self.calls.append((node, "Metadata"))
            make = ctx.respond
            brokers = [
                make.MetadataResponseBroker(node_id=n, host=h, port=p)
                for n, (h, p) in self.addresses.items()
            ]
            leader = 1 if self.wrong_node else 2
            part = make.MetadataResponsePartition(partition_index=0, leader_id=leader)
            topic = make.MetadataResponseTopic(name="t", partitions=[part])
            return make.message(
                brokers=brokers,
                topics=[topic],
                controller_id=self.controller,
                cluster_id="small",
            )

        return run

    def _find(self, node: int) -> Callable[..., Any]:
        @handles(ApiKey.FIND_COORDINATOR, versions=(0, 6), permission="DESCRIBE Group")
        def run(ctx: Context) -> Any:
            self.calls.append((node, "FindCoordinator"))
            target = 1 if self.wrong_node else 2
            host, port = self.addresses[target]
            found = ctx.respond.Coordinator(node_id=target, host=host, port=port)
            return ctx.respond.message(coordinators=[found], node_id=target, host=host, port=port)

        return run

    def _list_offsets(self, node: int) -> Callable[..., Any]:
        @handles(ApiKey.LIST_OFFSETS, versions=(1, 11), permission="DESCRIBE Topic")
        def run(ctx: Context) -> Any:
            self.calls.append((node, "ListOffsets"))
            make = ctx.respond
            codes = [self._code(node)] if len(self.answers) < 2 else [self.answers.pop(0), 0]
            parts = [
                make.ListOffsetsPartitionResponse(partition_index=0, error_code=code, offset=42)
                for code in codes
            ]
            return make.message(topics=[make.ListOffsetsTopicResponse(name="t", partitions=parts)])

        return run

    def _end_txn(self, node: int) -> Callable[..., Any]:
        @handles(ApiKey.END_TXN, versions=(0, 5), permission="WRITE TransactionalId")
        def run(ctx: Context) -> Any:
            self.calls.append((node, "EndTxn"))
            code = self._code(node)
            if code == -2:
                raise CloseConnection("test")
            return ctx.respond.message(error_code=code)

        return run

    def _code(self, node: int) -> int:
        if self.answers:
            code = self.answers.pop(0)
            self.wrong_node = False
            return code
        return 0 if node == 2 else 16


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.stop()


def test_negotiation_takes_the_highest_common_version(cluster: Cluster) -> None:
    with WireClient(cluster.bootstrap) as client:
        assert client.versions()[ApiKey.END_TXN] == (0, 5)
        assert client.features() == {"transaction.version": 2}
        answer = client.call("EndTxn", to_transaction="x", transactional_id="x", committed=True)
        assert type(answer).__version__ == 5
        with pytest.raises(UnsupportedVersion):
            client.call("Heartbeat", group_id="g")
        with pytest.raises(UnsupportedVersion):
            client.call("EndTxn", 6, to_node=2)
        with pytest.raises(KeyError):
            client.call("NoSuchApi")


def test_call_is_routed_to_leader_coordinator_or_node(cluster: Cluster) -> None:
    with WireClient(cluster.bootstrap) as client:
        answer = client.call("ListOffsets", to_leader=("t", 0), replica_id=-1)
        assert answer.topics[0].partitions[0].offset == 42
        client.call(ApiKey.END_TXN, 3, to_transaction="x", transactional_id="x")
        client.call("end_txn", to_node=2)
        metadata = client.metadata()
        assert metadata.topics["t"].partitions[0].leader == 2
        assert metadata.cluster_id == "small"
        assert sorted(metadata.brokers) == [1, 2]
        with pytest.raises(BrokerUnreachable, match="no broker 3"):
            client.call("EndTxn", to_node=3, timeout_ms=1_000)
    wanted = [(1, "Metadata"), (2, "ListOffsets"), (1, "FindCoordinator"), (2, "EndTxn")]
    assert cluster.calls[:4] == wanted
    assert cluster.calls[4] == (2, "EndTxn")


def test_call_after_leader_or_coordinator_moved_looks_it_up_again(cluster: Cluster) -> None:
    cluster.wrong_node = True
    with WireClient(cluster.bootstrap) as client:
        cluster.answers = [16]
        client.call("EndTxn", to_transaction="x")
        cluster.wrong_node = True
        cluster.answers = [6]
        client.metadata(refresh=True)
        client.call("ListOffsets", to_leader=("t", 0))
    ends = [call for call in cluster.calls if call[1] in {"EndTxn", "ListOffsets"}]
    assert ends == [(1, "EndTxn"), (2, "EndTxn"), (1, "ListOffsets"), (2, "ListOffsets")]


def test_call_with_retriable_error_is_retried_until_the_deadline(cluster: Cluster) -> None:
    with WireClient(cluster.bootstrap) as client:
        cluster.answers = [14, 51, 14]
        assert client.call("EndTxn", to_transaction="x").error_code == 0
        cluster.answers = [14] * 1_000
        with pytest.raises(ApiError, match="EndTxn: COORDINATOR_LOAD_IN_PROGRESS") as caught:
            client.call("EndTxn", to_transaction="x", timeout_ms=1_000)
        assert caught.value.code is ErrorCode.coordinator_load_in_progress


def test_other_error_is_raised_or_returned_without_retry(cluster: Cluster) -> None:
    with WireClient(cluster.bootstrap) as client:
        cluster.answers = [90]
        with pytest.raises(ApiError, match=r"PRODUCER_FENCED \(90\)"):
            client.call("EndTxn", to_transaction="x")
        cluster.answers = [14]
        answer = client.call("EndTxn", to_transaction="x", check=False)
        assert answer.error_code == ErrorCode.coordinator_load_in_progress
        cluster.answers = [29]
        answer = client.call("ListOffsets", to_leader=("t", 0))
        assert answer.topics[0].partitions[0].error_code == 29


def test_call_with_partial_success_is_not_retried(cluster: Cluster) -> None:
    with WireClient(cluster.bootstrap) as client:
        cluster.answers = [6, 0, 0]
        answer = client.call("ListOffsets", to_leader=("t", 0))
        assert [part.error_code for part in answer.topics[0].partitions] == [6, 0]


def test_call_for_unknown_topic_is_retried_only_briefly(cluster: Cluster) -> None:
    with (
        WireClient(cluster.bootstrap) as client,
        pytest.raises(ApiError, match=r"UNKNOWN_TOPIC_OR_PARTITION.*nope-0"),
    ):
        client.call("ListOffsets", to_leader=("nope", 0))


def test_changing_call_is_not_retried_after_a_lost_connection(cluster: Cluster) -> None:
    with WireClient(cluster.bootstrap) as client:
        cluster.answers = [-2]
        with pytest.raises(BrokerUnreachable, match="EndTxn, outcome unknown"):
            client.call("EndTxn", to_transaction="x")
        assert client.call("EndTxn", to_transaction="x").error_code == 0


def test_request_returns_a_response_with_errors(cluster: Cluster) -> None:
    with WireClient(cluster.bootstrap) as client:
        cluster.answers = [14]
        body = request_factory(ApiKey.END_TXN, 1).message(transactional_id="x")
        assert client.request(ApiKey.END_TXN, 1, body, to_node=2).error_code == 14


def test_unreachable_broker_error_names_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BrokerUnreachable, match=address):
            WireClient(address).call("Metadata", timeout_ms=100)


def test_second_bootstrap_server_is_used_if_the_first_is_unreachable(cluster: Cluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
        with WireClient([dead, cluster.bootstrap]) as client:
            assert client.metadata().controller_id == 1


@pytest.mark.parametrize(("told", "found"), [(2, 2), (-1, 1)])
def test_session_without_controller_uses_some_broker(
    cluster: Cluster, told: int, found: int
) -> None:
    cluster.controller = told
    with ClusterSession(cluster.bootstrap, 10) as session:
        assert (session.controller, session.some_broker) == (told, found)


def test_api_versions_request_falls_back_to_the_version_of_an_old_broker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked: list[int] = []

        def old_broker() -> None:
            connection, _ = listener.accept()
            with connection:
                for _ in range(2):
                    frame = connection.recv(int.from_bytes(connection.recv(4), "big"))
                    version, correlation_id = struct.unpack_from(">hi", frame, 2)
                    asked.append(version)
                    if version > 2:
                        body = struct.pack(">hihhh", 35, 1, 18, 0, 2)
                    else:
                        body = struct.pack(">hihhhi", 0, 1, 12, 0, 3, 0)
                    connection.sendall(struct.pack(">ii", len(body) + 4, correlation_id) + body)

        thread = threading.Thread(target=old_broker)
        thread.start()
        with WireClient(f"127.0.0.1:{listener.getsockname()[1]}") as client:
            assert client.versions() == {12: (0, 3)}
        thread.join()
        assert asked == [4, 2]


def test_call_to_silent_broker_fails_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = WireClient(f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(BrokerUnreachable):
            client.call("Metadata", timeout_ms=200)


async def test_async_client_routes_and_retries_like_the_blocking_client(cluster: Cluster) -> None:
    async with AsyncWireClient(cluster.bootstrap) as client:
        answers = await asyncio.gather(
            *(client.call("ListOffsets", to_leader=("t", 0)) for _ in range(50))
        )
        assert all(answer.topics[0].partitions[0].offset == 42 for answer in answers)
        cluster.answers = [16, 14]
        assert (await client.call("EndTxn", to_transaction="x")).error_code == 0
        assert (await client.metadata()).cluster_id == "small"
        assert (await client.versions())[18] == (0, 5)
        cluster.answers = [-2]
        with pytest.raises(BrokerUnreachable, match="outcome unknown"):
            await client.call("EndTxn", to_transaction="x")


async def test_cancelled_call_leaves_the_connection_usable(cluster: Cluster) -> None:
    async with AsyncWireClient(cluster.bootstrap) as client:
        await client.metadata()
        call = asyncio.create_task(client.call("EndTxn", to_node=2))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await client.call("EndTxn", to_node=2)).error_code == 0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a:1", [("a", 1)]),
        ("a", [("a", 9092)]),
        ("a:1, b:2", [("a", 1), ("b", 2)]),
        ("[::1]:7", [("::1", 7)]),
        ("[::1]", [("::1", 9092)]),
    ],
)
def test_bootstrap_servers_are_parsed_with_default_port(
    text: str, found: list[tuple[str, int]]
) -> None:
    assert parse_bootstrap(text) == found


@pytest.mark.parametrize("text", ["", "a:b", ":1", [], "a:1,,b:2"])
def test_invalid_bootstrap_servers_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"server|host:port"):
        parse_bootstrap(text)


def test_response_without_items_is_classified_by_its_error_code() -> None:
    from fencepost.protocol.messages import response_factory

    make = response_factory(ApiKey.HEARTBEAT, 4)
    assert classify_errors(make.message(error_code=0)).failed == ()
    assert classify_errors(make.message(error_code=14)).retriable
    assert not classify_errors(make.message(error_code=90)).retriable


def test_metadata_request_is_retried_after_its_connection_died(tmp_path: Path) -> None:
    with hold_port() as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        with WireClient(address) as client:
            for _ in range(2):
                with Broker.in_thread(tmp_path, listen=address):
                    assert set(client.metadata(refresh=True).brokers) == {1}
            with pytest.raises(BrokerUnreachable, match=address):
                client.metadata(refresh=True)


async def test_cancelled_connect_is_cancelled_even_if_it_fails():
    """The caller must see the cancellation, even if connecting fails at the same time."""
    held = hold_port()
    host, port = held.getsockname()
    with held:
        for turns in range(12):
            connecting = asyncio.create_task(AsyncChannel.connect(host, port, 5_000))
            for _ in range(turns):
                await asyncio.sleep(0)
            was_under_way = connecting.cancel()
            await asyncio.wait({connecting})
            assert connecting.cancelled() or not was_under_way, turns


async def test_call_cancelled_before_api_versions_closes_its_connection() -> None:
    """A connection that is not ready yet belongs only to the call, which must close it."""
    asked, ended = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set()
        await reader.read()
        ended.set()
        writer.close()

    gc.disable()  # the collector would close the connection eventually
    try:
        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            async with AsyncWireClient(f"{host}:{port}") as client:
                call = asyncio.create_task(client.versions())
                await asyncio.wait_for(asked.wait(), 30)
                call.cancel()
                await asyncio.wait({call})
                assert call.cancelled()
                await asyncio.wait_for(ended.wait(), 30)
    finally:
        gc.enable()
