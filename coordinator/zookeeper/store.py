"""The metadata of the active controller, whose decisions are written to ZooKeeper in order.

Like an appended metadata record, a change takes effect at once for later decisions. The controller
sends the change to brokers once it is in ZooKeeper. If ZooKeeper rejects a change or cannot be
reached, all later changes are void as well: the broker resigns as controller, and the next
controller reads the znodes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import structlog

from fencepost.cluster.controller.errors import NotControllerError, TopicAlreadyExistsError
from fencepost.cluster.delta import replayed
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import MetadataRecord, RemoveTopicRecord, TopicRecord
from fencepost.cluster.topic_records import without_partition_records
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.runtime.turns import completed
from fencepost.coordinator.zookeeper.errors import ZooKeeperError
from fencepost.coordinator.zookeeper.loading import ZkImage
from fencepost.coordinator.zookeeper.session import Write, ZkSession
from fencepost.coordinator.zookeeper.writes import ZnodeWriter, check_storable, fenced
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PendingDecision:
    """A decision that is not yet in ZooKeeper."""

    before: MetadataImage
    after: MetadataImage
    records: Sequence[MetadataRecord]
    """Records to write; none if another program has already written the change."""
    done: asyncio.Future[None]


class ZkMetadataStore(Metadata):
    """The controller's metadata, and the queue of changes to write.

    When a change is written, ``on_written`` is called with the images before and after the change.
    ``on_refused`` is called for the first change that cannot be written.
    """

    def __init__(
        self,
        config: BrokerConfig,
        session: ZkSession,
        loaded: ZkImage,
        *,
        node_id: int,
        epoch: int,
        epoch_version: int,
        on_written: Callable[[MetadataImage, MetadataImage], None],
        on_refused: Callable[[], None],
    ) -> None:
        super().__init__(config, node_id=node_id)
        self.image = loaded.image
        self.deleting = {name for name, node in loaded.deleting.items() if node is not None}
        """Names of topics under deletion."""
        self.marked: set[str] = set()
        """Topics that another program has marked for deletion in ZooKeeper."""
        self._session, self._epoch, self._epoch_version = session, epoch, epoch_version
        self._on_written, self._on_refused = on_written, on_refused
        self._changes: deque[PendingDecision] = deque()
        self._wake = asyncio.Event()
        self._is_over = False
        self._task = spawn(self._write_all(), "write decisions to ZooKeeper")

    @property
    def epoch(self) -> int:
        """The controller epoch."""
        return self._epoch

    @property
    def next_offset(self) -> int:
        """The number of the next change, since this store has no log offsets."""
        return self.image.offset + 1

    def unforced(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because appends never wait (see :meth:`durable`)."""
        return nullcontext()

    def install(self, image: MetadataImage) -> None:
        """Replace the image, but publish nothing.

        This broker, like every other, applies a change when the controller's request arrives.
        """
        self.image = image

    def append(self, records: Sequence[MetadataRecord]) -> None:
        """Apply a change.

        Raises NotControllerError, NotInZooKeeperError or TopicAlreadyExistsError; after an error
        nothing has changed.
        """
        if self._is_over:
            raise _resigned()
        others = without_partition_records(records)
        for record in others:
            if isinstance(record, TopicRecord) and record.name in self.deleting:
                raise TopicAlreadyExistsError(f"Topic '{record.name}' is marked for deletion.")
        check_storable(records)
        before, after = self.image, self._replayed(records)
        for record in others:
            if isinstance(record, RemoveTopicRecord):
                self.deleting.add(before.topics_by_id[record.topic_id].name)
        self._queue_decision(after, records)

    def learn(self, records: Sequence[MetadataRecord]) -> None:
        """Apply records that another program has written to ZooKeeper."""
        if records and not self._is_over:
            self._queue_decision(self._replayed(records), ())

    def _replayed(self, records: Sequence[MetadataRecord]) -> MetadataImage:
        return replayed(self.image, records, self.image.offset + len(records), self._epoch)

    def _queue_decision(self, after: MetadataImage, records: Sequence[MetadataRecord]) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.append(PendingDecision(self.image, after, records, done))
        self.install(after)
        self._wake.set()

    def forget(self, topic: str) -> None:
        """Drop the deletion marks of a topic whose znodes are gone."""
        self.deleting.discard(topic)
        self.marked.discard(topic)

    def durable(self) -> asyncio.Future[None] | None:
        """Return a future that is done once all changes so far are in ZooKeeper; None if they are.

        The future raises NotControllerError if a change cannot be written. After :meth:`close`,
        every returned future has failed, even if the caller's changes were written, because the
        store no longer knows which changes were void.
        """
        if self._is_over:
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            failed.set_exception(without_traceback(_resigned()))
            failed.exception()  # retrieved here, in case no caller awaits the future
            return failed
        return asyncio.shield(self._changes[-1].done) if self._changes else None

    # --- writing ---

    async def do(self, writes: Sequence[Write]) -> None:
        """Apply writes that are not part of a decision.

        Raises RefusedError, also if another broker has become the active controller.
        """
        for transaction in fenced(writes, self._epoch_version):
            await self._session.do(transaction)

    async def _write_all(self) -> None:
        try:
            while not self._is_over:
                self._wake.clear()
                while self._changes:
                    await self._write(self._changes[0])
                await self._wake.wait()
        except Exception as error:
            if self._is_over:
                return  # the error is already known
            self.close()
            self._on_refused()
            if not isinstance(error, ZooKeeperError):
                raise
            _log.warning("ZooKeeper did not take a decision", cause=str(error))

    async def _write(self, change: PendingDecision) -> None:
        writer = ZnodeWriter(change.before, change.after, self._epoch, self.marked)
        writes = await completed(writer.write(change.records))
        if not self._is_over:
            await self.do(writes)
        if self._is_over:
            return
        self._changes.popleft()
        self._on_written(change.before, change.after)
        if not change.done.done():
            change.done.set_result(None)

    def close(self) -> None:
        """Accept no further changes, and discard the changes that are not written yet."""
        if self._is_over:
            return
        self._is_over = True
        self._wake.set()
        error = _resigned()
        for change in self._changes:
            if not change.done.done():
                change.done.set_exception(without_traceback(error))
                change.done.exception()  # retrieved here, in case no caller awaits the future
        self._changes.clear()


def _resigned() -> NotControllerError:
    return NotControllerError("This broker is no longer the active controller.")
