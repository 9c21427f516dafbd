"""Clients share threads by the processor time of their jobs, not by order of arrival."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from fencepost.coordinator.runtime.fair_threads import CREDIT_S, SLICE_S, FairThreads
from fencepost.logcore.errors import InvalidRecordError
from fencepost.logcore.steps import Steps
from tests.support.waits import until_true

STEP_S = 0.001


class Busy:
    """Work that uses processor time and measures the used time."""

    def __init__(self, seconds: float) -> None:
        self.wanted = seconds
        self.had = 0.0

    def steps(self) -> Steps[float]:
        while self.had < self.wanted:
            since = time.thread_time()
            while time.thread_time() - since < STEP_S:
                pass
            self.had += time.thread_time() - since
            yield
        return self.had


@pytest.fixture
def fair_threads() -> FairThreads:
    return FairThreads("fair", 1)


async def test_small_job_passes_large_jobs_that_came_before_it() -> None:
    threads = FairThreads("fair", 2)
    large = [Busy(60) for _ in range(6)]
    tasks = [
        asyncio.ensure_future(threads.run(job.steps(), number)) for number, job in enumerate(large)
    ]
    await until_true(lambda: all(job.had > 2 * CREDIT_S for job in large))
    before = sum(job.had for job in large)
    small = Busy(CREDIT_S / 2)
    assert await threads.run(small.steps(), "small") == small.had
    # One thread ran the small job while the other thread ran large jobs.
    assert sum(job.had for job in large) - before < 2 * CREDIT_S + 10 * SLICE_S
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    threads.close()


async def test_client_with_many_jobs_gets_no_more_than_client_with_one(
    fair_threads: FairThreads,
) -> None:
    many = [Busy(60) for _ in range(8)]
    tasks = [asyncio.ensure_future(fair_threads.run(job.steps(), "many")) for job in many]
    await until_true(lambda: any(job.had > 0 for job in many))
    before, single = sum(job.had for job in many), Busy(0.4)
    await fair_threads.run(single.steps(), "one")
    had = sum(job.had for job in many) - before
    assert single.had - CREDIT_S - 5 * SLICE_S < had < single.had + 5 * SLICE_S
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    fair_threads.close()


async def test_client_with_repeated_small_jobs_gets_no_more_than_its_share(
    fair_threads: FairThreads,
) -> None:
    steady = Busy(60)
    task = asyncio.ensure_future(fair_threads.run(steady.steps(), "steady"))
    await until_true(lambda: steady.had > 0)
    before, taken = steady.had, 0.0
    while taken < 0.4:
        again = Busy(CREDIT_S / 2)
        taken += await fair_threads.run(again.steps(), "again")
    assert steady.had - before > taken / 2 - CREDIT_S - 5 * SLICE_S
    task.cancel()
    await asyncio.wait({task})
    fair_threads.close()


async def test_processor_time_is_reported_for_ended_failed_and_cancelled_jobs(
    fair_threads: FairThreads,
) -> None:
    told: list[float] = []
    job = Busy(0.05)
    await fair_threads.run(job.steps(), 1, told.append)
    assert told.pop() >= job.had

    def failing() -> Steps[None]:
        yield from Busy(0.02).steps()
        raise InvalidRecordError("the records end inside a field")

    with pytest.raises(InvalidRecordError):
        await fair_threads.run(failing(), 1, told.append)
    assert told.pop() >= 0.02

    endless = Busy(600)
    task = asyncio.ensure_future(fair_threads.run(endless.steps(), 1, told.append))
    await until_true(lambda: endless.had > 0)
    task.cancel()
    await asyncio.wait({task})
    await until_true(lambda: bool(told))  # the thread is free again
    had = endless.had
    assert told.pop() >= had > 0
    await fair_threads.run(Busy(0.02).steps(), 1)
    assert endless.had == had
    fair_threads.close()


async def test_close_waits_for_a_slice_and_not_for_jobs() -> None:
    threads = FairThreads("closed", 2)
    jobs = [Busy(600) for _ in range(4)]
    tasks = [asyncio.ensure_future(threads.run(job.steps(), at)) for at, job in enumerate(jobs)]
    await until_true(lambda: any(job.had > 0 for job in jobs))
    threads.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("closed_")]
    had = sum(job.had for job in jobs)
    assert had < 60
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert sum(job.had for job in jobs) == had
