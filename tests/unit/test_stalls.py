"""The watch over the event loop finds what keeps it, however slow the machine is at the moment."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.stalls import (
    MAX_SLOWNESS,
    MAX_STALL_MS,
    LoopWatch,
    Stall,
    slowness,
    watched_loop,
)


async def _keep_the_loop(cpu_ms: float) -> LoopWatch:
    def turn() -> None:
        until = time.thread_time() + cpu_ms / 1000
        while time.thread_time() < until:
            pass
        over.set()

    over = asyncio.Event()
    with watched_loop() as watch:
        asyncio.get_running_loop().call_soon(turn)
        await over.wait()
        await asyncio.sleep(0)
    return watch


async def test_a_turn_that_no_machine_excuses() -> None:
    watch = await _keep_the_loop(MAX_SLOWNESS * MAX_STALL_MS + 10)
    assert "turn" in watch.cpu.what
    with pytest.raises(AssertionError, match="times as slow as alone"):
        watch.check()


async def test_a_turn_that_needs_no_excuse() -> None:
    watch = await _keep_the_loop(MAX_STALL_MS / 2)
    assert watch.cpu.slowness == 1
    watch.check()


@pytest.mark.parametrize(
    ("slow", "cpu_ms", "is_right"),
    [(1.0, 50, True), (1.0, 50.1, False), (2.0, 100, True), (2.0, 100.1, False)],
)
def test_what_is_excused(slow: float, cpu_ms: float, is_right: bool) -> None:
    watch = LoopWatch(cpu=Stall(cpu_ms, cpu_ms, "a turn", slow))
    if is_right:
        watch.check()
        return
    with pytest.raises(AssertionError, match=f"while the machine was {slow}"):
        watch.check()


def test_slowness_has_bounds() -> None:
    assert 1 <= slowness() <= MAX_SLOWNESS
