"""The requests of share groups and share partitions to the share coordinator, with retries.

The group coordinator and the leaders of share partitions have a :class:`SharePersister`. It sends
each command to the shard of its share partition, and repeats a command that found no coordinator.
The transport decides where that shard is.

Source: Kafka's ``Persister`` and ``PersisterStateManager``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Final, TypeVar

from fencepost.coordinator.runtime import errors as shard_errors
from fencepost.coordinator.runtime.background import Pace, log_failure, spawn
from fencepost.groups.share import errors
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.state import (
    DeleteState,
    InitializeState,
    ReadStateSummary,
    StateCommand,
    StateSummary,
)
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback

C = TypeVar("C", bound=StateCommand)

Transport = Callable[[StateCommand], "asyncio.Future[object]"]
"""Sends a command to the shard of its key, without retries; the future has the reply or a
DomainError.

If a coordinator does not respond, the future fails with CoordinatorNotAvailableError. Commands that
are sent in the same turn of the event loop may be combined into one request.
"""

Pause = Callable[[int], Awaitable[object]]
"""Waits for a number of milliseconds."""

MAX_ATTEMPTS: Final = 5
"""The maximum number of attempts to send a command, including the first."""
FIRST_PAUSE_MS: Final = 2_000
"""The pause after the first attempt, doubled after each further one. Kafka's backoff is 1 s for
attempt 0, but is first used after attempt 1."""
MAX_PAUSE_MS: Final = 30_000
JITTER: Final = 0.2
"""The fraction by which a pause is randomly shorter or longer."""

RETRIED: Final = (
    shard_errors.CoordinatorLoadInProgressError,
    shard_errors.CoordinatorNotAvailableError,
    shard_errors.NotCoordinatorError,
    errors.ShareCoordinatorUnavailableError,
    errors.ShareCoordinatorUnloadedError,
    # The coordinator's metadata may lag behind (KAFKA-19455).
    errors.UnknownSharePartitionError,
)
"""Errors after which a command is sent again. Others are final."""


async def sleep_ms(pause_ms: int) -> None:
    """Wait for ``pause_ms`` milliseconds."""
    await asyncio.sleep(pause_ms / 1000)


def pause_ms(attempts: int) -> int:
    """Return the pause after ``attempts`` failed attempts. Source: ``ExponentialBackoff``."""
    factor = random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - not used for security
    return min(int(factor * (FIRST_PAUSE_MS << (attempts - 1))), MAX_PAUSE_MS)


class SharePersister:
    """Sends commands to the share coordinator; ``pause`` waits between two attempts."""

    def __init__(self, transport: Transport, pause: Pause = sleep_ms) -> None:
        self._transport = transport
        self._pause = pause
        self._repeating: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def initialize(
        self, state_epoch: int, start_offsets: Mapping[SharePartitionKey, int]
    ) -> dict[SharePartitionKey, DomainError | None]:
        """Initialize states without batches; return the error of each share partition, or None."""
        results = await self.ask(
            [InitializeState(key, state_epoch, start) for key, start in start_offsets.items()]
        )
        return _errors(results)

    async def delete(
        self, keys: Collection[SharePartitionKey]
    ) -> dict[SharePartitionKey, DomainError | None]:
        """Forget states; return the error of each share partition, or None."""
        return _errors(await self.ask([DeleteState(key) for key in keys]))

    async def summaries(
        self, keys: Collection[SharePartitionKey]
    ) -> dict[SharePartitionKey, StateSummary | DomainError]:
        """Return the offsets and epochs of each share partition, or its error."""
        results = await self.ask([ReadStateSummary(key) for key in keys])
        return {
            key: result
            if isinstance(result, StateSummary | DomainError)
            else errors.SharePartitionFailedError(f"not a summary: {result!r}")
            for key, result in results.items()
        }

    def begin(self, command: StateCommand, done: Callable[[object | DomainError], None]) -> None:
        """Send one command; ``done`` gets its reply or error, in this turn if it is known.

        Most coordinators answer at once; only a repeated command needs a task.
        """
        first = self._transport(command)
        answered = partial(self._answered, command, done)
        if first.done():
            answered(first)
        else:
            first.add_done_callback(answered)

    def _answered(
        self,
        command: StateCommand,
        done: Callable[[object | DomainError], None],
        first: asyncio.Future[object],
    ) -> None:
        reply: object = None
        if first.cancelled():
            reply = asyncio.CancelledError()
        elif (reply := first.exception()) is None:
            reply = first.result()
        if isinstance(reply, RETRIED) and not self._is_closed:
            task = spawn(self._repeat(command, done), "repeat a share state request")
            self._repeating.add(task)
            task.add_done_callback(self._repeating.discard)
        else:
            done(_result(reply))

    async def _repeat(
        self, command: StateCommand, done: Callable[[object | DomainError], None]
    ) -> None:
        done((await self.ask([command], attempts=1))[command.key])

    def close(self) -> None:
        """Cancel the retries of :meth:`begin`, without calling ``done``."""
        self._is_closed = True
        for task in self._repeating:
            task.cancel()

    async def ask(
        self, commands: Collection[C], *, attempts: int = 0
    ) -> dict[SharePartitionKey, object | DomainError]:
        """Send commands of different share partitions; return each one's reply or error.

        ``attempts`` is the number of earlier attempts. A cancellation cancels the commands in
        flight, some of which may have been carried out.
        """
        results: dict[SharePartitionKey, object | DomainError] = {}
        for attempt in range(attempts, MAX_ATTEMPTS):
            if attempt:
                await self._pause(pause_ms(attempt))
            replies = await self._sent(commands)
            retried = []
            for command, reply in zip(commands, replies, strict=True):
                results[command.key] = _result(reply)
                if isinstance(reply, RETRIED):
                    retried.append(command)
            if not retried:
                break
            commands = retried
        return results

    async def _sent(self, commands: Collection[StateCommand]) -> list[object | BaseException]:
        """Send each command once; return the replies and errors."""
        pace, sent = Pace(), []
        try:
            for command in commands:
                sent.append(self._transport(command))
                await pace()
        except asyncio.CancelledError:
            asyncio.gather(*sent, return_exceptions=True).cancel()
            raise
        return await asyncio.gather(*sent, return_exceptions=True)


def _result(reply: object) -> object | DomainError:
    if isinstance(reply, DomainError):
        return without_traceback(reply)
    if isinstance(reply, asyncio.CancelledError):  # the coordinator shuts down
        return shard_errors.NotCoordinatorError("the share coordinator has stopped")
    if isinstance(reply, Exception):
        log_failure("share coordinator", reply)
        return errors.SharePartitionFailedError(f"{type(reply).__name__}: {reply}")
    if isinstance(reply, BaseException):
        raise reply
    return reply


def _errors(
    results: Mapping[SharePartitionKey, object | DomainError],
) -> dict[SharePartitionKey, DomainError | None]:
    return {
        key: result if isinstance(result, DomainError) else None for key, result in results.items()
    }
