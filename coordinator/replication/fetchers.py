"""What this broker follows: connections to leaders, and what comes over them into the logs.

For each leader there are ``num.replica.fetchers`` connections with one request under way on each.
What is to be asked and what an answer means say the machines (``cluster/fetcher.py``,
``cluster/follower.py``); here it is done. A partition that is no longer followed, or anew, has
another machine: whatever was begun for the former one ends without an effect.

Source: ``ReplicaFetcherManager``, ``AbstractFetcherThread``, ``ReplicaFetcherThread``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Protocol
from uuid import UUID

import structlog

from fencepost.cluster.errors import Errors, error_name
from fencepost.cluster.fetcher import (
    SESSION_ERRORS,
    FetchRequest,
    LeaderFetcher,
    PartitionResult,
    fetcher_id,
)
from fencepost.cluster.follower import FollowerStep, OffsetQuestion, PartitionFollower, Truncation
from fencepost.cluster.image import LocalPartition, MetadataImage
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.replication.fetch_wire import (
    Sizes,
    fetch_answer,
    fetch_entity,
    list_offsets_entity,
    listed_offsets,
)
from fencepost.coordinator.replication.followed_log import FollowedLog
from fencepost.coordinator.replication.peers import Peers, Purpose
from fencepost.coordinator.runtime.background import (
    AFTER_FAILURE_MS,
    Pace,
    call_later,
    spawn,
    survived,
    tell,
)
from fencepost.coordinator.runtime.key_partition import java_string_hash
from fencepost.coordinator.security.replication_quota import ReplicationQuota, Side
from fencepost.coordinator.wire.errors import WireError
from fencepost.coordinator.wire.schema import Entity
from fencepost.logcore.clock import Clock
from fencepost.logcore.errors import (
    CorruptRecordError,
    InvalidRecordError,
    LogError,
    NoRoomError,
    StorageError,
    UnexpectedAppendOffsetError,
)
from fencepost.logcore.machine import Event
from fencepost.logcore.partition import Partition
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass

_log = structlog.get_logger(__name__)

Key = tuple[UUID, int]
"""A partition: topic id and index."""

BATCHES_AT_ONCE: Final = 512
"""Batches that are appended before others get their turn: three milliseconds of small ones."""

FETCHERS_KEY: Final = "num.replica.fetchers"


class Logs(Protocol):
    """The part of the log manager that cuts need."""

    def plan_cut(self, partition: Partition, offset: int) -> set[str]:
        """Say no more of a log than is there once it ends, or begins anew, at ``offset``.

        The names of the checkpoints that have to be saved before it is cut.
        """

    async def save_all(self, names: Collection[str]) -> bool:
        """Write checkpoints; whether they are on disk."""


@dataclass(slots=True, eq=False)
class Followed:
    """One partition that is fetched."""

    local: LocalPartition
    partition: Partition
    machine: PartitionFollower
    fetcher: _Fetcher | None = None


class Fetchers:
    """``services.fetchers``. Belongs to the event loop."""

    def __init__(
        self,
        config: BrokerConfig,
        peers: Peers,
        logs: Logs,
        clock: Clock,
        *,
        node_id: int,
        image: Callable[[], MetadataImage],
        broker_epoch: Callable[[], int],
        log_of: Callable[[LocalPartition], Partition],
        on_disk: Callable[[Iterable[Partition], Callable[[], None]], bool],
        remember: Callable[[LocalPartition, Event], None] | None = None,
    ) -> None:
        """``log_of`` opens a replica, or raises StorageError. ``on_disk`` is ``Flusher.after``.

        ``remember`` keeps causes in the history; it must not fail.
        """
        self.config, self.peers, self.logs, self.clock = config, peers, logs, clock
        self.node_id = node_id
        self.image, self.broker_epoch, self.on_disk = image, broker_epoch, on_disk
        self._log_of, self._remember = log_of, remember
        self.quota = ReplicationQuota(config, clock, Side.FOLLOWER, node_id=node_id)
        """What throttled replicas fetch."""
        self._followed: dict[Key, Followed] = {}
        self._fetchers: dict[tuple[int, int], _Fetcher] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._count = config.int(FETCHERS_KEY)
        self._again: dict[Key, LocalPartition] = {}
        """What could not be followed, for a reason that nobody expected."""
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        config.listen(self._reconfigure)

    # --- what is followed ------------------------------------------------------------------------

    def follow(self, partitions: Sequence[LocalPartition]) -> None:
        """Fetch these from their leaders from now on, in the leader epoch that each has.

        One that is fetched already goes on as it is unless its leader epoch is another. What can
        not be opened is left out until it comes again.
        """
        for one in partitions:
            key = one.topic_id, one.index
            known = self._followed.get(key)
            epoch = one.registration.leader_epoch
            if known is not None and known.local.registration.leader_epoch >= epoch:
                known.local = one
                with self.alone(known):
                    self._do(known, known.machine.become_follower(one.registration))
                continue
            self._let_go(key)
            try:
                self._begin(one)
            except Exception as error:  # noqa: BLE001 - it must not stay without a fetcher
                self._try_again(one, error)

    def _try_again(self, one: LocalPartition, error: Exception) -> None:
        """Follow a partition from its log's end on after a while: nothing else would begin it."""
        tell("follow", error, partition=_name(one))
        key = one.topic_id, one.index
        self._let_go(key)
        self._again[key] = one
        if self._retry is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._retry = call_later(loop, AFTER_FAILURE_MS, "follow again", self._follow_again)

    def _follow_again(self) -> None:
        self._retry = None
        again, self._again = self._again, {}
        self.follow(list(again.values()))

    def _begin(self, one: LocalPartition) -> None:
        try:
            partition = self._log_of(one)
        except StorageError as error:
            _log.error("replica not followed", partition=_name(one), cause=str(error))
            return
        # What was begun for it before, a cut above all, is begun no more.
        partition.replica.follow(one.registration.leader_epoch)
        machine = PartitionFollower(
            one.topic,
            one.topic_id,
            one.index,
            FollowedLog(partition),
            backoff_ms=self.config.int("replica.fetch.backoff.ms"),
        )
        found = Followed(one, partition, machine)
        self._followed[machine.key] = found
        step = machine.become_follower(one.registration)
        self._assign(found)
        self._do(found, step)

    def _assign(self, one: Followed) -> None:
        """Hand a partition to the fetcher of its leader."""
        leader = one.machine.leader
        n = fetcher_id(java_string_hash(one.local.topic), one.local.index, self._count)
        fetcher = self._fetchers.get((leader, n))
        if fetcher is None:
            fetcher = self._fetchers[leader, n] = _Fetcher(self, leader, n)
        one.fetcher = fetcher
        fetcher.add(one)

    def stop(self, partitions: Iterable[Key]) -> None:
        """Fetch these no more; what is under way for them has no effect."""
        for key in partitions:
            self._let_go(key)

    def _let_go(self, key: Key) -> None:
        self._again.pop(key, None)
        one = self._followed.pop(key, None)
        if one is None:
            return
        one.machine.stop()
        fetcher, one.fetcher = one.fetcher, None
        if fetcher is not None and fetcher.remove(one):
            self._end(fetcher)

    def _end(self, fetcher: _Fetcher) -> None:
        """End a fetcher that has nothing to fetch."""
        del self._fetchers[fetcher.machine.leader, fetcher.machine.fetcher]
        fetcher.is_over = True
        self.peers.hang_up(fetcher.machine.leader, Purpose.FETCHER, fetcher.machine.fetcher)
        if not fetcher.task.done():
            self._ending.add(fetcher.task)
            fetcher.task.add_done_callback(self._ending.discard)
            fetcher.task.cancel()

    def ended(self, fetcher: _Fetcher) -> None:
        """A fetcher's task is over; if nobody has asked for that, another one takes its place."""
        if not fetcher.is_over:
            for one in fetcher.followed:
                self._try_again(one.local, RuntimeError(f"{fetcher.task.get_name()} has ended"))

    def _reconfigure(self) -> None:
        """Spread the partitions anew where their fetchers are more or fewer now."""
        backoff_ms = self.config.int("replica.fetch.backoff.ms")
        for one in self._followed.values():
            one.machine.backoff_ms = backoff_ms
        count = self.config.int(FETCHERS_KEY)
        if count == self._count or self._closed:
            return
        self._count = count
        every = [one.local for one in self._followed.values()]
        # What is under way for them, a cut above all, ends with the fetcher that it was given to.
        self.stop((one.topic_id, one.index) for one in every)
        self.follow(every)

    def is_followed(self, one: Followed) -> bool:
        """Whether this is still what is done for the partition."""
        return self._followed.get(one.machine.key) is one

    def __iter__(self) -> Iterator[PartitionFollower]:
        """The machines of all that is fetched, in no order."""
        return (one.machine for one in self._followed.values())

    @property
    def max_lag(self) -> int:
        """Records that the one furthest behind its leader lacks (kafka: ``MaxLag``)."""
        return max((one.lag or 0 for one in self), default=0)

    async def close(self) -> None:
        """Fetch nothing more; return when nothing is under way."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self.stop(list(self._followed))
        while self._ending:
            await asyncio.wait(set(self._ending))

    # --- what machines say -----------------------------------------------------------------------

    def _do(self, one: Followed, step: FollowerStep) -> None:
        """Do what needs no time, and hand the rest to the partition's fetcher."""
        for event in step.events:
            self._tell(one.local, event)
        partition = one.partition
        if step.high_watermark is not None:
            before = partition.high_watermark
            if partition.replica.move_high_watermark(step.high_watermark):
                _log.warning(
                    "high watermark goes down",
                    partition=_name(one.local),
                    offset=partition.high_watermark,
                    before=before,
                )
        if step.log_start_offset is not None:
            partition.cleanup.delete_records_before(step.log_start_offset)
        if one.fetcher is not None:
            one.fetcher.take(one, step)

    def _tell(self, local: LocalPartition, event: Event) -> None:
        below = event.detail.get("below_high_watermark") is not None
        failed = event.kind == "follower-failed"
        level = logging.ERROR if failed else logging.WARNING if below else logging.INFO
        _log.log(level, event.kind, **{**event.detail, "partition": event.subject})
        if self._remember is not None:
            self._remember(local, event)

    def do(self, one: Followed, step: FollowerStep) -> None:
        """Do what a machine says."""
        with self.alone(one):
            self._do(one, step)

    @contextmanager
    def alone(self, one: Followed) -> Iterator[None]:
        """What fails for one partition inside leaves the others alone.

        If its log could not do what was asked of it, it has failed; else it begins anew.
        """
        try:
            yield
        except LogError as error:
            self._do(one, one.machine.failed(str(error)))
        except Exception as error:  # noqa: BLE001 - its machine waits for what was not done
            if self.is_followed(one):
                self._try_again(one.local, error)
            else:
                tell("follow", error, partition=_name(one.local))


class _Fetcher:
    """One connection to one leader, and the task that uses it."""

    def __init__(self, owner: Fetchers, leader: int, n: int) -> None:
        self._owner = owner
        self.machine = LeaderFetcher(leader, n)
        self._parts: dict[Key, Followed] = {}
        self._cuts: dict[Followed, Truncation] = {}
        self._questions: dict[Followed, OffsetQuestion] = {}
        self._wake = asyncio.Event()
        self._pace = Pace()
        self._trouble = ""
        """Why the last request got no answer."""
        self.is_over = False
        """Whether its task is to end: it has nothing to fetch any more."""
        self.task = spawn(self._run(), f"fetcher {n} of leader {leader}")
        self.task.add_done_callback(lambda _: owner.ended(self))

    # --- what is fetched ---

    @property
    def followed(self) -> list[Followed]:
        """What it fetches."""
        return list(self._parts.values())

    def add(self, one: Followed) -> None:
        self._parts[one.machine.key] = one
        self.machine.add(one.machine)
        self._wake.set()

    def remove(self, one: Followed) -> bool:
        """Whether nothing is left."""
        self._parts.pop(one.machine.key, None)
        self.machine.remove(one.machine.key)
        self._cuts.pop(one, None)
        self._questions.pop(one, None)
        return not self._parts

    def take(self, one: Followed, step: FollowerStep) -> None:
        """Do soon what takes time."""
        if step.truncate is not None:
            self._cuts[one] = step.truncate
        if step.ask is not None:
            self._questions[one] = step.ask
        self._wake.set()

    def _now(self) -> int:
        return self._owner.clock.monotonic_ms()

    # --- rounds ---

    async def _run(self) -> None:
        while not self.is_over:
            await self._pace()
            pause_ms: int | None = AFTER_FAILURE_MS
            with survived("fetch from a leader", leader=self.machine.leader):
                try:
                    pause_ms = await self._round()
                except asyncio.CancelledError as error:
                    if self.task.cancelling():
                        raise
                    raise RuntimeError("what a fetcher waited for was cancelled") from error
            if pause_ms is None or pause_ms > 0:
                await self._pause(pause_ms)

    async def _pause(self, pause_ms: int | None) -> None:
        """Wait until there is something to do."""
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if pause_ms is None else pause_ms / 1000):
                await self._wake.wait()

    async def _round(self) -> int | None:
        """Do what is due; how long to wait then, None until something is new."""
        backoff_ms = self._owner.config.int("replica.fetch.backoff.ms")
        if self._cuts and not await self._cut():
            return max(1, backoff_ms)
        if self._questions:
            await self._ask()
            return 0
        request = self.machine.next_request(self._now(), self._is_throttled)
        if request is None:
            wake_at = self.machine.wake_at()
            if wake_at is not None:
                return max(1, wake_at - self._now())
            # Those that are throttled are looked at again.
            return max(1, backoff_ms) if self.machine.followers else None
        try:
            await self._fetch(request)
        except BaseException:
            # Whatever it was, all of it is asked for anew.
            self.machine.failed(self._now())
            raise
        return 0

    def _is_throttled(self, machine: PartitionFollower) -> bool:
        owner = self._owner
        return self._counts(machine) and owner.quota.is_exceeded

    def _counts(self, machine: PartitionFollower) -> bool:
        """Whether a partition's bytes count for the quota."""
        owner = self._owner
        configs = owner.image().topic_configs(machine.topic)
        return bool(configs) and owner.quota.covers(configs, machine.index)

    # --- fetching --------------------------------------------------------------------------------

    @property
    def _level(self) -> int:
        return self._owner.image().features.get("metadata.version", 0)

    async def _send(self, entity: Entity) -> Entity | None:
        """The leader's answer, None where it has none."""
        leader, n = self.machine.leader, self.machine.fetcher
        try:
            answer = await self._owner.peers.channel(leader, Purpose.FETCHER, n).request(entity)
        except WireError as error:
            cause = str(error)
            level = logging.DEBUG if cause == self._trouble else logging.WARNING
            _log.log(level, "leader does not answer", leader=leader, fetcher=n, cause=cause)
            self._trouble = cause
            return None
        self._trouble = ""
        return answer

    async def _fetch(self, request: FetchRequest) -> None:
        owner, config = self._owner, self._owner.config
        sizes = Sizes(
            config.int("replica.fetch.wait.max.ms"),
            config.int("replica.fetch.min.bytes"),
            config.int("replica.fetch.response.max.bytes"),
            config.int("replica.fetch.max.bytes"),
        )
        answer = await self._send(
            fetch_entity(
                request,
                self._level,
                sizes,
                broker_id=owner.node_id,
                broker_epoch=owner.broker_epoch(),
            )
        )
        if answer is None:
            self.machine.failed(self._now())
            return
        appended: list[Partition] = []
        if answer.error_code not in (Errors.NONE, *SESSION_ERRORS):
            leader, error = self.machine.leader, error_name(int(answer.error_code))
            _log.warning("leader refuses a fetch", leader=leader, error=error)
        for result in self.machine.answered(fetch_answer(answer), self._now()):
            one = self._parts.get(result.follower.key)
            if one is None or one.machine is not result.follower:
                continue
            with owner.alone(one):
                owner.do(one, result.step)
                if result.step.append_up_to_epoch is not None:
                    await self._append(one, result)
                    appended.append(one.partition)
            await self._pace()
        await self._on_disk(appended)

    async def _append(self, one: Followed, result: PartitionResult) -> None:
        """Append an answer's records, straight from where they have arrived."""
        owner, machine, partition = self._owner, one.machine, one.partition
        records, at, began = result.answer.records, 0, partition.log_end_offset
        limit = result.step.append_up_to_epoch
        if self._counts(machine):
            owner.quota.record(len(records))
        error: LogError | None = None
        try:
            while at < len(records) and limit is not None:
                arrived = partition.append_as_follower(
                    records, limit, start=at, most=BATCHES_AT_ONCE
                )
                for warning in arrived.warnings:
                    _log.warning("odd batch of a leader", partition=str(machine), cause=warning)
                at = arrived.taken
                await self._pace()
                if not owner.is_followed(one):
                    return
        except LogError as caught:
            error = without_traceback(caught)
            _log.warning("answer not appended", partition=str(machine), cause=str(error))
        if partition.log_end_offset != began and not isinstance(error, StorageError):
            # What comes behind a piece that is damaged is asked for again from there.
            owner.do(one, machine.appended())
        elif error is None or isinstance(error, NoRoomError):
            # Nothing of it could be used, which may pass.
            owner.do(one, machine.delay(self._now()))
        else:
            owner.do(one, machine.append_failed(_code_of(error), self._now()))

    async def _on_disk(self, partitions: Sequence[Partition]) -> None:
        """Wait for what flush.messages asks for: the next fetch says that it is here."""
        done = asyncio.get_running_loop().create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        if partitions and self._owner.on_disk(partitions, settle):
            await done

    # --- cutting ---------------------------------------------------------------------------------

    async def _cut(self) -> bool:
        """Cut logs as machines have said; whether the checkpoints could be written before."""
        owner, names = self._owner, set[str]()
        for one, cut in list(self._cuts.items()):
            is_planned = False
            with owner.alone(one):
                names |= owner.logs.plan_cut(one.partition, cut.offset)
                is_planned = True
            if not is_planned:
                self._cuts.pop(one, None)
        cuts = dict(self._cuts)
        if not await owner.logs.save_all(names):
            return False
        for one, cut in cuts.items():
            if self._cuts.pop(one, None) is not cut:
                continue
            with owner.alone(one):
                replica = one.partition.replica
                if cut.start_anew:
                    replica.restart_at(cut.offset)
                else:
                    replica.truncate_to(cut.offset)
                owner.do(one, one.machine.truncated())
            await self._pace()
        return True

    async def _ask(self) -> None:
        """Ask the leader for the ends of its logs."""
        owner, asked = self._owner, self._questions
        self._questions = {}
        timeout_ms = owner.config.int("replica.socket.timeout.ms")
        questions = [(one.machine, question) for one, question in asked.items()]
        found: Mapping[Key, tuple[int, int]] = {}
        try:
            answer = await self._send(
                list_offsets_entity(
                    questions, self._level, broker_id=owner.node_id, timeout_ms=timeout_ms
                )
            )
            if answer is not None:
                found = listed_offsets(answer, questions)
        finally:
            # Whatever comes of it, none stays without an answer.
            for one, question in asked.items():
                offset, error = found.get(one.machine.key, (-1, Errors.NETWORK_EXCEPTION))
                if owner.is_followed(one):
                    with owner.alone(one):
                        step = one.machine.offset_listed(question, offset, error, self._now())
                        owner.do(one, step)


def _code_of(error: LogError) -> int:
    """What the machine is told of a failed append."""
    if isinstance(error, CorruptRecordError):
        return Errors.CORRUPT_MESSAGE
    if isinstance(error, InvalidRecordError):
        return Errors.INVALID_RECORD
    if isinstance(error, UnexpectedAppendOffsetError):
        return Errors.OFFSET_OUT_OF_RANGE
    return Errors.KAFKA_STORAGE_ERROR


def _name(one: LocalPartition) -> str:
    return f"{one.topic}-{one.index}"
