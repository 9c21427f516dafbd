"""Clients that can be given up at any moment, and how state is read back."""

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
from fencepost.pipelines.stopping import look_at

STOP_S = 5.0
"""How long an orderly end of a client may take; then its tasks are cancelled."""

LOOK_S = 2.0
"""How long records are on their way before their topics are looked for."""

CheckThere = Callable[[Collection[str]], Awaitable[None]]
"""Raises where one of the topics is gone."""

Left = Callable[[float], float]
"""How much of a time limit, in seconds, may be spent: less where the end was asked for."""

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
) -> AIOKafkaProducer:
    """Start a producer: it fences its predecessor, and settles the last transaction of its id.

    Raises AuthenticationError where the broker does not take us, of which aiokafka says no more
    than that it can't connect.
    """
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        transactional_id=transactional_id,
        transaction_timeout_ms=transaction_timeout_ms,
        **{**PRODUCER_DEFAULTS, **aiokafka_options(security), **options},
    )
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
    """Stop it, in any state. An open transaction is left to its next owner.

    aiokafka's ``stop`` waits for undelivered batches, for ever if the broker is away, and leaves
    its sender running when it is cancelled meanwhile; that one is ended here. ``left_s`` says how
    much of a time limit is left to spend.
    """
    sender = producer._sender.sender_task
    # In a task of its own: wait_for would hide whether it was stop() that timed out.
    with contextlib.suppress(TimeoutError, KafkaError, AssertionError, OSError):
        await asyncio.wait_for(producer.stop(), left_s(STOP_S))
        return
    if sender is not None and not sender.done():
        sender.cancel()
        await asyncio.wait([sender], timeout=left_s(STOP_S))
    with contextlib.suppress(TimeoutError, KafkaError, OSError):
        await asyncio.wait_for(producer.client.close(), left_s(STOP_S))


async def close_consumer(consumer: AIOKafkaConsumer, left_s: Left = _whole) -> None:
    """Leave the group and stop, also while the broker is away.

    aiokafka's ``stop`` ends with the cancellation of its own fetch if that one was pausing after
    a lost connection. In a task of its own that cannot be taken for a cancellation of the caller.
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
    check_there: CheckThere | None = None,
) -> None:
    """Send ``outputs`` in their order and wait until all are acknowledged.

    With ``check_there`` their topics are looked for while that takes long: aiokafka would send to
    a topic that was deleted for as long as its time-outs allow.

    Records go into batches of their partition here, and whole batches to the producer: a future
    and a walk through its accumulator for each record would take most of the client's time.
    Records without a key fill a batch of one partition before another is chosen (KIP-480).

    Raises the first failure of any of them; ValueError for a partition that its topic does not
    have; MessageSizeTooLargeError above ``max_request_size``.
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
                known = await producer.partitions_for(topic)
                spread = spreads[topic] = _Spread(producer, topic, known)
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
        for one in sent:
            one.add_done_callback(look_at)
        raise
    waiting: set[asyncio.Future[RecordMetadata]] = set(sent)
    try:
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=LOOK_S if check_there else None)
            if waiting and check_there is not None:
                await check_there(spreads.keys())
    except BaseException:
        for one in sent:
            one.add_done_callback(look_at)
        raise
    await asyncio.gather(*sent)


class _Spread:
    """Which partitions of a topic the records of one transaction go to."""

    def __init__(self, producer: AIOKafkaProducer, topic: str, known: Collection[int]) -> None:
        self._topic = topic
        self._known = frozenset(known)
        self._all = sorted(known)
        self._available = sorted(producer._metadata.available_partitions_for_topic(topic))
        self._choose = producer._partitioner
        self._most_bytes = producer._max_request_size
        self._unkeyed: int | None = None

    def target(self, key: bytes | None, asked: int | None) -> int:
        """The partition of one record. Raises ValueError for one that the topic does not have."""
        if asked is not None:
            if asked not in self._known:
                raise ValueError(
                    f"an output asks for partition {asked} of {self._topic}, which has"
                    f" {len(self._all)}"
                )
            return asked
        if len(self._all) == 1:
            return self._all[0]
        if key is None and self._unkeyed is not None:
            return self._unkeyed
        chosen: int = self._choose(key, self._all, self._available)
        if key is None:
            self._unkeyed = chosen
        return chosen

    def refuse(self, size: int) -> NoReturn:
        """Raise for a record of so many bytes."""
        raise MessageSizeTooLargeError(
            f"an output to {self._topic} takes {size} bytes, more than max_request_size,"
            f" {self._most_bytes}"
        )

    def turn(self, partition: int) -> None:
        """A batch of ``partition`` is full: records without a key go elsewhere now."""
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
    """Yield every committed record of a partition, from its beginning to its present end.

    The end is the high watermark, so that a transaction that is still open, or whose markers are
    still on their way, is waited for: its records count if it commits. Raises TimeoutError when
    it stays open longer than ``timeout_ms``.
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
    """A consumer that is started, and whose end is bounded."""
    consumer = AIOKafkaConsumer(**options)
    try:
        await consumer.start()
        yield consumer
    finally:
        await close_consumer(consumer, left_s)
