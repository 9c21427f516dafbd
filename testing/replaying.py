"""Replays of incidents: the recorded requests, sent to a fresh broker whose clock the test moves.

::

    result = replay("incident.json")  # AssertionError if the broker behaves differently
    assert result.failures == []  # fails where the incident failed

The replay opens a connection for each recorded one, and sends the requests in the recorded order.
Each request is sent when the clock has reached the recorded time, with the ids and epochs that the
fresh broker has given out. If the incident has a response before the next request, the replay
awaits it before it sends that request. Records have keys, values and headers if the file has them.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fencepost.client.queries.features import finalized_levels
from fencepost.client.queries.incident import (
    APIS_BY_NAME,
    MAX_RECORDS,
    Cause,
    Incident,
    IncidentError,
    Step,
    load,
)
from fencepost.client.queries.incident_values import from_json
from fencepost.client.queries.open_transactions import known_transaction
from fencepost.client.queries.recording import COMPARED
from fencepost.client.queries.session import ClusterSession
from fencepost.client.queries.settings import alter
from fencepost.logcore.batch import LogRecord
from fencepost.protocol.schema import Entity
from fencepost.testing.kafka import Kafka
from fencepost.testing.replay_ids import ReplayIds, acquires_only, error_names
from fencepost.testing.replay_wire import ReplayConnection
from fencepost.testing.waiting import TIMEOUT_S, wait
from fencepost.testing.writing import write

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker

ANSWER_S: Final = 10.0
"""How long a replay waits, in real time, for a response that the incident has at this point."""


REPLAYED_FEATURES: Final = frozenset({"group.version", "share.version", "transaction.version"})
"""Features whose levels decide how a coordinator answers."""


SETTLE_S: Final = 2.0
"""How long a replay waits, in real time, for the event of a timer that has fired."""

MAX_LATE_MS: Final = 256
"""The maximum delay of a timer in milliseconds: of the recorded timer after its deadline, and of
the replayed deadline after the recorded one."""

_EXPIRIES: Final = frozenset(
    {
        *("member-expired", "pending-member-expired", "transaction-timed-out"),
        *("share-records-returned", "share-records-given-up"),
    }
)
RESET: Final = "share.auto.offset.reset"
_INITIALIZED: Final = "share-state-initialized"


class ReplayError(AssertionError):
    """The broker has behaved differently than in the incident; the message names the step."""


@dataclass(frozen=True)
class ReplayedStep:
    """One request of a replay, with the errors in its response."""

    number: int
    at_ms: int
    api: str
    client_id: str | None
    returned: tuple[str, ...] | None
    """The errors, NONE for success; None for a request that was not answered."""

    @property
    def failed(self) -> bool:
        """Whether the response has an error."""
        return any(name != "NONE" for name in self.returned or ())

    def __str__(self) -> str:
        result = _text(self.returned)
        return f"step {self.number} at {self.at_ms} ms: {self.api} of {self.client_id} {result}"


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    incident: Incident
    """The incident that was replayed."""
    steps: tuple[ReplayedStep, ...]
    """All requests, each with the errors that it returned."""
    causes: tuple[Cause, ...]
    """The causes in the history of the replay's broker, in the ids of the incident."""

    @property
    def failures(self) -> list[str]:
        """Each step whose response had an error, in a sentence."""
        return [str(step) for step in self.steps if step.failed]

    def whys(self, what: str) -> list[str | None]:
        """Return the causes of the events of one kind, oldest first."""
        return [cause.why for cause in self.causes if cause.what == what]


def replay(incident: str | Path | Incident, *, data_dir: str | Path | None = None) -> Replay:
    """Replay an incident on a fresh broker with the incident's settings, topics and start time.

    Raises IncidentError for a file that cannot be used. Raises ReplayError, an AssertionError, at
    the first step whose response has other errors than in the incident, or if the causes in the
    broker's history differ.
    """
    __tracebackhide__ = True
    loaded = incident if isinstance(incident, Incident) else load(incident)
    with broker_for(loaded, data_dir) as kafka:
        return replay_on(kafka, loaded)


def broker_for(incident: Incident, data_dir: str | Path | None = None) -> Kafka:
    """Return the broker of a replay, not started: its settings are the incident's."""
    return Kafka(data_dir, incident.settings, now_ms=incident.start_ms)


def replay_on(kafka: Kafka, incident: Incident) -> Replay:
    """Replay an incident on a started and unused broker from :func:`broker_for`."""
    __tracebackhide__ = True
    player = _Player(kafka, incident)
    try:
        player.prepare()
        player.play()
        causes = player.causes()
    finally:
        player.close()
    _compare_causes(incident, causes)
    return Replay(incident, tuple(player.replayed), tuple(causes))


@dataclass
class _Player:
    """A replay in progress."""

    kafka: Kafka
    incident: Incident
    replayed: list[ReplayedStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kafka.clock.auto = False
        self._begin_ms = self.kafka.clock.now_ms()
        self._connections: dict[int, ReplayConnection] = {}
        self._pending: dict[int, tuple[Step, Entity | None]] = {}
        """Requests without a response yet, with their recorded responses, by step."""
        expiries = (
            cause
            for cause in self.incident.causes
            if cause.what in _EXPIRIES and (cause.trigger or "").startswith("timer")
        )
        self._expiries = deque(expiries)
        """The expiries of the incident that the clock has not reached."""
        self._expected: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()
        """The number of expiries so far, by kind of event: ``_expected`` in the incident, ``_seen``
        in the replay."""
        self._unsent: set[int] = set()
        """Pending ShareFetch requests that are sent later."""
        self._sent = 0
        self._observer = self.kafka.faults.observe()
        self._written = self._initialized = 0
        self._ends: dict[tuple[str, int], int] = {}
        """The end offset of each partition whose records share consumers acquire."""

    # --- before the first step ---

    def prepare(self) -> None:
        """Create the topics and settings of the incident, and load the coordinators."""
        kafka, incident = self.kafka, self.incident
        with kafka._session() as session:
            levels = finalized_levels(session)
        for name, level in incident.features.items():
            if name in REPLAYED_FEATURES and levels.get(name) != level:
                kafka.feature(name, level)
        for name, topic in incident.topics.items():
            if not name.startswith("__"):
                kafka.topic(name, max(topic.partitions, 1))
        with kafka._session() as session:
            for group in incident.groups:
                # The log begins with the first record that was acquired.
                settings = {**incident.group_settings.get(group, {}), RESET: "earliest"}
                alter(session, ("group", group), settings, (), execute=True)
            topic_ids = {topic.name: topic.topic_id for topic in session.topics()}
        kafka._query(self._load)
        self._ids = ReplayIds(incident, topic_ids)
        self._firsts = self._ids.boundaries(self._recorded(step) for step in incident.steps)

    def _load(self, session: ClusterSession) -> bool:
        for group in self.incident.groups:
            session.committed(group)
        for transactional_id in self.incident.transactional_ids:
            known_transaction(session, transactional_id)
        return True

    # --- the steps ---

    def play(self) -> None:
        """Send all requests, and compare the responses."""
        for step in self.incident.steps:
            self._answers(step.number, step.at_ms)
            self._advance(step.number, step.at_ms)
            self._await_share_state(step.number)
            if step.is_end:
                self._end(step)
            else:
                self._handle(step)
        end, span_ms = len(self.incident.steps) + 1, self.incident.end_ms - self.incident.start_ms
        self._answers(end, span_ms)
        self._advance(end, span_ms)
        self.replayed.sort(key=lambda step: step.number)

    def close(self) -> None:
        """Close all connections."""
        self._observer.remove()
        for connection in self._connections.values():
            connection.close()

    def _advance(self, number: int, at_ms: int) -> None:
        """Advance the clock past the timers that fired before step ``number`` of the incident.

        A busy broker fires timers late, so the incident may have requests between the deadline and
        the expiry. Therefore the clock stops :data:`MAX_LATE_MS` before the incident's next expiry,
        until that expiry is due. In the replay a deadline may be some milliseconds later, because a
        timer starts between request and response, at an unrecorded time. In this case the clock
        advances a little further.
        """
        held_ms = at_ms
        if self._expiries and not self._is_due(number, at_ms):
            held_ms = min(at_ms, self._expiries[0].at_ms - MAX_LATE_MS)
        has_fired = self._run_clock(self._begin_ms + held_ms - self.kafka.clock.now_ms())
        while self._is_due(number, at_ms):
            self._expected[self._expiries.popleft().what] += 1
        late_ms = 1
        while not self._has_expired(has_fired) and late_ms <= MAX_LATE_MS:
            has_fired = self._run_clock(late_ms)
            late_ms *= 2

    def _is_due(self, number: int, at_ms: int) -> bool:
        """Return whether the next expiry came before step ``number``, and not after ``at_ms``."""
        due = self._expiries[0] if self._expiries else None
        return due is not None and due.after < number and due.at_ms <= at_ms

    def _run_clock(self, ms: int) -> bool:
        """Advance the clock; return whether a timer of the incident's subjects has fired."""
        fired = self.kafka.clock.advance(ms=ms) if ms > 0 else []
        return any(deadline.who in self.incident.subjects for deadline in fired)

    def _has_expired(self, has_fired: bool) -> bool:
        """Return whether the replay has had every expiry that the incident had by now."""

        def look(_limit: float) -> bool:
            if self._expected != self._seen:
                self._seen = self._expected & self.kafka.call(_expired)
            return self._expected == self._seen

        if not has_fired:
            return look(0)
        # A share partition writes a new state before the history has the event.
        with contextlib.suppress(TimeoutError):
            return wait(look, SETTLE_S, lambda: "")
        return False

    def _await_share_state(self, number: int) -> None:
        """Wait, in real time, for the initialization of share partitions.

        The incident initialized them before step ``number``. No request waits for the
        initialization, but later heartbeats depend on it.
        """
        expected = sum(
            cause.what == _INITIALIZED and cause.after < number for cause in self.incident.causes
        )
        if expected > self._initialized:
            wait(
                lambda _limit: self.kafka.call(_initialized_count) >= expected,
                TIMEOUT_S,
                lambda: f"step {number}: the state of share partitions is not initialized",
            )
            self._initialized = expected

    def _recorded(self, step: Step) -> Entity | None:
        if step.response is None:
            return None
        return from_json(APIS_BY_NAME[step.api], step.version, "response", step.response)

    def _handle(self, step: Step) -> None:
        recorded = self._recorded(step)
        if step.answered_after is None:
            replayed = ReplayedStep(step.number, step.at_ms, step.api, step.client_id, None)
            self.replayed.append(replayed)
        else:
            self._pending[step.number] = step, recorded
            if acquires_only(step, recorded):
                # Send this request later, at the time of its response, once the records are
                # written.
                self._unsent.add(step.number)
                return
        if step.answered_after == step.number:
            self._write_acquired(recorded)
        self._send(step)

    def _send(self, step: Step) -> None:
        body = self._ids.request(step)
        connection = self._connections.get(step.connection)
        if connection is None:
            connection = ReplayConnection(self.kafka.address)
            self._connections[step.connection] = connection
        connection.send(step, APIS_BY_NAME[step.api], body)
        self._sent += 1
        try:
            self._observer.wait(ANSWER_S, hits=self._sent)
        except TimeoutError:
            waiting = [
                pending
                for pending, _ in self._pending.values()
                if pending.connection == step.connection
            ]
            raise ReplayError(
                f"{_name(step)} was not handled: the response of step"
                f" {waiting[0].number if waiting else step.number - 1} has not come"
            ) from None

    def _answers(self, number: int, at_ms: int) -> None:
        """Await the responses that came before step ``number``, in the order of their times."""
        due = [
            (step.answered_at_ms or 0, step, recorded)
            for step, recorded in self._pending.values()
            if (step.answered_after or 0) < number
        ]
        for answered_ms, step, recorded in sorted(
            due, key=lambda answer: (answer[0], answer[1].number)
        ):
            self._advance(min(step.answered_after or 0, number - 1) + 1, min(answered_ms, at_ms))
            self._write_acquired(recorded)
            if step.number in self._unsent:
                self._unsent.remove(step.number)
                self._send(step)
            del self._pending[step.number]
            connection = self._connections[step.connection]
            response = connection.receive(step, APIS_BY_NAME[step.api], ANSWER_S)
            self._compare(step, recorded, response)

    def _compare(self, step: Step, recorded: Entity | None, response: Entity | None) -> None:
        expected = (step.error or "NONE",) if recorded is None else error_names(recorded)
        returned = None if response is None else error_names(response)
        replayed = ReplayedStep(step.number, step.at_ms, step.api, step.client_id, returned)
        self.replayed.append(replayed)
        is_same = expected == returned
        if recorded is None and returned is not None:
            is_same = expected[0] in returned
        if not is_same:
            difference = f"{replayed}; in the incident it {_text(expected)}"
            if returned is not None and _text(returned) == _text(expected):
                difference += f", with {len(expected)} results instead of {len(returned)}"
            raise ReplayError(difference)
        if recorded is not None and response is not None:
            self._ids.learn(step, recorded, response)

    def _end(self, step: Step) -> None:
        connection = self._connections.pop(step.connection, None)
        if connection is None:
            return
        before = self.kafka.call(_connection_count)
        connection.close()
        wait(
            lambda _limit: self.kafka.call(_connection_count) < before,
            TIMEOUT_S,
            lambda: f"step {step.number}: the broker has not noticed the end of the connection",
        )

    def _write_acquired(self, recorded: Entity | None) -> None:
        """Write the records that a share consumer acquired, in batches like the acquired ones."""
        for place, last in self._ids.acquired(recorded):
            firsts = self._firsts[place]
            end = self._ends.setdefault(place, firsts[0])
            if last < end:
                continue
            self._written += last + 1 - end
            if self._written > MAX_RECORDS:
                raise IncidentError(f"the requests acquire more than {MAX_RECORDS} records")
            cuts = [end, *(first for first in firsts if end < first <= last), last + 1]
            with self.kafka._session() as session:
                for first, stop in itertools.pairwise(cuts):
                    now_ms = self.kafka.clock.now_ms()
                    rows = [
                        LogRecord(at, now_ms, *self._ids.payload(place, first + at))
                        for at in range(stop - first)
                    ]
                    write(session, place, rows)
            self._ends[place] = last + 1

    # --- the causes ---

    def causes(self) -> list[Cause]:
        """Return the causes in the broker's history, once it has as many as the incident."""
        count = len(self.incident.causes)
        causes: list[Cause] = []

        def look(_limit: float) -> bool:
            causes[:] = self._found_causes()
            return len(causes) >= count

        with contextlib.suppress(TimeoutError):
            wait(look, ANSWER_S, lambda: "")
        return causes

    def _last_step(self, at_ms: int) -> int:
        return bisect_right(self.incident.steps, at_ms, key=lambda step: step.at_ms)

    def _found_causes(self) -> list[Cause]:
        return [
            Cause(
                entry.at_ms - self._begin_ms,
                self._last_step(entry.at_ms - self._begin_ms),
                entry.subject,
                entry.what,
                self._ids.recorded_text(entry.why),
                self._ids.recorded_text(_member(entry.detail)),
                entry.trigger,
            )
            for entry in self.kafka.history()
            if entry.what in COMPARED and entry.subject in self.incident.subjects
        ]


def _compare_causes(incident: Incident, found: Iterable[Cause]) -> None:
    """Raise ReplayError for the first cause that differs, separately for each subject."""
    __tracebackhide__ = True
    expected_of: dict[str, list[Cause]] = defaultdict(list)
    found_of: dict[str, list[Cause]] = defaultdict(list)
    for into, causes in ((expected_of, incident.causes), (found_of, found)):
        for cause in causes:
            into[cause.subject].append(cause)
    for subject in incident.subjects:
        expected, replayed = expected_of[subject], found_of[subject]
        for at in range(max(len(expected), len(replayed))):
            recorded = expected[at] if at < len(expected) else None
            real = replayed[at] if at < len(replayed) else None
            if _sense(recorded) != _sense(real):
                after = (recorded or real).after  # type: ignore[union-attr]
                raise ReplayError(
                    f"after step {after}, cause {at + 1} of {subject} is {_cause_text(real)};"
                    f" in the incident it is {_cause_text(recorded)}"
                )


def _sense(cause: Cause | None) -> object:
    return None if cause is None else (cause.what, cause.why, cause.member, cause.trigger)


def _cause_text(cause: Cause | None) -> str:
    if cause is None:
        return "missing"
    parts = [cause.why, cause.member and f"member {cause.member}", cause.trigger]
    text = "; ".join(part for part in parts if part)
    return f"{cause.what} at {cause.at_ms} ms ({text})"


def _member(detail: Mapping[str, Any]) -> str | None:
    member = detail.get("member")
    return None if member is None else str(member)


def _name(step: Step) -> str:
    return f"step {step.number} at {step.at_ms} ms: {step.api} of {step.client_id}"


def _text(errors: tuple[str, ...] | None) -> str:
    if errors is None:
        return "was not answered"
    names = [key for key in dict.fromkeys(errors) if key != "NONE"] or ["NONE"]
    return f"returned {', '.join(names)}"


async def _expired(broker: Broker) -> Counter[str]:
    expired: Counter[str] = Counter()
    for (_, kind, cause), count in broker.services.history.counts.items():
        if kind in _EXPIRIES and (cause == "lock-expired" or cause.startswith("timer ")):
            expired[kind] += count
    return expired


async def _initialized_count(broker: Broker) -> int:
    counts = broker.services.history.counts
    return sum(count for (_, kind, _), count in counts.items() if kind == _INITIALIZED)


async def _connection_count(broker: Broker) -> int:
    return len(broker.server.connections)
