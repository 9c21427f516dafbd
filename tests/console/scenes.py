"""Events on a broker for tests of the console, and the console in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import confluent_kafka
from confluent_kafka import TopicPartition

from fencepost.console.server import ConsoleSettings, served
from tests.support.cluster import unique
from tests.support.waits import until
from tests.wire.clients import confluent_consumer, confluent_producer
from tests.wire.test_consumer_protocol import member

TOKEN = "a-token-of-the-tests"
MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@contextlib.contextmanager
def running(bootstrap: str, **settings: Any) -> Iterator[str]:
    """Run a console in a thread with its own loop; yield its URL without the token."""
    started, stop = threading.Event(), threading.Event()
    found: list[str | BaseException] = []

    async def serve() -> None:
        told = {"bootstrap": bootstrap, "token": TOKEN, "timeout_s": 5.0, **settings}
        async with served(ConsoleSettings(**told)) as url:
            found.append(url.partition("#")[0])
            started.set()
            await asyncio.get_running_loop().run_in_executor(None, stop.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            found.append(error)
            raise
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(30)
        url = found[0]
        assert isinstance(url, str), url
        yield url
    finally:
        stop.set()
        thread.join(30)


@contextlib.contextmanager
def open_transaction(
    bootstrap: str, topic: str, values: Sequence[str] = ("open",), *, partition: int = 0
) -> Iterator[tuple[str, confluent_kafka.Producer]]:
    """Open a transaction with ``values``; at the end of the block, abort it if it is open."""
    name = unique("pipeline")
    conf = {"transactional_id": name, "client_id": f"{name}-client"}
    with confluent_producer(bootstrap, **conf) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, key=b"in-txn", partition=partition)
        producer.flush(60)
        yield name, producer
        with contextlib.suppress(confluent_kafka.KafkaException):
            producer.abort_transaction(60)


def write(
    bootstrap: str,
    topic: str,
    values: Sequence[bytes | str | None],
    *,
    partition: int = 0,
    key: bytes | str | None = None,
    headers: Mapping[str, bytes] | None = None,
) -> None:
    """Write records without a transaction."""
    with confluent_producer(bootstrap) as producer:
        for value in values:
            producer.produce(
                topic, value, key=key, partition=partition, headers=list((headers or {}).items())
            )


def commit(bootstrap: str, group: str, topic: str, offset: int, partition: int = 0) -> None:
    """Commit an offset for ``group``, which needs no members."""
    with confluent_consumer(bootstrap, group_id=group) as consumer:
        place = TopicPartition(topic, partition, offset)
        consumer.commit(offsets=[place], asynchronous=False)


def fence(bootstrap: str, topic: str, name: str) -> None:
    """Run two producers with one id; the second fences the first during the first's transaction."""
    conf = {"transactional_id": name, "client_id": "the-zombie"}
    shut_out = contextlib.suppress(confluent_kafka.KafkaException)
    with shut_out, confluent_producer(bootstrap, **conf) as first:
        first.init_transactions(60)
        first.begin_transaction()
        first.produce(topic, b"of the zombie")
        first.flush(60)
        with confluent_producer(bootstrap, **{**conf, "client_id": "the-successor"}) as second:
            second.init_transactions(60)
            first.commit_transaction(60)


@contextlib.contextmanager
def share_member(
    bootstrap: str, group: str, topic: str, client_id: str
) -> Iterator[confluent_kafka.ShareConsumer]:
    """Run a member of a share group that holds all records of a topic."""
    consumer = confluent_kafka.ShareConsumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "client.id": client_id,
            "share.acknowledgement.mode": "explicit",
        }
    )
    consumer.subscribe([topic])
    held: list[confluent_kafka.Message] = []

    def has_records() -> bool:
        held.extend(consumer.poll(0.5))
        return bool(held)

    try:
        until(has_records, "records are acquired")
        yield consumer
    finally:
        # The consumer acknowledges nothing when it closes, so the records are released.
        consumer.close()


@contextlib.contextmanager
def stuck_rebalance(
    bootstrap: str, group: str, topic: str, protocol: str = "classic"
) -> Iterator[None]:
    """Run a group that waits for the member ``polls-no-more``, which owns all partitions."""
    stop = threading.Event()
    with contextlib.ExitStack() as stack:

        def enter(name: str) -> confluent_kafka.Consumer:
            conf = {"client_id": name, "max_poll_interval_ms": 120_000}
            if protocol == "consumer":
                return stack.enter_context(member(bootstrap, group, topic, **conf))
            more = {"group_id": group, "session_timeout_ms": 60_000}
            return stack.enter_context(confluent_consumer(bootstrap, **conf, **more))

        first = enter("polls-no-more")
        first.subscribe([topic])
        until(lambda: first.poll(0.1) is None and first.assignment(), "its partitions")
        second = enter("newcomer")
        second.subscribe([topic])

        def poll() -> None:
            while not stop.is_set():
                second.poll(0.05)

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@contextlib.contextmanager
def members(
    bootstrap: str, group: str, topic: str, *names: str, protocol: str = "classic"
) -> Iterator[None]:
    """Run group members that own partitions and poll all the time."""
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        consumers = []
        for name in names:
            if protocol == "consumer":
                new_consumer = stack.enter_context(member(bootstrap, group, topic, client_id=name))
            else:
                conf = {"group_id": group, "client_id": name}
                new_consumer = stack.enter_context(confluent_consumer(bootstrap, **conf))
                new_consumer.subscribe([topic])
            consumers.append(new_consumer)

        def all_have() -> bool:
            for consumer in consumers:
                consumer.poll(0.05)
            return all(consumer.assignment() for consumer in consumers)

        until(all_have, "an assignment of each")

        def poll() -> None:
            while not stop.is_set():
                for consumer in consumers:
                    consumer.poll(0.05)

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
