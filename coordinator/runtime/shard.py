"""The shard runtime: one state machine on one partition of an internal topic.

A shard passes through the states of :class:`ShardState`: it reads its partition from the start
(LOADING), then serves (ACTIVE). Every request is one *turn*, which runs to completion without
yielding to the event loop:

  decide → append → replay → timers → effects → (reports of effects: decide → …) → replies

Replies are sent only after the turn's records are appended and committed (``commits.py``), so no
client sees state that a crash could undo. Effects wait for the commit, too: a marker must not reach
the disk, or other brokers, before the decision to write it is committed. Further turns run
meanwhile; their replies wait until all records that they depend on are committed, and are sent in
order. If other replicas do not have the records in time, the requests fail with
COORDINATOR_NOT_AVAILABLE, but the records stay in the log.

A shard serves in one leader epoch. When the epoch changes, the shard ends: it appends nothing more,
and its waiting requests get NOT_COORDINATOR.

The state machine may refuse a request. The partition may refuse a request with a producer id, if
the partition has seen a newer epoch of that producer. Both refusals happen before anything is
written, and affect only that request. Any other failure in a turn (a failed append, or a bug) makes
the shard FAILED: its waiting requests get NOT_COORDINATOR, the cause and the request are logged,
and the state is rebuilt from the log. There is no rollback, hence no second path to get wrong.

A shard survives a kill -9 between any two appends (the state machine resumes in ``loaded``), append
failures, and an append by another writer (the offset check).

Source: ``CoordinatorRuntime``; the offset check is in ``CoordinatorRuntime.CoordinatorContext``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

import structlog

from fencepost.coordinator.runtime.background import Pace, spawn
from fencepost.coordinator.runtime.commits import Commits
from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    NotCoordinatorError,
    ShardError,
)
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.shard_about import About, Turn, blame, trigger
from fencepost.coordinator.runtime.shard_load import replay_log
from fencepost.coordinator.runtime.shard_state import LOADING_STATES, SHARD_TRANSITIONS, ShardState
from fencepost.coordinator.runtime.timers import TimerQueue
from fencepost.logcore.clock import Clock
from fencepost.logcore.errors import LogError, NoSpaceError
from fencepost.logcore.machine import (
    Decision,
    DomainError,
    EndMarker,
    Event,
    InvariantViolation,
    Machine,
    ProducerStamp,
    Record,
    Reply,
    Token,
)
from fencepost.logcore.partition import Partition
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass

RELOAD_BACKOFF_MS = 100
"""The delay before the second of consecutive reloads; doubles up to :data:`MAX_RELOAD_BACKOFF_MS`.
The first reload starts at once, because usually a single request has caused the failure."""

MAX_RELOAD_BACKOFF_MS = 30_000
"""The maximum delay between two reloads: a faulty disk is tried twice a minute."""

NO_ROOM_BACKOFF_MS = 1_000
"""The maximum delay while the disk is full: clients wait, and space may be freed at any time."""

STABLE_AFTER_MS = 60_000
"""The time in the ACTIVE state after which a failure counts as the first one again."""

POSTPONE_MS = 50
"""The delay before the retry of a report or timer that must write while too few replicas are in
sync (kafka: the ``LogAppendRetryQueue`` of ``TransactionMarkerChannelManager``)."""

_HELD, _POSTPONED = "held replies", "postponed reports"
"""The keys of the timers for replies that wait for a commit, and for postponed reports."""

_log = structlog.get_logger(__name__)


RunEffect = Callable[["ShardRuntime[Machine]", object, int, Callable[[], None]], None]
"""Executes one effect: ``run_effect(shard, effect, now_ms, first_attempt_done)``.

The function reports results with ``shard.report``, at once (the report then belongs to the same
turn) or later. After its immediate reports it calls ``first_attempt_done``; the turn's replies wait
for that call."""

WhileLoading = Callable[[object], object | None]
"""Returns a loading shard's answer to a command; None for COORDINATOR_LOAD_IN_PROGRESS."""


Admit = Callable[[Partition, object], DomainError | None]
"""Returns an error if a command, or the timer of a key, must not write to a replicated partition
now. The check precedes the decision of the state machine, because a decision cannot be undone."""


Remember = Callable[[str, str, Event, Origin | None, str | None], None]
"""Records a history event: ``remember(topic, shard, event, origin, trigger)``. Never raises."""


@dataclass(frozen=True, slots=True)
class ShardServices:
    """The daemon's services that a shard uses."""

    clock: Clock
    loop: asyncio.AbstractEventLoop
    timers: TimerQueue
    run_effect: RunEffect
    while_loading: WhileLoading
    remember: Remember
    commits: Commits
    commit_timeout_ms: Callable[[], int]
    """Returns the time for which a reply waits for other replicas."""
    admit: Admit | None = None
    """None if one replica is enough to write (kafka: ``requiredAcks``)."""


class _LeadershipLostError(Exception):
    """The leader epoch of the partition is no longer the shard's."""


M_co = TypeVar("M_co", bound=Machine, covariant=True)

Build = Callable[[Partition, int], M_co]
"""Returns an empty state machine for a partition and a coordinator epoch."""


class ShardRuntime(Generic[M_co]):
    """One state machine on one partition, which this broker leads in ``leader_epoch``.

    ``build`` creates an empty state machine of ``coordinator_epoch`` for each load.
    """

    def __init__(
        self, partition: Partition, leader_epoch: int, build: Build[M_co], services: ShardServices
    ) -> None:
        self.partition = partition
        self.leader_epoch = leader_epoch
        """The epoch in which this broker became the coordinator; any other epoch ends the shard."""
        marks = partition.marks
        # A log from another cluster may contain newer epochs than this cluster's.
        self.coordinator_epoch = max(leader_epoch, marks.leader_epoch)
        self._append_epoch = leader_epoch if marks.is_replicated else marks.leader_epoch
        self.name = f"{partition.topic}-{partition.index}"
        self._build = partial(build, partition, self.coordinator_epoch)
        self._clock, self._loop = services.clock, services.loop
        self._run_effect, self._while_loading = services.run_effect, services.while_loading
        self._remember, self._commits = services.remember, services.commits
        self._commit_timeout_ms, self._admit = services.commit_timeout_ms, services.admit
        self._held: OrderedDict[int, tuple[int, list[Reply]]] = OrderedDict()
        """Replies that wait for other replicas, and their deadlines, by ``id()`` of the list."""
        self._postponed: list[object] = []
        self._origin: Origin | None = None
        self._about: About | None = None
        self._timers = services.timers.timers(self._fire)
        self._state = ShardState.INITIAL
        self._machine = self._build()
        self._waiting: dict[Token, asyncio.Future[object]] = {}
        self._last_token: Token = 0
        self._next_offset = 0
        self._in_turn = False
        self._inbox: deque[object] = deque()
        self._active_since_ms = 0
        self._failures = 0
        self._loads = 0
        self._out_of_room = False
        self._reload: asyncio.Task[None] | None = None

    @property
    def state(self) -> ShardState:
        """Return the state of the shard."""
        return self._state

    @property
    def machine(self) -> M_co:
        """Return the state machine, for reading only (tests, the command line)."""
        return self._machine

    # --- requests --------------------------------------------------------------------------------

    def submit(
        self, command: object, origin: Origin | None = None, *, reply_before_flush: bool = False
    ) -> asyncio.Future[object]:
        """Decide on ``command``; the future holds the result, now or after a later turn.

        ``origin`` is the requesting client, for the history. With ``reply_before_flush`` the result
        is set before it is committed, and the caller must not publish it before the commit. The
        future fails with the state machine's :class:`DomainError`, or with a :class:`ShardError`.
        """
        future: asyncio.Future[object] = self._loop.create_future()
        if self._state is not ShardState.ACTIVE:
            answer = self._while_loading(command) if self._state in LOADING_STATES else None
            if answer is None:
                future.set_exception(without_traceback(self.unavailable()))
            else:
                future.set_result(answer)
            return future
        if self._admit is not None and (refusal := self._refusal(command)) is not None:
            future.set_exception(without_traceback(refusal))
            return future
        self._last_token = token = self._last_token + 1
        self._waiting[token] = future
        self._turn(
            partial(self._machine.decide, token, command),
            self._clock.now_ms(),
            ("upkeep" if origin is None else "request", command),
            token,
            origin,
            reply_before_flush=reply_before_flush,
        )
        return future

    def report(self, command: object) -> None:
        """Handle the report of an effect: as part of the current turn, or in a new one.

        A shard that is not active ignores the report, because loading emits the effect again.
        """
        if self._in_turn:
            self._inbox.append(command)
        elif self._state is ShardState.ACTIVE:
            if self._refusal(command) is not None:
                self._postponed.append(command)
                self._timers.set(_POSTPONED, self._clock.now_ms() + POSTPONE_MS)
            else:
                self._turn(self._decide_report(command), self._clock.now_ms(), ("report", command))

    def _refusal(self, command: object) -> DomainError | None:
        if self._admit is None or not self.partition.marks.is_replicated:
            return None
        return self._admit(self.partition, command)

    def complete_transaction(self, marker: EndMarker) -> None:
        """Append the end marker of a transaction to this partition and apply it.

        Raises :class:`ShardError` if the shard is not active, and :class:`LogError` if the
        partition refuses the marker (kafka: ``ProducerAppendInfo.appendEndTxnMarker``).
        """
        if self._state is ShardState.ACTIVE and not self._leads:
            self._end_of_leadership()
        if self._state is not ShardState.ACTIVE:
            raise self.unavailable()
        appended = self.partition.append_marker(marker, self._clock.now_ms())
        # The marker is in the log now: after any failure, loading applies it.
        try:
            self._check_offset(appended.base_offset)
            self._machine.replay_marker(marker.stamp, appended.base_offset, commit=marker.commit)
        except Exception as cause:  # noqa: BLE001 - after any failure the state is suspect
            self._about = "marker", marker.stamp
            self._fail(cause, None)
            self._about = None
            return
        self._next_offset = appended.last_offset + 1

    def unavailable(self) -> ShardError:
        """Return the error that says why the shard is not active."""
        if self._state in LOADING_STATES:
            return CoordinatorLoadInProgressError(f"{self.name} is being read")
        return NotCoordinatorError(f"{self.name} is not served here")

    # --- one turn --------------------------------------------------------------------------------

    def _turn(
        self,
        first: Callable[[int], Decision],
        now_ms: int,
        about: About | None,
        token: Token | None = None,
        origin: Origin | None = None,
        *,
        reply_before_flush: bool = False,
    ) -> None:
        """Run one turn that begins with the decision ``first``.

        ``token`` identifies the request that the turn answers, ``origin`` the client that sent it.
        """
        if self._in_turn:
            raise InvariantViolation(f"{self.name}: a turn began inside another")
        turn = Turn()
        self._in_turn = True
        self._about, self._origin = about, origin
        try:
            try:
                decision = first(now_ms)
                stamp = decision.stamp
                if stamp is not None and decision.records:
                    producers = self.partition.producers
                    producers.check_epoch(stamp.producer_id, stamp.producer_epoch)
            except DomainError as refusal:
                if token is None:
                    raise
                turn.replies.append(Reply(token, without_traceback(refusal)))
            else:
                self._carry_out(decision, now_ms, turn)
            while self._inbox:
                self._carry_out(self._decide_report(self._inbox.popleft())(now_ms), now_ms, turn)
        except _LeadershipLostError:
            self._end_of_leadership()
            return
        except Exception as cause:  # noqa: BLE001 - after any failure the state is suspect
            self._fail(cause, token)
            return
        finally:
            self._in_turn = False
            self._about = self._origin = None
        if reply_before_flush:
            for reply in turn.replies:
                if reply.token == token:
                    self._answer(reply)
        turn.has_ended = True
        if not turn.effects:
            self._deliver(turn.replies)
        elif turn.replies:
            self._hold(turn.replies)

    def _attempt_done(self, turn: Turn) -> None:
        """Count an attempted effect of the turn; the last one releases the replies."""
        turn.effects -= 1
        if turn.has_ended and not turn.effects:
            self._deliver(turn.replies)

    def _deliver(self, replies: list[Reply]) -> None:
        """Send replies once everything that they depend on is committed."""
        if not replies:
            return
        if not self._commits.is_idle:
            release = partial(self._release, replies, self._next_offset, self._loads)
            if self._commits.after((self.partition,), release):
                self._hold(replies)
                return
        if self._held:
            self._held.pop(id(replies), None)
        for reply in replies:
            self._answer(reply)

    def _hold(self, replies: list[Reply]) -> None:
        """Limit the time for which replies, or effects that precede them, wait for replicas."""
        if self.partition.marks.is_replicated and id(replies) not in self._held:
            now_ms = self._clock.now_ms()
            deadline_ms = now_ms + self._commit_timeout_ms()
            if not self._held:
                self._timers.set(_HELD, deadline_ms, now_ms)
            self._held[id(replies)] = deadline_ms, replies

    def _release(self, replies: list[Reply], end: int, loads: int) -> None:
        """Send the replies that waited for the records below ``end``, if those are committed."""
        self._held.pop(id(replies), None)
        if self._still_stands(end, loads):
            for reply in replies:
                self._answer(reply)

    def _still_stands(self, end: int, loads: int) -> bool:
        """Return whether the records below ``end`` are committed and the shard was not reloaded.

        If they are lost, fail or end the shard.
        """
        if self._state is not ShardState.ACTIVE or self._loads != loads:
            return False
        marks = self.partition.marks
        if self.partition.offline is not None:
            self._fail(self.partition.offline, None)
        elif not self._leads or (marks.is_replicated and marks.high_watermark < end):
            self._end_of_leadership()
        else:
            return True
        return False

    def _give_up_waiting(self, now_ms: int) -> None:
        """Fail the requests whose replies have waited too long for other replicas."""
        while self._held:
            key, (deadline_ms, replies) = next(iter(self._held.items()))
            if deadline_ms > now_ms:
                self._timers.set(_HELD, deadline_ms, now_ms)
                break
            del self._held[key]
            error = CoordinatorNotAvailableError(f"{self.name}: not replicated in time")
            for reply in replies:
                self._answer(Reply(reply.token, error))

    @property
    def _leads(self) -> bool:
        """Return whether the leader epoch is still the one in which the shard was created."""
        return self.partition.marks.leader_epoch == self._append_epoch

    def _end_of_leadership(self) -> None:
        """End the shard after a change of the partition's leader epoch."""
        _log.info("shard lost its leadership", shard=self.name, leader_epoch=self.leader_epoch)
        self.end()

    def _carry_out(self, decision: Decision, now_ms: int, turn: Turn) -> None:
        if decision.records:
            self._append(decision.records, decision.stamp, now_ms)
        for timer in decision.timers:
            self._timers.set(timer.key, timer.deadline_ms, now_ms)
        for event in decision.events:
            level = logging.DEBUG if event.routine or event.quiet else logging.INFO
            if _log.is_enabled_for(level):
                fields = {"subject": event.subject, "shard": self.name}
                _log.log(level, event.kind, **{**event.detail, **fields})
            self._remember(
                self.partition.topic, self.name, event, self._origin, trigger(self._about)
            )
        turn.replies += decision.replies
        for effect in decision.effects:
            turn.effects += 1
            first_attempt_done = partial(self._attempt_done, turn)
            later = partial(
                self._run_effect_later, effect, first_attempt_done, self._next_offset, self._loads
            )
            if not self._commits.after((self.partition,), later):
                self._run_effect(self, effect, now_ms, first_attempt_done)

    def _run_effect_later(
        self, effect: object, first_attempt_done: Callable[[], None], end: int, loads: int
    ) -> None:
        """Run a delayed effect, unless the shard was reloaded since: loading emits it again."""
        if self._still_stands(end, loads):
            self._run_effect(self, effect, self._clock.now_ms(), first_attempt_done)

    def _append(
        self, records: tuple[Record, ...], stamp: ProducerStamp | None, now_ms: int
    ) -> None:
        if not self._leads:
            raise _LeadershipLostError
        appended = self.partition.append_records(records, now_ms=now_ms, producer=stamp)
        self._check_offset(appended.base_offset)
        if appended.last_offset != appended.base_offset + len(records) - 1:
            raise InvariantViolation(f"{self.name}: {len(records)} records became {appended}")
        self._next_offset = appended.last_offset + 1
        replay = self._machine.replay
        for offset, record in enumerate(records, appended.base_offset):
            replay(record, offset, now_ms, stamp)

    def _check_offset(self, base_offset: int) -> None:
        if base_offset != self._next_offset:
            raise InvariantViolation(
                f"{self.name}: appended at {base_offset}, expected {self._next_offset}: "
                "somebody else writes to this partition"
            )

    def _decide_report(self, command: object) -> Callable[[int], Decision]:
        """Return a function that decides on a command for which no request waits."""
        self._last_token = token = self._last_token + 1

        def decide(now_ms: int) -> Decision:
            try:
                return self._machine.decide(token, command, now_ms)
            except DomainError as refusal:
                _log.debug("report refused", shard=self.name, command=command, cause=str(refusal))
                return Decision()

        return decide

    def _fire(self, key: Hashable, now_ms: int) -> None:
        if key == _HELD:
            self._give_up_waiting(now_ms)
        elif key == _POSTPONED:
            postponed, self._postponed = self._postponed, []
            for command in postponed:
                self.report(command)
        elif self._refusal(key) is not None:
            self._timers.set(key, now_ms + POSTPONE_MS, now_ms)
        elif self._state is ShardState.ACTIVE:
            self._turn(partial(self._machine.fire, key), now_ms, ("timer", key))

    def _answer(self, reply: Reply) -> None:
        # A report has no future. A future is done if its request's connection is closed.
        future = self._waiting.pop(reply.token, None)
        if future is None or future.done():
            return
        if isinstance(reply.response, DomainError):
            future.set_exception(without_traceback(reply.response))
        else:
            future.set_result(reply.response)

    # --- failure, load, close --------------------------------------------------------------------

    def _fail(self, cause: Exception, token: Token | None) -> None:
        """Stop serving because of ``cause``, raised in the turn of ``token``, and reload."""
        _log.error(
            "shard failed",
            shard=self.name,
            cause=f"{type(cause).__name__}: {cause}",
            **blame(self._about, self._origin),
            # A refusal of the log explains itself; any other error is a bug and needs a traceback.
            exc_info=None if isinstance(cause, LogError) else cause,
        )
        if self._state is ShardState.ACTIVE:
            stable = self._clock.monotonic_ms() - self._active_since_ms >= STABLE_AFTER_MS
            self._failures = 1 if stable else self._failures + 1
        else:
            self._failures += 1
        self._out_of_room = isinstance(cause, NoSpaceError)
        self._enter(ShardState.FAILED)
        asker = self._waiting.pop(token, None) if token is not None else None
        if asker is not None and not asker.done():
            asker.set_exception(without_traceback(self.unavailable()))
        self._drop_state()
        self._reload = spawn(self._load_again(), f"reload {self.name}")

    async def _load_again(self) -> None:
        if self._failures > 1:
            backoff_ms = RELOAD_BACKOFF_MS << min(self._failures - 2, 20)
            longest_ms = NO_ROOM_BACKOFF_MS if self._out_of_room else MAX_RELOAD_BACKOFF_MS
            await asyncio.sleep(min(backoff_ms, longest_ms) / 1000)
        await self.load(Pace())

    def load_empty(self) -> bool:
        """Begin to serve at once if the log is empty; return whether it is."""
        if self.partition.log_start_offset != self.partition.log_end_offset:
            return False
        self._enter(ShardState.LOADING)
        self._activate(self.partition.log_end_offset)
        return True

    async def load(self, pace: Pace) -> None:
        """Rebuild the state from the log, then serve. Ends in ACTIVE or FAILED; never raises."""
        self._enter(ShardState.LOADING)
        try:
            while True:
                machine = self._build()
                offset = await replay_log(self.partition, machine, pace, self._goes_on_loading)
                if offset == self.partition.log_end_offset:
                    break
                # The log has grown during the read, so the state is incomplete: read the log again.
        except Exception as cause:  # noqa: BLE001 - after any error this log cannot be served
            if self._state is ShardState.LOADING:
                self._about = "load", f"batch at offset {self._next_offset}"
                self._fail(cause, None)
                self._about = None
            return
        if self._state is ShardState.LOADING:
            if self._leads:
                self._machine = machine
                self._activate(offset)
            else:
                self._end_of_leadership()

    def _goes_on_loading(self, at: int) -> bool:
        self._next_offset = at
        return self._state is ShardState.LOADING

    def _activate(self, offset: int) -> None:
        self._next_offset = offset
        self._active_since_ms = self._clock.monotonic_ms()
        self._enter(ShardState.ACTIVE)
        if offset and _log.is_enabled_for(logging.DEBUG):
            _log.debug("shard loaded", shard=self.name, end=offset, digest=self._machine.digest())
        self._turn(self._machine.on_loaded, self._clock.now_ms(), about=None)

    def end(self) -> None:
        """Stop serving for good: answer all waiting requests, drop the state."""
        if self._state is ShardState.CLOSED:
            return
        was_active = self._state is ShardState.ACTIVE
        self._enter(ShardState.CLOSED)
        if self._reload is not None:
            self._reload.cancel()
        if was_active:
            for reply in self._machine.on_unloaded().replies:
                self._answer(reply)
        self._drop_state()

    async def close(self) -> None:
        """Call :meth:`end`, and wait until no reload is running."""
        self.end()
        if self._reload is not None:
            await asyncio.gather(self._reload, return_exceptions=True)

    def _drop_state(self) -> None:
        """Cancel all timers, fail waiting requests (NOT_COORDINATOR), replace the state machine."""
        self._loads += 1
        self._timers.clear()
        self._inbox.clear()
        self._held.clear()
        self._postponed.clear()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(NotCoordinatorError(f"{self.name} stopped serving"))
        self._machine = self._build()

    def _enter(self, state: ShardState) -> None:
        if state not in SHARD_TRANSITIONS[self._state]:
            raise InvariantViolation(f"{self.name}: {self._state.value} → {state.value}")
        self._state = state
