"""The share coordinator's machine with a log in memory, as the transport of a persister."""

from __future__ import annotations

import asyncio
from collections import deque
from uuid import UUID

from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.services.share_persister import SharePersister, StateCommand
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.state import ReadStateSummary, ShareStateLimits, ShareStateMachine
from fencepost.groups.share.state import StateSummary as Summary
from fencepost.logcore.machine import DomainError


class LocalShareState:
    """All share partitions of a broker in one machine.

    The next commands fail with the errors in ``failures``, as if the coordinator could not be
    reached. If ``gate`` is set, replies wait until it is done.
    """

    def __init__(self, services: Services) -> None:
        self._metadata = services.metadata
        self._machine = ShareStateMachine(ShareStateLimits(), self._partitions)
        self._machine.on_loaded(0)
        self._next_offset = 0
        self.commands: list[StateCommand] = []
        self.failures: deque[DomainError] = deque()
        self.gate: asyncio.Future[None] | None = None
        self.pauses: list[int] = []
        services._share_persister = SharePersister(self.send, self._pause)

    async def _pause(self, pause_ms: int) -> None:
        self.pauses.append(pause_ms)
        await asyncio.sleep(0)

    def _partitions(self, topic_id: bytes) -> int | None:
        topic = self._metadata.topic_by_id(UUID(bytes=topic_id))
        return None if topic is None else len(topic.partitions)

    def send(self, command: StateCommand) -> asyncio.Future[object]:
        self.commands.append(command)
        if self.gate is not None:
            return asyncio.ensure_future(self._decide_after(self.gate, command))
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self._decide(command))
        except DomainError as error:
            future.set_exception(error)
        return future

    async def _decide_after(self, gate: asyncio.Future[None], command: StateCommand) -> object:
        await asyncio.shield(gate)
        return self._decide(command)

    def _decide(self, command: StateCommand) -> object:
        if self.failures:
            raise self.failures.popleft()
        decision = self._machine.decide(0, command, 0)
        for record in decision.records:
            self._machine.replay(record, self._next_offset, 0, None)
            self._next_offset += 1
        self._machine.check()
        (reply,) = decision.replies
        return reply.response

    def summary(self, group_id: str, topic_id: bytes, partition: int) -> Summary:
        """Return what the share coordinator knows of a share partition."""
        result = self._decide(ReadStateSummary(SharePartitionKey(group_id, topic_id, partition)))
        assert isinstance(result, Summary)
        return result
