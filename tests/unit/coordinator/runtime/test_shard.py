"""The shard runtime with a small state machine on a real partition."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.runtime.background import Pace
from fencepost.coordinator.runtime.commits import Commits
from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    NotCoordinatorError,
)
from fencepost.coordinator.runtime.flusher import Flusher
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.shard import ShardRuntime, ShardServices
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.coordinator.runtime.timers import TimerQueue
from fencepost.logcore.config import LogConfig
from fencepost.logcore.errors import InvalidProducerEpochError, StorageError
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.machine import (
    Decision,
    DomainError,
    EndMarker,
    Event,
    InvariantViolation,
    ProducerStamp,
    Record,
    Reply,
    Timer,
)
from fencepost.logcore.partition import Partition
from tests.support.clock import ManualClock
from tests.unit.coordinator.services.coordinators import serves

COMMIT_TIMEOUT_MS = 5_000


@dataclass(frozen=True)
class Put:
    key: str
    value: str
    stamp: ProducerStamp | None = None


@dataclass(frozen=True)
class Get:
    key: str


@dataclass(frozen=True)
class Wait:
    key: str


@dataclass(frozen=True)
class Later:
    key: str
    delay_ms: int


@dataclass(frozen=True)
class PutAndTell:
    """Two steps with an effect between the steps, like Prepare and Complete."""

    key: str


@dataclass(frozen=True)
class Told:
    key: str


@dataclass(frozen=True)
class Tell:
    """The effect that :class:`PutAndTell` requests."""

    key: str


class RefusedError(DomainError):
    pass


class TableMachine:
    """A table of strings; a request that waits for an absent key is parked."""

    def __init__(self) -> None:
        self.table: dict[str, tuple[str, int]] = {}
        self.pending: dict[int, dict[str, tuple[str, int]]] = {}
        self.parked: dict[str, list[int]] = {}
        self.serving = False

    def decide(self, token: int, command: object, now_ms: int) -> Decision:
        match command:
            case Put("", _):
                raise RefusedError("no key")
            case Put("bug", _):
                raise ZeroDivisionError("a bug of ours")
            case Put("broken", _):
                raise InvariantViolation("must not be")
            case Put(key, value, stamp):
                waiting = tuple(Reply(other, value) for other in self.parked.pop(key, ()))
                return Decision(
                    records=(_record(key, value),),
                    replies=(Reply(token, now_ms), *waiting),
                    events=(Event("put", key, {"value": value, "shard": "not mine"}),),
                    stamp=stamp,
                )
            case Get(key):
                if key not in self.table:
                    return Decision(replies=(Reply(token, RefusedError(key)),))
                return Decision(replies=(Reply(token, self.table[key]),))
            case Wait(key):
                self.parked.setdefault(key, []).append(token)
                return Decision()
            case Later(key, delay_ms):
                return Decision(
                    timers=(Timer(("late", key), now_ms + delay_ms),),
                    replies=(Reply(token, None),),
                )
            case PutAndTell(key):
                return Decision(
                    records=(_record(key, "prepared"),),
                    replies=(Reply(token, "done"),),
                    effects=(Tell(key),),
                )
            case Told("stale"):
                raise RefusedError("nobody asked")
            case Told(key):
                return Decision(records=(_record(key, "complete"),))
        raise InvariantViolation(f"not a command: {command}")

    def fire(self, key: Hashable, now_ms: int) -> Decision:
        assert isinstance(key, tuple)
        return Decision(records=(_record(key[1], f"fired at {now_ms}"),))

    def replay(
        self, record: Record, offset: int, timestamp_ms: int, stamp: ProducerStamp | None
    ) -> None:
        key = record.key.decode()
        if record.value is None:
            self.table.pop(key, None)
            return
        if record.value == b"poison":
            raise InvariantViolation("cannot be replayed")
        target = self.table if stamp is None else self.pending.setdefault(stamp.producer_id, {})
        target[key] = (record.value.decode(), offset)

    def replay_marker(self, stamp: ProducerStamp, offset: int, *, commit: bool) -> None:
        pending = self.pending.pop(stamp.producer_id, {})
        if commit:
            self.table.update(pending)

    def on_loaded(self, now_ms: int) -> Decision:
        self.serving = True
        prepared = [key for key, (value, _) in self.table.items() if value == "prepared"]
        return Decision(effects=tuple(Tell(key) for key in prepared))

    def on_unloaded(self) -> Decision:
        tokens = [token for tokens in self.parked.values() for token in tokens]
        return Decision(replies=tuple(Reply(token, RefusedError("unloaded")) for token in tokens))

    def digest(self) -> str:
        return hashlib.sha256(repr((sorted(self.table.items()), self.pending)).encode()).hexdigest()

    def check(self) -> None:
        pass


def _record(key: str, value: str | None) -> Record:
    return Record(key.encode(), None if value is None else value.encode())


class FlakyPartition:
    """A partition whose appends may be made to fail, before or after the write."""

    def __init__(self, partition: Partition) -> None:
        self.inner = partition
        self.fail_next: list[Exception] = []
        self.fail_after: list[Exception] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def append_records(self, records: Sequence[Record], **rest: object) -> object:
        if self.fail_next:
            raise self.fail_next.pop(0)
        appended = self.inner.append_records(records, **rest)  # type: ignore[arg-type]
        if self.fail_after:
            raise self.fail_after.pop(0)
        return appended


class Bench:
    def __init__(self, directory: Path, **config: object) -> None:
        self.clock = ManualClock(1_000_000)
        self.directory = directory
        self.config = LogConfig(**config)  # type: ignore[arg-type]
        self.partition = FlakyPartition(self.open())
        self.loop = asyncio.get_running_loop()
        # The pass limit is long, so that a busy machine does not end a pass early.
        self.timers = TimerQueue(self.clock, self.loop, pass_ms=60_000)
        self.effects: list[object] = []
        self.remembered: list[tuple[str, str, Event, Origin | None, str | None]] = []
        self.machines: list[TableMachine] = []
        self.commits = Commits(Flusher(self.clock))
        self.too_few_replicas = False
        self.answer: Callable[[ShardRuntime, object], None] = self.report
        self.shard = self.new_shard()

    def open(self) -> Partition:
        import uuid

        return Partition.open(
            OsFileSystem(),
            self.directory / "table-0",
            topic="table",
            index=0,
            topic_id=uuid.UUID(int=7),
            config=self.config,
            clock=self.clock,
            clean=False,
        )

    def build(self, _partition: Partition, _coordinator_epoch: int) -> TableMachine:
        self.machines.append(TableMachine())
        return self.machines[-1]

    def run_effect(
        self,
        shard: ShardRuntime,
        effect: object,
        now_ms: int,
        first_attempt_done: Callable[[], None],
    ) -> None:
        self.effects.append(effect)
        self.answer(shard, effect)
        first_attempt_done()

    def report(self, shard: ShardRuntime, effect: object) -> None:
        assert isinstance(effect, Tell)
        shard.report(Told(effect.key))

    def new_shard(self) -> ShardRuntime:
        services = ShardServices(
            self.clock,
            self.loop,
            self.timers,
            self.run_effect,
            lambda command: "loading" if command == Get("loading") else None,
            lambda *said: self.remembered.append(said),
            self.commits,
            lambda: COMMIT_TIMEOUT_MS,
            self.admit,
        )
        return ShardRuntime(self.partition, 0, self.build, services)  # type: ignore[arg-type]

    def admit(self, _partition: Partition, command: object) -> DomainError | None:
        writes = not isinstance(command, Get)
        return RefusedError("too few replicas") if writes and self.too_few_replicas else None

    async def load(self) -> ShardRuntime:
        await self.shard.load(Pace())
        assert self.shard.state is ShardState.ACTIVE
        return self.shard

    def table(self) -> dict[str, str]:
        machine = self.shard.machine
        assert isinstance(machine, TableMachine)
        return {key: value for key, (value, _) in machine.table.items()}


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_command_is_appended_replayed_and_answered_in_one_turn(bench: Bench) -> None:
    shard = await bench.load()
    future = shard.submit(Put("a", "1"))
    assert future.done()
    assert future.result() == 1_000_000
    assert bench.table() == {"a": "1"}
    assert bench.partition.log_end_offset == 1


async def test_domain_error_is_the_response_and_leaves_shard_active(bench: Bench) -> None:
    shard = await bench.load()
    for command in (Put("", "x"), Get("missing")):
        with pytest.raises(RefusedError):
            await shard.submit(command)
    assert shard.state is ShardState.ACTIVE


async def test_parked_request_is_answered_by_a_later_turn(bench: Bench) -> None:
    shard = await bench.load()
    waiting = shard.submit(Wait("a"))
    assert not waiting.done()
    await shard.submit(Put("a", "1"))
    assert waiting.result() == "1"


async def test_response_to_cancelled_request_is_dropped(bench: Bench) -> None:
    shard = await bench.load()
    waiting = shard.submit(Wait("a"))
    waiting.cancel()
    await shard.submit(Put("a", "1"))
    assert shard.state is ShardState.ACTIVE


async def test_restart_rebuilds_the_same_state_from_the_log(bench: Bench) -> None:
    shard = await bench.load()
    await shard.submit(Put("a", "1"))
    await shard.submit(PutAndTell("b"))
    await shard.submit(Put("c", "open", ProducerStamp(7, 0)))
    await shard.submit(Put("d", "aborted", ProducerStamp(8, 0)))
    await shard.submit(Put("e", "committed", ProducerStamp(9, 0)))
    shard.complete_transaction(EndMarker(ProducerStamp(8, 0), commit=False))
    shard.complete_transaction(EndMarker(ProducerStamp(9, 0), commit=True))
    await shard.submit(Put("a", "2"))
    digest = shard.machine.digest()
    assert bench.table() == {"a": "2", "b": "complete", "e": "committed"}
    bench.shard = bench.new_shard()
    await bench.load()
    assert bench.shard.machine.digest() == digest
    await bench.shard.submit(Put("z", "26"))


async def test_effect_and_its_report_run_before_the_response(bench: Bench) -> None:
    """The reply must not be sent before the last record of the turn is in the log."""
    shard = await bench.load()
    ends: list[int] = []

    def answer(shard: ShardRuntime, effect: object) -> None:
        ends.append(bench.partition.log_end_offset)
        bench.report(shard, effect)

    bench.answer = answer
    future = shard.submit(PutAndTell("a"))
    assert future.result() == "done"
    assert ends == [1]
    assert bench.partition.log_end_offset == 2
    assert bench.table() == {"a": "complete"}


async def test_effect_report_after_the_response_is_applied(bench: Bench) -> None:
    bench.answer = lambda shard, effect: None
    shard = await bench.load()
    assert (await shard.submit(PutAndTell("a"))) == "done"
    assert bench.table() == {"a": "prepared"}
    shard.report(Told("stale"))
    shard.report(Told("a"))
    assert bench.table() == {"a": "complete"}


async def test_loading_resumes_effects_of_prepared_keys(bench: Bench) -> None:
    bench.answer = lambda shard, effect: None
    shard = await bench.load()
    await shard.submit(PutAndTell("a"))
    bench.answer = bench.report
    bench.shard = bench.new_shard()
    await bench.load()
    assert bench.table() == {"a": "complete"}


async def test_failed_append_reloads_shard_and_fails_parked_requests(bench: Bench) -> None:
    shard = await bench.load()
    await shard.submit(Put("a", "1"))
    waiting = shard.submit(Wait("b"))
    shard.submit(Later("a", 10))
    bench.partition.fail_next.append(StorageError("a bad disk"))
    with pytest.raises(NotCoordinatorError):
        await shard.submit(Put("b", "2"))
    assert isinstance(waiting.exception(), NotCoordinatorError)
    assert shard.state is ShardState.FAILED
    with pytest.raises(NotCoordinatorError):
        await shard.submit(Get("a"))
    await serves(bench.shard)
    assert bench.table() == {"a": "1"}
    bench.clock.advance(100)
    bench.timers.run_due()
    assert bench.table() == {"a": "1"}, "a timer of the dropped state fired"


async def test_record_of_append_that_failed_after_its_write_is_reloaded(bench: Bench) -> None:
    shard = await bench.load()
    bench.partition.fail_after.append(StorageError("in doubt"))
    with pytest.raises(NotCoordinatorError):
        await shard.submit(Put("a", "1"))
    await serves(bench.shard)
    assert bench.table() == {"a": "1"}, "the log is the truth"


async def test_failed_effect_report_is_repeated_after_reload(bench: Bench) -> None:
    shard = await bench.load()

    def answer(shard: ShardRuntime, effect: object) -> None:
        bench.partition.fail_next.append(StorageError("second step"))
        bench.answer = bench.report
        bench.report(shard, effect)

    bench.answer = answer
    with pytest.raises(NotCoordinatorError):
        await shard.submit(PutAndTell("a"))
    await serves(bench.shard)
    assert bench.table() == {"a": "complete"}


async def test_older_producer_epoch_is_refused_without_failing_the_shard(bench: Bench) -> None:
    shard = await bench.load()
    await shard.submit(Put("a", "1", ProducerStamp(7, 5)))
    waiting, end = shard.submit(Wait("b")), bench.partition.log_end_offset
    digest = shard.machine.digest()
    for _ in range(3):
        with pytest.raises(InvalidProducerEpochError):
            await shard.submit(Put("a", "2", ProducerStamp(7, 4)))
    assert (shard.state, bench.partition.log_end_offset) == (ShardState.ACTIVE, end)
    assert shard.machine.digest() == digest
    assert not waiting.done()
    assert bench.remembered[-1][2] == Event("put", "a", {"value": "1", "shard": "not mine"})
    await shard.submit(Put("b", "3", ProducerStamp(7, 5)))
    assert waiting.result() == "3"


async def test_failed_shard_logs_its_trigger_and_cause(bench: Bench) -> None:
    shard = await bench.load()
    with capture_logs() as said:
        for command, origin in (
            (Put("bug", "1"), Origin("me", "host")),
            (Put("broken", "2"), None),
        ):
            with pytest.raises(NotCoordinatorError):
                await shard.submit(command, origin)
            await serves(bench.shard)
        await shard.submit(Later("a", 10))
        bench.partition.fail_next.append(StorageError("a bad disk"))
        bench.clock.advance(10)
        bench.timers.run_due()
        await serves(bench.shard)
        bench.partition.inner.append_records((_record("a", "poison"),), now_ms=1)
        await shard.close()
        again = bench.new_shard()
        await again.load(Pace())
        await again.close()
    keys = "trigger", "subject", "client_id", "client_host", "cause"
    failures = [line for line in said if line["event"] == "shard failed"]
    assert [{key: failure[key] for key in keys if key in failure} for failure in failures] == [
        {
            "trigger": "request Put",
            "client_id": "me",
            "client_host": "host",
            "cause": "ZeroDivisionError: a bug of ours",
        },
        {"trigger": "upkeep Put", "cause": "InvariantViolation: must not be"},
        {"trigger": "timer late", "subject": "a", "cause": "StorageError: a bad disk"},
        {
            "trigger": "load batch at offset 0",
            "cause": "InvariantViolation: cannot be replayed",
        },
    ]


@pytest.mark.parametrize("key", ["bug", "broken"])
async def test_unexpected_exception_fails_and_reloads_the_shard(bench: Bench, key: str) -> None:
    shard = await bench.load()
    await shard.submit(Put("a", "1"))
    with pytest.raises(NotCoordinatorError):
        await shard.submit(Put(key, "x"))
    assert shard.state is ShardState.FAILED
    await serves(bench.shard)
    assert bench.table() == {"a": "1"}


async def test_shard_reloads_after_append_of_another_writer(bench: Bench) -> None:
    shard = await bench.load()
    await shard.submit(Put("a", "1"))
    bench.partition.inner.append_records((_record("x", "foreign"),), now_ms=1)
    with pytest.raises(NotCoordinatorError):
        await shard.submit(Put("b", "2"))
    await serves(bench.shard)
    assert bench.table() == {"a": "1", "x": "foreign", "b": "2"}


async def test_shard_whose_log_cannot_be_replayed_stays_failed(bench: Bench) -> None:
    bench.partition.inner.append_records((_record("a", "poison"),), now_ms=1)
    await bench.shard.load(Pace())
    assert bench.shard.state is ShardState.FAILED
    with pytest.raises((NotCoordinatorError, CoordinatorLoadInProgressError)):
        await bench.shard.submit(Get("a"))
    await bench.shard.close()


async def test_loading_shard_answers_coordinator_load_in_progress(bench: Bench) -> None:
    assert isinstance(bench.shard.submit(Get("a")).exception(), CoordinatorLoadInProgressError)
    assert bench.shard.submit(Get("loading")).result() == "loading"
    with pytest.raises(CoordinatorLoadInProgressError):
        bench.shard.complete_transaction(EndMarker(ProducerStamp(1, 0), commit=True))


async def test_loading_yields_to_other_tasks_and_replays_late_appends(bench: Bench) -> None:
    for number in range(50):
        bench.partition.inner.append_records((_record(f"k{number}", "v"),), now_ms=1)
    loading = asyncio.ensure_future(bench.shard.load(Pace(slice_ms=0)))
    await asyncio.sleep(0)
    assert bench.shard.state is ShardState.LOADING
    bench.partition.inner.append_records((_record("late", "v"),), now_ms=1)
    await loading
    assert len(bench.table()) == 51
    await bench.shard.submit(Put("more", "v"))


async def test_shard_closed_while_loading_is_not_coordinator(bench: Bench) -> None:
    for number in range(50):
        bench.partition.inner.append_records((_record(f"k{number}", "v"),), now_ms=1)
    loading = asyncio.ensure_future(bench.shard.load(Pace(slice_ms=0)))
    await asyncio.sleep(0)
    await bench.shard.close()
    await loading
    assert bench.shard.state is ShardState.CLOSED
    assert isinstance(bench.shard.submit(Get("loading")).exception(), NotCoordinatorError)


async def test_fired_timer_appends_records_of_its_decision(bench: Bench) -> None:
    shard = await bench.load()
    await shard.submit(Later("a", 10))
    bench.clock.advance(10)
    bench.timers.run_due()
    assert bench.table() == {"a": "fired at 1000010"}


async def test_close_answers_parked_requests_and_cancels_timers(bench: Bench) -> None:
    shard = await bench.load()
    waiting = shard.submit(Wait("a"))
    shard.submit(Later("b", 10))
    await shard.close()
    assert isinstance(waiting.exception(), RefusedError)
    assert isinstance(shard.submit(Get("a")).exception(), NotCoordinatorError)
    assert len(bench.timers) == 0
    shard.report(Told("a"))
    await shard.close()


async def test_marker_of_older_producer_epoch_is_refused_without_effect(bench: Bench) -> None:
    shard = await bench.load()
    await shard.submit(Put("a", "1", ProducerStamp(7, 5)))
    with pytest.raises(InvalidProducerEpochError):
        shard.complete_transaction(EndMarker(ProducerStamp(7, 4), commit=True))
    assert shard.state is ShardState.ACTIVE
    shard.complete_transaction(EndMarker(ProducerStamp(7, 5), commit=True))
    assert bench.table() == {"a": "1"}


async def test_shard_with_empty_log_is_active_without_loading(bench: Bench) -> None:
    assert bench.shard.load_empty()
    assert bench.shard.state is ShardState.ACTIVE
    await bench.shard.submit(Put("a", "1"))
    assert not bench.new_shard().load_empty()


async def test_events_are_recorded_with_origin_and_trigger(bench: Bench) -> None:
    shard = await bench.load()
    me = Origin("client", "host")
    await shard.submit(Put("a", "1"), me)
    await shard.submit(Put("b", "2"))
    with pytest.raises(RefusedError):
        await shard.submit(Put("", "3"), me)
    with pytest.raises(NotCoordinatorError):
        await shard.submit(Put("bug", "4"), me)
    told = [
        (topic, name, event.subject, who, trigger)
        for topic, name, event, who, trigger in bench.remembered
    ]
    where = shard.partition.topic, shard.name
    assert told == [(*where, "a", me, "request Put"), (*where, "b", None, "upkeep Put")]
    await shard.close()
