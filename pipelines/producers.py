"""Opens and closes aiokafka's clients in bounded time, sends batches, reads committed records."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaConnectionError, KafkaError, MessageSizeTooLargeError
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.structs import RecordMetadata

from fencepost.pipelines.records import Output
from fencepost.pipelines.security import PLAINTEXT, Security, aiokafka_options, check_login
from fencepost.pipelines.serde import Serde
from fencepost.pipelines.stopping import consume_exception

STOP_S = 5.0
"""The time limit for a client's orderly stop; then its tasks are cancelled."""

LOOK_S = 2.0
"""How long records are in flight before their topics are checked."""

CheckExisting = Callable[[Collection[str]], Awaitable[None]]
"""Raises an error if one of the topics is gone."""

Left = Callable[[float], float]
"""Reduces a time limit, in seconds, after a stop was requested."""

PRODUCER_DEFAULTS: Mapping[str, Any] = {
    "linger_ms": 5,
    "max_batch_size": 256 * 1024,
    "retry_backoff_ms": 50,
    "request_timeout_ms": 30_000,
}


def _whole(seconds: float) -> float:
    return seconds


async def open_producer(
    bootstrap: str,
    transactional_id: str,
    transaction_timeout_ms: int,
    options: Mapping[str, Any],
    security: Security = PLAINTEXT,
    left_s: Left = _whole,
    adopt: Callable[[AIOKafkaProducer], None] | None = None,
) -> AIOKafkaProducer:
    """Start a producer, which fences its predecessor and completes the id's last transaction.

    ``adopt`` may give the producer an id and epoch before the start, which then sends no
    InitProducerId.

    Raises AuthenticationError if the broker rejects the login; aiokafka reports only that it cannot
    connect.
    """
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        transactional_id=transactional_id,
        transaction_timeout_ms=transaction_timeout_ms,
        **{**PRODUCER_DEFAULTS, **aiokafka_options(security), **options},
    )
    if adopt is not None:
        adopt(producer)
    try:
        await producer.start()
    except BaseException as error:
        await close_producer(producer, left_s)
        if isinstance(error, KafkaConnectionError):
            await check_login(bootstrap, security)
        raise
    return producer


async def abort_open(producer: AIOKafkaProducer, most_s: float) -> bool:
    """Abort the open transaction, if there is one; return whether the producer is usable."""
    manager = producer._txn_manager
    if not manager.is_in_transaction() and manager.state.name != "ABORTABLE_ERROR":
        return bool(manager.state.name == "READY")
    try:
        await asyncio.wait_for(producer.abort_transaction(), most_s)
    except (TimeoutError, KafkaError, AssertionError):
        return False
    return True


async def close_producer(producer: AIOKafkaProducer, left_s: Left = _whole) -> None:
    """Stop a producer in any state. An open transaction is left to the next producer of its id.

    aiokafka's ``stop`` waits for undelivered batches, forever if the broker is away. If ``stop`` is
    cancelled meanwhile, aiokafka leaves its sender running, so this function cancels the sender.
    ``left_s`` reduces time limits.
    """
    sender = producer._sender.sender_task
    # After a timeout or an error, the steps below end the sender and close the connections.
    with contextlib.suppress(TimeoutError, KafkaError, AssertionError, OSError):
        await asyncio.wait_for(producer.stop(), left_s(STOP_S))
        return
    if sender is not None and not sender.done():
        sender.cancel()
        await asyncio.wait([sender], timeout=left_s(STOP_S))
    with contextlib.suppress(TimeoutError, KafkaError, OSError):
        await asyncio.wait_for(producer.client.close(), left_s(STOP_S))


async def close_consumer(consumer: AIOKafkaConsumer, left_s: Left = _whole) -> None:
    """Leave the group and stop, even while the broker is away.

    aiokafka's ``stop`` ends with the CancelledError of its own fetch task if that task was pausing
    after a lost connection. As ``stop`` runs in a separate task here, the error cannot be mistaken
    for a cancellation of the caller.
    """
    stopping = asyncio.create_task(consumer.stop())
    await asyncio.wait([stopping], timeout=left_s(STOP_S))
    if not stopping.done():
        stopping.cancel()
        await asyncio.wait([stopping], timeout=left_s(STOP_S))
    elif not stopping.cancelled() and not stopping.exception():
        return
    with contextlib.suppress(TimeoutError, KafkaError, OSError):
        await asyncio.wait_for(consumer._client.close(), left_s(STOP_S))


async def send_all(
    producer: AIOKafkaProducer,
    outputs: Sequence[Output],
    key_serde: Serde,
    value_serde: Serde,
    check_existing: CheckExisting | None = None,
) -> None:
    """Send ``outputs`` in order, and wait until all are acknowledged.

    If acknowledgements take long, ``check_existing`` checks the topics: aiokafka would keep sending
    to a deleted topic until its timeouts.

    Records are collected here in batches per partition, and the producer gets whole batches: with
    ``send()``, a future and a walk through aiokafka's accumulator for each record would take most
    of the client's time.
    Records without a key fill a batch of one partition before another is chosen (KIP-480).

    Raises the first failure of a batch; ValueError for a partition that the topic lacks;
    MessageSizeTooLargeError above ``max_request_size``.
    """
    sent: list[asyncio.Future[RecordMetadata]] = []
    filling: dict[tuple[str, int], BatchBuilder] = {}
    spreads: dict[str, _Spread] = {}
    try:
        for output in outputs:
            topic = output.topic
            key, value = key_serde.dump(output.key), value_serde.dump(output.value)
            spread = spreads.get(topic)
            if spread is None:
                partitions = await producer.partitions_for(topic)
                spread = spreads[topic] = _Spread(producer, topic, partitions)
            partition = spread.target(key, output.partition)
            at = topic, partition
            builder = filling.get(at)
            if builder is None:
                builder = filling[at] = producer.create_batch()
            record: dict[str, Any] = {
                "timestamp": output.timestamp_ms,
                "key": key,
                "value": value,
                "headers": list(output.headers),
            }
            added = builder.append(**record)
            if added is None:
                sent.append(await producer.send_batch(builder, topic, partition=partition))
                spread.turn(partition)
                builder = filling[at] = producer.create_batch()
                added = builder.append(**record)
            if added.size > producer._max_request_size:
                spread.refuse(added.size)
        for (topic, partition), builder in filling.items():
            builder.close()
            sent.append(await producer.send_batch(builder, topic, partition=partition))
    except BaseException:
        for future in sent:
            future.add_done_callback(consume_exception)
        raise
    waiting: set[asyncio.Future[RecordMetadata]] = set(sent)
    try:
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=LOOK_S if check_existing else None)
            if waiting and check_existing is not None:
                await check_existing(spreads.keys())
    except BaseException:
        for future in sent:
            future.add_done_callback(consume_exception)
        raise
    await asyncio.gather(*sent)


class _Spread:
    """The choice of a topic's partitions for the records of one transaction."""

    def __init__(self, producer: AIOKafkaProducer, topic: str, partitions: Collection[int]) -> None:
        self._topic = topic
        self._known = frozenset(partitions)
        self._all = sorted(partitions)
        self._available = sorted(producer._metadata.available_partitions_for_topic(topic))
        self._choose = producer._partitioner
        self._most_bytes = producer._max_request_size
        self._unkeyed: int | None = None

    def target(self, key: bytes | None, partition: int | None) -> int:
        """Return a record's partition. Raises ValueError for a partition that the topic lacks."""
        if partition is not None:
            if partition not in self._known:
                raise ValueError(
                    f"an output asks for partition {partition} of {self._topic}, which has"
                    f" {len(self._all)}"
                )
            return partition
        if len(self._all) == 1:
            return self._all[0]
        if key is None and self._unkeyed is not None:
            return self._unkeyed
        chosen: int = self._choose(key, self._all, self._available)
        if key is None:
            self._unkeyed = chosen
        return chosen

    def refuse(self, size: int) -> NoReturn:
        """Raise MessageSizeTooLargeError for a record of this size."""
        raise MessageSizeTooLargeError(
            f"an output to {self._topic} takes {size} bytes, more than max_request_size,"
            f" {self._most_bytes}"
        )

    def turn(self, partition: int) -> None:
        """Move on to another partition for records without a key, after a full batch."""
        if self._unkeyed == partition:
            self._unkeyed = None


async def read_committed(
    bootstrap: str,
    source: TopicPartition,
    *,
    timeout_ms: int = 60_000,
    security: Security = PLAINTEXT,
    left_s: Left = _whole,
) -> AsyncIterator[ConsumerRecord]:
    """Yield every committed record of a partition, from its start to its current end.

    The end is the high watermark. If transactions before it are open, or their markers are not
    written yet, wait for them, and yield their records if they commit. Raises TimeoutError if one
    stays open longer than ``timeout_ms``.
    """
    options = {
        "bootstrap_servers": bootstrap,
        "enable_auto_commit": False,
        **aiokafka_options(security),
    }
    async with _consumer(left_s, **options, isolation_level="read_uncommitted") as observer:
        observer.assign([source])
        end = (await observer.end_offsets([source]))[source]
    async with _consumer(left_s, **options, isolation_level="read_committed") as consumer:
        consumer.assign([source])
        await consumer.seek_to_beginning(source)
        last = time.monotonic()
        while await consumer.position(source) < end:
            records = (await consumer.getmany(timeout_ms=200)).get(source, ())
            for record in records:
                if record.offset >= end:
                    return
                yield record
            if records:
                last = time.monotonic()
            elif time.monotonic() - last > timeout_ms / 1000:
                raise TimeoutError(f"{source}: a transaction stayed open for {timeout_ms} ms")


@contextlib.asynccontextmanager
async def _consumer(left_s: Left, **options: Any) -> AsyncIterator[AIOKafkaConsumer]:
    """Return a started consumer, which is stopped within a bounded time."""
    consumer = AIOKafkaConsumer(**options)
    try:
        await consumer.start()
        yield consumer
    finally:
        await close_consumer(consumer, left_s)
