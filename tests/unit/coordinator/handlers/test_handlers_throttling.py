"""Client quotas: responses carry the throttle time, and the broker mutes the connection (KIP-219).

The scenarios come from Kafka's ``RequestQuotaTest``, ``ControllerMutationQuotaTest``,
``BaseQuotaTest``, and the throttling cases of ``SocketServerTest``. Only tests advance the broker's
clock, so that rates are exact; connections wait in real time.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.handlers import Registry
from fencepost.coordinator.security.quotas import MAX_DEBT_MS
from fencepost.coordinator.server import connection
from fencepost.logcore.compression import Codec
from fencepost.protocol.api import APIS, ApiKey
from fencepost.protocol.messages import response_factory
from fencepost.testing.clock import TestClock
from tests.support.batches import batch
from tests.support.cluster import Cluster, unique
from tests.support.raw import ConnectionLostError, encode
from tests.support.telemetry import ENABLED
from tests.support.waits import until
from tests.support.worst_batches import most_records
from tests.unit.coordinator.handlers.test_handlers_quotas import alter, entry

WINDOW_S = 10
"""The window of a rate in seconds if the clock does not advance."""


class Started(BrokerThread):
    """A broker whose state tests inspect."""

    def __init__(self, directory: Path, clock: TestClock, **config: str) -> None:
        self.served = Broker(directory, config=config, clock=clock)
        super().__init__(lambda: self.served)


@pytest.fixture(scope="module")
def clock() -> TestClock:
    return TestClock()


@pytest.fixture(scope="module")
def broker(tmp_path_factory, clock) -> Iterator[Started]:
    config = {
        **ENABLED,
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.num.partitions": "1",
    }
    with Started(tmp_path_factory.mktemp("data"), clock, **config) as started:
        yield started


@pytest.fixture
def admin(broker) -> Iterator[Cluster]:
    with Cluster(broker.bootstrap, client_id="admin") as connected:
        yield connected


@pytest.fixture
def topic(admin) -> str:
    return admin.create_topic(unique("t"), 2)


@contextmanager
def limited(
    broker: Started, admin: Cluster, clock: TestClock, **quotas: float
) -> Iterator[Cluster]:
    """Yield a client with a new client id, which has these quotas."""
    name = unique("limited")
    assert alter(admin, entry({"client-id": name}, **quotas)) == ["none"]
    with Cluster(broker.bootstrap, client_id=name) as client:
        yield client
    assert alter(admin, entry({"client-id": name}, **dict.fromkeys(quotas))) == ["none"]
    clock.advance(seconds=60)


def produced(client: Cluster, topic: str, size: int, acks: int = -1, **more: Any) -> int:
    """Send a Produce request and return its size in bytes."""
    data = batch([b"x" * size])
    body = {
        "transactional_id": None,
        "acks": acks,
        "timeout": 10_000,
        "topic_data": [{"name": topic, "partition_data": [{"index": 0, "records": data}]}],
    }
    client.send("produce", 9, **body, **more)
    return len(encode("produce", 9, 1, client.client_id, body))


def fetched(broker: Started, client: Cluster, topic: str, **more: Any) -> Any:
    """Fetch on a new connection, which is not muted, and return the response."""
    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}
    body = {"replica_id": -1, "max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20}
    topics = [{"topic": topic, "partitions": [part]}]
    with Cluster(broker.bootstrap, client_id=client.client_id) as alone:
        return alone.call("fetch", 11, **{**body, "session_epoch": -1, "topics": topics, **more})


def wait_ms(amount: float, quota: float) -> int:
    return round((amount / WINDOW_S - quota) / quota * WINDOW_S * 1000)


# --- bytes ---------------------------------------------------------------------------------------


def test_producer_above_its_quota_is_answered_at_once_and_muted(broker, admin, clock, topic):
    with limited(broker, admin, clock, producer_byte_rate=1000) as client:
        size = produced(client, topic, 10_000)
        expected_ms = wait_ms(size, 1000)
        assert 0 < expected_ms < 2000
        client.send("metadata", 8, topics=[])
        answer = client.receive()
        since = time.monotonic()
        assert answer["throttle_time"] == expected_ms
        part = answer["responses"][0]["partition_responses"][0]
        assert (part["error_code"], part["base_offset"]) == ("none", 0)
        assert client.receive()["throttle_time"] == 0
        assert time.monotonic() - since >= expected_ms / 1000 - 0.02
        assert produced(admin, topic, 10_000) > 10_000
        assert admin.receive()["throttle_time"] == 0


def test_producer_above_its_quota_with_acks_0_is_muted(broker, admin, clock, topic):
    with limited(broker, admin, clock, producer_byte_rate=1000) as client:
        since = time.monotonic()
        expected_ms = wait_ms(produced(client, topic, 10_000, acks=0), 1000)
        client._waiting.clear()
        assert client.call("metadata", 8, topics=[])["throttle_time"] == 0
        assert time.monotonic() - since >= expected_ms / 1000 - 0.02
        assert admin.offset(topic) == 1


def test_fetch_above_the_quota_returns_no_records_and_is_not_counted(broker, admin, clock, topic):
    for _ in range(10):
        admin.produce(topic, [b"x" * 1000])
    with limited(broker, admin, clock, consumer_byte_rate=300) as client:
        # The quota's bytes per window limit a response.
        first = fetched(broker, client, topic)
        records = first["responses"][0]["partitions"][0]["records"]
        assert first["throttle_time"] == 0
        assert 2000 < len(records) <= 3000
        second = fetched(broker, client, topic)
        assert second["throttle_time"] > 0
        assert second["responses"] == []
        assert (second["error_code"], second["session_id"]) == ("none", 0)
        # Records that were not returned do not count: the throttle time stays the same.
        third = fetched(broker, client, topic)
        assert third["throttle_time"] == second["throttle_time"]
        clock.advance(seconds=11)
        assert fetched(broker, client, topic)["responses"] == first["responses"]


def test_fetch_session_continues_after_a_throttled_fetch(broker, admin, clock, topic):
    admin.produce(topic, [b"x" * 1000])
    with limited(broker, admin, clock, consumer_byte_rate=200) as client:
        opened = fetched(broker, client, topic, session_epoch=0)
        assert opened["session_id"]
        assert opened["throttle_time"] == 0
        more = {"session_id": opened["session_id"], "topics": []}
        admin.produce(topic, [b"y" * 1000])
        fetched(broker, client, topic)
        throttled = fetched(broker, client, topic, **more, session_epoch=1)
        assert throttled["throttle_time"] > 0
        assert throttled["session_id"] == opened["session_id"]
        assert throttled["responses"] == []
        clock.advance(seconds=11)
        told = fetched(broker, client, topic, **more, session_epoch=2)
        assert told["responses"][0]["partitions"][0]["records"]


def test_batch_above_the_quota_of_a_window_is_returned_after_an_idle_window(
    broker, admin, clock, topic
):
    admin.produce(topic, [b"x" * 1000])
    with limited(broker, admin, clock, consumer_byte_rate=99) as client:
        first = fetched(broker, client, topic)
        assert first["throttle_time"] > 0
        assert first["responses"][0]["partitions"][0]["records"]
        assert fetched(broker, client, topic)["responses"] == []
        clock.advance(seconds=11)
        assert fetched(broker, client, topic)["responses"] == first["responses"]


def test_delayed_fetch_is_counted_against_the_quota_when_it_completes(broker, admin, clock, topic):
    with limited(broker, admin, clock, consumer_byte_rate=150) as client:
        part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}
        client.send(
            "fetch",
            11,
            replica_id=-1,
            max_wait=60_000,
            min_bytes=1,
            max_bytes=1 << 20,
            session_epoch=-1,
            topics=[{"topic": topic, "partitions": [part]}],
        )
        until(lambda: len(broker.served.services.fetches.delayed) == 1, "the fetch waits")
        admin.produce(topic, [b"x" * 1000])
        answer = client.receive()
        assert answer["throttle_time"] == 0
        assert answer["responses"][0]["partitions"][0]["records"]
        assert fetched(broker, client, topic)["throttle_time"] > 0


# --- time on the loop ----------------------------------------------------------------------------

TELLING = sorted(
    key
    for key in Registry().versions
    if any(
        field.name == "throttle_time"
        for field in dataclasses.fields(response_factory(key, APIS[key].max_version)._cls)
    )
)


@pytest.mark.parametrize("key", TELLING, ids=lambda key: ApiKey(key).name.lower())
def test_throttled_response_of_every_api_carries_the_throttle_time(broker, admin, clock, key):
    """RequestQuotaTest.testResponseThrottleTime, with requests of zeros and empty strings."""
    body: dict[str, Any] = {}
    if key == ApiKey.API_VERSIONS:
        body = {"client_software_name": "raw", "client_software_version": "1"}
    if key == ApiKey.PRODUCE:
        body = {"acks": 1}
    with limited(broker, admin, clock, request_percentage=0.000_001) as client:
        answer = client.call(ApiKey(key).name.lower(), Registry().versions[key][1], **body)
    assert 0 < answer["throttle_time"] <= 1000


def test_client_without_a_quota_is_not_throttled(broker, admin, clock):
    """RequestQuotaTest.testUnthrottledClient."""
    with limited(broker, admin, clock, request_percentage=0.000_001) as client:
        assert client.call("metadata", 8, topics=[])["throttle_time"] > 0
        assert admin.call("metadata", 8, topics=[])["throttle_time"] == 0


@pytest.mark.parametrize("what", ["produce", "fetch"])
def test_longer_throttle_time_applies_if_two_quotas_are_violated(broker, admin, clock, topic, what):
    """RequestQuotaTest.testResponseThrottleTimeWhenBoth…QuotasViolated."""
    key = {"produce": "producer_byte_rate", "fetch": "consumer_byte_rate"}[what]
    for _ in range(3):
        admin.produce(topic, [b"x" * 100])
    with limited(broker, admin, clock, request_percentage=0.000_001, **{key: 1}) as client:
        if what == "produce":
            produced(client, topic, 100)
            answer = client.receive()
        else:
            answer = fetched(broker, client, topic)
        # A client that has only used time on the event loop is throttled for at most a second.
        assert answer["throttle_time"] > 1000


def test_write_txn_markers_is_exempt_from_the_request_quota(broker, admin, clock):
    """RequestQuotaTest.testExemptRequestTime."""
    with limited(broker, admin, clock, request_percentage=0.000_001) as client:
        for _ in range(3):
            assert client.call("write_txn_markers", 1, markers=[]) == {"markers": []}
        assert not [
            key
            for key in broker.served.services.quotas.budgets["request_percentage"]
            if key[1] == client.client_id
        ]


EMPTY = {"topics": [], "max_wait": 0, "min_bytes": 0, "max_bytes": 1000}


@pytest.mark.parametrize(
    "body",
    [
        {"replica_state": {"replica_id": 1, "replica_epoch": -1}, "session_epoch": -1, **EMPTY},
        {"replica_state": {"replica_id": -1, "replica_epoch": -1}, "session_epoch": -1, **EMPTY},
    ],
    ids=["follower", "consumer"],
)
def test_follower_fetch_is_exempt_from_the_request_quota(broker, admin, clock, body):
    with limited(broker, admin, clock, request_percentage=0.000_001) as client:
        answer = client.call("fetch", 17, **body)
        assert (answer["throttle_time"] == 0) == (body["replica_state"]["replica_id"] >= 0)


def test_follower_fetch_is_exempt_from_the_consumer_byte_rate(broker, admin, clock, topic):
    for _ in range(3):
        admin.produce(topic, [b"x" * 1000])
    with limited(broker, admin, clock, consumer_byte_rate=1) as client:
        for _ in range(2):
            fetched(broker, client, topic)
        held = fetched(broker, client, topic)
        assert held["throttle_time"] > 0
        assert fetched(broker, client, topic, replica_id=1)["throttle_time"] == 0


def sent(client: Cluster, topic: str, data: bytes, acks: int = -1) -> None:
    parts = [{"index": 0, "records": data}]
    body = {"transactional_id": None, "acks": acks, "timeout": 10_000}
    client.send("produce", 9, **body, topic_data=[{"name": topic, "partition_data": parts}])


@pytest.mark.parametrize("acks", [-1, 0])
def test_validation_in_threads_throttles_beyond_a_second_up_to_the_maximum(
    broker, admin, clock, topic, acks
):
    """If the client has used time in threads, the throttle time may exceed a second."""
    quotas = broker.served.services.quotas
    with limited(broker, admin, clock, request_percentage=0.01) as client:
        sent(client, topic, most_records(Codec.ZSTD, 20_000), acks)
        if acks:
            assert 1000 < client.receive()["throttle_time"] <= MAX_DEBT_MS
        (budget,) = until(
            lambda: [
                used
                for entity, used in quotas.budgets["request_percentage"].items()
                if entity[1] == client.client_id and used.throttles
            ],
            "the client has to wait",
        )
        assert 1000 < budget.throttled_ms <= MAX_DEBT_MS


def test_validation_time_of_a_disconnected_client_is_counted(broker, admin, clock, topic):
    quotas = broker.served.services.quotas
    with limited(broker, admin, clock, request_percentage=0.01) as client:
        sent(client, topic, most_records(Codec.ZSTD, 20_000))
        client.close()
        until(
            lambda: [
                entity
                for entity in quotas.budgets["request_percentage"]
                if entity[1] == client.client_id
            ],
            "its time is counted",
        )


@pytest.mark.slow
def test_validation_threads_stay_within_the_request_percentage(tmp_path):
    """The operating system's processor time of the threads stays within the quota."""
    percent, seconds = 20, 8.0
    config = {"quota.window.num": "2", "quota.window.size.seconds": "1"}
    data = most_records(Codec.ZSTD, 60_000)
    with (
        Broker.in_thread(tmp_path, config=config) as started,
        Cluster(started.bootstrap, client_id="busy") as client,
    ):
        topic = client.create_topic(unique("t"))
        assert alter(client, entry({"client-id": "busy"}, request_percentage=percent)) == ["none"]
        sent(client, topic, data)
        client.receive()
        since, before = time.monotonic(), checked_s()
        throttles = []
        while time.monotonic() - since < seconds:
            sent(client, topic, data)
            throttles.append(client.receive()["throttle_time"])
        took = checked_s() - before
        elapsed = time.monotonic() - since
    print(f"{took:.2f} s of {elapsed:.2f} s, {len(throttles)} batches")
    assert sum(throttles) > 1000
    # In the first window the client may use the whole window's quota before it is throttled.
    assert took <= percent / 100 * (elapsed + 2)


def checked_s() -> float:
    """Return the processor time, in seconds, of the threads that check batches."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name.startswith("check_") and thread.ident is not None
    )


def test_request_quota_counts_the_processor_time_of_each_request(broker, admin, clock):
    quotas = broker.served.services.quotas
    with limited(broker, admin, clock, request_percentage=99) as client:

        def spent() -> float:
            budget = quotas.budgets["request_percentage"].get(("", client.client_id))
            return 0 if budget is None else sum(sample.value for sample in budget.rate._samples)

        client.call("metadata", 8, topics=[])
        single = until(spent, "the request is counted")
        for _ in range(10):
            client.call("list_groups", 4)
            client.call("delete_topics", 5, topic_names=["nowhere"])
        assert spent() > single
        # Twenty small requests take less than a second of processor time (100 percent).
        assert spent() < 100


# --- topic mutations -----------------------------------------------------------------------------

RATE = 2


def created(client: Cluster, version: int, *names: str, partitions: int = 30) -> Any:
    topics = [
        {"name": name, "num_partitions": partitions, "replication_factor": 1} for name in names
    ]
    return client.call("create_topics", version, timeout=10_000, topics=topics)


def deleted(client: Cluster, version: int, *names: str) -> Any:
    return client.call("delete_topics", version, timeout=10_000, topic_names=list(names))


def grown(client: Cluster, version: int, *names: str) -> Any:
    topics = [{"name": name, "count": 31} for name in names]
    return client.call("create_partitions", version, timeout=10_000, topics=topics)


CHANGES = {"create": (created, 6), "delete": (deleted, 5), "grow": (grown, 3)}


def codes(answer: Any) -> list[str]:
    parts = answer.get("topics") or answer.get("responses") or answer.get("results")
    return [part["error_code"] for part in parts]


def prepare(admin: Cluster, what: str, names: list[str]) -> None:
    if what != "create":
        created(admin, 5, *names, partitions=30 if what == "delete" else 1)


@pytest.mark.parametrize("what", CHANGES)
def test_strict_request_above_the_mutation_quota_is_partly_refused(broker, admin, clock, what):
    """ControllerMutationQuotaTest.testStrict…Request: 30 mutations exceed 22 by 8: throttle 4 s."""
    names = [unique(what) for _ in range(2)]
    prepare(admin, what, names)
    change, version = CHANGES[what]
    with limited(broker, admin, clock, controller_mutation_rate=RATE) as client:
        first = change(client, version, *names)
        assert first["throttle_time"] == 4000
        assert codes(first) == ["none", "throttling_quota_exceeded"]
        clock.advance(ms=3999)
        with Cluster(broker.bootstrap, client_id=client.client_id) as again:
            assert codes(change(again, version, names[1])) == ["throttling_quota_exceeded"]
        clock.advance(ms=1)
        with Cluster(broker.bootstrap, client_id=client.client_id) as again:
            last = change(again, version, names[1])
        assert (codes(last), last["throttle_time"]) == (["none"], 0)


@pytest.mark.parametrize("what", CHANGES)
def test_permissive_request_above_the_mutation_quota_is_served_and_throttled(
    broker, admin, clock, what
):
    """ControllerMutationQuotaTest.testPermissive…Request: 60 exceed 22 by 38: throttle 19 s."""
    names = [unique(what) for _ in range(2)]
    prepare(admin, what, names)
    change, version = CHANGES[what]
    with limited(broker, admin, clock, controller_mutation_rate=RATE) as client:
        answer = change(client, version - 1, *names)
        assert codes(answer) == ["none"] * 2
        assert answer["throttle_time"] == 19_000


@pytest.mark.parametrize("what", CHANGES)
def test_client_without_a_mutation_quota_changes_topics_at_any_rate(broker, admin, clock, what):
    """ControllerMutationQuotaTest.testUnbounded…Request."""
    names = [unique(what) for _ in range(2)]
    prepare(admin, what, names)
    change, version = CHANGES[what]
    with limited(broker, admin, clock, controller_mutation_rate=RATE):
        answer = change(admin, version, *names)
        assert (codes(answer), answer["throttle_time"]) == (["none"] * 2, 0)


def test_validate_only_counts_toward_the_mutation_quota_invalid_topics_do_not(broker, admin, clock):
    with limited(broker, admin, clock, controller_mutation_rate=RATE) as client:
        topic = {"name": unique("t"), "num_partitions": 22, "replication_factor": 1}
        wrong = [topic | {"replication_factor": 2}] * 1
        answer = client.call("create_topics", 6, timeout=1, topics=wrong)
        assert codes(answer) == ["invalid_replication_factor"]
        for _ in range(2):
            answer = client.call("create_topics", 6, timeout=1, topics=[topic], validate_only=True)
            assert codes(answer) == ["none"]
        answer = client.call("create_topics", 6, timeout=1, topics=[topic])
        assert codes(answer) == ["throttling_quota_exceeded"]


def test_auto_topic_creation_waits_for_the_mutation_quota(broker, admin, clock):
    with limited(broker, admin, clock, controller_mutation_rate=RATE) as client:
        created(client, 6, unique("t"), partitions=24)
        name = unique("auto")
    with limited(broker, admin, clock, controller_mutation_rate=RATE) as client:
        # The second connection stays unmuted; only its topic creation waits for the quota.
        created(client, 5, unique("t"), partitions=23)
        with Cluster(broker.bootstrap, client_id=client.client_id) as again:
            for _ in range(2):
                answer = again.call("metadata", 8, topics=[{"name": name}])
                assert answer["throttle_time"] == 0
                assert answer["topics"][0]["error_code"] == "unknown_topic_or_partition"
            clock.advance(seconds=1)
            again.call("metadata", 8, topics=[{"name": name}])
            until(lambda: again.leaders(name) == 1, "the topic is there")


# --- muted connections ---------------------------------------------------------------------------


def muted(broker: Started, client: Cluster) -> list[Any]:
    """Return the client's connection in a list if it is muted, else an empty list."""
    port = client._socket.getsockname()[1]
    open_ones = broker.served.server.connections
    return [
        opened for opened in open_ones if opened.peer_port == port and opened._muted is not None
    ]


def sweep(broker: Started, connection: Any, after_s: float = 0) -> None:
    """Let the broker check a connection as if the connection had been idle for ``after_s``."""

    async def look() -> None:
        connection.check_idle(connection.last_active + after_s)

    broker.call(look)


def test_muted_connection_that_the_client_closed_is_detected(broker, admin, clock, topic):
    with limited(broker, admin, clock, producer_byte_rate=1) as client:
        produced(client, topic, 1000)
        assert client.receive()["throttle_time"] > 900_000
        (connection,) = muted(broker, client)
        client.send("metadata", 8, topics=[])
        sweep(broker, connection)
        assert muted(broker, client) == [connection]
    sweep(broker, connection)
    until(lambda: connection not in broker.served.server.connections, "it is closed")


def test_muted_connection_is_closed_after_the_idle_timeout(broker, admin, clock, topic):
    with limited(broker, admin, clock, producer_byte_rate=1) as client:
        produced(client, topic, 1000)
        client.receive()
        (connection,) = muted(broker, client)
        limit_s = broker.served.server.limits.max_idle_ms / 1000
        sweep(broker, connection, limit_s - 1)  # rounding might exceed the exact limit
        assert muted(broker, client) == [connection]
        sweep(broker, connection, limit_s + 1)
        with pytest.raises(ConnectionLostError):
            client.receive_frame()
    until(lambda: connection not in broker.served.server.connections, "it is closed")


def test_broker_with_a_muted_connection_stops_at_once(tmp_path):
    with (
        Started(tmp_path, TestClock()) as broker,
        Cluster(broker.bootstrap, client_id="c") as client,
    ):
        topic = client.create_topic("t")
        assert alter(client, entry({"client-id": "c"}, producer_byte_rate=1)) == ["none"]
        produced(client, topic, 1000)
        client.receive()
        client.send("metadata", 8, topics=[])
        server = broker.served.server
        since = time.monotonic()
        broker.stop()
        assert time.monotonic() - since < server.limits.drain_timeout_ms / 1000
        with pytest.raises(ConnectionLostError):
            client.receive_frame()


def test_quota_manager_is_not_consulted_without_quotas(broker, admin, clock, topic, monkeypatch):
    assert broker.served.server.throttles is None

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("somebody asked about quotas")

    with monkeypatch.context() as watched:
        for name in ("LoopTime", "throttle_of", "throttled"):
            watched.setattr(connection, name, asked)
        admin.produce(topic, [b"x"])
        assert admin.values(topic) == [b"x"]
        admin.call("list_groups", 4)
        created(admin, 6, unique("t"))
    with limited(broker, admin, clock, producer_byte_rate=1):
        assert broker.served.server.throttles is broker.served.services.quotas
    assert broker.served.server.throttles is None
    assert alter(admin, entry({"ip": "1.2.3.4"}, connection_creation_rate=5)) == ["none"]
    assert broker.served.server.throttles is None
    assert alter(admin, entry({"ip": "1.2.3.4"}, connection_creation_rate=None)) == ["none"]
