"""Common base of the three coordinators: internal topic, shards and routing."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Generic, TypeVar

from fencepost.cluster.image import MetadataImage, TopicImage
from fencepost.coordinator.metadata.metadata import InternalTopic
from fencepost.coordinator.runtime.background import Pace
from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    ShardError,
)
from fencepost.coordinator.runtime.late_imports import NEW_TOPIC_MODULES, load
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.shard import M_co, Remember, ShardRuntime
from fencepost.coordinator.runtime.shards import ShardSet
from fencepost.coordinator.runtime.timers import TimerQueue
from fencepost.coordinator.services.elections import publish_elections
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.budget import Account, Budget
from fencepost.logcore.machine import DomainError, Machine
from fencepost.logcore.partition import Partition
from fencepost.protocol.steps import Steps

R = TypeVar("R")

UPKEEP = "upkeep"
"""The key of the periodic timer that runs in every coordinator."""
PRUNE = "prune"
"""The key of the timer with which the share coordinator deletes redundant records."""
PERIODIC = frozenset({UPKEEP, PRUNE})
"""The keys of timers that recur."""


class ShardedCoordinator(Generic[M_co]):
    """A coordinator on the partitions of ``topic``, created in the event loop that it belongs to.

    It has a shard for each partition that this broker leads: :meth:`elected` and :meth:`resigned`
    start and stop the shards. The topic is created by the first FindCoordinator, so a broker
    without groups needs neither 50 directories nor 50 state machines.

    All shards periodically get the command ``upkeep``; ``interval`` is the configuration key of the
    period in milliseconds. ``commit_timeout`` is the key of the time for which a response waits for
    replication. With ``all_in_sync``, commands that write are refused while the ISR is smaller than
    ``min.insync.replicas``. ``internal_topic`` creates the topic.
    """

    MODULES: ClassVar[Sequence[str]] = ()
    """The modules of the state machine; see :func:`load`."""

    def __init__(
        self,
        storage: Storage,
        remember: Remember,
        internal_topic: InternalTopic,
        topic: str,
        *,
        upkeep: object,
        interval: str,
        commit_timeout: str,
        all_in_sync: bool = False,
    ) -> None:
        self._config, self._clock = storage.config, storage.clock
        self._metadata, self._replicas = storage.metadata, storage.replicas
        self._internal_topic = internal_topic
        self._shards = ShardSet(
            topic,
            storage.clock,
            source=storage.replicas,
            partitions=self._count_partitions,
            build=self._build,
            run_effect=self._run_effect,
            while_loading=self._while_loading,
            remember=remember,
            commits=storage.commits,
            commit_timeout_ms=partial(storage.config.int, commit_timeout),
            admit=self._admit if all_in_sync else None,
        )
        self._upkeep, self._interval = upkeep, interval
        self._upkeep_timer = self._shards.timers.timers(self._send_upkeep)

    @property
    def timers(self) -> TimerQueue:
        """Return the deadlines of all shards; the upkeep's key is :data:`UPKEEP`."""
        return self._shards.timers

    def _build(self, partition: Partition, coordinator_epoch: int) -> M_co:
        """Return an empty state machine."""
        raise NotImplementedError

    def _budget(self, key: str) -> Budget:
        """Return the memory budget that all shards share; ``key`` is the setting of its size."""
        return Budget(key, self._config.int(key))

    @staticmethod
    def _release_with(machine: Machine, *accounts: Account) -> None:
        """Release the memory accounts of a state machine once its shard drops it."""
        for account in accounts:
            weakref.finalize(machine, account.close).atexit = False

    def _run_effect(
        self,
        shard: ShardRuntime[Machine],
        effect: object,
        now_ms: int,
        first_attempt_done: Callable[[], None],
    ) -> None:
        """Carry out an effect of a state machine; see ``RunEffect`` in ``runtime/shard.py``."""
        raise NotImplementedError

    def _admit(self, partition: Partition, command: object) -> DomainError | None:
        """Return an error for a writing command if too few replicas are in sync, else None."""
        if not self._reads_only(command):
            try:
                self._replicas.check_min_isr(partition.topic, partition.index)
            except DomainError as error:
                return CoordinatorNotAvailableError(str(error))
        return None

    def _reads_only(self, command: object) -> bool:  # noqa: ARG002 - most commands write
        """Return whether a command never writes, in any state."""
        return False

    def _while_loading(self, command: object) -> object | None:  # noqa: ARG002 - usually none
        """Return a loading shard's answer to a command; None for COORDINATOR_LOAD_IN_PROGRESS."""
        return None

    def _send_upkeep(self, _key: Hashable, _now_ms: int) -> None:
        self._set_upkeep()
        self._shards.sweep(self._upkeep, f"upkeep of {self._shards.topic}")

    def _set_upkeep(self) -> None:
        interval_ms = self._config.int(self._interval)
        self._upkeep_timer.set(UPKEEP, self._clock.now_ms() + interval_ms)

    def _count_partitions(self) -> int:
        topic = self._metadata.topic(self._shards.topic)
        return 0 if topic is None else len(topic.partitions)

    @property
    def shards(self) -> Sequence[ShardRuntime[M_co]]:
        """Return one shard per partition that this broker leads; none until the topic exists."""
        return self._shards.shards

    # --- elections ---

    def publish(self, old: MetadataImage, image: MetadataImage) -> None:
        """Start and stop shards after the elections between two metadata images."""
        publish_elections(self, self._shards.topic, self._replicas.node_id, old, image)

    def elected(self, index: int, leader_epoch: int) -> None:
        """Serve a partition that this broker now leads; see :meth:`ShardSet.elected`."""
        self._shards.elected(index, leader_epoch)

    def resigned(self, index: int, leader_epoch: int | None) -> None:
        """Stop serving a partition; see :meth:`ShardSet.resigned`."""
        self._shards.resigned(index, leader_epoch)

    async def start(self) -> None:
        """Serve the partitions that this broker leads; large logs continue to load afterwards."""
        self._set_upkeep()
        topic = self._metadata.topic(self._shards.topic)
        if topic is not None:
            for index, leader_epoch in self._led(topic):
                self._shards.serve(index, leader_epoch)
            await self._shards.loaded()

    def _led(self, topic: TopicImage) -> Iterator[tuple[int, int]]:
        """Yield index and leader epoch of each partition of the topic that this broker leads."""
        node_id = self._replicas.node_id
        return (
            (index, partition.leader_epoch)
            for index, partition in enumerate(topic.partitions)
            if partition.leader == node_id
        )

    @property
    def _is_open(self) -> bool:
        return self._count_partitions() > 0 and self._shards.is_open

    def open_in_steps(self, key: str | None = None) -> Steps[None]:
        """Create the topic and its shards if they do not exist.

        Each imported module and each partition, which needs a directory and files, is one step.
        With a ``key`` the caller waits only for that key's partition: a first client gets its
        response before the other partitions are opened. Raises CoordinatorNotAvailableError if the
        topic cannot be created.
        """
        if not self._is_open:
            yield from load(self.MODULES)
            if self._metadata.topic(self._shards.topic) is None:
                yield from load(NEW_TOPIC_MODULES)
        if self._is_open:  # opened by another request in the meantime
            return
        name = self._shards.topic
        try:
            led = list(self._led(self._internal_topic(name)))
            # The other partitions are opened in the background.
            first = None if key is None else self.partition_for(key)
            for partition in led:
                if first in (None, partition[0]):
                    self._shards.serve(*partition)
                    yield
        except DomainError as error:
            raise CoordinatorNotAvailableError(f"{name}: {error}") from error

    def submit(
        self, key: str, command: object, origin: Origin | None = None
    ) -> asyncio.Future[object]:
        """Send a command to the shard of ``key``, a group or a transactional id."""
        return self._shards.submit(key, command, origin)

    def partition_for(self, key: str) -> int:
        """Return the partition of the internal topic for ``key``; any broker may lead it.

        Raises NotCoordinatorError if the topic does not exist.
        """
        return self._shards.index_for(key)

    async def _everywhere(self, command: object, kind: type[R]) -> list[R]:
        """Return the answers of all shards that are served here.

        Raises CoordinatorLoadInProgressError while any shard is loading, and the command's own
        errors.
        """
        await self._shards.open_all()
        results: list[R] = []
        pace = Pace()
        for shard in self._shards.shards:
            await pace()
            try:
                result = await shard.submit(command)
            except CoordinatorLoadInProgressError:
                raise
            except ShardError:
                continue
            if isinstance(result, kind):
                results.append(result)
        return results
