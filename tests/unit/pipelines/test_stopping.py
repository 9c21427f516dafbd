"""A stop request interrupts a wait, and limits the remaining time."""

from __future__ import annotations

import asyncio

import pytest

from fencepost.pipelines.stopping import CLEAN_UP_S, LEAST_S, StopRequest

LONG_S = 600.0


async def test_work_that_ends_by_itself_is_not_interrupted() -> None:
    stop = StopRequest()
    assert not await stop.run_until_set(asyncio.sleep(0))
    with pytest.raises(ZeroDivisionError):
        await stop.run_until_set(failing())
    assert stop.left_s(LONG_S) == LONG_S


async def failing() -> None:
    raise ZeroDivisionError


async def test_stop_request_interrupts_a_wait() -> None:
    stop = StopRequest()
    asyncio.get_running_loop().call_soon(stop.set)
    assert await stop.run_until_set(asyncio.sleep(LONG_S))
    await stop.pause(LONG_S)


@pytest.mark.parametrize("is_worth_waiting", [False, True])
async def test_work_continues_after_the_stop_request_only_if_worth_waiting_for(
    is_worth_waiting: bool,
) -> None:
    stop = StopRequest(stop_ms=60_000)
    steps = []

    async def work() -> None:
        await stop.wait()
        for _ in range(10):
            await asyncio.sleep(0.001)
        steps.append("done")

    asyncio.get_running_loop().call_soon(stop.set)
    assert await stop.run_until_set(work(), lambda: is_worth_waiting) is not is_worth_waiting
    assert steps == ["done"] * is_worth_waiting


async def test_work_is_interrupted_after_the_stop_timeout() -> None:
    stop = StopRequest(stop_ms=1)
    stop.set()
    assert await stop.run_until_set(asyncio.sleep(LONG_S), lambda: True)


async def test_steps_after_a_stop_request_share_its_time() -> None:
    stop = StopRequest(stop_ms=0)
    stop.set()
    assert stop.left_s(0.5) == 0.5
    assert LEAST_S < stop.left_s(LONG_S) <= CLEAN_UP_S
    stop._end -= CLEAN_UP_S
    assert stop.left_s(LONG_S) == LEAST_S
    stop.set()  # a second signal does not extend the time
    assert stop.left_s(LONG_S) == LEAST_S


async def test_cancelled_wait_cancels_its_work() -> None:
    stop, ended = StopRequest(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(LONG_S)
        finally:
            ended.set()

    waiting = asyncio.create_task(stop.run_until_set(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()
