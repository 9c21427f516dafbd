"""A clock that tests control: timers fire only when it advances, in order, at their deadlines."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.testing.broker import OwnBroker
from fencepost.testing.clock import LAST_MS, Fired, TestClock
from tests.support.raw import RawClient
from tests.support.waits import until

SESSION_MS = 30_000
REBALANCE_MS = 60_000


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def broker(tmp_path: Path, clock: TestClock) -> Iterator[OwnBroker]:
    with OwnBroker(tmp_path, clock=clock) as broker:
        yield broker


@pytest.fixture
def client(broker: OwnBroker) -> Iterator[RawClient]:
    with RawClient(broker.bootstrap) as client:
        yield client


def join(client: RawClient, group: str = "g", member_id: str = "", **more: object) -> dict:
    client.call("find_coordinator", 3, key=group, key_type=0)
    told = {
        "group_id": group,
        "session_timeout": SESSION_MS,
        "rebalance_timeout": REBALANCE_MS,
        "member_id": member_id,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b""}],
        **more,
    }
    answer = client.call("join_group", 3, **told)
    assert answer["error_code"] == "none"
    return answer


def sync(client: RawClient, joined: dict, group: str = "g") -> None:
    """Sync as the leader, with an empty assignment."""
    answer = client.call(
        "sync_group",
        3,
        group_id=group,
        generation_id=joined["generation_id"],
        member_id=joined["member_id"],
        assignments=[{"member_id": joined["member_id"], "assignment": b""}],
    )
    assert answer["error_code"] == "none"


def begin_transaction(client: RawClient, name: str, timeout_ms: int) -> dict:
    """Begin a transaction with partition ``t-0``, and return its producer id and epoch."""
    client.call("find_coordinator", 3, key=name, key_type=1)
    begun = client.call(
        "init_producer_id",
        4,
        transactional_id=name,
        transaction_timeout=timeout_ms,
        producer_id=-1,
        producer_epoch=-1,
    )
    assert begun["error_code"] == "none"
    added = client.call(
        "add_partitions_to_txn",
        3,
        v3_and_below_transactional_id=name,
        v3_and_below_producer_id=begun["producer_id"],
        v3_and_below_producer_epoch=begun["producer_epoch"],
        v3_and_below_topics=[{"name": "t", "partitions": [0]}],
    )
    results = added["results_by_topic_v3_and_below"][0]["results_by_partition"]
    assert results[0]["partition_error_code"] == "none"
    return begun


def create_topic(client: RawClient, num_partitions: int = 1) -> None:
    topic = {"name": "t", "num_partitions": num_partitions, "replication_factor": 1}
    answer = client.call("create_topics", 5, topics=[topic], timeout=10_000)
    assert answer["topics"][0]["error_code"] == "none"


def kinds(fired: list[Fired]) -> list[tuple[str, str]]:
    return [(deadline.what, deadline.who) for deadline in fired]


def test_clock_moves_only_when_it_is_advanced() -> None:
    clock = TestClock(1_000_000)
    assert (clock.now_ms(), clock.monotonic_ms()) == (1_000_000, 0)
    assert clock.advance(seconds=1.5, ms=1) == []
    assert (clock.now_ms(), clock.monotonic_ms()) == (1_001_501, 1_501)
    with pytest.raises(ValueError, match="0 or more"):
        clock.advance(seconds=-1)


def test_auto_clock_runs_from_its_current_time() -> None:
    clock = TestClock(1_000_000, auto=True)
    until(lambda: clock.now_ms() > 1_000_000, "the clock runs")
    clock.advance(seconds=60)
    stopped = clock.now_ms()
    assert stopped >= 1_060_000
    clock.auto = False
    stopped = clock.now_ms()
    time.sleep(0.01)  # real time must have no effect
    assert clock.now_ms() == stopped


def test_session_expires_exactly_at_its_timeout(client: RawClient, clock: TestClock) -> None:
    sync(client, joined := join(client))
    begun_ms = clock.now_ms()
    assert clock.advance(ms=SESSION_MS - 1) == []
    fired = clock.advance(ms=1)
    assert kinds(fired) == [("session", "g")]
    (session,) = fired
    assert session.member == joined["member_id"]
    assert session.at_ms == begun_ms + SESSION_MS
    assert "member-expired" in session.events
    answer = client.call(
        "heartbeat",
        3,
        group_id="g",
        generation_id=joined["generation_id"],
        member_id=joined["member_id"],
    )
    assert answer["error_code"] == "unknown_member_id"


def test_heartbeat_between_two_advances_keeps_the_session(
    client: RawClient, clock: TestClock
) -> None:
    sync(client, joined := join(client))
    for _ in range(3):
        assert clock.advance(ms=SESSION_MS - 1) == []
        beat = client.call(
            "heartbeat",
            3,
            group_id="g",
            generation_id=joined["generation_id"],
            member_id=joined["member_id"],
        )
        assert beat["error_code"] == "none"
    assert kinds(clock.advance(ms=SESSION_MS)) == [("session", "g")]


def test_timer_set_by_another_timer_fires_at_its_own_deadline(
    broker: OwnBroker, client: RawClient, clock: TestClock
) -> None:
    sync(client, first := join(client))
    with RawClient(broker.bootstrap) as other:
        other.send(
            "join_group",
            3,
            group_id="g",
            session_timeout=10 * REBALANCE_MS,
            rebalance_timeout=REBALANCE_MS,
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b""}],
        )
        until(
            lambda: (
                client.call(
                    "heartbeat",
                    3,
                    group_id="g",
                    generation_id=first["generation_id"],
                    member_id=first["member_id"],
                )["error_code"]
                == "rebalance_in_progress"
            ),
            "the second member makes the group rebalance",
        )
        begun_ms = clock.now_ms()
        # The first member does not rejoin: its session expires, which ends the join phase.
        fired = clock.advance(ms=3 * REBALANCE_MS)
        joined = other.receive()
        assert joined["error_code"] == "none"
        assert (joined["generation_id"], joined["leader"]) == (2, joined["member_id"])
    # The new leader then sends no assignment until its own sync deadline expires.
    assert kinds(fired) == [("session", "g"), ("sync", "g")]
    session, late = fired
    assert session.at_ms == begun_ms + SESSION_MS
    assert "generation-started" in session.events
    assert late.at_ms == session.at_ms + REBALANCE_MS


def test_transaction_times_out_and_its_producer_is_fenced(
    client: RawClient, clock: TestClock
) -> None:
    create_topic(client)
    begun = begin_transaction(client, "orders", 20_000)
    begun_ms = clock.now_ms()
    assert clock.advance(ms=19_999) == []
    (fired,) = clock.advance(ms=10)
    assert (fired.what, fired.who) == ("transaction", "orders")
    assert 20_000 <= fired.at_ms - begun_ms <= 20_001
    assert {"transaction-aborted", "producer-fenced"} <= set(fired.events)
    ended = client.call(
        "end_txn",
        3,
        transactional_id="orders",
        producer_id=begun["producer_id"],
        producer_epoch=begun["producer_epoch"],
        committed=True,
    )
    assert ended["error_code"] == "producer_fenced"


def test_timers_fire_in_the_order_of_their_deadlines(client: RawClient, clock: TestClock) -> None:
    create_topic(client)
    begin_transaction(client, "last", 40_000)
    begin_transaction(client, "first", 20_000)
    sync(client, join(client, "middle"), "middle")
    fired = clock.advance(seconds=60)
    assert kinds(fired) == [
        ("transaction", "first"),
        ("session", "middle"),
        ("transaction", "last"),
    ]
    assert [deadline.at_ms for deadline in fired] == sorted(deadline.at_ms for deadline in fired)
    assert list(clock.fired)[-3:] == fired


@pytest.mark.parametrize("seed", range(5))
def test_random_timers_fire_at_their_deadlines_for_any_advances(
    client: RawClient, clock: TestClock, seed: int
) -> None:
    rng = random.Random(seed)
    create_topic(client)
    due: list[tuple[int, str, str]] = []
    fired: list[Fired] = []
    for number in range(12):
        name, timeout_ms = f"{seed}-{number}", rng.randrange(6_000, 90_000)
        if rng.random() < 0.5:
            begin_transaction(client, name, timeout_ms)
            # A transaction times out once it is older than its timeout.
            due.append((clock.now_ms() + timeout_ms + 1, "transaction", name))
        else:
            sync(client, join(client, name, session_timeout=timeout_ms), name)
            due.append((clock.now_ms() + timeout_ms, "session", name))
        fired += clock.advance(ms=rng.choice((0, 1, 500, 7_000)))
    while clock.now_ms() < max(due)[0]:
        fired += clock.advance(ms=rng.choice((1, 999, 10_000, 60_000)))
    told = [(deadline.at_ms, deadline.what, deadline.who) for deadline in fired]
    assert sorted(told) == sorted(due)
    assert [at_ms for at_ms, *_ in told] == sorted(at_ms for at_ms, *_ in told)


def test_initial_rebalance_delay_follows_the_test_clock(tmp_path: Path, clock: TestClock) -> None:
    config = {"group.initial.rebalance.delay.ms": "3000"}
    with (
        OwnBroker(tmp_path, config=config, clock=clock) as broker,
        RawClient(broker.bootstrap) as client,
    ):
        client.call("find_coordinator", 3, key="g", key_type=0)
        client.send(
            "join_group",
            3,
            group_id="g",
            session_timeout=SESSION_MS,
            rebalance_timeout=REBALANCE_MS,
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b""}],
        )
        fired = until(lambda: clock.advance(ms=1_500), "the delayed join")
        assert kinds(fired) == [("join", "g")]
        assert client.receive()["generation_id"] == 1


def beat(client: RawClient, member: str, epoch: int, **more: object) -> dict:
    """Send a heartbeat of the consumer protocol."""
    told = {
        "group_id": "g",
        "member_id": member,
        "member_epoch": epoch,
        "rebalance_timeout": -1,
        "instance_id": None,
        "rack_id": None,
        "subscribed_topic_names": None,
        "subscribed_topic_regex": None,
        "server_assignor": None,
        "topic_partitions": None,
        **more,
    }
    return client.call("consumer_group_heartbeat", 1, **told)


def enter(client: RawClient, member: str) -> dict:
    answer = beat(
        client,
        member,
        0,
        rebalance_timeout=20_000,
        subscribed_topic_names=["t"],
        topic_partitions=[],
    )
    assert answer["error_code"] == "none"
    return answer


def partitions_in(answer: dict) -> list[int]:
    given = (answer["assignment"] or {"topic_partitions": []})["topic_partitions"]
    return [index for topic in given for index in topic["partitions"]]


def test_member_that_does_not_revoke_is_removed_after_rebalance_timeout(
    tmp_path: Path, clock: TestClock
) -> None:
    config = {"group.consumer.assignment.interval.ms": "0", "num.partitions": "2"}
    with (
        OwnBroker(tmp_path, config=config, clock=clock) as broker,
        RawClient(broker.bootstrap) as client,
    ):
        client.call("find_coordinator", 3, key="g", key_type=0)
        create_topic(client, num_partitions=2)
        first = enter(client, "first")
        assert partitions_in(first) == [0, 1]
        assert partitions_in(enter(client, "second")) == []
        told = beat(client, "first", first["member_epoch"])
        assert len(partitions_in(told)) == 1
        fired = clock.advance(ms=20_000)
        assert [(deadline.what, deadline.member) for deadline in fired] == [("rebalance", "first")]
        assert "member-expired" in fired[0].events or "member-fenced" in fired[0].events


def test_assignment_interval_follows_the_test_clock(client: RawClient, clock: TestClock) -> None:
    client.call("find_coordinator", 3, key="g", key_type=0)
    create_topic(client, num_partitions=2)
    first = enter(client, "first")
    assert partitions_in(first) == [0, 1]
    enter(client, "second")
    assert beat(client, "first", first["member_epoch"])["assignment"] is None
    clock.advance(seconds=1)
    enter(client, "second")
    assert len(partitions_in(beat(client, "first", first["member_epoch"]))) == 1


async def test_broker_on_the_tests_event_loop_needs_advance_async(tmp_path: Path) -> None:
    clock = TestClock()
    async with Broker(tmp_path, clock=clock) as broker:

        def talk() -> None:
            with RawClient(broker.bootstrap) as client:
                sync(client, join(client))

        await asyncio.to_thread(talk)
        with pytest.raises(RuntimeError, match="advance_async"):
            clock.advance(seconds=1)
        fired = await clock.advance_async(ms=SESSION_MS)
        assert kinds(fired) == [("session", "g")]
    assert await clock.advance_async(seconds=1) == []


def test_two_brokers_share_one_clock(tmp_path: Path, clock: TestClock) -> None:
    with (
        OwnBroker(tmp_path / "a", clock=clock) as one,
        OwnBroker(tmp_path / "b", clock=clock) as two,
        RawClient(one.bootstrap) as first,
        RawClient(two.bootstrap) as second,
    ):
        sync(first, join(first, "late"), "late")
        clock.advance(seconds=1)
        sync(second, join(second, "later"), "later")
        fired = clock.advance(ms=2 * SESSION_MS)
    assert kinds(fired) == [("session", "late"), ("session", "later")]
    assert fired[1].at_ms - fired[0].at_ms == 1_000


def test_advance_beyond_the_year_9999_is_refused() -> None:
    clock = TestClock(now_ms=LAST_MS - 1_000)
    with pytest.raises(ValueError, match="year 9999"):
        clock.advance(ms=1_001)
    clock.advance(seconds=1)
    assert clock.now_ms() == LAST_MS
