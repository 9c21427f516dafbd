"""Keyed timers: cancelled or replaced timers never fire, due timers fire in order."""

import asyncio
import socket
from collections.abc import Hashable
from random import Random

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.runtime.timers import TimerQueue, Timers
from fencepost.logcore.clock import SystemClock
from tests.support.clock import ManualClock
from tests.support.quick import seeds
from tests.support.waits import until_true

UNBOUNDED_MS = 60_000
"""A pass limit that a pass does not reach even on a busy machine."""


class Recorder:
    def __init__(self) -> None:
        self.fired: list[tuple[Hashable, int]] = []

    def __call__(self, key: Hashable, now_ms: int) -> None:
        self.fired.append((key, now_ms))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000)


@pytest.fixture
async def queue(clock: ManualClock) -> TimerQueue:
    return TimerQueue(clock, asyncio.get_running_loop(), UNBOUNDED_MS)


async def test_timer_fires_at_its_deadline_and_not_before(
    queue: TimerQueue, clock: ManualClock
) -> None:
    fired = Recorder()
    timers = queue.timers(fired)
    timers.set("session", 1_010)
    clock.advance(9)
    assert queue.run_due() == 0
    clock.advance(1)
    assert queue.run_due() == 1
    assert fired.fired == [("session", 1_010)]
    assert len(timers) == len(queue) == 0


async def test_timers_fire_in_order_of_deadlines(queue: TimerQueue, clock: ManualClock) -> None:
    fired = Recorder()
    timers = queue.timers(fired)
    for key, deadline in [("c", 1_030), ("a", 1_010), ("b", 1_020), ("b2", 1_020)]:
        timers.set(key, deadline)
    clock.advance(100)
    queue.run_due()
    assert [key for key, _ in fired.fired] == ["a", "b", "b2", "c"]


async def test_cancelled_and_replaced_timers_never_fire(
    queue: TimerQueue, clock: ManualClock
) -> None:
    fired = Recorder()
    timers = queue.timers(fired)
    timers.set("cancelled", 1_010)
    timers.set("cancelled", None)
    timers.set("replaced", 1_010)
    timers.set("replaced", 1_050)
    timers.set("unknown", None)
    clock.advance(20)
    assert queue.run_due() == 0
    clock.advance(30)
    queue.run_due()
    assert fired.fired == [("replaced", 1_050)]


async def test_timer_cancelled_by_another_in_the_same_pass_does_not_fire(
    queue: TimerQueue, clock: ManualClock
) -> None:
    fired: list[Hashable] = []

    def fire(key: Hashable, _: int) -> None:
        fired.append(key)
        timers.set("second", None)

    timers: Timers = queue.timers(fire)
    timers.set("first", 1_001)
    timers.set("second", 1_001)
    clock.advance(1)
    queue.run_due()
    assert fired == ["first"]


async def test_timer_may_set_itself_again(queue: TimerQueue, clock: ManualClock) -> None:
    fired: list[int] = []

    def fire(key: Hashable, now_ms: int) -> None:
        fired.append(now_ms)
        timers.set(key, now_ms + 10)

    timers: Timers = queue.timers(fire)
    timers.set("tick", 1_010)
    for _ in range(3):
        clock.advance(10)
        queue.run_due()
    assert fired == [1_010, 1_020, 1_030]


async def test_same_key_of_two_shards_are_two_timers(queue: TimerQueue, clock: ManualClock) -> None:
    one, two = Recorder(), Recorder()
    first, second = queue.timers(one), queue.timers(two)
    first.set("key", 1_010)
    second.set("key", 1_010)
    first.clear()
    clock.advance(10)
    queue.run_due()
    assert (one.fired, two.fired) == ([], [("key", 1_010)])


async def test_failing_timer_does_not_stop_the_queue(queue: TimerQueue, clock: ManualClock) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("bug")

    fired = Recorder()
    queue.timers(fail).set("bad", 1_001)
    queue.timers(fired).set("good", 1_002)
    clock.advance(10)
    with capture_logs() as told:
        assert queue.run_due() == 2
    assert [key for key, _ in fired.fired] == ["good"]
    assert [(line["what"], line["cause"]) for line in told] == [("timer", "RuntimeError: bug")]


@pytest.mark.parametrize(("pass_ms", "fired_at_once"), [(0, 1), (60_000, 5)])
async def test_pass_is_bounded_by_time(
    clock: ManualClock, pass_ms: int, fired_at_once: int
) -> None:
    queue = TimerQueue(clock, asyncio.get_running_loop(), pass_ms)
    fired = Recorder()
    timers = queue.timers(fired)
    for key in range(5):
        timers.set(key, 1_001)
    clock.advance(1)
    assert queue.run_due() == fired_at_once
    await until_true(lambda: len(fired.fired) == 5)


async def test_data_that_arrived_before_a_late_pass_is_read_first(clock: ManualClock) -> None:
    loop = asyncio.get_running_loop()
    queue = TimerQueue(clock, loop, 0)
    fired = Recorder()
    timers = queue.timers(fired)
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def heartbeat() -> None:
            timers.set(ours.recv(16).decode(), 9_000)

        loop.add_reader(ours, heartbeat)
        for key in ("silent", "also silent"):
            timers.set(key, 1_010)
        timers.set("alive", 1_011)
        # The loop stalls until after all three deadlines, and meanwhile a heartbeat arrives.
        clock.advance(20)
        theirs.send(b"alive")
        timers.set("next", 1_009)
        await until_true(lambda: len(fired.fired) == 3)
        loop.remove_reader(ours)
    assert [key for key, _ in fired.fired] == ["next", "silent", "also silent"]
    assert timers.deadline_ms("alive") == 9_000
    queue.close()


async def test_data_that_arrives_during_expirations_is_read_in_between(
    clock: ManualClock,
) -> None:
    loop = asyncio.get_running_loop()
    queue = TimerQueue(clock, loop, 0)
    order: list[Hashable] = []
    ours, theirs = socket.socketpair()

    def fire(key: Hashable, _: int) -> None:
        order.append(key)
        if key == 1:
            theirs.send(b"!")

    timers = queue.timers(fire)
    with ours, theirs:
        loop.add_reader(ours, lambda: order.append(ours.recv(16)))
        for key in range(5):
            timers.set(key, 1_001)
        clock.advance(1)
        queue.run_due()
        await until_true(lambda: len(order) == 6)
        loop.remove_reader(ours)
    assert order == [0, 1, b"!", 2, 3, 4]


async def test_timers_fire_in_order_on_the_system_clock() -> None:
    clock = SystemClock()
    queue = TimerQueue(clock, asyncio.get_running_loop())
    fired = Recorder()
    timers = queue.timers(fired)
    now = clock.now_ms()
    timers.set("late", now + 40)
    timers.set("soon", now + 10)
    timers.set("past", now - 10)
    await until_true(lambda: len(fired.fired) == 3)
    assert [key for key, _ in fired.fired] == ["past", "soon", "late"]


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000])
async def test_wall_clock_jump_expires_no_timer(jump_ms: int) -> None:
    clock = ManualClock(10_000_000)
    queue = TimerQueue(clock, asyncio.get_running_loop())
    fired = Recorder()
    queue.timers(fired).set("session", 10_000_100)
    clock.jump(jump_ms)
    clock.advance(99)
    assert queue.run_due() == 0
    clock.advance(1)
    assert queue.run_due() == 1
    [(_, now_ms)] = fired.fired
    assert now_ms >= 10_000_100


async def test_timer_set_by_a_timer_is_not_delayed_by_wall_clock_jump() -> None:
    clock = ManualClock(10_000_000)
    queue = TimerQueue(clock, asyncio.get_running_loop())
    fired: list[tuple[Hashable, int]] = []

    def fire(key: Hashable, now_ms: int) -> None:
        fired.append((key, now_ms))
        if key == "join":
            timers.set("sync", now_ms + 50, now_ms)

    timers: Timers = queue.timers(fire)
    timers.set("join", 10_000_100)
    clock.jump(-3_600_000)
    clock.advance(100)
    assert queue.run_due() == 1
    clock.advance(49)
    assert queue.run_due() == 0
    clock.advance(1)
    assert queue.run_due() == 1
    assert fired == [("join", 10_000_100), ("sync", 10_000_150)]


async def test_closed_queue_fires_no_timer(queue: TimerQueue, clock: ManualClock) -> None:
    fired = Recorder()
    queue.timers(fired).set("key", 1_010)
    queue.close()
    clock.advance(100)
    assert queue.run_due() == 0
    assert fired.fired == []


@pytest.mark.parametrize("seed", seeds(20))
async def test_rescheduled_timers_fire_at_their_last_deadline(
    clock: ManualClock, seed: int
) -> None:
    queue = TimerQueue(clock, asyncio.get_running_loop(), 60_000)
    random = Random(seed)
    fired = Recorder()
    timers = queue.timers(fired)
    due: dict[int, tuple[int, int]] = {}
    for turn in range(300):
        key = random.randrange(8)
        if random.random() < 0.1:
            timers.set(key, None)
            due.pop(key, None)
        else:
            due[key] = clock.now_ms() + random.randrange(1, 40), turn
            timers.set(key, due[key][0])
        assert [at for at, _ in queue] == sorted(at for at, _ in due.values())
        assert len(queue) == len(timers) == len(due)
        clock.advance(random.randrange(10))
        order = sorted((at, key) for key, at in due.items() if at[0] <= clock.now_ms())
        fired.fired.clear()
        assert queue.run_due() == len(order)
        assert [timer_key for timer_key, _ in fired.fired] == [timer_key for _, timer_key in order]
        for _, timer_key in order:
            del due[timer_key]


async def test_pass_over_postponed_timers_is_bounded_by_time(clock: ManualClock) -> None:
    queue = TimerQueue(clock, asyncio.get_running_loop(), 0)
    fired = Recorder()
    timers = queue.timers(fired)
    for deadline in (1_001, 1_500):
        for key in range(5):
            timers.set(key, deadline)
    timers.set("due", 1_002)
    clock.advance(2)
    for _ in range(5):
        assert queue.run_due(clock.monotonic_ms()) == 0
    assert queue.run_due(clock.monotonic_ms()) == 1
    assert fired.fired == [("due", 1_002)]
