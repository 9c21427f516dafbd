"""What the two coordinators share: their internal topic, its shards, and the way to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from fencepost.coordinator.data.storage import Storage
from fencepost.coordinator.runtime.background import Pace
from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    ShardError,
)
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.shard import Remember, ShardRuntime
from fencepost.coordinator.runtime.shards import ShardSet
from fencepost.coordinator.runtime.timers import TimerQueue
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.machine import DomainError, Machine
from fencepost.logcore.partition import Partition

R = TypeVar("R")

UPKEEP = "upkeep"
"""The key of the timer that comes again and again, whatever the shards hold."""


class ShardedCoordinator:
    """A coordinator on the partitions of ``topic``, made in the event loop that it belongs to.

    The topic, and with it the shards, come into being with the first FindCoordinator; until then a
    broker without groups has neither 50 directories nor 50 machines.

    All shards get the command ``upkeep`` again and again; ``interval`` is the key of the setting
    that says how many milliseconds lie between.
    """

    def __init__(
        self, storage: Storage, remember: Remember, topic: str, *, upkeep: object, interval: str
    ) -> None:
        self._config, self._clock = storage.config, storage.clock
        self._metadata, self._logs = storage.metadata, storage.logs
        self._shards = ShardSet(
            topic,
            storage.clock,
            build=self._build,
            run_effect=self._run_effect,
            while_loading=self._while_loading,
            remember=remember,
            flusher=storage.flusher,
        )
        self._upkeep, self._interval = upkeep, interval
        self._upkeep_timer = self._shards.timers.timers(self._send_upkeep)

    @property
    def timers(self) -> TimerQueue:
        """The deadlines of all shards; the key of the upkeep's own is :data:`UPKEEP`."""
        return self._shards.timers

    def _build(self, partition: Partition) -> Machine:
        """Make an empty machine."""
        raise NotImplementedError

    def _run_effect(
        self,
        shard: ShardRuntime,
        effect: object,
        now_ms: int,
        first_attempt_done: Callable[[], None],
    ) -> None:
        """Carry out an effect of a machine; see ``RunEffect`` in ``runtime/shard.py``."""
        raise NotImplementedError

    def _while_loading(self, command: object) -> object | None:  # noqa: ARG002 - most have none
        """Answer what a loading shard may answer; None is COORDINATOR_LOAD_IN_PROGRESS."""
        return None

    def _send_upkeep(self, _key: Hashable, _now_ms: int) -> None:
        self._set_upkeep()
        self._shards.sweep(self._upkeep, f"upkeep of {self._shards.topic}")

    def _set_upkeep(self) -> None:
        interval_ms = self._config.int(self._interval)
        self._upkeep_timer.set(UPKEEP, self._clock.now_ms() + interval_ms)

    @property
    def shards(self) -> Sequence[ShardRuntime]:
        """One for each partition; none until the topic exists."""
        return self._shards.shards

    async def start(self) -> None:
        """Open the shards if the topic exists; large logs go on loading after the return."""
        self._set_upkeep()
        topic = self._metadata.topic(self._shards.topic)
        if topic is not None:
            self._shards.open(self._logs, topic.partitions)
            await self._shards.loaded()

    def open_in_steps(self) -> Steps[None]:
        """Create the topic and its shards if they are not there.

        A step for each partition, which makes a directory and files. Raises
        CoordinatorNotAvailableError if the topic can't be made.
        """
        if self._shards.is_open:
            return
        name = self._shards.topic
        try:
            topic = self._metadata.ensure_internal_topic(name)
            for index in range(topic.partitions):
                self._logs.partition(name, index)
                yield
            if not self._shards.is_open:  # another request may have done it
                self._shards.open(self._logs, topic.partitions)
        except DomainError as error:
            raise CoordinatorNotAvailableError(f"{name}: {error}") from error

    def submit(
        self, key: str, command: object, origin: Origin | None = None
    ) -> asyncio.Future[object]:
        """Send a command to the shard of ``key``, a group or a transactional id."""
        return self._shards.submit(key, command, origin)

    def partition_for(self, key: str) -> int:
        """The partition of the internal topic that ``key`` lives on.

        Raises NotCoordinatorError where the topic does not exist.
        """
        return self._shards.index_for(key)

    async def _everywhere(self, command: object, kind: type[R]) -> list[R]:
        """The answers of all shards; a shard that does not serve here is passed over.

        Raises CoordinatorLoadInProgressError while any shard loads, and the command's own errors.
        """
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
