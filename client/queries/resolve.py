"""Collects the evidence about transactions, and ends an open one under its own identity."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kio.schema.errors import ErrorCode

from fencepost.client.client import ApiError, WireClient
from fencepost.client.queries.blame import Blame, blame
from fencepost.client.queries.entries import entries_of
from fencepost.client.queries.evidence import EndMarker, StateLog, end_markers, state_logs
from fencepost.client.queries.open_transactions import (
    ONGOING,
    Producer,
    is_two_phase,
    known_transaction,
    producers,
)
from fencepost.client.queries.resolution import (
    Evidence,
    Resolution,
    Verdict,
    agree,
    begun,
    is_whole,
    partitions_of,
    resolve,
    target_of,
)
from fencepost.coordinator.history.entries import TRANSACTION, Entry
from fencepost.coordinator.metadata.names import is_internal
from fencepost.logcore.errors import LogError
from fencepost.protocol.errors import WireError
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.events import RESOLVER_CLIENT_ID, EventKind
from fencepost.txn.state import TV2

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.requests import Partition

CLOCK_SKEW_MS = 600_000
"""How far the clocks of a coordinator and of a partition's leader may differ."""

MAX_READS = 3
"""The maximum number of reads of the log for a transaction whose state changes meanwhile."""

LAST_TV1_END_TXN = 4
"""The last version of EndTxn that leaves the producer's epoch as it is."""


class Question(NamedTuple):
    """A transaction to resolve: by default the last one of the transactional id."""

    transactional_id: str
    identity: ProducerIdentity | None = None


class Answer(NamedTuple):
    """The verdict about a transaction, and the partitions in which readers wait for it."""

    resolution: Resolution
    waiting: tuple[Blame, ...]
    history: tuple[Entry, ...]
    """The entries about the transaction's end in the event history; Apache Kafka has none."""

    @property
    def is_unknown(self) -> bool:
        """Whether the question names only an id, and nothing shows that it was ever used."""
        resolution = self.resolution
        return resolution.verdict is Verdict.NO_EVIDENCE and resolution.identity is None


def resolve_all(
    session: ClusterSession,
    questions: Sequence[Question],
    places: Collection[Partition] = (),
    since_ms: int | None = None,
) -> list[Answer]:
    """Return the verdict about each transaction.

    ``places`` are searched for markers in addition to the partitions that the coordinator and
    ``__transaction_state`` name, from ``since_ms`` on.
    """
    names = {question.transactional_id for question in questions}
    logs, history = state_logs(session, names), _history(session, names)
    return [
        _resolve_question(
            session, question, logs[question.transactional_id], history, places, since_ms
        )
        for question in questions
    ]


def _resolve_question(
    session: ClusterSession,
    question: Question,
    log: StateLog,
    history: Sequence[Entry],
    places: Collection[Partition],
    since_ms: int | None,
) -> Answer:
    name, identity = question
    current = known_transaction(session, name)
    for _ in range(MAX_READS):
        if log.unreadable or agree(current, log):
            break
        log, current = state_logs(session, [name])[name], known_transaction(session, name)
    entries = tuple(entry for entry in history if entry.subject == name)
    expired = [entry.at_ms for entry in entries if entry.what == EventKind.TRANSACTIONAL_ID_EXPIRED]
    evidence = Evidence(
        transactional_id=name,
        identity=identity,
        current=current,
        log=log,
        expired_ms=expired[-1] if expired else None,
    )
    if identity is not None:
        evidence = _searched(session, evidence, target_of(identity, log), places, since_ms)
    resolution = resolve(evidence)
    waiting: tuple[Blame, ...] = ()
    if resolution.verdict in {Verdict.OPEN, Verdict.HANGING}:
        held = {transaction.place for transaction in evidence.open_here}
        held |= current.partitions if current is not None and current.state == ONGOING else set()
        waiting = _waiting(session, [place for place in held if not is_internal(place[0])])
    return Answer(resolution, waiting, tuple(_end_entries(entries, resolution)))


def _waiting(session: ClusterSession, held: Sequence[Partition]) -> tuple[Blame, ...]:
    """Return the partitions with records behind the last stable offset."""
    places = _existing_partitions(session, held)
    try:
        blames = blame(session, places)
    except ApiError:
        blames = []
        for place in places:
            with contextlib.suppress(ApiError):  # it has no leader, or may not be described
                blames += blame(session, [place])
    return tuple(row for row in blames if row.stable < row.end)


def _searched(
    session: ClusterSession,
    evidence: Evidence,
    target: ProducerIdentity,
    places: Collection[Partition],
    since_ms: int | None,
) -> Evidence:
    """Add the evidence of partitions."""
    current, records = evidence.current, evidence.log.records
    is_current = current is not None and (current.producer_id, current.epoch) == target
    partitions = partitions_of(records, target)
    partitions |= current.partitions if current is not None and is_current else frozenset()
    # Skip __consumer_offsets: it gets the same markers as the partitions with records.
    existing = _existing_partitions(
        session,
        {partition for partition in partitions if not is_internal(partition[0])} | {*places},
    )
    if not existing:
        return evidence
    known_begun = begun(records, target)
    is_new = bool(known_begun) and known_begun[-1].client_transaction_version >= TV2
    if is_new or is_whole(records, target):
        if is_current and current is not None and current.state == ONGOING:
            # No other transaction can have ended under this identity.
            return replace(evidence, open_here=_open_producers(session, existing, target))
        if since_ms is None and known_begun:
            # The transaction's markers are younger than its start, and no older batch would prove
            # more.
            since_ms = known_begun[0].start_ms - CLOCK_SKEW_MS
    markers: list[EndMarker] = []
    searched, unread = [], []
    for place in existing:
        try:
            markers += end_markers(session, place, target, since_ms)
            searched.append(place)
        except (ApiError, LogError) as error:  # without a leader, without the right, or damaged
            unread.append(f"{place[0]}:{place[1]}: {error}")
    return replace(
        evidence,
        end_markers=tuple(markers),
        open_here=_open_producers(session, searched, target),
        searched=tuple(searched),
        unread=tuple(unread),
    )


def _existing_partitions(session: ClusterSession, places: Iterable[Partition]) -> list[Partition]:
    topics = session.client.metadata().topics
    return sorted(
        (topic, index)
        for topic, index in set(places)
        if topic in topics and index in topics[topic].partitions
    )


def _open_producers(
    session: ClusterSession, places: Sequence[Partition], target: ProducerIdentity
) -> tuple[Producer, ...]:
    try:
        rows = producers(session, places)
    except WireError:  # an older broker
        return ()
    return tuple(row for row in rows if row.is_open and row.producer_id == target.producer_id)


def _history(session: ClusterSession, names: Iterable[str]) -> list[Entry]:
    subjects = [(TRANSACTION, name) for name in names]
    try:
        return list(entries_of(session, subjects=subjects))
    except WireError:  # the history may not be readable, and the logs have the proof
        return []


class Abort(NamedTuple):
    """The abort of a transaction, from the broker's event history."""

    at_ms: int
    client: str
    """CLIENT_ID@HOST."""
    cause: str
    """The request, or ``timeout``."""


def abort_of(
    session: ClusterSession, transactional_id: str, identity: tuple[int, int]
) -> Abort | None:
    """Return the abort of a transaction; None if the event history does not have it."""
    for entry in reversed(_history(session, [transactional_id])):
        entry_identity = entry.detail.get("producer_id"), entry.detail.get("producer_epoch")
        if entry.what == EventKind.TRANSACTION_ABORTED and entry_identity == identity:
            client = f"{entry.client_id}@{entry.client_host}"
            return Abort(entry.at_ms, client, str(entry.detail.get("cause")))
    return None


def _end_entries(history: Iterable[Entry], resolution: Resolution) -> list[Entry]:
    """Return the entries about the end of the transaction."""
    if resolution.identity is None or resolution.verdict not in {
        Verdict.COMMITTED,
        Verdict.ABORTED,
    }:
        return []
    ends = {EventKind.TRANSACTION_ABORTED, EventKind.TRANSACTION_COMMITTED}
    return [
        entry
        for entry in history
        if entry.what in ends
        and entry.detail.get("producer_id") == resolution.identity.producer_id
        and entry.detail.get("producer_epoch") == resolution.identity.epoch
    ]


def end_transaction(session: ClusterSession, resolution: Resolution, *, commit: bool) -> None:
    """Send EndTxn with the identity of an open transaction. Raises ApiError if it is refused.

    The request has the version that the transaction's producer uses, so that the producer's own
    retry gets the same answer. In a two-phase commit the version is one that bumps the epoch:
    otherwise the producer would not notice that its transaction has ended, and would add its next
    records to another transaction. The client id tells the broker's event history that an operator
    has decided.
    """
    if resolution.ends_as is None:
        raise ApiError(ErrorCode.producer_fenced, "EndTxn", resolution.evidence.transactional_id)
    version = resolution.version
    if version is None:
        version = session.client.features().get("transaction.version", 0)
    if is_two_phase(resolution.evidence.current):
        version = TV2
    with WireClient(
        session.bootstrap,
        client_id=RESOLVER_CLIENT_ID,
        timeout_ms=session.timeout_ms,
        security=session.security,
    ) as client:
        client.call(
            "EndTxn",
            at_most=None if version >= TV2 else LAST_TV1_END_TXN,
            to_transaction=resolution.evidence.transactional_id,
            transactional_id=resolution.evidence.transactional_id,
            producer_id=resolution.ends_as.producer_id,
            producer_epoch=resolution.ends_as.epoch,
            committed=commit,
        )
