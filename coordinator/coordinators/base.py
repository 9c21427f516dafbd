"""What the two coordinators share: their internal topic, its shards, and the way to them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Generic, TypeVar

from fencepost.cluster.image import MetadataImage, TopicImage
from fencepost.coordinator.coordinators.elections import publish_elections
from fencepost.coordinator.data.storage import Storage
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
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.budget import Account, Budget
from fencepost.logcore.machine import DomainError, Machine
from fencepost.logcore.partition import Partition

R = TypeVar("R")

UPKEEP = "upkeep"
"""The key of the timer that comes again and again, whatever the shards hold."""


class ShardedCoordinator(Generic[M_co]):
    """A coordinator on the partitions of ``topic``, made in the event loop that it belongs to.

    There is a shard for each partition that this broker leads: :meth:`elected` and :meth:`resigned`
    bring them and take them. The topic comes into being with the first FindCoordinator; until then
    a broker without groups has neither 50 directories nor 50 machines.

    All shards get the command ``upkeep`` again and again; ``interval`` is the key of the setting
    that says how many milliseconds lie between. ``commit_timeout`` is that of the one which says
    how long an answer waits for other replicas. With ``all_in_sync`` nothing is written while fewer
    replicas are in sync than ``min.insync.replicas``. ``internal_topic`` creates the topic.
    """

    MODULES: ClassVar[Sequence[str]] = ()
    """What the machine is made of; see :func:`load`."""

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
        """The deadlines of all shards; the key of the upkeep's own is :data:`UPKEEP`."""
        return self._shards.timers

    def _build(self, partition: Partition, coordinator_epoch: int) -> M_co:
        """Make an empty machine."""
        raise NotImplementedError

    def _budget(self, key: str) -> Budget:
        """Return what all machines may hold together of what the setting ``key`` bounds."""
        return Budget(key, self._config.int(key))

    @staticmethod
    def _give_back(machine: Machine, *accounts: Account) -> None:
        """See to it that what a machine holds is given back when its shard lets go of it."""
        for account in accounts:
            weakref.finalize(machine, account.close).atexit = False

    def _run_effect(
        self,
        shard: ShardRuntime[Machine],
        effect: object,
        now_ms: int,
        first_attempt_done: Callable[[], None],
    ) -> None:
        """Carry out an effect of a machine; see ``RunEffect`` in ``runtime/shard.py``."""
        raise NotImplementedError

    def _admit(self, partition: Partition, command: object) -> DomainError | None:
        """Why a command may not write now: too few replicas are in sync."""
        if not self._reads_only(command):
            try:
                self._replicas.check_min_isr(partition.topic, partition.index)
            except DomainError as error:
                return CoordinatorNotAvailableError(str(error))
        return None

    def _reads_only(self, command: object) -> bool:  # noqa: ARG002 - most write
        """Whether a command writes nothing, whatever the state."""
        return False

    def _while_loading(self, command: object) -> object | None:  # noqa: ARG002 - most have none
        """Answer what a loading shard may answer; None is COORDINATOR_LOAD_IN_PROGRESS."""
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
        """One for each partition that is led here; none until the topic exists."""
        return self._shards.shards

    # --- elections ---

    def publish(self, old: MetadataImage, image: MetadataImage) -> None:
        """Serve the partitions that this broker has come to lead, and those it lost no longer."""
        publish_elections(self, self._shards.topic, self._replicas.node_id, old, image)

    def elected(self, index: int, leader_epoch: int) -> None:
        """Serve a partition that this broker has come to lead; see :meth:`ShardSet.elected`."""
        self._shards.elected(index, leader_epoch)

    def resigned(self, index: int, leader_epoch: int | None) -> None:
        """Serve a partition no more; see :meth:`ShardSet.resigned`."""
        self._shards.resigned(index, leader_epoch)

    async def start(self) -> None:
        """Serve what is led here already; large logs go on loading after the return."""
        self._set_upkeep()
        topic = self._metadata.topic(self._shards.topic)
        if topic is not None:
            for index, leader_epoch in self._led(topic):
                self._shards.serve(index, leader_epoch)
            await self._shards.loaded()

    def _led(self, topic: TopicImage) -> Iterator[tuple[int, int]]:
        """The partitions of the internal topic that this broker leads, and in which epochs."""
        here = self._replicas.node_id
        return (
            (index, one.leader_epoch)
            for index, one in enumerate(topic.partitions)
            if one.leader == here
        )

    @property
    def _is_open(self) -> bool:
        return self._count_partitions() > 0 and self._shards.is_open

    def open_in_steps(self, key: str | None = None) -> Steps[None]:
        """Create the topic and its shards if they are not there.

        A step for each module that is not loaded yet, and for each partition, which makes a
        directory and files. With a ``key`` only its own is waited for: a first client gets its
        answer before the others are opened behind it. Raises CoordinatorNotAvailableError if the
        topic can't be made.
        """
        if not self._is_open:
            yield from load(self.MODULES)
            if self._metadata.topic(self._shards.topic) is None:
                yield from load(NEW_TOPIC_MODULES)
        if self._is_open:  # by now
            return
        name = self._shards.topic
        try:
            led = list(self._led(self._internal_topic(name)))
            # What this request does not come to is opened behind it.
            first = None if key is None else self.partition_for(key)
            for one in led:
                if first in (None, one[0]):
                    self._shards.serve(*one)
                    yield
        except DomainError as error:
            raise CoordinatorNotAvailableError(f"{name}: {error}") from error

    def submit(
        self, key: str, command: object, origin: Origin | None = None
    ) -> asyncio.Future[object]:
        """Send a command to the shard of ``key``, a group or a transactional id."""
        return self._shards.submit(key, command, origin)

    def partition_for(self, key: str) -> int:
        """The partition of the internal topic that ``key`` lives on.

        It may be another broker's. Raises NotCoordinatorError where the topic does not exist.
        """
        return self._shards.index_for(key)

    async def _everywhere(self, command: object, kind: type[R]) -> list[R]:
        """The answers of all shards; a shard that does not serve here is passed over.

        Raises CoordinatorLoadInProgressError while any shard loads, and the command's own errors.
        """
        await self._shards.opened()
        found: list[R] = []
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
                found.append(result)
        return found
