"""Commands to the share coordinator: retried errors, the number of retries, and the results."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    NotCoordinatorError,
)
from fencepost.coordinator.services.share_persister import (
    JITTER,
    MAX_PAUSE_MS,
    RETRIED,
    pause_ms,
)
from fencepost.groups.share import errors
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.state import DeleteState, InitializeState, StateSummary
from fencepost.logcore.machine import DomainError
from tests.support.share_state import LocalShareState
from tests.unit.coordinator.services.coordinators import Services

T = "t"


@pytest.fixture
async def services(tmp_path: Path):
    services = await Services(tmp_path).start()
    services.topic(T, 3)
    yield services
    await services.stop()


@pytest.fixture
def state(services: Services) -> LocalShareState:
    return LocalShareState(services)


def key(services: Services, partition: int = 0) -> SharePartitionKey:
    return SharePartitionKey("g", services.metadata.known(T).topic_id.bytes, partition)


async def test_each_partition_has_its_own_result(
    services: Services, state: LocalShareState
) -> None:
    ask, here, there = services.share_persister, key(services), key(services, 9)
    initialized = await ask.initialize(2, {here: 7, there: 7})
    assert initialized[here] is None
    assert isinstance(initialized[there], errors.UnknownSharePartitionError)
    assert (await ask.summaries([here]))[here] == StateSummary(7, 0, 0, 2)
    assert await ask.delete([here]) == {here: None}
    assert (await ask.summaries([here]))[here] == StateSummary()


async def test_command_without_coordinator_is_sent_five_times(
    services: Services, state: LocalShareState
) -> None:
    state.failures.extend(NotCoordinatorError(f"attempt {number}") for number in range(5))
    (error,) = (await services.share_persister.delete([key(services)])).values()
    assert isinstance(error, NotCoordinatorError)
    assert str(error) == "attempt 4"
    assert state.commands == [DeleteState(key(services))] * 5
    assert state.pauses == pytest.approx([2_000, 4_000, 8_000, 16_000], rel=JITTER)


def test_retry_backoff_has_jitter_and_a_maximum() -> None:
    pauses = [pause_ms(1) for _ in range(100)]
    assert min(pauses) < 2_000 < max(pauses)
    assert [pause_ms(10) for _ in range(100)] == [MAX_PAUSE_MS] * 100


@pytest.mark.parametrize("kind", RETRIED)
async def test_error_of_a_moving_coordinator_is_retried(
    services: Services, state: LocalShareState, kind: type[DomainError]
) -> None:
    state.failures.append(kind("not now"))
    assert await services.share_persister.initialize(2, {key(services): 7}) == {key(services): None}
    assert state.pauses == pytest.approx([2_000], rel=JITTER)


async def test_only_partitions_with_retriable_errors_are_sent_again(
    services: Services, state: LocalShareState
) -> None:
    first, second = key(services), key(services, 1)
    state.failures.extend(
        [CoordinatorLoadInProgressError("not now"), errors.FencedStateEpochError("old")]
    )
    results = await services.share_persister.initialize(2, {first: 7, second: 8})
    assert state.commands[2:] == [InitializeState(first, 2, 7)]
    assert results[first] is None
    assert isinstance(results[second], errors.FencedStateEpochError)


async def test_exception_of_the_transport_fails_its_partition_without_retry(
    services: Services, state: LocalShareState
) -> None:
    def broken(_command: object) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.set_exception(ZeroDivisionError("a bug"))
        return future

    services.share_persister._transport = broken
    (error,) = (await services.share_persister.delete([key(services)])).values()
    assert isinstance(error, errors.SharePartitionFailedError)
    assert str(error) == "ZeroDivisionError: a bug"
    assert state.pauses == []


async def test_cancelled_request_ends_during_retry_backoff(
    services: Services, state: LocalShareState
) -> None:
    state.failures.append(CoordinatorNotAvailableError("not now"))
    reached = asyncio.Event()

    async def for_ever(_pause_ms: int) -> None:
        reached.set()
        await asyncio.Event().wait()

    services.share_persister._pause = for_ever
    task = asyncio.ensure_future(services.share_persister.delete([key(services)]))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(state.commands) == 1
