"""Work in steps: short work runs in one turn, long work in several turns."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.runtime.background import SLICE_MS
from fencepost.coordinator.runtime.turns import (
    ActionQueue,
    Job,
    OneAtATime,
    Pause,
    Turns,
    Work,
    completed,
)
from fencepost.logcore.clock import monotonic_s
from fencepost.protocol.steps import Steps, finish


class Desk:
    """The :class:`Turns` of an event loop, and the steps that have run."""

    def __init__(self) -> None:
        self.turns = Turns(asyncio.get_running_loop())
        self.done: list[object] = []
        self.ended: list[str] = []

    def steps(self, name: str, count: int, spent_ms: float = 0.0) -> Work:
        """Yield ``count`` steps, each of which blocks the loop for ``spent_ms``."""
        try:
            for number in range(count):
                until = time.perf_counter() + spent_ms / 1000
                while time.perf_counter() < until:
                    pass
                self.done.append((name, number))
                yield None
        finally:
            self.ended.append(name)

    def begin(self, work: Work, on_end: Callable[[], None] = lambda: None) -> Job | None:
        return self.turns.begin(work, self.turns.until(), on_end)

    def begin_short(self, work: Work) -> Job | None:
        """Begin work with a slice that suffices even on a slow machine."""
        return self.turns.begin(work, self.turns.until() + 60, lambda: None)


async def test_short_work_ends_within_its_first_turn() -> None:
    desk = Desk()
    assert desk.begin_short(desk.steps("a", 1000)) is None
    assert desk.done == [("a", number) for number in range(1000)]


async def test_long_work_yields_to_other_callbacks_of_the_loop() -> None:
    desk = Desk()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.call_soon(desk.done.append, "somebody else")
    assert desk.begin(desk.steps("a", 6, SLICE_MS / 2), over.set) is not None
    async with asyncio.timeout(30):
        await over.wait()
    assert desk.done.index("somebody else") <= 2
    assert desk.done[-1] == ("a", 5)


async def test_long_jobs_alternate_and_new_short_work_runs_first() -> None:
    desk = Desk()
    over = [asyncio.Event() for _ in range(2)]
    for name, event in zip("ab", over, strict=True):
        assert desk.begin(desk.steps(name, 4, SLICE_MS), event.set) is not None
    assert desk.begin_short(desk.steps("short", 3)) is None
    async with asyncio.timeout(30):
        for event in over:
            await event.wait()
    order = [name for name, number in desk.done if name != "short"]
    assert order == ["a", "b"] * 4


async def test_job_resumes_when_its_future_is_done() -> None:
    desk = Desk()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def work() -> Work:
        yield answer
        desk.done.append(answer.result())

    over = asyncio.Event()
    job = desk.begin(work(), over.set)
    assert job is not None
    assert job.waits_for is answer
    await asyncio.sleep(0)
    assert desk.done == []
    answer.set_result("it is there")
    async with asyncio.timeout(30):
        await over.wait()
    assert desk.done == ["it is there"]
    assert job.is_over


async def test_dropped_job_runs_no_further_step_and_cancels_its_future() -> None:
    desk = Desk()
    waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def waiting() -> Work:
        try:
            yield waits
        finally:
            desk.ended.append("waiting")

    jobs = [desk.begin(waiting()), desk.begin(desk.steps("long", 9, SLICE_MS))]
    for job in jobs:
        assert job is not None
        job.drop()
    assert sorted(desk.ended) == ["long", "waiting"]
    assert waits.cancelled()
    await asyncio.sleep(0.02)
    assert desk.done == [("long", 0)]


async def test_job_may_drop_itself() -> None:
    desk = Desk()
    jobs: list[Job] = []
    release: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def work() -> Work:
        yield release
        jobs[0].drop()
        desk.done.append("came to its end")

    job = desk.begin(work())
    assert job is not None
    jobs.append(job)
    release.set_result(None)
    await asyncio.sleep(0.01)
    assert desk.done == ["came to its end"]


async def test_pause_resumes_its_job_in_the_same_turn() -> None:
    desk, pause = Desk(), Pause()

    def work() -> Work:
        yield pause
        desk.done.append("resumed")

    desk.begin(work(), lambda: desk.done.append("ended"))
    assert desk.done == []
    pause.end()
    assert desk.done == ["resumed", "ended"]
    pause.end()
    assert desk.done == ["resumed", "ended"]


async def test_pause_of_a_dropped_job_resumes_nothing() -> None:
    desk, pause = Desk(), Pause()

    def work() -> Work:
        yield pause
        desk.done.append("resumed")

    job = desk.begin(work())
    assert job is not None
    job.drop()
    assert pause.is_over
    pause.end()
    assert desk.done == []


async def test_task_waits_for_a_pause() -> None:
    pause = Pause()

    def work() -> Work[str]:
        yield pause
        return "resumed"

    asyncio.get_running_loop().call_soon(pause.end)
    async with asyncio.timeout(30):
        assert await completed(work()) == "resumed"


async def test_actions_run_in_order_when_they_are_released() -> None:
    actions, done = ActionQueue(), list[str]()
    assert actions.hold()

    def first() -> None:
        assert not actions.hold(), "actions are being released"
        actions.add(lambda: done.append("added by the first"))
        done.append("first")

    actions.add(first)
    actions.add(lambda: done.append("second"))
    assert done == []
    actions.release(monotonic_s() + 60)
    assert done == ["first", "second", "added by the first"]


async def test_actions_for_which_no_time_is_left_run_in_later_turns() -> None:
    actions, desk = ActionQueue(), Desk()
    over = asyncio.Event()
    assert actions.hold()
    for name in "abcd":
        actions.add(partial(deque, desk.steps(name, 1, SLICE_MS), 0))
    actions.add(over.set)
    actions.release(monotonic_s())
    assert desk.done == []
    loop = asyncio.get_running_loop()
    loop.call_soon(desk.done.append, "another callback")
    async with asyncio.timeout(30):
        await over.wait()
    assert desk.done == [("a", 0), "another callback", ("b", 0), ("c", 0), ("d", 0)]


async def test_action_outside_of_a_request_runs_in_the_next_turn() -> None:
    actions, done = ActionQueue(), list[str]()
    actions.add(lambda: done.append("first"))
    actions.add(lambda: done.append("second"))
    assert done == []
    await asyncio.sleep(0)
    assert done == ["first", "second"]


async def test_failed_action_is_logged_and_the_others_run() -> None:
    actions, done = ActionQueue(), list[str]()

    def fail() -> None:
        raise ZeroDivisionError

    actions.add(fail)
    actions.add(lambda: done.append("second"))
    with capture_logs() as logs:
        await asyncio.sleep(0)
    assert done == ["second"]
    assert [line["what"] for line in logs] == ["complete a waiting request"]


def test_finish_runs_all_steps_and_returns_the_result() -> None:
    def inner() -> Steps[int]:
        yield
        return 4

    def outer() -> Steps[int]:
        first = yield from inner()
        yield
        return first + 1

    assert finish(outer()) == 5


async def test_one_at_a_time_keeps_order_if_a_waiting_job_is_dropped() -> None:
    desk, queue = Desk(), OneAtATime()
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    def first() -> Work[None]:
        yield from desk.steps("first", 1)
        yield gate

    desk.begin(queue.run(first()))
    dropped = desk.begin(queue.run(desk.steps("dropped", 1)))
    desk.begin(queue.run(desk.steps("second", 2)))
    desk.begin(queue.run(desk.steps("third", 1)), over.set)
    assert desk.done == [("first", 0)]
    assert dropped is not None
    dropped.drop()
    gate.set_result(None)
    async with asyncio.timeout(30):
        await over.wait()
    assert desk.done == [("first", 0), ("second", 0), ("second", 1), ("third", 0)]


async def test_next_job_begins_after_the_previous_one_fails_or_is_dropped() -> None:
    desk, queue = Desk(), OneAtATime()
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def waits() -> Work[None]:
        yield gate

    def fails() -> Work[None]:
        raise ZeroDivisionError
        yield None

    begun = desk.begin(queue.run(waits()))
    assert begun is not None
    over = asyncio.Event()
    desk.begin(queue.run(desk.steps("next", 1)), over.set)
    begun.drop()
    async with asyncio.timeout(30):
        await over.wait()
    with pytest.raises(ZeroDivisionError):
        finish(queue.run(fails()))
    finish(queue.run(desk.steps("last", 1)))
    assert desk.done == [("next", 0), ("last", 0)]
