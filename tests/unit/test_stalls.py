"""The event loop's watch finds blocking code, even on a slow machine."""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Callable

import pytest

from tests.support.stalls import (
    MAX_SLOWNESS,
    MAX_STALL_MS,
    LockWatch,
    LoopWatch,
    Stall,
    slowness,
    watched_loop,
)
from tests.support.waits import until


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


async def test_turn_above_the_limit_of_the_slowest_machine_is_a_stall() -> None:
    watch = await _keep_the_loop(MAX_SLOWNESS * MAX_STALL_MS + 10)
    assert "turn" in watch.cpu.what
    with pytest.raises(AssertionError, match="times as slow as alone"):
        watch.check()


async def test_turn_below_the_limit_is_no_stall() -> None:
    watch = await _keep_the_loop(MAX_STALL_MS / 2)
    assert watch.cpu.slowness == 1
    watch.check()


@pytest.mark.parametrize(
    ("slow", "cpu_ms", "is_right"),
    [(1.0, 50, True), (1.0, 50.1, False), (2.0, 100, True), (2.0, 100.1, False)],
)
def test_stall_limit_is_proportional_to_slowness(
    slow: float, cpu_ms: float, is_right: bool
) -> None:
    watch = LoopWatch(cpu=Stall(cpu_ms, cpu_ms, "a turn", slow))
    if is_right:
        watch.check()
        return
    with pytest.raises(AssertionError, match=f"while the machine was {slow}"):
        watch.check()


def test_slowness_is_between_1_and_its_maximum() -> None:
    assert 1 <= slowness() <= MAX_SLOWNESS


def _in_a_thread(work: Callable[[], object]) -> LockWatch:
    is_done, is_seen = threading.Event(), threading.Event()

    def run() -> None:
        work()
        is_done.set()
        is_seen.wait()

    with LockWatch() as watch:
        thread = threading.Thread(target=run)
        thread.start()
        is_done.wait()
        probes = watch.probes
        until(lambda: watch.probes > probes + 1, "the probe has looked again")
        is_seen.set()
        thread.join()
    return watch


def test_thread_that_keeps_the_gil_is_found() -> None:
    # The probe misses about one stall in fifty, because it may lose the lock between measurements.
    watches = (_in_a_thread(lambda: pow(3, 4_000_000)) for _ in range(3))  # a single call
    assert any(not watch.is_short for watch in watches)


def test_thread_that_releases_the_gil_is_not_found() -> None:
    data = bytes(20_000_000)
    watch = _in_a_thread(lambda: zlib.crc32(zlib.compress(data)))
    assert watch.is_short
