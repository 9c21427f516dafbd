"""A broker's work as a leader: requests, the leaders' state machines, and replies.

The order is the one of ``ReplicaManager``: check, read or append, update the state machine, carry
out its step, and only then answer the waiting requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from fencepost.cluster.alter_partition import AlterPartitionRequest, AlterPartitions
from fencepost.cluster.divergence import diverging_epoch
from fencepost.cluster.errors import Errors, NotLeaderOrFollowerError, UnknownReplicaError
from fencepost.cluster.fetcher import FetchRequest, FetchResponse
from fencepost.cluster.follower import OffsetSpec, PartitionFetch, PartitionResponse
from fencepost.cluster.image import LocalPartition
from fencepost.cluster.isr import AlteredPartition
from fencepost.cluster.leader import AcksVerdict, LeaderStep, PartitionLeader
from fencepost.logcore.errors import (
    InvalidProducerEpochError,
    InvalidTxnStateError,
    LogError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
)
from tests.sim.disk import Key, ModelLog
from tests.sim.messages import Code, Consume, Consumed, Produce, Produced
from tests.sim.network import Answer

if TYPE_CHECKING:
    from tests.sim.process import Process

LOG_ERRORS: Mapping[type[LogError], Code] = {
    OutOfOrderSequenceError: Code.OUT_OF_ORDER_SEQUENCE_NUMBER,
    InvalidProducerEpochError: Code.INVALID_PRODUCER_EPOCH,
    InvalidTxnStateError: Code.INVALID_TXN_STATE,
}
VERDICTS: Mapping[AcksVerdict, Code] = {
    AcksVerdict.DONE: Code.NONE,
    AcksVerdict.NOT_LEADER_OR_FOLLOWER: Code.NOT_LEADER_OR_FOLLOWER,
    AcksVerdict.NOT_ENOUGH_REPLICAS_AFTER_APPEND: Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
}


class FollowerFetch(NamedTuple):
    """A follower's Fetch, with the follower's id and broker epoch."""

    broker_id: int
    broker_epoch: int
    request: FetchRequest


class ListOffset(NamedTuple):
    """A follower's ListOffsets."""

    broker_id: int
    key: Key
    leader_epoch: int
    end: OffsetSpec


class Listed(NamedTuple):
    """The answer to a ListOffsets: the leader's log start or end, or an error."""

    error: int
    offset: int = -1


@dataclass(slots=True)
class _Waiter:
    """A request that waits until a write is committed."""

    required: int
    leader_epoch: int
    reply: Callable[[Code], None]
    is_done: bool = False


@dataclass(slots=True)
class _Parked:
    """A fetch that waits for records."""

    fetch: FollowerFetch
    parts: dict[Key, PartitionFetch]
    reply: Answer
    session: _Session
    is_done: bool = False


@dataclass(slots=True)
class _Session:
    """The leader's side of a fetch session."""

    session_id: int
    epoch: int = 1
    parts: dict[Key, PartitionFetch] = field(default_factory=dict)
    told: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """The high watermark and log start offset that the follower was last told, by partition."""


class Leading:
    """The partitions that one process leads, or has led."""

    def __init__(self, broker: Process) -> None:
        self.broker = broker
        self.leaders: dict[Key, PartitionLeader] = {}
        self.alter = AlterPartitions(broker.view)
        self._waiters: dict[Key, list[_Waiter]] = {}
        self._parked: dict[Key, list[_Parked]] = {}
        self._sessions: dict[int, _Session] = {}
        self._next_session = 1

    def leader(self, key: Key) -> PartitionLeader | None:
        """Return the state machine of a partition, None if this broker does not lead it."""
        found = self.leaders.get(key)
        return found if found is not None and found.is_leader else None

    # --- images ---

    def lead(self, one: LocalPartition) -> None:
        """Become the leader by a registration."""
        broker, key = self.broker, (one.topic_id, one.index)
        log = broker.log(key)
        machine = self.leaders.get(key)
        if machine is None:
            machine = self.leaders[key] = PartitionLeader(
                broker.view,
                one.topic,
                one.topic_id,
                one.index,
                min_insync_replicas=broker.options.min_isr,
            )
        step = machine.become_leader(
            one.registration, log.start, log.end, log.high_watermark, broker.node.now_ms
        )
        self.carry_out(key, step)
        self._settle(key)

    def resign(self, one: LocalPartition, *, is_gone: bool = False) -> None:
        """Stop leading a partition."""
        key = one.topic_id, one.index
        machine = self.leaders.get(key)
        if machine is not None and machine.resign(None if is_gone else one.registration):
            self._settle(key)
            self._wake(key)
        if is_gone:
            self.leaders.pop(key, None)

    def reconsider(self) -> None:
        """Reconsider all ISRs after a change of broker registrations."""
        now_ms = self.broker.node.now_ms
        for key, machine in self.leaders.items():
            if machine.is_leader:
                self.carry_out(key, machine.reconsider(now_ms))

    def check_isr(self) -> None:
        """Look for lagging replicas; called periodically."""
        now_ms = self.broker.node.now_ms
        for key, machine in self.leaders.items():
            self.carry_out(key, machine.check_isr(now_ms))
            self.carry_out(key, machine.reconsider(now_ms))

    # --- steps ---

    def carry_out(self, key: Key, step: LeaderStep) -> None:
        """Carry out a step of a partition's state machine."""
        broker = self.broker
        log, machine = broker.log(key), self.leaders[key]
        if step.epoch_entry is not None:
            log.lead(step.epoch_entry[0])
            broker.node.say(f"leads {machine} in epoch {step.epoch_entry[0]} from {log.end}")
            broker.cluster.invariants.took_office(broker.broker_id, key, step.epoch_entry[0])
            self._wake(key)
        if step.high_watermark_moved:
            log.move_high_watermark(machine.high_watermark)
            broker.cluster.invariants.shows_more(broker.broker_id, key)
        for event in step.events:
            broker.node.say(f"{event.kind} {event.subject} {event.detail}")
        if step.send is not None:
            if self.alter.submit(step.send):
                self.send_changes()
            else:
                refused = machine.alter_partition_answered(
                    step.send, Errors.OPERATION_NOT_ATTEMPTED, broker.node.now_ms
                )
                self.carry_out(key, refused)
        if step.high_watermark_moved or step.isr_changed:
            self._settle(key)

    def send_changes(self) -> None:
        """Send the queued ISR changes to the controller, unless a request is in flight."""
        broker = self.broker
        request = self.alter.next_request(broker.node.now_ms)
        if request is None:
            return
        changes = [(f"{one.topic}-{one.index}", one.new_isr) for one in request.changes]
        broker.node.say(f"asks for {changes}")

        def answered(answer: Mapping[Key, int | AlteredPartition] | int | None) -> None:
            self._altered(request, answer)

        broker.ask_controller(request, answered, purpose="alter", may_repeat=True)

    def _altered(
        self,
        request: AlterPartitionRequest,
        answer: Mapping[Key, int | AlteredPartition] | int | None,
    ) -> None:
        now_ms = self.broker.node.now_ms
        error: int = Errors.NONE
        parts: Mapping[Key, int | AlteredPartition] = {}
        if answer is None:
            error = Errors.NETWORK_EXCEPTION
        elif isinstance(answer, int):
            error = answer
        else:
            parts = answer
        for change, result in self.alter.answered(error, parts, now_ms):
            key = change.topic_id, change.index
            machine = self.leaders.get(key)
            if machine is not None:
                self.broker.node.say(f"hears for {machine} {result}")
                self.carry_out(key, machine.alter_partition_answered(change, result, now_ms))
        self._send_in_time()

    def _send_in_time(self) -> None:
        """Retry when it is time by this node's clock, which may have been set back."""
        wait_ms = (self.alter.retry_at_ms or 0) - self.broker.node.now_ms
        if wait_ms > 0:
            self.broker.node.after(wait_ms, self._send_in_time)
        else:
            self.send_changes()

    # --- writes ---

    def produce(self, request: Produce, reply: Answer, *, is_verified: bool = False) -> None:
        """Append a producer's batch; the first one of a transaction is verified before."""
        machine, header = self.leader(request.key), request.batch.header
        if machine is None:
            if request.key not in self.broker.disk.logs:
                reply(Produced(Code.UNKNOWN_TOPIC_OR_PARTITION))
                return
            if header.producer_id >= 0:
                self.broker.log(request.key).producers.refused(header)
            reply(Produced(Code.NOT_LEADER_OR_FOLLOWER))
            return
        log = self.broker.log(request.key)
        if request.acks == -1 and machine.is_under_min_isr:
            if header.producer_id >= 0:
                log.producers.refused(header)
            reply(Produced(Code.NOT_ENOUGH_REPLICAS))
            return
        base = -1
        if header.producer_id >= 0:
            known = log.producers.find_duplicate(header)
            producer = header.producer_id, header.producer_epoch
            if (
                header.is_transactional
                and known is None
                and not is_verified
                and not log.producers.has_open_transaction(*producer)
            ):
                topic = self.broker.image.topics_by_id[request.key[0]]
                self.broker.coordinator.verify(
                    (topic.name, request.key[1]),
                    (request.transactional_id, *producer),
                    lambda code: reply(Produced(code)),
                    lambda: self.produce(request, reply, is_verified=True),
                )
                return
            try:
                if known is not None:
                    base, last = known.first_offset, known.last_offset
                else:
                    log.producers.check_batch(
                        header, verified=is_verified, transaction_version=2 * is_verified
                    )
            except LogError as error:
                log.producers.refused(header)
                reply(Produced(LOG_ERRORS[type(error)]))
                return
        if base < 0:
            base, last = self.append(request.key, request)
        if request.acks != -1:
            reply(Produced(Code.NONE, base))
            return
        self.wait(
            request.key,
            last + 1,
            machine.leader_epoch,
            request.timeout_ms,
            lambda code: reply(Produced(code, base)),
        )

    def append(self, key: Key, request: Produce) -> tuple[int, int]:
        """Append a batch as the leader; return its first and last offset."""
        machine, log = self.leaders[key], self.broker.log(key)
        placed = log.append(request.batch, machine.leader_epoch)
        self.broker.touched(key)
        self.carry_out(key, machine.appended(log.end, self.broker.node.now_ms))
        self._wake(key)
        return placed.base_offset, placed.next_offset - 1

    def delete_records(self, key: Key) -> None:
        """Delete the older half of the committed records."""
        machine = self.leader(key)
        if machine is None:
            return
        log = self.broker.log(key)
        log.move_start((log.start + log.high_watermark) // 2)
        self.broker.node.say(f"drops what is below {log.start} of {machine}")
        self.broker.touched(key)
        self.carry_out(key, machine.log_start_moved(log.start))

    def wait(
        self,
        key: Key,
        required: int,
        leader_epoch: int,
        timeout_ms: int,
        reply: Callable[[Code], None],
    ) -> None:
        """Reply once the records below ``required`` are committed, or can no longer be."""
        waiter = _Waiter(required, leader_epoch, reply)
        self._waiters.setdefault(key, []).append(waiter)
        self.broker.node.after(timeout_ms, self._give_up, waiter)
        self._settle(key)

    def _give_up(self, waiter: _Waiter) -> None:
        if not waiter.is_done:
            waiter.is_done = True
            waiter.reply(Code.REQUEST_TIMED_OUT)

    def _settle(self, key: Key) -> None:
        for shards in self.broker.coordinators:
            if shards.key == key:
                shards.commits.changed()
        waiting = self._waiters.get(key)
        if not waiting:
            return
        machine = self.leaders.get(key)
        left = []
        for waiter in waiting:
            if waiter.is_done:
                continue
            verdict = AcksVerdict.NOT_LEADER_OR_FOLLOWER
            if machine is not None:
                verdict = machine.acks_verdict(waiter.required, waiter.leader_epoch)
            if verdict is AcksVerdict.WAITING:
                left.append(waiter)
            else:
                waiter.is_done = True
                waiter.reply(VERDICTS[verdict])
        self._waiters[key] = left

    # --- reads ---

    def follower_fetches(self, fetch: FollowerFetch, reply: Answer) -> None:
        """Answer a follower's fetch, at once if it has news, otherwise later."""
        session = self._session(fetch.request)
        if isinstance(session, int):
            reply(FetchResponse(error=session))
            return
        answers: dict[Key, PartitionResponse] = {}
        for key, part in session.parts.items():
            answers[key] = self._read(fetch, part, counts=True)
        fresh = fetch.request.is_full or any(_is_news(one) for one in answers.values())
        if fresh:
            _answer(session, answers, reply, is_full=fetch.request.is_full)
            return
        parked = _Parked(fetch, session.parts, reply, session)
        for key in session.parts:
            self._parked.setdefault(key, []).append(parked)
        self.broker.node.after(self.broker.options.fetch_wait_ms, self._unpark, parked)

    def _session(self, request: FetchRequest) -> _Session | int:
        if request.is_full:
            self._sessions.pop(request.session_id, None)
            session = _Session(self._next_session)
            self._next_session += 1
            self._sessions[session.session_id] = session
        else:
            found = self._sessions.get(request.session_id)
            if found is None:
                return Errors.FETCH_SESSION_ID_NOT_FOUND
            if found.epoch != request.session_epoch:
                return Errors.INVALID_FETCH_SESSION_EPOCH
            session = found
            session.epoch += 1
        parts = dict(session.parts)
        for key in request.forgotten:
            parts.pop(key, None)
            session.told.pop(key, None)
        for one in request.partitions:
            known = parts.get(one.key)
            if known is not None and known.current_leader_epoch != one.current_leader_epoch:
                # The follower may have dropped the offsets of another epoch.
                session.told.pop(one.key, None)
            parts[one.key] = one
        session.parts = parts
        return session

    def _unpark(self, parked: _Parked) -> None:
        if parked.is_done:
            return
        parked.is_done = True
        for key in parked.parts:
            waiting = self._parked.get(key)
            if waiting is not None and parked in waiting:
                waiting.remove(parked)
        answers = {
            key: self._read(parked.fetch, part, counts=False) for key, part in parked.parts.items()
        }
        _answer(parked.session, answers, parked.reply, is_full=False)

    def _wake(self, key: Key) -> None:
        """Answer the fetches that wait on a partition."""
        for parked in self._parked.pop(key, ()):
            self._unpark(parked)

    def _refusal(self, key: Key, leader_epoch: int) -> int:
        """Return the error for a request with a leader epoch, 0 if it can be served."""
        if self.broker.image.partition(*key) is None:
            known = key[0] in self.broker.image.topics_by_id
            return Errors.UNKNOWN_TOPIC_OR_PARTITION if known else Errors.UNKNOWN_TOPIC_ID
        epoch = self.broker.leader_epoch(key)
        if epoch is None:
            return Errors.NOT_LEADER_OR_FOLLOWER
        if leader_epoch < epoch:
            return Errors.FENCED_LEADER_EPOCH
        if leader_epoch > epoch:
            return Errors.UNKNOWN_LEADER_EPOCH
        return 0 if self.leader(key) is not None else Errors.NOT_LEADER_OR_FOLLOWER

    def _read(
        self, fetch: FollowerFetch, part: PartitionFetch, *, counts: bool
    ) -> PartitionResponse:
        key = part.key
        refusal = self._refusal(key, part.current_leader_epoch)
        if refusal:
            return PartitionResponse(error=refusal)
        machine, log = self.leaders[key], self.broker.log(key)
        try:
            machine.check_replica(fetch.broker_id)
            answer = read_for_follower(
                log, part, machine.high_watermark, self.broker.options.fetch_batches
            )
            if answer.error or not counts:
                return answer
            step = machine.fetched(
                fetch.broker_id,
                fetch.broker_epoch,
                part.fetch_offset,
                part.log_start_offset,
                log.end,
                self.broker.node.now_ms,
                is_diverging=answer.diverging is not None,
            )
        except UnknownReplicaError:
            return PartitionResponse(error=Errors.UNKNOWN_LEADER_EPOCH)
        except NotLeaderOrFollowerError:
            return PartitionResponse(error=Errors.NOT_LEADER_OR_FOLLOWER)
        self.carry_out(key, step)
        return answer

    def list_offset(self, request: ListOffset, reply: Answer) -> None:
        """Answer a follower's ListOffsets."""
        refusal = self._refusal(request.key, request.leader_epoch)
        if refusal:
            reply(Listed(refusal))
            return
        log = self.broker.log(request.key)
        reply(Listed(0, log.end if request.end is OffsetSpec.LATEST else log.start))

    def consume(self, request: Consume, reply: Answer) -> None:
        """Answer a consumer's fetch, as the leader or, if the request allows it, as a follower."""
        key = request.key
        refusal = self._refusal(key, request.leader_epoch)
        if refusal == Errors.NOT_LEADER_OR_FOLLOWER and request.from_follower:
            refusal = 0 if key in self.broker.disk.logs else refusal
        if refusal:
            reply(Consumed(refusal))
            return
        log = self.broker.log(key)
        if not log.start <= request.offset <= log.end:
            reply(Consumed(Code.OFFSET_OUT_OF_RANGE))
            return
        limit = log.stable if request.read_committed else log.high_watermark
        reply(Consumed(Code.NONE, tuple(log.read(request.offset, limit)), limit))


def read_for_follower(
    log: ModelLog, part: PartitionFetch, high_watermark: int, most: int
) -> PartitionResponse:
    """Read the leader's log for a follower's fetch (kafka: ``Partition.readRecords``)."""
    offset = part.fetch_offset
    try:
        epoch = part.last_fetched_epoch
        diverging = diverging_epoch(log.end_of_epoch(epoch), epoch, offset, log.start)
    except OffsetOutOfRangeError:
        return PartitionResponse(error=Errors.OFFSET_OUT_OF_RANGE)
    if offset < log.start or (diverging is None and offset > log.end):
        return PartitionResponse(error=Errors.OFFSET_OUT_OF_RANGE)
    if diverging is not None:
        return PartitionResponse(
            high_watermark=high_watermark, log_start_offset=log.start, diverging=diverging
        )
    batches = log.read(offset, log.end, most)
    return PartitionResponse(
        high_watermark=high_watermark,
        log_start_offset=log.start,
        records=batches,
        size=sum(one.header.size for one in batches),
    )


def _is_news(answer: PartitionResponse) -> bool:
    return bool(answer.error or answer.size or answer.diverging is not None)


def _answer(
    session: _Session, answers: dict[Key, PartitionResponse], reply: Answer, *, is_full: bool
) -> None:
    """Answer a follower with the partitions that have news, or, in a full answer, with all."""
    told = session.told
    for key, one in list(answers.items()):
        marks = one.high_watermark, one.log_start_offset
        if not is_full and not _is_news(one) and told.get(key) == marks:
            del answers[key]
        if one.error or one.diverging is not None:
            told.pop(key, None)  # the follower ignores the offsets of this answer
        else:
            told[key] = marks
    reply(FetchResponse(session_id=session.session_id, partitions=answers))
