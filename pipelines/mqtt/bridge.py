"""MQTT in, Kafka transactions out; the acknowledgement last."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiomqtt
import structlog
from aiokafka import AIOKafkaProducer, TopicPartition

from coordinator.wire.client import ApiError, AsyncWireClient
from pipelines.failures import Action, Patience, RetryPolicy, classify
from pipelines.mqtt.ledger import Ledger, LedgerError, digest
from pipelines.mqtt.routes import Mapped, RouteError
from pipelines.mqtt.session import (
    Address,
    Publish,
    Release,
    Session,
    SubscriptionRefusedError,
)
from pipelines.producers import close_producer, open_producer, read_committed, send_all
from pipelines.records import REASON, Output
from pipelines.serde import BYTES

_log = structlog.get_logger()

CREATE_TOPICS_VERSION = 5
"""The first in which the broker chooses the replication factor (KIP-464), and all still serve."""

CREATE_TIMEOUT_MS = 30_000


@dataclass(slots=True)
class Counters:
    """Since the start. ``duplicates`` are redeliveries that were recognised."""

    received: int = 0
    written: int = 0
    duplicates: int = 0
    unrouted: int = 0
    transactions: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class BridgeOptions:
    """How large a transaction gets and how long one may take.

    Messages whose topic gives no Kafka topic go to ``dead_letter``; without one they end the
    bridge, unacknowledged.
    """

    max_records: int = 5_000
    linger_ms: float = 5.0
    transaction_timeout_ms: int = 30_000
    dead_letter: str | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)


class Bridge:
    """One bridge: one MQTT client id, one transactional id, one ledger topic."""

    def __init__(
        self, bootstrap: str, address: Address, mapped: Mapped, options: BridgeOptions | None = None
    ) -> None:
        self.counters = Counters()
        self.is_stopping = asyncio.Event()
        self.is_connected = False
        """Subscribed, and writing what comes."""
        self.session: Session | None = None
        """The connection to the MQTT broker, None between two."""
        self._bootstrap = bootstrap
        self._address = address
        self._mapped = mapped
        self._options = options or BridgeOptions()
        name = re.sub(r"[^a-zA-Z0-9._-]", "_", address.client_id)
        self.ledger_topic = f"mqtt-ledger.{name}"[:249]
        self._transactional_id = f"mqtt-bridge.{address.client_id}"
        self._ledger = Ledger()
        self._patience = Patience(self._options.retry)

    def stop(self) -> None:
        """Ask for the end."""
        self.is_stopping.set()

    async def run(self, *, handle_signals: bool = True) -> None:
        """Bridge until :meth:`stop` or a signal. Connects anew, with pauses, after failures.

        Raises what no repetition can heal: a refused subscription, a message without a route and
        without a dead-letter topic, a missing permission.
        """
        loop = asyncio.get_running_loop()
        if handle_signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        while not self.is_stopping.is_set():
            try:
                await self._create_ledger()
                await self._life()
            except Exception as error:
                if isinstance(error, SubscriptionRefusedError | RouteError | LedgerError):
                    raise
                if not isinstance(error, aiomqtt.MqttError) and classify(error) is Action.STOP:
                    raise
                pause_ms = self._patience.failed(error, time.monotonic() * 1000)
                self.counters.restarts += 1
                _log.warning("bridge begins anew", error=repr(error)[:300], pause_ms=pause_ms)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.is_stopping.wait(), pause_ms / 1000)

    async def _create_ledger(self) -> None:
        async with AsyncWireClient(self._bootstrap) as client:
            answer = await client.call(
                "CreateTopics",
                CREATE_TOPICS_VERSION,
                check=False,
                entity=lambda f: f.message(
                    topics=[
                        f.CreatableTopic(
                            name=self.ledger_topic,
                            num_partitions=1,
                            replication_factor=-1,
                            assignments=[],
                            configs=[
                                f.CreatableTopicConfig(name="cleanup.policy", value="compact")
                            ],
                        )
                    ],
                    timeout_ms=CREATE_TIMEOUT_MS,
                ),
            )
        for topic in answer.topics:
            if topic.error_code and topic.error_code.name != "topic_already_exists":
                raise ApiError(topic.error_code, "CreateTopics", topic.error_message)

    async def _life(self) -> None:
        """From fencing the predecessor to the first failure."""
        producer = await open_producer(
            self._bootstrap, self._transactional_id, self._options.transaction_timeout_ms, {}
        )
        try:
            place = TopicPartition(self.ledger_topic, 0)
            values = [record.value async for record in read_committed(self._bootstrap, place)]
            self._ledger = Ledger.restore(values)
            in_doubt = await self._announce(producer)
            async with Session(self._address) as session:
                self.session = session
                await self._bind(session, producer, in_doubt=in_doubt)
                await self._work(session, producer)
        finally:
            self.is_connected = False
            self.session = None
            await close_producer(producer)

    async def _announce(self, producer: AIOKafkaProducer) -> bool:
        """Note that we connect. Returns whether a predecessor did and said nothing more."""
        ledger = self._ledger
        in_doubt = ledger.is_connecting
        if ledger.open and not in_doubt:
            ledger.is_connecting = True
            await self._write(producer, [], ledger.sequence)
        return in_doubt

    async def _bind(self, session: Session, producer: AIOKafkaProducer, *, in_doubt: bool) -> None:
        """Forget the packet ids of a session that the broker has lost.

        Before any subscription, so before any packet id of a new session. A session that the
        broker began for a predecessor who then died has no subscription, so it stays silent.
        """
        ledger = self._ledger
        if not ledger.is_connecting:
            return
        if session.is_new or (in_doubt and not await session.speaks()):
            _log.warning("the session was lost", new=session.is_new, packets=len(ledger.open))
            ledger.new_session()
        ledger.is_connecting = False
        await self._write(producer, [], ledger.sequence)

    async def _work(self, session: Session, producer: AIOKafkaProducer) -> None:
        stopping = asyncio.ensure_future(self.is_stopping.wait())
        # Beside the work: before its answer come the messages of a resumed session, and when they
        # are more than may wait, the answer is only read once some of them are done.
        subscribing = asyncio.ensure_future(session.subscribe(self._mapped))
        tasks: set[asyncio.Future[Any]] = {stopping, subscribing}
        try:
            while not self.is_stopping.is_set():
                gathering = asyncio.ensure_future(
                    session.gather(self._options.max_records, self._options.linger_ms)
                )
                tasks.add(gathering)
                while not (gathering.done() or self.is_stopping.is_set()):
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    if subscribing in tasks and subscribing.done():
                        tasks.discard(subscribing)
                        self._subscribed(subscribing, session)
                if not gathering.done():
                    return  # what has not been gathered is not acknowledged
                tasks.discard(gathering)
                await self._transact(gathering.result(), session, producer)
                self._patience.succeeded()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _subscribed(self, subscribing: asyncio.Future[None], session: Session) -> None:
        subscribing.result()
        _log.info("bridge at work", new_session=session.is_new, ids=len(self._ledger))
        self.is_connected = True

    async def _transact(
        self, events: Sequence[Publish | Release], session: Session, producer: AIOKafkaProducer
    ) -> None:
        """Write what is new, and the ledger, in one transaction; then acknowledge everything."""
        first = self._ledger.sequence
        outputs: list[Output] = []
        changed = False
        for event in events:
            if isinstance(event, Release):
                self._ledger.release(event.packet_id)
                changed = True
                continue
            self.counters.received += 1
            output = self._judge(event)
            if output is None:
                self.counters.duplicates += 1
            else:
                outputs.append(output)
            changed = changed or output is not None or event.qos == 2
        if changed:
            await self._write(producer, outputs, first)
            self.counters.written += len(outputs)
        for event in events:
            session.acknowledge(event)

    async def _write(self, producer: AIOKafkaProducer, outputs: list[Output], first: int) -> None:
        """One transaction: ``outputs``, and the ledger's slots from ``first`` on."""
        slots = [
            Output(self.ledger_topic, value, key, 0) for key, value in self._ledger.snapshot(first)
        ]
        await producer.begin_transaction()
        await send_all(producer, [*outputs, *slots], BYTES, BYTES)
        await producer.commit_transaction()
        self.counters.transactions += 1

    def _judge(self, event: Publish) -> Output | None:
        """Return what is to be written, None for what has been; note it in the ledger.

        Whatever fails after this throws the ledger away with the connection, and both are read
        back from what is committed.
        """
        ledger = self._ledger
        mark = digest(event.topic, event.payload) if event.qos == 2 else b""
        if event.qos == 2 and ledger.is_redelivery(event.packet_id, mark):
            return None
        message_id = self._mapped.message_id.of(event.topic, event.payload, event.properties)
        known = message_id is not None and ledger.knows(message_id)
        if event.qos == 2:
            ledger.receive(event.packet_id, mark)
        if known:
            return None
        if message_id is not None:
            ledger.add_id(message_id)
        headers = (
            ("mqtt.topic", event.topic.encode()),
            ("mqtt.qos", b"%d" % event.qos),
            ("mqtt.retain", b"%d" % event.retain),
            *((f"mqtt.property.{name}", text.encode()) for name, text in event.properties.items()),
        )
        try:
            topic, key = self._mapped.route(event.topic).target(event.topic)
        except RouteError as error:
            self.counters.unrouted += 1
            if self._options.dead_letter is None:
                raise
            reason = (REASON, str(error).encode())
            letter = self._options.dead_letter
            return Output(letter, event.payload, event.topic.encode(), headers=(*headers, reason))
        return Output(topic, event.payload, key, headers=headers)
