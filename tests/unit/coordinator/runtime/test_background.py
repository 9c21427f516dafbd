"""Background work: every failure is reported, and other work continues."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.runtime.background import (
    AFTER_FAILURE_MS,
    Pace,
    Repeated,
    Threads,
    call_later,
    each_in_turn,
    report,
    spawn,
)
from tests.support.clock import ManualClock
from tests.support.waits import until_true

FOREVER_MS = 2**63 - 1


class Failing:
    """A callable that always fails and counts its calls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = ValueError("nobody thought of this") if error is None else error
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        raise self.error


async def test_failed_round_is_logged_and_the_next_one_runs() -> None:
    failing = Failing()
    task = Repeated("counting", failing, lambda: 1)
    with capture_logs() as told:
        task.start()
        await until_true(lambda: failing.calls >= 3, "the third round")
        await task.stop()
    assert {(line["what"], line["cause"]) for line in told} == {
        ("counting", "ValueError: nobody thought of this")
    }
    assert all(line["exc_info"] is failing.error for line in told)
    calls = failing.calls
    await asyncio.sleep(0)
    assert failing.calls == calls


async def test_pause_defaults_to_a_second_if_its_computation_fails() -> None:
    rounds: list[float] = []

    async def work() -> None:
        rounds.append(time.monotonic())

    def pause_ms() -> int:
        raise TypeError("is no integer")

    task = Repeated("asking", work, pause_ms)
    with capture_logs() as told:
        task.start()
        await until_true(lambda: len(rounds) == 2, "the second round")
        await task.stop()
    assert rounds[1] - rounds[0] >= AFTER_FAILURE_MS / 1000
    assert {line["cause"] for line in told} == {"TypeError: is no integer"}


async def test_repeated_work_skips_pause_while_work_remains_and_on_stop() -> None:
    left = 5

    async def work() -> bool:
        nonlocal left
        left -= 1
        return left > 0

    task = Repeated("emptying", work, lambda: FOREVER_MS)
    task.start()
    await until_true(lambda: left == 0, "all is done")
    await asyncio.wait_for(task.stop(), 30)
    assert left == 0
    # Stopping does not wait for the end of the delay before the first round.
    task.start(first_ms=FOREVER_MS)
    await asyncio.wait_for(task.stop(), 30)
    assert left == 0


async def test_stop_waits_for_the_current_round() -> None:
    began, may_end, ended = asyncio.Event(), asyncio.Event(), False

    async def work() -> None:
        nonlocal ended
        began.set()
        await may_end.wait()
        ended = True

    task = Repeated("slow", work, lambda: 0)
    task.start()
    await began.wait()
    stopping = asyncio.ensure_future(task.stop())
    await asyncio.sleep(0)
    assert task.is_stopping
    assert not stopping.done()
    may_end.set()
    await asyncio.wait_for(stopping, 30)
    assert ended


async def test_failed_task_and_failed_timer_are_logged_cancelled_task_is_not() -> None:
    async def fail() -> None:
        raise KeyError("gone")

    failing = Failing()
    with capture_logs() as told:
        task = spawn(fail(), "a load")
        timer = call_later(asyncio.get_running_loop(), 0, "a sweep", failing)
        cancelled = spawn(asyncio.sleep(60), "a wait")
        cancelled.cancel()
        await asyncio.wait({task, cancelled})
        await until_true(lambda: failing.calls == 1, "the timer")
    timer.cancel()
    assert {(line["what"], line["cause"]) for line in told} == {
        ("a load", "KeyError: 'gone'"),
        ("a sweep", "ValueError: nobody thought of this"),
    }


async def test_exception_caught_by_event_loop_is_logged() -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(report)
    failing = Failing()
    with capture_logs() as told:
        loop.call_soon(failing)
        await until_true(lambda: failing.calls == 1, "the callback")
        loop.call_exception_handler({"message": "without a cause"})
    assert [line.get("cause") for line in told] == ["ValueError: nobody thought of this", None]
    assert told[1]["what"] == "without a cause"


@pytest.mark.parametrize("failing_step", range(4))
async def test_each_in_turn_runs_every_step_despite_a_failed_one(failing_step: int) -> None:
    taken: list[int] = []

    def step(number: int) -> Callable[[], object]:
        def take() -> None:
            taken.append(number)
            if number == failing_step:
                raise OSError(5, "Input/output error")

        async def take_later() -> None:
            await asyncio.sleep(0)
            take()

        return take_later if number % 2 else take

    with capture_logs() as told:
        await each_in_turn([(f"step {number}", step(number)) for number in range(4)])  # type: ignore[misc]
    assert taken == [0, 1, 2, 3]
    assert [line["what"] for line in told] == [f"step {failing_step}"]


async def test_cancelled_each_in_turn_still_runs_the_remaining_steps() -> None:
    taken: list[str] = []

    async def wait() -> None:
        taken.append("waits")
        await asyncio.Event().wait()

    task = asyncio.ensure_future(
        each_in_turn([("wait", wait), ("close", lambda: taken.append("closed"))])
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert taken == ["waits", "closed"]


async def test_single_thread_runs_steps_in_order_and_returns_their_exceptions() -> None:
    threads, seen = Threads("one"), []
    failing = Failing()
    steps = [threads.run(lambda number=number: seen.append(number)) for number in range(20)]
    results = await asyncio.gather(*steps, threads.run(failing), return_exceptions=True)
    assert seen == list(range(20))
    assert results[-1] is failing.error
    assert await threads.run(lambda: threading.current_thread().name) == "one_0"
    threads.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("one_")]


async def test_step_is_never_run_if_its_thread_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the pool cannot start a thread, it nevertheless keeps the step in its queue."""
    threads, seen = Threads("few", 2), []
    may_end = threading.Event()
    busy = asyncio.ensure_future(threads.run(may_end.wait))
    await asyncio.sleep(0)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            await threads.run(lambda: seen.append("late"))
    may_end.set()
    await busy
    await threads.run(lambda: seen.append("next"))
    assert seen == ["next"]
    threads.close()


async def test_pace_yields_to_other_tasks_only_after_its_slice() -> None:
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    pace = Pace(slice_ms=0)
    for _ in range(10):
        await pace()
    assert others >= 10
    patient = Pace(slice_ms=60_000)
    before = others
    for _ in range(10):
        await patient()
    assert others == before
    task.cancel()


async def test_pauses_follow_a_manual_clock() -> None:
    clock = ManualClock(0)
    rounds: list[int] = []
    task = Repeated("by the clock", lambda: rounds.append(clock.now_ms()), lambda: 1_000, clock)
    task.start(500)
    await until_true(lambda: task.due_ms == 500)
    clock.advance(499)
    await task.catch_up()
    assert rounds == []
    clock.advance(1)
    await task.catch_up()
    assert (rounds, task.due_ms) == ([500], 1_500)
    clock.advance(5_000)
    await task.catch_up()
    assert (rounds, task.due_ms) == ([500, 5_500], 6_500)
    await task.stop()
    assert task.due_ms is None
    await task.catch_up()  # stop has nothing to wait for
