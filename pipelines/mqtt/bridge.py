"""A bridge from MQTT to Kafka; it acknowledges a message after the commit of its transaction.

A QoS 2 message passes these points; ``T1`` and ``T2`` are transactions, and each survives a kill
of the bridge or of the Kafka broker as a whole or not at all:

    PUBLISH → T1: record, packet id open → PUBREC → PUBREL → T2: packet id released → PUBCOMP

The message is written once even if the connection or a process ends

* before T1: the MQTT broker has no PUBREC, and publishes again under the same id (MQTT 5, 4.4).
  The bridge does not know the message yet;
* from T1 to PUBREC: the broker publishes again, and the ledger has the id as open;
* from PUBREC to T2: the broker publishes again, or releases again if it has read PUBREC. The id is
  open;
* from T2 until PUBCOMP is read: the broker releases again, which changes nothing. It does not use
  the id for another message before PUBCOMP, so no other message is taken for this one;
* with the outcome of T1 or T2 unknown: the bridge drops the connection, the next producer's
  InitProducerId completes the transaction, and the bridge reads the ledger back after that;
* because a second bridge uses the client id: the second bridge fences the first one's producer,
  then reads the ledger, and only then connects. The first acknowledges QoS 2 messages only after a
  commit, so the second finds every acknowledged message in the ledger.

In two cases Mosquitto (2.0.11 to 2.0.20) publishes a released message again, with DUP, so that the
protocol alone does not cover T2 to PUBCOMP; the ledger's released ids do:

* Mosquitto was restarted. It restores at most ``max_inflight_messages`` messages as in flight, but
  had sent more: with MQTT 5 up to our Receive Maximum, with 3.1.1 because of a wrong count when
  many messages wait (fixed in 2.0.13). It queues the others as if they had not been sent;
* the bridge's connection broke before Mosquitto read its CONNECT. Mosquitto then forgets that it
  must send PUBREL again.

No bridge can know the messages that Mosquitto forgets when it is killed: pipelines/README.md has
the limits. :meth:`Bridge._bind` and :class:`~fencepost.pipelines.mqtt.session.Settled` detect the
losses that can be noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiomqtt
import structlog
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import TopicAuthorizationFailedError

from fencepost.client.access import missing_right
from fencepost.client.client import (
    ApiError,
    AsyncWireClient,
    AuthenticationError,
    SecurityError,
)
from fencepost.pipelines.failures import (
    Action,
    MissingTopicError,
    NotAuthorizedError,
    Patience,
    RetryPolicy,
    classify,
    explained,
)
from fencepost.pipelines.mqtt.ledger import Ledger, LedgerError, digest, former_digest
from fencepost.pipelines.mqtt.routes import Mapped, RouteError
from fencepost.pipelines.mqtt.session import (
    SESSION_EXPIRY_S,
    Address,
    Event,
    LoginRefusedError,
    MqttSession,
    Publish,
    Release,
    Settled,
    SubscriptionRefusedError,
)
from fencepost.pipelines.producers import (
    abort_open,
    close_producer,
    open_producer,
    read_committed,
    send_all,
)
from fencepost.pipelines.records import MAX_REASON_CHARS, REASON, Headers, Output
from fencepost.pipelines.security import PLAINTEXT, Security, watched
from fencepost.pipelines.serde import BYTES
from fencepost.pipelines.stopping import (
    CLEAN_UP_S,
    STOP_MS,
    StopRequest,
    consume_exception,
    stop_on_signals,
)
from fencepost.pipelines.topics import CREATE_TOPICS_VERSION, TOPIC_WAIT_MS, Topics, illegal

_log = structlog.get_logger()

CREATE_TIMEOUT_MS = 30_000

CANCEL_S = 10.0
"""The time limit for tasks that are cancelled together with a connection."""

LEDGER_CONFIGS = {
    "cleanup.policy": "compact",
    # The active segment is never compacted, and every connection reads it.
    "segment.bytes": str(4 * 1024 * 1024),
    # Each transaction leaves its marker, which compaction keeps for this long.
    "delete.retention.ms": str(10 * 60 * 1000),
}

MAX_REQUEST_BYTES = 1024 * 1024
"""aiokafka's default ``max_request_size``; a ledger slot fits in it with any number of open ids."""

MAX_RECORD_BYTES = 1_000_000
"""The default limit of a record: a broker's ``message.max.bytes`` is 1,048,588 by default."""

MIN_RECORD_BYTES = 300_000
"""The lowest ``max_record_bytes``: an MQTT topic, in key and header, may take 131,070 bytes."""

RECORD_OVERHEAD_BYTES = 200
"""The size of a record, alone in its batch, without key, value and headers."""

PART = "dead-letter.part"
"""The header of a dead letter with a part of a payload: ``1/3``, ``2/3``, ``3/3``."""

CLIENT_ID_CHARS = 200
"""A longer client id is cut, and a hash appended, in the ledger's topic name (at most 249)."""


@dataclass(slots=True)
class Counters:
    """Counters since the start.

    ``duplicates`` are recognised redeliveries; ``repeated`` are those duplicates whose packet id
    the MQTT broker had already released (PUBREL). ``unwritable`` messages became dead letters
    because their Kafka topic does not exist. ``sessions_lost`` and ``forgotten`` (packets in flight
    that the broker did not know after a reconnection) mean that the MQTT broker has lost state:
    from then on it may have lost messages that it had acknowledged to their publishers.
    """

    received: int = 0
    written: int = 0
    duplicates: int = 0
    repeated: int = 0
    unrouted: int = 0
    too_large: int = 0
    unwritable: int = 0
    sessions_lost: int = 0
    forgotten: int = 0
    transactions: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class BridgeOptions:
    """Limits of a transaction, and settings of the connections.

    ``dead_letter`` receives messages without a route to a Kafka topic, messages whose topic does
    not exist after ``topic_wait_ms``, and messages whose record would exceed ``max_record_bytes``.
    Without a dead-letter topic such a message ends the bridge, and is not acknowledged. The topics'
    ``max.message.bytes`` must leave room for a record of ``max_record_bytes`` (a broker's default
    does). At a stop, a transaction in progress has ``stop_ms`` to end. ``security`` applies to
    connections to Kafka. ``renewed`` is called before each connection, and returns the current
    settings for both sides.
    """

    max_records: int = 5_000
    max_bytes: int = 16 * 1024 * 1024
    max_record_bytes: int = MAX_RECORD_BYTES
    linger_ms: float = 5.0
    transaction_timeout_ms: int = 30_000
    stop_ms: int = STOP_MS
    topic_wait_ms: int = TOPIC_WAIT_MS
    dead_letter: str | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    security: Security = PLAINTEXT
    renewed: Callable[[], tuple[Address, Security]] | None = None

    def __post_init__(self) -> None:
        if self.max_record_bytes < MIN_RECORD_BYTES:
            raise ValueError(
                f"max_record_bytes = {self.max_record_bytes}: it must be at least"
                f" {MIN_RECORD_BYTES}"
            )
        if self.dead_letter is not None and (reason := illegal(self.dead_letter)):
            raise ValueError(f"dead_letter: {reason}")


def ledger_topic(client_id: str) -> str:
    """Return the name of the ledger's topic; two client ids never have the same ledger."""
    name = re.sub(r"[^a-zA-Z0-9._-]", "_", client_id)
    if name != client_id or len(name) > CLIENT_ID_CHARS:
        name = f"{name[:CLIENT_ID_CHARS]}.{hashlib.sha256(client_id.encode()).hexdigest()[:16]}"
    return f"mqtt-ledger.{name}"


class Bridge:
    """One bridge: one MQTT client id, one transactional id, one ledger topic."""

    def __init__(
        self, bootstrap: str, address: Address, mapped: Mapped, options: BridgeOptions | None = None
    ) -> None:
        self._options = options or BridgeOptions()
        self.counters = Counters()
        self.is_stopping = StopRequest(self._options.stop_ms)
        self.is_connected = False
        """Whether the bridge has subscribed, and writes the messages that arrive."""
        self.session: MqttSession | None = None
        """The current connection to the MQTT broker."""
        self._bootstrap = bootstrap
        self._address = address
        self._mapped = mapped
        self.ledger_topic = ledger_topic(address.client_id)
        self._transactional_id = f"mqtt-bridge.{address.client_id}"
        self.ledger = Ledger()
        """Known packet ids and message ids; rebuilt for each connection."""
        self._security = self._options.security
        self._topics = Topics(bootstrap, self._security, self._options.topic_wait_ms)
        self._patience = Patience(self._options.retry)
        self._is_transacting = False
        """Whether records are being written, so that a stop waits."""
        self._has_worked = False
        """Whether both sides have accepted a login, so that a refusal may be temporary."""

    def stop(self) -> None:
        """Ask the bridge to stop."""
        self.is_stopping.set()

    async def run(self, *, handle_signals: bool = True) -> None:
        """Bridge until :meth:`stop` or a signal. Reconnects after failures, with pauses.

        Raises errors that a retry cannot fix: a refused subscription, a message without a route
        and without a dead-letter topic, a missing permission, a login that never succeeded. A login
        that succeeded before is retried with growing pauses: its credentials may be changing on
        both sides.
        """
        with stop_on_signals(self.stop) if handle_signals else contextlib.nullcontext():
            await self.is_stopping.run_until_set(
                self._run_connections(), lambda: self._is_transacting
            )

    async def _run_connections(self) -> None:
        while not self.is_stopping.is_set():
            try:
                if self._options.renewed is not None:
                    self._address, self._security = self._options.renewed()
                await self._create_ledger()
                await self._run_connection()
            except Exception as error:
                is_login = isinstance(
                    error, LoginRefusedError | AuthenticationError | SecurityError
                )
                if self._is_final(error) and not (is_login and self._has_worked):
                    shown = explained(error, (), self._security.username)
                    if shown is error:
                        raise
                    raise shown from error
                pause_ms = self._patience.failed(error, time.monotonic() * 1000, is_login=is_login)
                self.counters.restarts += 1
                _log.warning("bridge restarts", error=repr(error)[:300], pause_ms=pause_ms)
                await asyncio.sleep(pause_ms / 1000)

    @staticmethod
    def _is_final(error: Exception) -> bool:
        if isinstance(error, aiomqtt.MqttError):
            return isinstance(error, SubscriptionRefusedError | LoginRefusedError)
        return isinstance(error, RouteError | LedgerError) or classify(error) is Action.STOP

    async def _create_ledger(self) -> None:
        """Create the ledger's topic if it is missing; only this needs the right CREATE."""
        async with AsyncWireClient(self._bootstrap, security=self._security) as client:
            metadata = (await client.metadata()).topics.get(self.ledger_topic)
            if metadata is not None and not metadata.error:
                return
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
                                f.CreatableTopicConfig(name=name, value=value)
                                for name, value in LEDGER_CONFIGS.items()
                            ],
                        )
                    ],
                    timeout_ms=CREATE_TIMEOUT_MS,
                ),
            )
        for topic in answer.topics:
            if topic.error_code and topic.error_code.name != "topic_already_exists":
                missing = missing_right("CreateTopics", topic.error_code, topic.name)
                if missing:
                    who = self._security.username
                    user_text = f" to user {who!r}" if who else ""
                    raise NotAuthorizedError(f"{missing} is missing{user_text}, to begin with")
                if topic.error_code.name == "invalid_topic_exception":
                    raise MissingTopicError(
                        f"the ledger's topic cannot be created: {topic.error_message}; choose"
                        " another client id"
                    )
                raise ApiError(topic.error_code, "CreateTopics", topic.error_message)

    async def _run_connection(self) -> None:
        """Fence the predecessor, connect, and work until the first failure."""
        options, left_s = self._options, self.is_stopping.left_s
        producer = await open_producer(
            self._bootstrap,
            self._transactional_id,
            options.transaction_timeout_ms,
            {"max_request_size": max(MAX_REQUEST_BYTES, options.max_record_bytes)},
            self._security,
            left_s,
        )
        self._topics = Topics(self._bootstrap, self._security, options.topic_wait_ms)
        try:
            values = await self._read_ledger()
            self.ledger = Ledger.restore(values)
            in_doubt = await self._announce(producer)
            _log.info("bridge connects", mqtt=f"{self._address.host}:{self._address.port}")
            async with MqttSession(self._address) as session:
                self.session = session
                self._has_worked = True
                self._log_session_state(session, is_first=not values)
                await self._bind(session, producer, in_doubt=in_doubt)
                await self._work(session, producer)
        finally:
            self.is_connected = self._is_transacting = False
            self.session = None
            if self.is_stopping.is_set():
                # Otherwise readers would wait for an open transaction until its timeout.
                await abort_open(producer, left_s(CLEAN_UP_S))
            await close_producer(producer, left_s)
            await self._topics.close()

    async def _read_ledger(self) -> list[bytes]:
        place = TopicPartition(self.ledger_topic, 0)
        reading = read_committed(
            self._bootstrap, place, security=self._security, left_s=self.is_stopping.left_s
        )
        try:
            return [record.value async for record in reading]
        except TopicAuthorizationFailedError as error:
            raise explained(error, [self.ledger_topic], self._security.username) from error

    def _log_session_state(self, session: MqttSession, *, is_first: bool) -> None:
        """Log lost messages, or the risk of losing some, as the CONNACK shows them."""
        if session.is_new and not is_first:
            self.counters.sessions_lost += 1
            _log.warning(
                "the MQTT broker has lost the session, and what it had queued for it",
                packets_open=len(self.ledger.open),
            )
        expiry_s = session.session_expiry_s
        if expiry_s is not None and expiry_s != SESSION_EXPIRY_S:
            _log.warning("the MQTT broker drops the session without a connection", after_s=expiry_s)

    async def _announce(self, producer: AIOKafkaProducer) -> bool:
        """Record in the ledger that a CONNECT follows; return whether it was recorded already.

        A predecessor's record remains if the predecessor ended before it used the answer.
        """
        ledger = self.ledger
        in_doubt = ledger.is_connecting
        if ledger.has_packets and not in_doubt:
            ledger.is_connecting = True
            await self._write(producer, [])
        return in_doubt

    async def _bind(
        self, session: MqttSession, producer: AIOKafkaProducer, *, in_doubt: bool
    ) -> None:
        """Forget the packet ids of a session that the broker has lost.

        A new session has no packet ids yet, because the bridge has not subscribed. CONNACK does not
        show a new session if a predecessor's CONNECT began it and the predecessor then died. So
        after such a CONNECT the ids are also forgotten if the broker repeats no message: the
        session is new, or an old one without messages in flight, which needs no ids either.
        """
        ledger = self.ledger
        if not ledger.is_connecting:
            return
        if session.is_new or (in_doubt and not await session.speaks()):
            _log.info("packet ids are forgotten", new=session.is_new, packets=len(ledger.open))
            ledger.new_session()
        ledger.is_connecting = False
        await self._write(producer, [])

    async def _work(self, session: MqttSession, producer: AIOKafkaProducer) -> None:
        # A resumed session's messages arrive before SUBACK. If they fill the queue, SUBACK is read
        # only after some of them are written, so do not wait for it before the first transaction.
        subscribing = asyncio.ensure_future(session.subscribe(self._mapped))
        tasks: set[asyncio.Future[Any]] = {subscribing}
        try:
            while not self.is_stopping.is_set():
                gathering = asyncio.ensure_future(
                    session.gather(
                        self._options.max_records, self._options.max_bytes, self._options.linger_ms
                    )
                )
                tasks.add(gathering)
                while not gathering.done():
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    if subscribing in tasks and subscribing.done():
                        tasks.discard(subscribing)
                        self._subscribed(subscribing, session)
                tasks.discard(gathering)
                work = asyncio.ensure_future(self._transact(gathering.result(), session, producer))
                tasks.add(work)
                await watched(work, self._bootstrap, self._security)
                tasks.discard(work)
                work.result()
                self._patience.succeeded()
        finally:
            # Gathered events that are not written are not acknowledged, so the broker resends them.
            for task in tasks:
                task.cancel()
                task.add_done_callback(consume_exception)
            if tasks:
                await asyncio.wait(tasks, timeout=self.is_stopping.left_s(CANCEL_S))

    def _subscribed(self, subscribing: asyncio.Future[None], session: MqttSession) -> None:
        subscribing.result()
        _log.info("bridge at work", new_session=session.is_new, ids=len(self.ledger))
        self.is_connected = True

    async def _transact(
        self, events: Sequence[Event], session: MqttSession, producer: AIOKafkaProducer
    ) -> None:
        """Write new messages and the ledger in one transaction; then acknowledge all events."""
        judged: list[tuple[Publish, list[Output]]] = []
        changed = False
        for event in events:
            if isinstance(event, Settled):
                self._settle()
                continue
            if isinstance(event, Release):
                self.ledger.release(event.packet_id)
                changed = True
                continue
            self.counters.received += 1
            outputs = self._outputs_of(event)
            self.counters.duplicates += not outputs
            judged.append((event, outputs))
            changed = changed or bool(outputs) or event.qos == 2
        if changed:
            writable = await self._writable(judged)
            self._is_transacting = True
            await self._write(producer, writable)
            self.counters.written += len(writable)
        for event in events:
            session.acknowledge(event)
        self._is_transacting = False

    async def _writable(self, judged: Sequence[tuple[Publish, list[Output]]]) -> list[Output]:
        """Return the outputs of all messages, with dead letters for missing Kafka topics.

        Raises MissingTopicError if the dead-letter topic is missing, too.
        """
        refused = await self._topics.unwritable(
            {output.topic for _, message_outputs in judged for output in message_outputs}
        )
        written: list[Output] = []
        for event, outputs in judged:
            if outputs and (reason := refused.get(outputs[0].topic)):
                text = f"{event.topic!r}: {reason}"
                self.counters.unwritable += 1
                written += self._letters(event, outputs[0].headers, MissingTopicError(text))
            else:
                written += outputs
        dead_letter = self._options.dead_letter
        if refused and dead_letter is not None:
            lost = await self._topics.unwritable([dead_letter])
            if lost:
                raise MissingTopicError(f"dead letters cannot be written: {lost[dead_letter]}")
        return written

    def _settle(self) -> None:
        forgotten = self.ledger.settle()
        self.counters.forgotten += forgotten
        if forgotten:
            _log.warning(
                "the MQTT broker has forgotten packets that were under way: it came back with an "
                "older state, or they have expired",
                packets=forgotten,
            )

    async def _write(self, producer: AIOKafkaProducer, outputs: list[Output]) -> None:
        """Write ``outputs`` and the changed slots of the ledger in one transaction."""
        slots = [Output(self.ledger_topic, value, key, 0) for key, value in self.ledger.snapshot()]
        await producer.begin_transaction()
        await send_all(producer, [*outputs, *slots], BYTES, BYTES, self._topics.check_existing)
        await producer.commit_transaction()
        self.counters.transactions += 1

    def _is_redelivery(self, event: Publish) -> bool:
        """Return whether the packet id shows a redelivery; mark the id as open in the ledger."""
        ledger = self.ledger
        mark = digest(event.topic, event.payload, event.properties, event.lasting)
        marks = mark, former_digest(event.topic, event.payload, event.properties)
        is_redelivery = any(
            ledger.is_redelivery(event.packet_id, log, dup=event.dup) for log in marks
        )
        if is_redelivery and any(ledger.was_released(event.packet_id, log) for log in marks):
            if not self.counters.repeated:
                _log.warning("the MQTT broker repeats messages that it had seen through")
            self.counters.repeated += 1
        ledger.receive(event.packet_id, mark, dup=event.dup)
        return is_redelivery

    def _outputs_of(self, event: Publish) -> list[Output]:
        """Return a message's outputs, none for a redelivery; note the message in the ledger.

        Any later failure discards the ledger together with the connection, and the next connection
        reads the committed state back.
        """
        ledger = self.ledger
        if event.qos == 2 and self._is_redelivery(event):
            return []
        message_id = self._mapped.message_id.of(event.topic, event.payload, event.properties)
        if message_id is not None and ledger.knows(event.topic, message_id, dup=event.dup):
            return []
        if message_id is not None:
            ledger.add_id(event.topic, message_id)
        headers = (
            ("mqtt.topic", event.topic.encode()),
            ("mqtt.qos", b"%d" % event.qos),
            ("mqtt.retain", b"%d" % event.retain),
            *((f"mqtt.{name}", value) for name, value in event.attributes),
            *((f"mqtt.property.{name}", text.encode()) for name, text in event.properties),
        )
        try:
            topic, key = self._mapped.route(event.topic).target(event.topic)
            output = Output(topic, event.payload, key, headers=headers)
            if record_bytes(output) > self._options.max_record_bytes:
                raise TooLargeError(
                    f"{event.topic!r}: a record of {record_bytes(output)} bytes, more than "
                    f"max_record_bytes, {self._options.max_record_bytes}"
                )
        except RouteError as error:
            self.counters.unrouted += not isinstance(error, TooLargeError)
            self.counters.too_large += isinstance(error, TooLargeError)
            return self._letters(event, headers, error)
        return [output]

    def _letters(self, event: Publish, headers: Headers, error: Exception) -> list[Output]:
        """Return the message's dead letters. Raises ``error`` if there is no dead-letter topic."""
        dead_letter = self._options.dead_letter
        if dead_letter is None:
            raise error
        return letters(event, headers, str(error), dead_letter, self._options.max_record_bytes)


class TooLargeError(RouteError):
    """The message is larger than any permitted record."""


def record_bytes(output: Output) -> int:
    """Return an upper estimate of the record's size, alone in its batch."""
    header_bytes = sum(len(name.encode()) + len(value) + 10 for name, value in output.headers)
    return RECORD_OVERHEAD_BYTES + len(output.key or b"") + len(output.value or b"") + header_bytes


def letters(
    event: Publish, headers: Headers, reason: str, topic: str, most_bytes: int
) -> list[Output]:
    """Return a message's dead letters, in several parts if it exceeds the size of a record.

    MQTT 5's properties are left out if they take over half of a record; the reason says so.
    """
    key = event.topic.encode()

    def frame(headers: Headers, reason: str) -> Headers:
        return (*headers, (REASON, reason[:MAX_REASON_CHARS].encode()), (PART, b"00000/00000"))

    framed = frame(headers, reason)
    if record_bytes(Output(topic, b"", key, headers=framed)) > most_bytes // 2:
        count = len(event.properties) + len(event.attributes)
        reason = f"{count} properties left out; {reason}"
        framed = frame(headers[: len(headers) - count], reason)
    room = most_bytes - record_bytes(Output(topic, b"", key, headers=framed))
    parts = [event.payload[at : at + room] for at in range(0, len(event.payload), room)] or [b""]
    fields = framed[:-1]
    if len(parts) == 1:
        return [Output(topic, parts[0], key, headers=fields)]
    return [
        Output(topic, part, key, headers=(*fields, (PART, b"%d/%d" % (number, len(parts)))))
        for number, part in enumerate(parts, 1)
    ]
