"""The dead-letter queues of share groups (KIP-1191): records that no member has accepted.

A queue is a topic, named by the group's ``errors.deadletterqueue.topic.name``. Delivery is best
effort: after MAX_ATTEMPTS the records are archived without being sent, so that an unavailable queue
does not block a share partition forever.

The records of one share partition are produced batch after batch, by one task. Each attempt checks
the queue's settings and finds its leader again. Requests to one leader are limited; when the
leader does not respond, the attempts that wait for it fail as well, instead of waiting one after
the other.

Source: ``ShareGroupDLQStateManager``.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol
from uuid import UUID

import structlog

from fencepost.cluster.errors import NotLeaderOrFollowerError
from fencepost.cluster.image import TopicImage
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import UnknownTopicIdError, UnknownTopicOrPartitionError
from fencepost.coordinator.runtime.background import Pace, log_failure, spawn
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.turns import completed
from fencepost.coordinator.services.dead_letter_records import (
    NO_BODY,
    DeadLetterBatch,
    SourceRecords,
)
from fencepost.coordinator.services.share_persister import (
    MAX_ATTEMPTS,
    Pause,
    pause_ms,
    sleep_ms,
)
from fencepost.coordinator.storage.appends import ALL, Append, Appends, Part
from fencepost.coordinator.storage.storage import Storage
from fencepost.groups.share.commands import SendToDeadLetterQueue
from fencepost.groups.share.dead_letters import (
    GROUP_ENABLE,
    NEW_QUEUE,
    TOPIC_NAME,
    DeadLetterError,
    LeaderUnreachableError,
    NotProducedError,
    fixed_headers,
    offset_header,
)
from fencepost.groups.share.partition import SharePartition
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Partition

COPY_RECORD: Final = "errors.deadletterqueue.copy.record.enable"
AUTO_CREATE: Final = "errors.deadletterqueue.auto.create.topics.enable"
PREFIX: Final = "errors.deadletterqueue.topic.name.prefix"
MAX_MESSAGE_BYTES: Final = "max.message.bytes"

TIMEOUT_MS: Final = 30_000
"""How long the leader of a queue's partition waits for other replicas."""

REQUESTS_TO_LEADER: Final = 4
"""The maximum number of in-flight requests to one leader. Each has a batch in memory."""

CREATION_WAIT_MS: Final = 2_000
"""How long an attempt waits for the metadata of a topic that the controller has created."""
_LOOK_MS: Final = 20

PRODUCE_VERSION: Final = 13
"""The version of Produce whose rules apply to an append on this broker."""

RANGES_PER_STEP: Final = 500
"""The number of offset ranges that one step of a share partition archives, in about 10 ms."""

MAX_SHOWN_RANGES: Final = 20
"""The maximum number of offset ranges in a log line."""

_RETRIED: Final = (NotLeaderOrFollowerError, UnknownTopicOrPartitionError, UnknownTopicIdError)
"""Errors of an append after which another attempt may succeed; nothing was appended."""

_log = structlog.get_logger(__name__)

CreateTopic = Callable[[str, Mapping[str, str]], Awaitable[None]]
"""Creates a topic with these settings. Raises DomainError, ConfigError or DeadLetterError."""

Done = Callable[[Sequence[tuple[int, int]], str, str | None], None]
"""Called with ranges of offsets, the queue's topic, and the reason of a failure or None."""


class OtherLeaders(Protocol):
    """Produces to other brokers: ``ProduceSender``."""

    async def produce(
        self, broker_id: int, topic: str, topic_id: UUID, index: int, batch: bytes
    ) -> None:
        """Have a broker append a batch with acks=-1. Raises NotProducedError."""


class _Line:
    """The records of one share partition that are being sent to the queue."""

    def __init__(
        self, share: SharePartition, log: Partition, done: Done, is_active: Callable[[], bool]
    ) -> None:
        self.share, self.log, self.done, self.is_active = share, log, done, is_active
        self.waiting: list[SendToDeadLetterQueue] = []
        self.task: asyncio.Task[None] | None = None

    @property
    def group_id(self) -> str:
        """The group whose queue gets the records."""
        return self.share.key.group_id


class _Job:
    """Records that are sent together, and the progress of sending them."""

    def __init__(self, requests: Iterable[SendToDeadLetterQueue]) -> None:
        self.left = deque(sorted(requests, key=lambda request: request.first))
        self.next_offset = self.left[0].first
        self.topic = ""
        """The queue's name at the last attempt."""

    def done_to(self, last: int) -> list[tuple[int, int]]:
        """Note that the records up to ``last`` are done; return the ranges of their offsets."""
        ranges: list[tuple[int, int]] = []
        while self.left and self.left[0].first <= last:
            first = max(self.left[0].first, self.next_offset)
            end = min(self.left[0].last, last)
            if ranges and ranges[-1][1] == first - 1:
                ranges[-1] = ranges[-1][0], end
            else:
                ranges.append((first, end))
            if end < self.left[0].last:
                break
            self.left.popleft()
        self.next_offset = last + 1
        return ranges

    @property
    def last(self) -> int:
        """The last offset."""
        return self.left[-1].last


class _Leader:
    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(REQUESTS_TO_LEADER)
        self.failures = 0
        """The number of requests without a response."""


class DeadLetterQueues:
    """Sends records of share partitions to the queues of their groups, on the event loop only."""

    def __init__(
        self,
        storage: Storage,
        appends: Appends,
        create_topic: CreateTopic,
        others: OtherLeaders | None,
        pause: Pause = sleep_ms,
    ) -> None:
        self._config, self._metadata = storage.config, storage.metadata
        self._clock, self._node_id = storage.clock, storage.node_id
        self._appends, self._create_topic, self._pause = appends, create_topic, pause
        self._others = others
        self._lines: dict[SharePartition, _Line] = {}
        self._leaders: dict[int, _Leader] = {}
        self._creation = asyncio.Lock()
        self._is_closed = False
        self.records: Counter[str] = Counter()
        """The number of records written to queues, by group."""
        self.requests: Counter[str] = Counter()
        """The number of batches that were sent to a leader, by group."""
        self.failures: Counter[str] = Counter()
        """The number of batches that were given up, by group."""

    def put(
        self,
        share: SharePartition,
        log: Partition,
        request: SendToDeadLetterQueue,
        done: Done,
        is_active: Callable[[], bool],
    ) -> None:
        """Send records; ``done`` is called once they are in the queue or were given up.

        Once ``is_active`` returns False, sending stops: a later share partition sends the records
        that remain.
        """
        if self._is_closed:
            return
        line = self._lines.get(share)
        if line is None:
            line = self._lines[share] = _Line(share, log, done, is_active)
            line.task = spawn(self._serve(line), "send to a dead-letter queue")
        line.waiting.append(request)

    def close(self) -> None:
        """Stop sending. The records stay ARCHIVING: the next leader sends them."""
        self._is_closed = True
        for line in tuple(self._lines.values()):
            if line.task is not None:
                line.task.cancel()

    async def _serve(self, line: _Line) -> None:
        try:
            while line.waiting and line.is_active():
                job = _Job(line.waiting)
                line.waiting = []
                try:
                    await self._send(line, job)
                except Exception as error:  # noqa: BLE001 - the share partition must not stop
                    log_failure("send to a dead-letter queue", error, partition=line.share.key)
                    await self._give_up(line, job, DeadLetterError(repr(error), is_final=True))
        finally:
            del self._lines[line.share]

    async def _send(self, line: _Line, job: _Job) -> None:
        attempts, source = 0, None
        while job.left and line.is_active():
            try:
                source = await self._attempt(line, job, source)
            except DeadLetterError as error:
                attempts += 1
                if error.is_final or attempts == MAX_ATTEMPTS:
                    await self._give_up(line, job, error)
                    return
                source = None  # frees its batch during the pause
                await self._pause(pause_ms(attempts))
            else:
                attempts = 0

    async def _attempt(
        self, line: _Line, job: _Job, source: SourceRecords | None
    ) -> SourceRecords | None:
        """Produce one batch; return the reader of the source log, for the next batch."""
        topic = await self._queue(line.group_id, job)
        index = line.share.key.partition % len(topic.partitions)
        leader, pace = topic.partitions[index].leader, Pace()
        if leader < 0:
            raise NotProducedError(f"{topic.name}-{index} has no leader", is_final=False)
        configs = self._metadata.topic_configs(topic.name)
        most = int(str(self._config.topic_value(MAX_MESSAGE_BYTES, configs)))
        settings = self._metadata.group_settings(line.group_id)
        if settings.get(COPY_RECORD, "false").strip().lower() != "true":
            source = None
        elif source is None:
            source = SourceRecords(line.log, most, pace)
        async with self._turn(leader):
            batch = DeadLetterBatch(most, self._clock.now_ms())
            last = await self._fill(batch, line, job, source, pace)
            self.requests[line.group_id] += 1
            await self._produce(leader, topic, index, batch.encoded())
        self.records[line.group_id] += batch.count
        await self._done(line, job.done_to(last), topic.name, None)
        return source

    # --- the queue -------------------------------------------------------------------------------

    async def _queue(self, group_id: str, job: _Job) -> TopicImage:
        """Return the queue's topic; create it if the settings allow that. Raises DeadLetterError.

        Source: ``ProduceRequestHandler.validateDlqTopic``.
        """
        name = job.topic = self._metadata.group_settings(group_id).get(TOPIC_NAME, "")
        topic = self._metadata.topic(name)
        prefix = self._config.text(PREFIX) or ""
        reason = None
        if not name.strip():
            reason = f"the group has no {TOPIC_NAME}"
        elif name.startswith("__"):
            reason = f"the name of topic {name} begins with __"
        elif topic is None and not self._config.bool(AUTO_CREATE):
            reason = f"there is no topic {name}, and {AUTO_CREATE} is false"
        elif topic is not None and not self._config.topic_value(
            GROUP_ENABLE, self._metadata.topic_configs(name)
        ):
            reason = f"{GROUP_ENABLE} of topic {name} is false"
        elif not name.startswith(prefix):
            reason = f"the name of topic {name} does not begin with {prefix} ({PREFIX})"
        if reason is not None:
            raise DeadLetterError(reason, is_final=True)
        return await self._created(name) if topic is None else topic

    async def _created(self, name: str) -> TopicImage:
        async with self._creation:
            if self._metadata.topic(name) is None:
                try:
                    await self._create_topic(name, NEW_QUEUE)
                except (DomainError, ConfigError) as error:
                    reason = f"topic {name} was not created: {error}"
                    raise DeadLetterError(reason, is_final=True) from None
            for _ in range(CREATION_WAIT_MS // _LOOK_MS):
                topic = self._metadata.topic(name)
                if topic is not None:
                    return topic
                await sleep_ms(_LOOK_MS)
        raise DeadLetterError(f"topic {name} was created, but is not known yet", is_final=False)

    # --- batches ---------------------------------------------------------------------------------

    async def _fill(
        self,
        batch: DeadLetterBatch,
        line: _Line,
        job: _Job,
        source: SourceRecords | None,
        pace: Pace,
    ) -> int:
        """Add records to a batch until it is full; return the last offset that is in it."""
        key = line.share.key
        topic = self._metadata.topic_by_id(UUID(bytes=key.topic_id))
        name = str(UUID(bytes=key.topic_id)) if topic is None else topic.name
        last = job.next_offset
        for request in job.left:
            before, after = fixed_headers(name, request)
            for offset in range(max(request.first, job.next_offset), request.last + 1):
                body = NO_BODY if source is None else await source.body(offset)
                if not batch.add((*before, offset_header(offset), *after), body):
                    return last
                last = offset
                await pace()
        return last

    @asynccontextmanager
    async def _turn(self, leader: int) -> AsyncIterator[None]:
        """Wait until a request may be sent to a leader."""
        state = self._leaders.setdefault(leader, _Leader())
        failures = state.failures
        async with state.slots:
            if state.failures != failures:
                raise LeaderUnreachableError(f"broker {leader} gave no response")
            try:
                yield
            except LeaderUnreachableError:
                state.failures += 1
                raise

    async def _produce(self, leader: int, topic: TopicImage, index: int, batch: bytes) -> None:
        if leader != self._node_id:
            if self._others is None:
                raise LeaderUnreachableError(f"broker {leader} is not reachable")
            await self._others.produce(leader, topic.name, topic.topic_id, index, batch)
            return
        part = Part(topic.name, index, batch)
        append = Append(
            [part],
            version=PRODUCE_VERSION,
            transactional_id=None,
            origin=Origin(None, ""),
            acks=ALL,
            timeout_ms=TIMEOUT_MS,
            client=self,
        )
        await completed(self._appends.run(append))
        error = part.error
        if error is not None:
            code = error_code(error).name.upper()
            is_final = not isinstance(error, _RETRIED)
            raise NotProducedError(f"{topic.name}-{index}: {code}: {error}", is_final=is_final)

    # --- failures --------------------------------------------------------------------------------

    async def _give_up(self, line: _Line, job: _Job, error: DeadLetterError) -> None:
        """Archive records that did not reach the queue, and log their offsets."""
        if isinstance(error, NotProducedError):
            self.failures[line.group_id] += 1
        ranges = job.done_to(job.last)
        shown = [f"{first}-{last}" for first, last in ranges[:MAX_SHOWN_RANGES]]
        if len(ranges) > MAX_SHOWN_RANGES:
            shown.append(f"and {len(ranges) - MAX_SHOWN_RANGES} more ranges")
        _log.warning(
            "records did not reach the dead-letter queue; they are archived",
            group=line.group_id,
            partition=line.log.name,
            offsets=", ".join(shown),
            queue=job.topic,
            cause=str(error),
        )
        await self._done(line, ranges, job.topic, str(error))

    async def _done(
        self, line: _Line, ranges: Sequence[tuple[int, int]], queue: str, failure: str | None
    ) -> None:
        pace = Pace()
        for begin in range(0, len(ranges), RANGES_PER_STEP):
            line.done(ranges[begin : begin + RANGES_PER_STEP], queue, failure)
            await pace()
