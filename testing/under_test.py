"""The common base of a broker and of a cluster for tests: a test's actions and queries.

All methods use the wire protocol with Fencepost's own client, so no Kafka client needs to be
installed. The calls block. For a test that is a coroutine, ``kafka.aio`` has the same methods as
coroutines, so that clients on the test's loop continue meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kio.schema.errors import ErrorCode

from fencepost.client.client import ApiError
from fencepost.client.partitioner import partition_for
from fencepost.client.queries.claims import claims_of, holder
from fencepost.client.queries.entries import entries_of
from fencepost.client.queries.group_view import GroupView
from fencepost.client.queries.open_transactions import unfinished
from fencepost.client.queries.session import ClusterSession
from fencepost.coordinator.config.key import nearest
from fencepost.coordinator.config.topic_keys import TOPIC_KEYS
from fencepost.logcore.batch import LogRecord
from fencepost.testing.access import USUAL_MECHANISM, BrokerAccess, add_rules
from fencepost.testing.arguments import checked, setting_texts
from fencepost.testing.clients import Clients
from fencepost.testing.clock import TestClock
from fencepost.testing.faults import OWN_CLIENT_ID, Faults
from fencepost.testing.groups import GroupWait, misspelt
from fencepost.testing.levels import level_of, set_level
from fencepost.testing.positions import FetchPositions
from fencepost.testing.reading import TopicReader, describe
from fencepost.testing.shares import ShareWait, States, in_order, merged, states_of
from fencepost.testing.views import (
    Headers,
    Message,
    Offsets,
    OpenTransaction,
    Outgoing,
    Partition,
    Record,
    ShareRecords,
    by_partition,
    bytes_of,
    header_pairs,
    outgoing,
)
from fencepost.testing.waiting import LOOK_S, TIMEOUT_S, is_unknown_topic, passes, wait
from fencepost.testing.writing import chunks, is_created, write

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker
    from fencepost.coordinator.history.entries import Entry

T = TypeVar("T")

SETTLE_S = 5.0
"""How long :meth:`KafkaUnderTest.assert_committed` waits for the expected offsets: offsets in a
transaction are visible only after its end marker."""


@checked
class KafkaUnderTest(ABC):
    """A broker of a test's own (``Kafka``) or a cluster of them (``Cluster``).

    The methods use a super user, so ACLs do not limit them. A wait continues while a coordinator
    loads, a leader is elected, or a broker is down, until its timeout. Timeouts run in real time,
    even if the test has frozen time with freezegun or time-machine.
    """

    clock: TestClock
    """The clock of the broker or brokers."""
    faults: Faults
    """Injected faults of the broker or brokers."""
    _positions: FetchPositions
    """The partitions that consumers fetch, for :meth:`wait_for_fetch`."""

    patience_s = TIMEOUT_S
    """How long a query is retried."""

    look_s = LOOK_S
    """The time limit of a request within a wait."""

    def __init__(self, access: BrokerAccess, rename: Callable[[str], str]) -> None:
        self._access = access
        self._rename = rename
        self._clients = Clients(self)
        self._idle: list[ClusterSession] = []
        self._idle_since = 0
        """The value of :attr:`_ends` when the idle sessions were opened."""
        self._turns: dict[str, int] = defaultdict(int)

    @property
    @abstractmethod
    def bootstrap(self) -> str:
        """HOST:PORT, or several separated by commas, for ``bootstrap.servers``."""

    data_dir: Path
    """The directory of the broker's or the cluster's files."""

    config: dict[str, str]
    """Settings of the broker or brokers, read at each start."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether any broker serves."""

    @abstractmethod
    def serve_again(self) -> None:
        """Start or resume every node that is down or paused, for the next test."""

    @property
    @abstractmethod
    def trouble(self) -> str:
        """The nodes that are down or paused, in a sentence; empty if none is."""

    @property
    @abstractmethod
    def _ends(self) -> int:
        """The number of times that a broker has ended."""

    @abstractmethod
    def _check_running(self) -> None:
        """Raise BrokerDownError while no broker can be called."""

    @abstractmethod
    def _running(self) -> Iterable[Callable[[Callable[[Broker], Any]], Any]]:
        """Return the method ``call`` of each running broker."""

    def _creates_topics(self) -> bool:
        """Return whether brokers create topics for producers."""
        return self.config.get("auto.create.topics.enable", "true").strip().lower() == "true"

    # --- access ---

    def client_config(
        self,
        user: str | None = None,
        style: str = "confluent",
        *,
        mechanism: str = USUAL_MECHANISM,
    ) -> dict[str, Any]:
        """Return the settings of a client, in the client's own format.

        ``style`` is ``confluent`` (also for kcat and other clients with librdkafka), ``aiokafka``,
        ``kafka-python`` (both for keyword arguments) or ``java`` (properties). ``user`` may be
        omitted if there is only one. ``mechanism`` is PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512. Raises
        ValueError.
        """
        return self._access.client_config(self.bootstrap, user, style, mechanism)

    def client(
        self, kind: Callable[..., T], *args: Any, user: str | None = None, **settings: Any
    ) -> T:
        """Make a client of the class ``kind``, connected to the broker; the client is closed first.

        ``kind`` is a class of confluent-kafka, whose settings are a mapping, of kafka-python or of
        aiokafka: ``kafka.client(Producer, {"transactional.id": "shop"})``,
        ``kafka.client(KafkaConsumer, "orders", group_id="shop")``. Address, login and certificate
        of ``user`` are added. A client of aiokafka must still be used with ``async with``.
        """
        return self._clients.make(kind, args, settings, user)

    @property
    def ca_file(self) -> Path:
        """A PEM file with the CA certificate for clients. Raises RuntimeError without ``tls``."""
        return self._access.ca_file

    def acl(self, *rules: str) -> None:
        """Add ACLs: ``"alice READ,DESCRIBE topic:orders"``, ``"deny bob ALL topic:secret-*"``.

        Operations and resources have Kafka's names (``group``, ``transactional-id``, ``cluster``).
        A name that ends in an asterisk is a prefix, the asterisk alone is any name. Raises
        ValueError, and ApiError if the broker has no ``acls``.
        """
        acls = [self._access.rule(rule) for rule in rules]
        with self._session() as session:
            add_rules(session, acls)

    def feature(self, name: str, level: int) -> None:
        """Set a feature's level: ``"share.version", 2`` for dead-letter queues. Raises ApiError."""
        with self._session() as session:
            set_level(session, name, level)

        def is_known(_session: ClusterSession) -> bool:
            return all(call(partial(level_of, name=name)) == level for call in self._running())

        self._wait(is_known, SETTLE_S, lambda: f"not all brokers have {name} {level}")

    # --- topics and records ---

    def name(self, base: str) -> str:
        """Return a name for a topic, a group or a transactional id that no other test uses.

        On a broker of the test's own, return ``base`` itself.
        """
        return self._rename(base)

    def topic(
        self, name: str, partitions: int | None = None, config: Mapping[str, object] | None = None
    ) -> str:
        """Create a topic, and return its full name, which is :meth:`name` of ``name``.

        The default of ``partitions`` is the broker's ``num.partitions``, which is one. Raises
        ApiError, for example TOPIC_ALREADY_EXISTS.
        """
        return self._create(name, partitions, config, None)

    def _create(
        self,
        name: str,
        partitions: int | None,
        config: Mapping[str, object] | None,
        replicas: int | None,
    ) -> str:
        full = self.name(name)
        settings = setting_texts(config or {})
        with self._session() as session:
            try:
                session.create_topic(
                    full,
                    -1 if partitions is None else partitions,
                    settings.items(),
                    replication_factor=-1 if replicas is None else replicas,
                )
            except ApiError as error:
                near = [nearest(key, TOPIC_KEYS) for key in settings if key not in TOPIC_KEYS]
                if error.code is not ErrorCode.invalid_config or not any(near):
                    raise
                raise ApiError(error.code, error.api, f"{error.message}{near[0]}") from None
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
        """Write messages, and return them as records of the log, in the same order.

        A message is a value (bytes, a str that is encoded as UTF-8, or None for a tombstone) or a
        tuple: (key, value), (key, value, headers), (key, value, headers, partition), or (key,
        value, headers, partition, timestamp_ms). The keywords are defaults for all messages. A
        message with a key gets the same partition as in Kafka's Java client; messages without a key
        use the partitions in turn. A message without a timestamp gets the broker's time, see
        :attr:`clock`. A missing topic is created as for any producer, unless
        ``auto.create.topics.enable`` is false. Raises ApiError.
        """
        usual = Outgoing(bytes_of(key), None, header_pairs(headers), partition, timestamp_ms)
        ready = [outgoing(message, usual) for message in messages]
        now_ms = self.clock.now_ms()
        with self._session() as session:
            count = self._partitions(session, topic)
            placed: dict[int, list[tuple[int, LogRecord]]] = defaultdict(list)
            for at, fixture in enumerate(ready):
                index = self._partition_of(topic, fixture, count)
                stamp = now_ms if fixture.timestamp_ms is None else fixture.timestamp_ms
                record = LogRecord(0, stamp, fixture.key, fixture.value, fixture.headers)
                placed[index].append((at, record))
            written: dict[int, Record] = {}
            for index, rows in placed.items():
                for chunk in chunks(rows):
                    base = write(session, (topic, index), [record for _, record in chunk])
                    for offset, (at, record) in enumerate(chunk, base):
                        written[at] = Record(topic, index, offset, *record[1:])
        return [written[at] for at in range(len(ready))]

    def _partitions(self, session: ClusterSession, topic: str) -> int:
        """Return the number of a topic's partitions; create the topic if a producer could."""
        topics = session.client.metadata(refresh=True).topics
        if topic not in topics and self._creates_topics():
            # On a busy machine the creation takes longer than the client retries an unknown topic.
            self._wait(
                partial(is_created, topic=topic), SETTLE_S, lambda: f"{topic} was not created"
            )
        return len(describe(session, topic).partitions)

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
        """Return all records that a consumer can read now, by partition and offset.

        ``isolation`` is ``read_committed`` or ``read_uncommitted``, which is the default as in any
        consumer. With ``at_least``, waits until there are that many records; the topic need not
        exist yet. After ``timeout`` seconds, raises TimeoutError, which describes the records.
        Without ``at_least`` the topic must exist. Raises ApiError.
        """
        __tracebackhide__ = True
        reader = TopicReader(topic, partition, committed=isolation == "read_committed")

        def enough(session: ClusterSession) -> bool:
            reader.read_on(session)
            return len(reader.found) >= at_least

        def is_temporary(error: Exception) -> bool:
            return passes(error) and (at_least > 0 or not is_unknown_topic(error))

        def progress() -> str:
            return f"at least {at_least} records of {topic} ({isolation}): {reader.progress()}"

        self._wait(enough, timeout, progress, is_temporary)
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
    ) -> GroupView:
        """Wait for a group of either protocol, and return the group's state at the end of the wait.

        By default wait until the group is ``Stable``, or ``Empty`` for ``members=0``; ``state`` is
        one of Kafka's names. With ``lag``, also wait until the group's lag is at most this number.
        The lag is the number of records between committed offsets and last stable offsets, summed
        over all partitions with a commit or a member. A partition without a commit counts from its
        log start offset. TimeoutError describes the group's state.
        """
        __tracebackhide__ = True
        return self._wait_for(GroupWait(group, members, state, lag), timeout)

    def wait_for_fetch(
        self, group: str, *, members: int | None = None, timeout: float = TIMEOUT_S
    ) -> GroupView:
        """Wait until a group is Stable and its consumers fetch all of their partitions.

        From then on each consumer has a position in each partition, so that it reads every record
        that is produced, even with ``auto.offset.reset=latest``. At least one member must have a
        partition, and none may be paused. A Fetch names no group: a consumer is recognised by its
        client id and host, so consumers of another group that read the same topics need a client id
        of their own. Not for share groups. TimeoutError names the partitions.
        """
        __tracebackhide__ = True
        missing = self._positions.not_fetched
        return self._wait_for(GroupWait(group, members, not_fetched=missing), timeout)

    def _wait_for(self, waiting: GroupWait, timeout: float) -> GroupView:
        __tracebackhide__ = True
        self._wait(waiting.is_over, timeout, waiting.describe)
        return waiting.seen  # type: ignore[return-value]  # it was looked at

    def committed(self, group: str) -> dict[Partition, int]:
        """Return the committed offsets of a group, by topic and partition."""
        return self._query(
            lambda session: {place: row.offset for place, row in session.committed(group).items()}
        )

    def assert_committed(self, group: str, offsets: Offsets, *, timeout: float = SETTLE_S) -> None:
        """Fail unless the group has committed ``offsets``: ``{"orders": {0: 5}}``.

        Other partitions are ignored; None means that nothing is committed. The assertion waits up
        to ``timeout`` seconds, because a transaction's offsets are visible only after its end
        marker, which the coordinator may write after the response to the commit.
        """
        __tracebackhide__ = True
        expected = by_partition(offsets)
        committed: dict[Partition, int] = {}
        hints: list[str] = []

        def agrees(session: ClusterSession) -> bool:
            nonlocal committed, hints
            committed = {place: row.offset for place, row in session.committed(group).items()}
            if all(committed.get(place) == offset for place, offset in expected.items()):
                return True
            hints = misspelt(session, group, expected, committed)
            return False

        try:
            self._wait(agrees, timeout, lambda: "")
        except TimeoutError as error:
            lines = [
                f"  {topic}:{index} is {committed.get((topic, index))}, not {offset}"
                for (topic, index), offset in sorted(expected.items())
                if committed.get((topic, index)) != offset
            ]
            failed = str(error).partition("; ")[2]
            lines += [f"  {text}" for text in [*hints, failed] if text]
            raise AssertionError(
                "\n".join([f"committed offsets of group {group}:", *lines])
            ) from None

    # --- share groups ---

    def shares(self, group: str) -> list[ShareRecords]:
        """Return the in-flight records of a share group, by topic, partition and offset.

        Neighbouring records with the same state are one entry. A record is in flight from its first
        fetch until its delivery and the deliveries of all records before it have ended.
        """
        return in_order(self._share_states(group))

    def wait_for_shares(
        self,
        group: str,
        record: tuple[str, int, int] | Record | None = None,
        *,
        until: str | None = None,
        delivery_count: int | None = None,
        timeout: float = TIMEOUT_S,
    ) -> list[ShareRecords]:
        """Wait until nothing of a share group is in flight, and return :meth:`shares` then.

        With ``record`` (topic, partition and offset, or a result of :meth:`produce`) wait until the
        delivery of that record has ended, or until it is in the state ``until``, or was delivered
        at least ``delivery_count`` times. Below the start offset a record is ARCHIVED if the
        history says so, otherwise ACKNOWLEDGED, and only archived ones have a delivery count.
        TimeoutError describes the states.
        """
        __tracebackhide__ = True
        place = None if record is None else (record[0], record[1], record[2])
        waiting = ShareWait(group, place, until, delivery_count)
        seen: States = {}
        groups: list[str] = []

        def reached(session: ClusterSession) -> bool:
            nonlocal seen, groups
            seen = self._share_states(group)
            if waiting.is_over(seen, lambda: self.history(group)):
                return True
            groups = [] if seen else [str(row.group_id) for row in session.groups()]
            return False

        def progress() -> str:
            return waiting.describe(seen, lambda: "" if group in groups else nearest(group, groups))

        self._wait(reached, timeout, progress)
        return in_order(seen)

    def _share_states(self, group: str) -> States:
        self._check_running()
        return merged([call(lambda broker: states_of(broker, group)) for call in self._running()])

    # --- transactions and causes ---

    def transactions(self) -> list[OpenTransaction]:
        """Return the ongoing and pending transactions, sorted by transactional id."""
        self._write_history()
        now_ms = self.clock.now_ms()

        def query(session: ClusterSession) -> tuple[list[Any], Mapping[int, Any]]:
            transactions = unfinished(session)
            return transactions, claims_of(
                session, (transaction.producer_id for transaction in transactions)
            )

        transactions, claims = self._query(query)
        rows = []
        for transaction in transactions:
            claim = holder(claims.get(transaction.producer_id, ()), transaction.epoch)
            started_ms = now_ms if transaction.started_ms is None else transaction.started_ms
            rows.append(
                OpenTransaction(
                    transactional_id=transaction.transactional_id,
                    state=transaction.state,
                    producer_id=transaction.producer_id,
                    producer_epoch=transaction.epoch,
                    client=claim.client if claim is not None else None,
                    partitions=tuple(sorted(transaction.partitions)),
                    timeout_ms=transaction.timeout_ms,
                    age_ms=max(0, now_ms - started_ms),
                )
            )
        return rows

    def history(self, subject: str | None = None) -> list[Entry]:
        """Return the events of a group or a transactional id, or of all, oldest first.

        An entry has the event (``what``), its cause (``why``), its numbers (``detail``), the
        request or timer that triggered it (``trigger``), and the request's client (``client_id``,
        ``client_host``).
        """
        self._write_history()
        entries = self._query(lambda session: list(entries_of(session)))
        return [entry for entry in entries if subject is None or entry.subject == subject]

    def _write_history(self) -> None:
        """Make brokers write their buffered history entries before a test reads the history."""

        async def write(broker: Broker) -> None:
            broker.services.history.write_now()

        self._check_running()
        for call in self._running():
            call(write)

    # --- requests ---

    @contextmanager
    def _session(self, limit_s: float = TIMEOUT_S) -> Iterator[ClusterSession]:
        """Yield a connection that no other thread uses meanwhile."""
        self._check_running()
        if self._idle_since != self._ends:
            self._close_sessions()
            self._idle_since = self._ends
        try:
            session = self._idle.pop()
        except IndexError:
            session = ClusterSession(
                self.bootstrap, TIMEOUT_S, client_id=OWN_CLIENT_ID, security=self._access.own()
            )
        session.limit(limit_s)
        try:
            yield session
        except BaseException:
            session.client.close()
            raise
        self._idle.append(session)

    def _close_sessions(self) -> None:
        idle, self._idle = self._idle, []
        for session in idle:
            session.client.close()

    def _wait(
        self,
        reached: Callable[[ClusterSession], bool],
        timeout: float,
        describe: Callable[[], str],
        passing: Callable[[Exception], bool] = passes,
    ) -> None:
        """Poll until ``reached``. Raises TimeoutError with the text of ``describe()``."""
        __tracebackhide__ = True
        self._check_running()

        def probe(limit_s: float) -> bool:
            with self._session(limit_s) as session:
                return reached(session)

        wait(probe, timeout, describe, passing, self.look_s)

    def _query(self, query: Callable[[ClusterSession], T]) -> T:
        """Query until there is an answer; raise the last error after the time limit."""
        __tracebackhide__ = True
        self._check_running()
        error: Exception | None = None

        def ask(limit_s: float) -> tuple[T] | None:
            nonlocal error
            try:
                with self._session(limit_s) as session:
                    return (query(session),)
            except Exception as failure:
                error = failure
                raise

        try:
            return wait(ask, self.patience_s, lambda: "", passes, self.look_s)[0]
        except TimeoutError:
            raise error or TimeoutError() from None
