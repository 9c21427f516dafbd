"""Requests to the share coordinators of other brokers.

While a request with commands of one kind for one group is in flight to a broker, further such
commands are combined into the next request. Two commands for one share partition never share a
request, because only the partition identifies a result in the response.

Source: ``PersisterStateManager``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.coordinator.replication.peers import Peers, Purpose
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    NotCoordinatorError,
)
from fencepost.groups.share import errors
from fencepost.groups.share.batches import UNKNOWN_COUNT, StateBatch
from fencepost.groups.share.commands import SharePartitionKey, StateRead
from fencepost.groups.share.state import (
    DeleteState,
    InitializeState,
    ReadShareState,
    ReadStateSummary,
    StateChanged,
    StateCommand,
    StateSummary,
    WriteShareState,
)
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol import ApiKey
from fencepost.protocol.errors import UnsupportedVersion, WireError
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity

ERRORS: Mapping[ErrorCode, type[DomainError]] = MappingProxyType(
    {
        ErrorCode.coordinator_load_in_progress: CoordinatorLoadInProgressError,
        ErrorCode.coordinator_not_available: CoordinatorNotAvailableError,
        ErrorCode.not_coordinator: NotCoordinatorError,
        ErrorCode.fenced_state_epoch: errors.FencedStateEpochError,
        ErrorCode.fenced_leader_epoch: errors.FencedShareLeaderEpochError,
        ErrorCode.unknown_topic_or_partition: errors.UnknownSharePartitionError,
        ErrorCode.group_id_not_found: errors.ShareGroupGoneError,
        ErrorCode.invalid_request: errors.InvalidShareRequestError,
    }
)
"""The exceptions that stand for a coordinator's error codes; for any other code,
SharePartitionFailedError."""

MAX_COMBINED: Final = 1_000
"""The maximum number of commands in one request. Their responses are small, but each command may
cause a write."""

_APIS: Final[Mapping[type, tuple[ApiKey, str]]] = {
    InitializeState: (ApiKey.INITIALIZE_SHARE_GROUP_STATE, "InitializeStateData"),
    ReadShareState: (ApiKey.READ_SHARE_GROUP_STATE, "ReadStateData"),
    WriteShareState: (ApiKey.WRITE_SHARE_GROUP_STATE, "WriteStateData"),
    DeleteState: (ApiKey.DELETE_SHARE_GROUP_STATE, "DeleteStateData"),
    ReadStateSummary: (ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, "ReadStateSummaryData"),
}
"""The API of each kind of command, and kio's structure for one topic of its request."""

_Pending = tuple[StateCommand, "asyncio.Future[object]"]
_Line = tuple[int, type, str]
"""A queue whose requests are sent one at a time: broker, kind of command, and group."""


class ShareStateSender:
    """Sends commands to the share coordinators of other brokers, on the event loop only."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._waiting: dict[_Line, list[_Pending]] = {}
        self._sending: dict[_Line, asyncio.Task[None]] = {}
        self._is_closed = False

    def send(self, broker_id: int, command: StateCommand) -> asyncio.Future[object]:
        """Send a command once; the future has the reply or fails with a DomainError."""
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            future.set_exception(NotCoordinatorError("the broker stops"))
            return future
        line = broker_id, type(command), command.key.group_id
        self._waiting.setdefault(line, []).append((command, future))
        if line not in self._sending:
            self._sending[line] = spawn(self._send_all(line), "send share states")
        return future

    async def close(self) -> None:
        """Send nothing more; commands without a response fail with NOT_COORDINATOR."""
        self._is_closed = True
        sending = list(self._sending.values())
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        # A task that was cancelled before its first step has not taken its commands.
        for pending in self._waiting.values():
            _give_up(pending)
        self._waiting.clear()

    async def _send_all(self, line: _Line) -> None:
        """Send the waiting commands, one request after the other, until none is left."""
        pending: list[_Pending] = []
        try:
            while line in self._waiting:
                pending = self._take_batch(line)
                await self._exchange(line, pending)
        finally:
            del self._sending[line]
            _give_up((*pending, *self._waiting.pop(line, ())))

    def _take_batch(self, line: _Line) -> list[_Pending]:
        """Take the first waiting command of each share partition."""
        taken: dict[SharePartitionKey, _Pending] = {}
        left: list[_Pending] = []
        for command, future in self._waiting.pop(line):
            if future.done():  # its caller has given up
                continue
            if command.key in taken or len(taken) == MAX_COMBINED:
                left.append((command, future))
            else:
                taken[command.key] = command, future
        if left:
            self._waiting[line] = left
        return list(taken.values())

    async def _exchange(self, line: _Line, pending: Sequence[_Pending]) -> None:
        broker_id, kind, group_id = line
        if not pending:
            return
        api, _ = _APIS[kind]
        commands = [command for command, _ in pending]
        failure: DomainError
        replies: dict[tuple[bytes, int], object] = {}
        try:
            peer = self._peers.channel(broker_id, Purpose.SHARE_STATE)
            answer = await peer.newest(api, lambda make: _request(make, group_id, commands))
            replies = _replies(kind, answer)
            failure = errors.SharePartitionFailedError(f"broker {broker_id} gave no result")
        except UnsupportedVersion as error:
            failure = errors.SharePartitionFailedError(f"broker {broker_id}: {error}")
        except WireError as error:
            failure = CoordinatorNotAvailableError(f"broker {broker_id}: {error}")
        for command, future in pending:
            if not future.done():
                reply = replies.get((command.key.topic_id, command.key.partition), failure)
                if isinstance(reply, DomainError):
                    future.set_exception(without_traceback(reply))
                else:
                    future.set_result(reply)


def _give_up(pending: Iterable[_Pending]) -> None:
    for _, future in pending:
        if not future.done():
            future.set_exception(NotCoordinatorError("the broker stops"))


def _request(make: RequestFactory, group_id: str, commands: Sequence[StateCommand]) -> Entity:
    topics: dict[bytes, list[Entity]] = {}
    for command in commands:
        part = make.PartitionData(partition=command.key.partition, **_fields(make, command))
        topics.setdefault(command.key.topic_id, []).append(part)
    _, topic_class = _APIS[type(commands[0])]
    rows = getattr(make, topic_class)
    return make.message(
        group_id=group_id,
        topics=tuple(
            rows(topic_id=UUID(bytes=topic_id), partitions=tuple(parts))
            for topic_id, parts in topics.items()
        ),
    )


def _fields(make: RequestFactory, command: StateCommand) -> dict[str, Any]:
    match command:
        case InitializeState():
            return {"state_epoch": command.state_epoch, "start_offset": command.start_offset}
        case ReadShareState():
            return {"leader_epoch": command.leader_epoch}
        case WriteShareState():
            return {
                "state_epoch": command.state_epoch,
                "leader_epoch": command.leader_epoch,
                "start_offset": command.start_offset,
                "delivery_complete_count": command.delivery_complete_count,
                "state_batches": tuple(
                    [
                        make.StateBatch(
                            first_offset=batch.first,
                            last_offset=batch.last,
                            delivery_state=batch.state,
                            delivery_count=batch.delivery_count,
                        )
                        for batch in command.batches
                    ]
                ),
            }
        case ReadStateSummary():
            # Kafka's group coordinator also sends 0: it does not know the leader epoch.
            return {"leader_epoch": 0}
        case DeleteState():
            return {}


def _replies(kind: type, answer: Entity) -> dict[tuple[bytes, int], object]:
    result = _RESULTS[kind]
    replies: dict[tuple[bytes, int], object] = {}
    for topic in answer.results:
        for part in topic.partitions:
            if topic.topic_id is None:
                continue
            code = ErrorCode(part.error_code)
            reply: object = None
            if code is ErrorCode.none:
                reply = result(part)
            else:
                error = ERRORS.get(code, errors.SharePartitionFailedError)
                reply = error(part.error_message or code.name.upper())
            replies[topic.topic_id.bytes, part.partition] = reply
    return replies


def _changed(_part: Any) -> StateChanged:
    return StateChanged()


def _read(part: Any) -> StateRead:
    batches = [
        StateBatch(
            batch.first_offset, batch.last_offset, batch.delivery_state, batch.delivery_count
        )
        for batch in part.state_batches
    ]
    return StateRead(part.state_epoch, part.start_offset, tuple(batches))


def _summary(part: Any) -> StateSummary:
    return StateSummary(
        part.start_offset,
        getattr(part, "delivery_complete_count", UNKNOWN_COUNT),
        part.leader_epoch,
        part.state_epoch,
    )


_RESULTS: Final[Mapping[type, Callable[[Any], object]]] = {
    InitializeState: _changed,
    ReadShareState: _read,
    WriteShareState: _changed,
    DeleteState: _changed,
    ReadStateSummary: _summary,
}
"""Functions that convert a partition's result without error into the reply to the command."""
