"""A broker for tests, in a thread of its own, with what a test wants to do to it and know of it.

Everything that a method asks goes over the wire, with Fencepost's own client: no Kafka client needs
to be installed. The calls block. In a test that is a coroutine, ``kafka.aio`` has the same methods
to be awaited, so that clients on the test's loop go on meanwhile.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from fencepost.coordinator.cli.partitioner import partition_for
from fencepost.coordinator.cli.queries.claims import claims_of, holder
from fencepost.coordinator.cli.queries.entries import entries_of
from fencepost.coordinator.cli.queries.group_view import Group, look_at, offset_rows, totals
from fencepost.coordinator.cli.queries.open_transactions import unfinished
from fencepost.coordinator.cli.queries.session import Session, check
from fencepost.coordinator.wire.client.requests import produce as produce_request
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.clock import monotonic_s
from fencepost.testing.access import USUAL_MECHANISM, Access, add_rules, parse_rule
from fencepost.testing.broker import OwnBroker
from fencepost.testing.clock import TestClock
from fencepost.testing.faults import OWN_CLIENT_ID
from fencepost.testing.reading import TopicReader
from fencepost.testing.views import (
    Headers,
    Message,
    Offsets,
    OpenTransaction,
    Outgoing,
    Partition,
    Record,
    by_partition,
    bytes_of,
    header_pairs,
    outgoing,
)

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker
    from fencepost.coordinator.history.entries import Entry

P = ParamSpec("P")
T = TypeVar("T")

SETTINGS: Mapping[str, str] = {
    "group.min.session.timeout.ms": "100",
    "group.consumer.heartbeat.interval.ms": "100",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.assignment.interval.ms": "0",
    "group.consumer.min.session.timeout.ms": "100",
}
"""Where a broker for tests differs from others: nobody waits for the sake of a fleet."""

TIMEOUT_S = 30.0
"""The patience of waits and of single requests; only a failing test spends it."""

SETTLE_S = 5.0
"""The patience with offsets that differ: they are those of a transaction, maybe, that has ended."""

POLL_S = 0.01
"""The pause between two looks at a state that does not tell of its change."""

BATCH_BYTES = 256 << 10
"""Keys and values of one batch that :meth:`Kafka.produce` writes; one message may have more."""


class Kafka(OwnBroker):
    """One broker, from ``start`` (or ``with``) to ``stop``.

    ``config`` has settings by Kafka's names, over :data:`SETTINGS`; a truth value becomes Kafka's
    word for it. Without a ``data_dir`` the broker has a directory of its own that goes with it.
    ``rename`` makes the names of :meth:`name` and :meth:`topic`; by default they stay as they are.
    ``users`` (passwords by name) have to log in, ``tls`` encrypts, and with ``acls`` they may do
    only what rules allow (see :meth:`acl`); the methods here may do everything.
    Its ``clock`` begins at ``now_ms``, by default at the machine's time of day (also where a test
    has frozen that), and runs as fast, until :attr:`clock`.auto is set to False. It may be moved on
    at any time.
    """

    clock: TestClock

    def __init__(
        self,
        data_dir: str | Path | None = None,
        config: Mapping[str, object] | None = None,
        *,
        users: Mapping[str, str] | None = None,
        tls: bool = False,
        acls: Sequence[str] | None = None,
        now_ms: int | None = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        self._access = Access(users, tls=tls, acls=acls)
        settings = {**SETTINGS, **self._access.settings, **setting_texts(config or {})}
        super().__init__(
            data_dir or "",
            config=settings,
            clock=TestClock(now_ms, auto=True),
            forces=False,
            add_scram=self._access.added,
        )
        self._has_rules = False
        self._is_temporary = data_dir is None
        self._rename = rename
        self._idle: list[Session] = []
        self._turns: dict[str, int] = defaultdict(int)

    # --- life ---

    def start(self) -> Self:
        """Start and wait until it listens. Raises BrokerError, and ConfigError for a setting."""
        if self._is_temporary and not self.data_dir.name:
            self.data_dir = Path(tempfile.mkdtemp(prefix="fencepost-"))
        try:
            super().start()
            if not self._has_rules:
                with self._session() as session:
                    self._access.make_rules(session)
                self._has_rules = True
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop it in an orderly way; a temporary directory is removed."""
        self._hang_up()
        super().stop()
        self._access.close()
        if self._is_temporary and self.data_dir.name:
            shutil.rmtree(self.data_dir, ignore_errors=True)
            self.data_dir = Path()

    def crash(self) -> None:
        """End as by ``kill -9``: sockets are reset, files stay as they are at this moment.

        What was acknowledged is in them; what a stop would have written is not.
        """
        self._hang_up()
        super().crash()

    def restart(self) -> Self:
        """Start again, on the same directory and port; stops before that if it still runs."""
        self._hang_up()
        return super().restart()

    def __repr__(self) -> str:
        return (
            f"<Kafka {self.bootstrap or 'that never started'}{'' if self.is_running else ', down'}>"
        )

    @cached_property
    def aio(self) -> Aio:
        """The same methods for coroutines, on asyncio and on trio."""
        return Aio(self)

    # --- who may come in ---

    def client_config(
        self,
        user: str | None = None,
        style: str = "confluent",
        *,
        mechanism: str = USUAL_MECHANISM,
    ) -> dict[str, Any]:
        """What a client of this broker has to be told, in its own words.

        ``style`` is ``confluent`` (also for kcat and whatever has librdkafka inside), ``aiokafka``,
        ``kafka-python`` (both for keyword arguments) or ``java`` (properties). The only user need
        not be named. ``mechanism`` is PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512. Raises ValueError.
        """
        return self._access.client_config(self.bootstrap, user, style, mechanism)

    @property
    def ca_file(self) -> Path:
        """A PEM file with the authority that clients trust. RuntimeError without ``tls``."""
        return self._access.ca_file

    def acl(self, *rules: str) -> None:
        """Add rules: ``"alice READ,DESCRIBE topic:orders"``, ``"deny bob ALL topic:secret-*"``.

        Operations and resources have Kafka's names (``group``, ``transactional-id``, ``cluster``).
        A name that ends in an asterisk is a prefix, the asterisk alone is any. Raises ValueError,
        and ApiError if the broker has no ``acls``.
        """
        wanted = [parse_rule(rule) for rule in rules]
        with self._session() as session:
            add_rules(session, wanted)

    # --- topics and records ---

    def name(self, base: str) -> str:
        """A name for a topic, a group or a transactional id that no other test uses.

        On a broker of the test's own that is ``base`` itself.
        """
        return self._rename(base)

    def topic(
        self, name: str, partitions: int | None = None, config: Mapping[str, object] | None = None
    ) -> str:
        """Create a topic and return what it is called: :meth:`name` of ``name``.

        Without ``partitions`` it has as many as ``num.partitions`` says, which is one. Raises
        ApiError, with TOPIC_ALREADY_EXISTS among the reasons.
        """
        full = self.name(name)
        with self._session() as session:
            session.create_topic(
                full, -1 if partitions is None else partitions, setting_texts(config or {}).items()
            )
        return full

    def produce(
        self,
        topic: str,
        *messages: Message,
        key: bytes | str | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> list[Record]:
        """Write messages and return them as they are in the log, in the same order.

        A message is a value (bytes, a str that is encoded as UTF-8, or None for a tombstone) or a
        tuple: (key, value), (key, value, headers), (key, value, headers, partition), and with
        timestamp_ms. The keywords are for messages that do not say so themselves. Messages with a
        key go where Kafka's Java client sends them, those without to one partition after the other;
        without a time they get that of the broker's clock. A topic that is not there is created as
        for any producer, unless ``auto.create.topics.enable`` is false. Raises ApiError.
        """
        usual = Outgoing(bytes_of(key), None, header_pairs(headers), partition, timestamp_ms)
        ready = [outgoing(message, usual) for message in messages]
        now_ms = self.clock.now_ms()
        with self._session() as session:
            count = self._partitions(session, topic)
            placed: dict[int, list[tuple[int, LogRecord]]] = defaultdict(list)
            for at, one in enumerate(ready):
                index = self._partition_of(topic, one, count)
                stamp = now_ms if one.timestamp_ms is None else one.timestamp_ms
                record = LogRecord(0, stamp, one.key, one.value, one.headers)
                placed[index].append((at, record))
            written: dict[int, Record] = {}
            for index, rows in placed.items():
                for chunk in _chunks(rows):
                    base = _write(session, (topic, index), [record for _, record in chunk])
                    for offset, (at, record) in enumerate(chunk, base):
                        written[at] = Record(topic, index, offset, *record[1:])
        return [written[at] for at in range(len(ready))]

    def _partitions(self, session: Session, topic: str) -> int:
        """How many partitions the topic has; it is created if a producer could do so."""
        known = session.client.metadata(refresh=True).topics
        if topic not in known and self._creates_topics():
            session.client.call(
                "Metadata",
                entity=lambda f: f.message(
                    topics=[f.MetadataRequestTopic(name=topic)], allow_auto_topic_creation=True
                ),
            )
        return len(session.topics([topic])[0].partitions)

    def _creates_topics(self) -> bool:
        return self.config.get("auto.create.topics.enable", "true").strip().lower() == "true"

    def _partition_of(self, topic: str, message: Outgoing, count: int) -> int:
        if message.partition is not None:
            if not 0 <= message.partition < count:
                raise ValueError(f"{topic} has no partition {message.partition}, but {count}")
            return message.partition
        if message.key is not None:
            return partition_for(message.key, count)
        self._turns[topic] += 1
        return (self._turns[topic] - 1) % count

    def records(
        self,
        topic: str,
        *,
        isolation: str = "read_uncommitted",
        partition: int | None = None,
        at_least: int = 0,
        timeout: float = TIMEOUT_S,
    ) -> list[Record]:
        """All records that a reader can get now, by partition and offset.

        ``isolation`` is Kafka's word, ``read_committed`` or (as for any consumer) by default
        ``read_uncommitted``. Waits until there are ``at_least`` so many; TimeoutError, which tells
        what there was, after ``timeout`` seconds. Raises ApiError.
        """
        __tracebackhide__ = True
        if isolation not in {"read_committed", "read_uncommitted"}:
            raise ValueError(f"isolation is read_committed or read_uncommitted, not {isolation!r}")
        with self._session() as session:
            reader = TopicReader(session, topic, partition, committed=isolation == "read_committed")

            def enough() -> bool:
                reader.read_on()
                return len(reader.found) >= at_least

            self._wait(
                enough,
                timeout,
                lambda: f"{at_least} records of {topic} ({isolation}): {reader.told()}",
            )
        return sorted(reader.found, key=lambda record: (record.partition, record.offset))

    # --- groups ---

    def wait_for_group(
        self,
        group: str,
        *,
        members: int | None = None,
        state: str | None = None,
        lag: int | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Group:
        """Wait for a group, of either protocol, and return it as it then is.

        By default until it is ``Stable``, or ``Empty`` for ``members=0``; ``state`` is one of
        Kafka's words. With ``lag`` also until a read_committed reader could get at most so many
        more records from what it has committed or owns; a partition without a commit counts from
        its log start. TimeoutError tells how it was instead.
        """
        __tracebackhide__ = True
        wanted = ("Empty" if members == 0 else "Stable") if state is None else state
        seen = Group(group, "", "Dead", "", None, ())
        behind: int | None = None

        def reached() -> bool:
            nonlocal seen, behind
            with self._session() as session:
                seen = look_at(session, group)
                if seen.state != wanted or (members is not None and len(seen.members) != members):
                    return False
                if lag is None:
                    return True
                behind = totals(offset_rows(session, [seen]))["lag_at_most"]
            return behind is not None and behind <= lag

        def told() -> str:
            asked = f"{wanted}{'' if members is None else f' with {members} members'}"
            if lag is not None:
                told_lag = "unknown" if behind is None else behind
                asked += f" and at most {lag} behind (it is {told_lag})"
            clients = ", ".join(f"{one.client_id}@{one.host}" for one in seen.members)
            count = len(seen.members)
            return (
                f"group {group} {asked}: it is {seen.state} with {count} members"
                f"{f' ({clients})' if clients else ''}"
            )

        self._wait(reached, timeout, told)
        return seen

    def committed(self, group: str) -> dict[Partition, int]:
        """The committed offsets of a group, by topic and partition."""
        with self._session() as session:
            return {place: row.offset for place, row in session.committed(group).items()}

    def assert_committed(self, group: str, offsets: Offsets, *, timeout: float = SETTLE_S) -> None:
        """Fail unless the group has committed ``offsets``: ``{"orders": {0: 5}}``.

        Partitions that are not named are not looked at; None says that nothing is committed. As the
        offsets of a transaction count some moments after its commit is answered, a difference has
        ``timeout`` seconds to go.
        """
        __tracebackhide__ = True
        wanted = by_partition(offsets)
        seen: dict[Partition, int] = {}

        def agrees() -> bool:
            nonlocal seen
            seen = self.committed(group)
            return all(seen.get(place) == offset for place, offset in wanted.items())

        try:
            self._wait(agrees, timeout, lambda: "")
        except TimeoutError:
            lines = [
                f"  {topic}:{index} is {seen.get((topic, index))}, not {offset}"
                for (topic, index), offset in sorted(wanted.items())
                if seen.get((topic, index)) != offset
            ]
            raise AssertionError(
                "\n".join([f"committed offsets of group {group}:", *lines])
            ) from None

    # --- transactions and causes ---

    def transactions(self) -> list[OpenTransaction]:
        """The transactions that have not ended, open or prepared, by transactional id."""
        self._write_history()
        now_ms = self.clock.now_ms()
        with self._session() as session:
            found = unfinished(session)
            claims = claims_of(session, (one.producer_id for one in found))
        rows = []
        for one in found:
            claim = holder(claims.get(one.producer_id, ()), one.epoch)
            started_ms = now_ms if one.started_ms is None else one.started_ms
            rows.append(
                OpenTransaction(
                    transactional_id=one.transactional_id,
                    state=one.state,
                    producer_id=one.producer_id,
                    producer_epoch=one.epoch,
                    client=claim.client if claim is not None else None,
                    partitions=tuple(sorted(one.partitions)),
                    timeout_ms=one.timeout_ms,
                    age_ms=max(0, now_ms - started_ms),
                )
            )
        return rows

    def history(self, subject: str | None = None) -> list[Entry]:
        """What happened to a group or a transactional id, or to all, oldest first, and why.

        ``what`` is the event, ``detail`` its cause and numbers, ``trigger`` the request or timer
        that set it off, ``client_id`` and ``client_host`` who sent that.
        """
        self._write_history()
        with self._session() as session:
            return [
                entry
                for entry in entries_of(session)
                if subject is None or entry.subject == subject
            ]

    def _write_history(self) -> None:
        """What the broker remembers and has not written yet, is written before it is read."""

        async def write(broker: Broker) -> None:
            broker.services.history.write_now()

        self._check_running()
        self.call(write)

    # --- requests ---

    def _check_running(self) -> None:
        if not self.is_running:
            raise RuntimeError("the broker is down; kafka.restart() starts it again")

    @contextmanager
    def _session(self) -> Iterator[Session]:
        """A connection that nobody else uses meanwhile, whatever thread he is in."""
        self._check_running()
        try:
            session = self._idle.pop()
        except IndexError:
            session = Session(
                self.bootstrap, TIMEOUT_S, client_id=OWN_CLIENT_ID, security=self._access.own()
            )
        try:
            yield session
        except BaseException:
            session.client.close()
            raise
        self._idle.append(session)

    def _hang_up(self) -> None:
        idle, self._idle = self._idle, []
        for session in idle:
            session.client.close()

    def _wait(self, reached: Callable[[], bool], timeout: float, told: Callable[[], str]) -> None:
        """Look until it is so. Raises TimeoutError with what is ``told`` then."""
        __tracebackhide__ = True
        end = monotonic_s() + timeout
        while not reached():
            if monotonic_s() >= end:
                raise TimeoutError(f"not within {timeout} s: {told()}{_advice()}")
            time.sleep(POLL_S)


def setting_texts(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings as Kafka writes them. Raises TypeError for a value that is no setting."""
    found = {}
    for key, value in settings.items():
        if isinstance(value, bool):
            found[key] = str(value).lower()
        elif isinstance(value, (str, int, float)):
            found[key] = str(value)
        else:
            raise TypeError(f"{key}={value!r}: a setting is a str, a number or a truth value")
    return found


def _chunks(rows: list[tuple[int, LogRecord]]) -> Iterator[list[tuple[int, LogRecord]]]:
    """Cut so that a batch stays well below ``message.max.bytes``."""
    chunk: list[tuple[int, LogRecord]] = []
    size = 0
    for row in rows:
        more = len(row[1].key or b"") + len(row[1].value or b"")
        if chunk and size + more > BATCH_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append((row[0], row[1]._replace(offset=len(chunk))))
        size += more
    if chunk:
        yield chunk


def _write(session: Session, place: Partition, records: list[LogRecord]) -> int:
    """Append one batch and return its first offset."""
    batch = encode_batch(records, base_offset=0)
    answer = session.client.call(
        "Produce",
        9,
        to_leader=place,
        entity=lambda make: produce_request(
            make, {place: batch}, timeout_ms=session.timeout_ms, transactional_id=None
        ),
    )
    row = answer.responses[0].partition_responses[0]
    check(row.error_code, "Produce", f"{place[0]}-{place[1]}", getattr(row, "error_message", None))
    offset: int = row.base_offset
    return offset


def _advice() -> str:
    """Whoever waits inside a coroutine may have stopped what he waits for."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ""
    return "; the call blocked this thread's event loop, which `await kafka.aio.…` does not"


def _beside(
    method: Callable[Concatenate[Kafka, P], T],
) -> Callable[Concatenate[Aio, P], Coroutine[Any, Any, T]]:
    @wraps(method)
    async def call(self: Aio, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _in_thread(partial(method, self.kafka, *args, **kwargs))

    return call  # type: ignore[return-value]  # it takes its ``self`` by position only


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # What is not asyncio and runs coroutines is trio, which is then imported already.
        trio = sys.modules["trio"]
        result: T = await trio.to_thread.run_sync(work)
        return result
    return await asyncio.to_thread(work)


class Aio:
    """``kafka.aio``: each method runs in a thread beside, so that the test's loop goes on."""

    def __init__(self, kafka: Kafka) -> None:
        self.kafka = kafka

    topic = _beside(Kafka.topic)
    produce = _beside(Kafka.produce)
    records = _beside(Kafka.records)
    wait_for_group = _beside(Kafka.wait_for_group)
    committed = _beside(Kafka.committed)
    assert_committed = _beside(Kafka.assert_committed)
    transactions = _beside(Kafka.transactions)
    history = _beside(Kafka.history)
    crash = _beside(Kafka.crash)
    restart = _beside(Kafka.restart)
