"""The daemon's shard runtime on a replicated partition of the simulation.

:class:`ShardRuntime`, with its turns, held answers and loading, and its state machine are the
product's code. The event loop, the timers, the partition's log, the wait for the high watermark and
the election of shards are models; the topic has only one partition here.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from fencepost.coordinator.runtime import shard as runtime
from fencepost.coordinator.runtime.errors import NotCoordinatorError
from fencepost.coordinator.runtime.shard import ShardRuntime, ShardServices
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.logcore.batch import (
    BatchHeader,
    LogRecord,
    encode_batch,
    end_marker,
    parse_header,
)
from fencepost.logcore.machine import (
    Decision,
    DomainError,
    EndMarker,
    Machine,
    ProducerStamp,
    Record,
    Reply,
)
from fencepost.logcore.partition import Appended
from fencepost.logcore.producers import ProducerStateManager
from tests.sim.disk import Batch, Key, ModelLog, data, end_of_transaction
from tests.sim.messages import Produce

if TYPE_CHECKING:
    from tests.sim.process import Process

SHARD: Final = 0
"""The only partition of a coordinator's topic."""
COMMIT_TIMEOUT_MS: Final = 1_500
"""``offsets.commit.timeout.ms``."""
LOADED_AT_ONCE: Final = 8
"""The batches that a loading shard reads before it yields."""


class Promise:
    """A future without an event loop, for one callback."""

    def __init__(self) -> None:
        self._answer: object = None
        self._is_done = False
        self._then: Callable[[object], None] | None = None

    def done(self) -> bool:
        """Return whether the result is set."""
        return self._is_done

    def set_result(self, answer: object) -> None:
        """Set the result, and call the callback."""
        self._answer, self._is_done = answer, True
        if self._then is not None:
            self._then(answer)

    set_exception = set_result

    def then(self, call: Callable[[object], None]) -> None:
        """Call ``call`` with the result or the error, once it is set."""
        if self._is_done:
            call(self._answer)
        else:
            self._then = call


class Timers:
    """The timers of a shard, on its process's clock."""

    def __init__(self, broker: Process, fire: Callable[[Hashable, int], None]) -> None:
        self._broker = broker
        self._fire = fire
        self._set: dict[Hashable, object] = {}

    def set(self, key: Hashable, deadline_ms: int | None, now_ms: int | None = None) -> None:
        """Set or cancel the timer of a key; the delay counts from ``now_ms``."""
        self._set.pop(key, None)
        if deadline_ms is not None:
            node = self._broker.node
            wait_ms = deadline_ms - (node.now_ms if now_ms is None else now_ms)
            self._set[key] = mark = object()
            node.after(max(wait_ms, 1), self._expire, key, mark, deadline_ms)

    def _expire(self, key: Hashable, mark: object, deadline_ms: int) -> None:
        if self._set.get(key) is mark:
            del self._set[key]
            self._fire(key, max(deadline_ms, self._broker.node.now_ms))

    def clear(self) -> None:
        """Cancel all timers."""
        self._set.clear()


class Commits:
    """Callbacks that wait until a partition's records are committed, or can no longer be."""

    is_idle = False

    def __init__(self, broker: Process) -> None:
        self._broker = broker
        self._waits: deque[tuple[LedPartition, int, Callable[[], None]]] = deque()
        self._is_armed = False

    def after(self, partitions: Sequence[LedPartition], callback: Callable[[], None]) -> bool:
        """Queue a callback; return False if all records are committed and the queue is empty."""
        (partition,) = partitions
        end = partition.log_end_offset
        if partition.high_watermark >= end and not self._waits:
            return False
        self._waits.append((partition, end, callback))
        return True

    def _is_due(self) -> bool:
        if not self._waits:
            return False
        partition, end, _ = self._waits[0]
        return partition.high_watermark >= end or not partition.is_led

    def changed(self) -> None:
        """Schedule the due callbacks, after a change of high watermark or leadership."""
        if not self._is_armed and self._is_due():
            self._is_armed = True
            # In a turn of their own, because the change comes inside an append.
            self._broker.node.after(0, self._call)

    def _call(self) -> None:
        self._is_armed = False
        while self._is_due():
            self._waits.popleft()[2]()


class LedPartition:
    """A shard's partition, in the leader epoch of the shard's election."""

    offline = None
    is_replicated = True

    def __init__(self, broker: Process, topic: str, key: Key, leader_epoch: int) -> None:
        self.broker, self.topic, self.key = broker, topic, key
        self.index = key[1]
        self._elected_in = leader_epoch
        self.marks = self.reader = self
        """This object is also its own marks and reader."""

    @property
    def leader_epoch(self) -> int:
        """The newest leader epoch that this process knows, -1 for none."""
        epoch = self.broker.leader_epoch(self.key)
        return -1 if epoch is None else epoch

    @property
    def is_led(self) -> bool:
        """Whether this process leads it in the epoch of the election."""
        return self.broker.leads(self.key) == self._elected_in

    @property
    def _log(self) -> ModelLog:
        return self.broker.disk.logs.get(self.key) or ModelLog()

    @property
    def high_watermark(self) -> int:
        """The high watermark of the log."""
        return self._log.high_watermark

    @property
    def log_start_offset(self) -> int:
        """The log start offset."""
        return self._log.start

    @property
    def log_end_offset(self) -> int:
        """The log end offset."""
        return self._log.end

    @property
    def producers(self) -> ProducerStateManager:
        """The producer state of the log."""
        return self._log.producers

    def append_records(
        self, records: Sequence[Record], *, now_ms: int, producer: ProducerStamp | None
    ) -> Appended:
        """Append a coordinator's records as one batch."""
        del now_ms
        in_transaction = producer is not None
        batch = data(
            tuple(records), producer, 0 if producer else -1, is_transactional=in_transaction
        )
        return self._append(batch)

    def append_marker(self, marker: EndMarker, now_ms: int) -> Appended:
        """Append an end marker, if :meth:`check_marker` accepts it."""
        del now_ms
        self.check_marker(marker)
        return self._append(end_of_transaction(marker))

    def check_marker(self, marker: EndMarker) -> None:
        """Check an end marker by the producer state.

        Raises TransactionCoordinatorFencedError, InvalidProducerEpochError.
        """
        stamp = marker.stamp
        self.producers.check_marker(
            stamp.producer_id,
            stamp.producer_epoch,
            marker.coordinator_epoch,
            marker.transaction_version,
        )

    def _append(self, batch: Batch) -> Appended:
        base, last = self.broker.leading.append(self.key, Produce(self.key, batch, -1))
        return Appended(base, last, 0, 0, False)

    def read_all(self) -> Iterator[tuple[BatchHeader, bytes]]:
        """Yield the header and the bytes of each batch, as a disk would hold them."""
        for batch in tuple(self._log.batches):
            written = _bytes_of(batch)
            yield parse_header(written), written


def _bytes_of(batch: Batch) -> bytes:
    header, marker = batch.header, batch.marker
    if marker is not None:
        written = end_marker(
            commit=marker.commit,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            coordinator_epoch=marker.coordinator_epoch,
            timestamp_ms=0,
        )
        # The checksum does not cover the base offset.
        return header.base_offset.to_bytes(8) + written[8:]
    records = [
        LogRecord(header.base_offset + at, 0, *cast("Record", value))
        for at, value in enumerate(batch.values)
    ]
    return encode_batch(
        records,
        leader_epoch=header.leader_epoch,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        transactional=header.is_transactional,
    )


@types.coroutine
def _wait(wait_ms: int) -> Generator[int, None, None]:
    yield wait_ms


class _Pace:
    """Yields for ``wait_ms`` after every ``LOADED_AT_ONCE`` batches."""

    def __init__(self, wait_ms: int) -> None:
        self._wait_ms, self._count = wait_ms, 0

    async def __call__(self) -> None:
        self._count += 1
        if self._wait_ms and self._count % LOADED_AT_ONCE == 0:
            await _wait(self._wait_ms)


class _Shard(ShardRuntime):
    """The shard runtime, which reports acknowledged records to the invariants."""

    def __init__(self, shards: Shards, partition: LedPartition, leader_epoch: int) -> None:
        self.shards = shards
        self._written: dict[int, tuple[int, tuple[Record, ...]]] = {}
        """The base offset and records of each unsent answer, by token."""
        super().__init__(cast("Any", partition), leader_epoch, shards.build, shards.services)

    def _carry_out(self, decision: Decision, now_ms: int, turn: Any) -> None:
        base = self.partition.log_end_offset
        super()._carry_out(decision, now_ms, turn)
        self._machine.check()
        if decision.records:
            for reply in decision.replies:
                self._written[reply.token] = base, decision.records

    def _answer(self, reply: Reply) -> None:
        written = self._written.pop(reply.token, None)
        if written is not None and not isinstance(reply.response, DomainError):
            self.shards.acknowledges(*written)
        super()._answer(reply)

    def _activate(self, offset: int) -> None:
        super()._activate(offset)
        self.shards.activated(self)

    def _fail(self, cause: Exception, token: int | None) -> None:
        """Raise the cause: in the simulation, only a bug makes a shard fail."""
        del token
        raise cause


class Shards:
    """A process's coordinator on an internal topic with one partition."""

    topic: str

    def __init__(self, broker: Process) -> None:
        self.broker = broker
        self.shard: _Shard | None = None
        self.key: Key | None = None
        self._unopened: int | None = None
        self.commits = Commits(broker)
        self.services = ShardServices(
            clock=cast("Any", self),
            loop=cast("Any", self),
            timers=cast("Any", self),
            run_effect=cast("Any", self.run_effect),
            while_loading=self.while_loading,
            remember=lambda _topic, _shard, event, _origin, _trigger: broker.node.say(
                f"{event.kind} {event.subject} {dict(event.detail)}"
            ),
            commits=cast("Any", self.commits),
            commit_timeout_ms=lambda: COMMIT_TIMEOUT_MS,
            admit=cast("Any", self.admit),
        )

    # --- hooks of a coordinator ---

    def build(self, partition: Any, coordinator_epoch: int) -> Machine:
        """Return an empty state machine."""
        raise NotImplementedError

    def run_effect(
        self, shard: _Shard, effect: object, now_ms: int, first_attempt_done: Callable[[], None]
    ) -> None:
        """Carry out an effect of the state machine."""
        raise NotImplementedError

    def while_loading(self, command: object) -> object | None:
        """Return a loading shard's answer to a command, None to refuse it."""
        del command
        return None

    def admit(self, partition: LedPartition, command: object) -> DomainError | None:
        """Return the error for a command that must not write now, or None."""
        del partition, command
        return None

    def activated(self, shard: _Shard) -> None:
        """Handle the activation of a shard, which has loaded its log."""

    def unserved(self) -> None:
        """Handle the absence of an active shard."""

    # --- the shard's clock and event loop ---

    def now_ms(self) -> int:
        """Return the time by the process's clock."""
        return self.broker.node.now_ms

    def monotonic_ms(self) -> int:
        """Return the monotonic time."""
        return self.broker.node.scheduler.now

    def create_future(self) -> Promise:
        """Return a promise for a request's answer."""
        return Promise()

    def timers(self, fire: Callable[[Hashable, int], None]) -> Timers:
        """Return the timers of a shard."""
        return Timers(self.broker, fire)

    def acknowledges(self, base: int, records: tuple[Record, ...]) -> None:
        """Report records to the invariants as their answer is sent."""
        if self.key is not None:
            self.broker.cluster.invariants.acknowledged(self.key, base, records)

    # --- elections (``ShardSet``) ---

    @property
    def active(self) -> _Shard | None:
        """The shard, if it is active."""
        one = self.shard
        return one if one is not None and one.state is ShardState.ACTIVE else None

    @property
    def epoch(self) -> int | None:
        """The coordinator epoch, None without an active shard."""
        one = self.active
        return None if one is None else one.coordinator_epoch

    def elected(self, key: Key, epoch: int) -> None:
        """Open a shard soon, unless this process knows a newer epoch."""
        if self._is_news(epoch):
            self._drop()
            self.key, self._unopened = key, epoch
            self.broker.node.after(1, self._open, epoch)
        if self.active is None:
            self.unserved()

    def resigned(self, epoch: int | None) -> None:
        """Close the shard; ``epoch`` is the new leader's, None if the replica was deleted."""
        if epoch is None or self._is_news(epoch):
            self._drop()
        if self.active is None:
            self.unserved()

    def _is_news(self, epoch: int) -> bool:
        if self.shard is None:
            return self._unopened is None or self._unopened < epoch
        return self.shard.leader_epoch < epoch or self.shard.state is ShardState.CLOSED

    def _drop(self) -> None:
        self._unopened = None
        shard, self.shard = self.shard, None
        if shard is not None:
            shard.end()

    def open_now(self) -> None:
        """Open the shard now, if an election has scheduled that."""
        if self._unopened is not None:
            self._open(self._unopened)

    def _open(self, epoch: int) -> None:
        if self._unopened != epoch or self.key is None:
            return
        self._unopened = None
        partition = LedPartition(self.broker, self.topic, self.key, epoch)
        self.broker.node.say(f"coordinates {self.topic} in epoch {epoch}")
        self.shard = shard = _Shard(self, partition, epoch)
        if not shard.load_empty():
            draw = self.broker.node.scheduler.draw
            self._go_on(shard.load(cast("Any", _Pace(draw.choice((0, 0, 0, 2, 20))))))

    def _go_on(self, work: Coroutine[int, None, None]) -> None:
        try:
            wait_ms = work.send(None)
        except StopIteration:
            return
        self.broker.node.after(wait_ms, self._go_on, work)

    # --- requests ---

    def submit(self, command: object, reply: Callable[[Any], None]) -> None:
        """Submit a command to the shard; the reply is a result or a DomainError."""
        if self.shard is None:
            reply(NotCoordinatorError(f"{self.topic} is not served here"))
        else:
            cast("Promise", self.shard.submit(command)).then(reply)


class _Quiet:
    """A logger that drops everything: the trace of a history tells the causes."""

    def is_enabled_for(self, _level: int) -> bool:
        return False

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_arguments, **_where: None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log of the shard runtime."""
    kept = runtime._log
    runtime._log = cast("Any", _Quiet())
    try:
        yield
    finally:
        runtime._log = kept
