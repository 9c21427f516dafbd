"""Observations of clients are recorded once, within limits, and only after a transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fencepost.coordinator.history.entries import Observed
from fencepost.coordinator.history.observations import (
    MAX_JUDGED_COMMITS,
    RHYTHM_COMMITS,
    RHYTHM_MIN_MS,
    ClientObservations,
    ObservationLimits,
    rhythm_of,
)
from fencepost.coordinator.metadata.names import TRANSACTION_STATE
from fencepost.coordinator.runtime.origin import Origin
from fencepost.groups.commands import OffsetToCommit
from fencepost.logcore.machine import Event
from tests.support.clock import ManualClock
from tests.support.metadata_changes import create_topic, internal_topic
from tests.unit.coordinator.services.coordinators import Services

ME = Origin("importer", "10.0.0.7")


class Observing:
    """The observations of one broker, and the recorded events."""

    def __init__(self, services: Services, limits: ObservationLimits | None = None) -> None:
        self.recorded: list[Event] = []
        self.clock = ManualClock()
        self.made = ClientObservations(
            lambda _scope, _shard, event, _origin, _trigger: self.recorded.append(event),
            services.metadata,
            self.clock,
            broker=1,
            limits=limits,
        )

    def produce(self, *topics: str, acks: int = -1, host: str = "10.0.0.7") -> None:
        self.made.produced("importer", host, None, acks, topics)

    def commit(self, after_ms: int, group: str = "g", member: str = "m-1", offset: int = 5) -> None:
        self.clock.advance(after_ms)
        self.made.committed(ME, group, member, 3, [OffsetToCommit("in", 0, offset)])

    def kinds(self) -> list[str]:
        return [event.kind for event in self.recorded]


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    started = await Services(tmp_path).start()
    yield started
    await started.stop()


@pytest.fixture
async def observing(services: Services) -> AsyncIterator[Observing]:
    internal_topic(services.metadata, TRANSACTION_STATE)
    made = Observing(services)
    yield made
    made.made.stop()


async def test_observation_is_recorded_once_until_renewal(observing: Observing) -> None:
    for _ in range(3):
        observing.produce("a")
        observing.produce("a", "b", "a")
    assert [event.detail["topic"] for event in observing.recorded] == ["a", "b"]
    observing.produce("a", acks=1)
    observing.produce("a", host="10.0.0.8")
    assert len(observing.recorded) == 4
    observing.made.renew()
    observing.produce("a")
    assert len(observing.recorded) == 5


async def test_observations_are_recorded_only_after_the_first_transaction(
    services: Services,
) -> None:
    observing = Observing(services)
    observing.produce("a")
    create_topic(services.metadata, "other")
    assert observing.recorded == []
    internal_topic(services.metadata, TRANSACTION_STATE)
    assert [event.detail["topic"] for event in observing.recorded] == ["a"]
    observing.produce("a")
    observing.produce("b")
    assert [event.detail["topic"] for event in observing.recorded] == ["a", "b"]
    observing.made.stop()


@pytest.mark.parametrize(("count", "dropped"), [(3, 0), (4, 1)])
async def test_observations_above_the_limit_are_dropped_and_counted(
    services: Services, count: int, dropped: int
) -> None:
    internal_topic(services.metadata, TRANSACTION_STATE)
    observing = Observing(services, ObservationLimits(max_observations=3))
    for number in range(count):
        observing.produce(f"t{number}")
    assert len(observing.recorded) == 3
    observing.made.renew()
    told = [
        observation
        for observation in observing.recorded
        if observation.kind == Observed.OBSERVATIONS_DROPPED
    ]
    assert [observation.detail for observation in told] == ([{"count": dropped}] if dropped else [])
    observing.made.stop()


@pytest.mark.parametrize(("count", "kept"), [(3, 3), (4, 1)])
async def test_known_requests_are_forgotten_above_the_limit(
    services: Services, count: int, kept: int
) -> None:
    observing = Observing(services, ObservationLimits(max_known=3))
    for number in range(count):
        observing.produce(f"t{number}")
    assert len(observing.made._known_keys) == kept
    observing.made.stop()


async def test_topic_in_several_combinations_is_observed_once(
    observing: Observing,
) -> None:
    for topics in (("a", "b"), ("b", "c"), ("a", "c"), ("c", "b", "a")):
        observing.produce(*topics)
    assert len(observing.made._known_keys) == 3
    assert sorted(str(event.detail["topic"]) for event in observing.recorded) == ["a", "b", "c"]


async def test_fetch_is_observed_once_its_topic_is_readable(observing: Observing) -> None:
    readable: dict[object, str] = {}
    for _ in range(2):
        observing.made.fetched("importer", "10.0.0.7", 0, ["a", "b"], readable.get)
    assert (observing.recorded, observing.made._known_keys) == ([], set())
    readable["a"] = "a"
    for _ in range(2):
        observing.made.fetched("importer", "10.0.0.7", 0, ["a", "b"], readable.get)
    assert [event.detail["topic"] for event in observing.recorded] == ["a"]


@pytest.mark.parametrize(("count", "kept"), [(3, 3), (4, 1)])
async def test_members_are_forgotten_above_the_limit(
    services: Services, count: int, kept: int
) -> None:
    observing = Observing(services, ObservationLimits(max_members=3))
    for number in range(count):
        observing.commit(1, member=f"m-{number}")
    assert len(observing.made._members) == kept
    observing.made.stop()


async def test_commit_without_a_member_is_no_observation(observing: Observing) -> None:
    observing.made.committed(ME, "g", "", -1, [OffsetToCommit("in", 0, 5)])
    assert observing.recorded == []


async def test_commit_after_the_groups_first_transaction_is_another_observation(
    observing: Observing,
) -> None:
    observing.commit(10)
    for _ in range(2):
        observing.made.added_offsets(
            ME, "id", "g", member_id="m-1", generation=3, version=3, topics=("in",)
        )
        observing.commit(10)
    assert observing.kinds() == [
        Observed.OFFSETS_COMMITTED,
        Observed.OFFSETS_ADDED_TO_TRANSACTION,
        Observed.OFFSETS_COMMITTED,
    ]
    beside = [observation.detail.get("beside_transactions") for observation in observing.recorded]
    assert beside == [False, None, True]


@pytest.mark.parametrize(
    ("interval_ms", "commits", "is_timer"),
    [
        (RHYTHM_MIN_MS, RHYTHM_COMMITS, True),
        (RHYTHM_MIN_MS, RHYTHM_COMMITS - 1, False),
        (RHYTHM_MIN_MS - 1, RHYTHM_COMMITS, False),
    ],
)
async def test_commits_at_equal_intervals_are_observed_as_timer_commits(
    observing: Observing, interval_ms: int, commits: int, *, is_timer: bool
) -> None:
    for _ in range(commits):
        observing.commit(interval_ms)
    assert (Observed.OFFSETS_COMMITTED_BY_TIMER in observing.kinds()) == is_timer


async def test_commits_of_unchanged_offsets_distinguish_auto_commit_from_a_client_timer(
    observing: Observing,
) -> None:
    for number in range(2 * RHYTHM_COMMITS):
        observing.commit(1_000, offset=number)
    timed = [
        observation
        for observation in observing.recorded
        if observation.kind == Observed.OFFSETS_COMMITTED_BY_TIMER
    ]
    assert [observation.detail["repeats"] for observation in timed] == [False]
    observing.commit(1_000, offset=2 * RHYTHM_COMMITS - 1)
    assert observing.recorded[-1].detail["repeats"] is True


@pytest.mark.parametrize(("open_ms", "is_long"), [(47_999, False), (48_000, True)])
async def test_transaction_that_nearly_timed_out_is_recorded_once(
    observing: Observing, open_ms: int, *, is_long: bool
) -> None:
    for _ in range(2):
        observing.made.ended(ME, "id", 5, open_ms=open_ms, timeout_ms=60_000)
    assert observing.kinds().count(Observed.TRANSACTION_NEARLY_TIMED_OUT) == is_long


async def test_commit_rhythm_is_detected_up_to_the_last_evaluated_commit(
    observing: Observing,
) -> None:
    for number in range(MAX_JUDGED_COMMITS - RHYTHM_COMMITS + 1):
        observing.commit(1_000 + 700 * (number % 2))
    assert Observed.OFFSETS_COMMITTED_BY_TIMER not in observing.kinds()
    for _ in range(RHYTHM_COMMITS - 1):
        observing.commit(1_000)
    assert observing.recorded[-1].detail["interval_ms"] == 1_000
    for number in range(MAX_JUDGED_COMMITS):
        observing.commit(1_000 + 700 * (number % 2), member="m-2")
    for _ in range(RHYTHM_COMMITS):
        observing.commit(1_000, member="m-2")
    assert observing.kinds().count(Observed.OFFSETS_COMMITTED_BY_TIMER) == 1


@pytest.mark.parametrize(("late_ms", "interval_ms"), [(1_240, 1_040), (1_600, None)])
def test_commit_interval_may_deviate_within_the_tolerance(
    late_ms: int, interval_ms: int | None
) -> None:
    times_ms = [0, 1_000, 2_000, 3_000, 3_000 + late_ms]
    assert rhythm_of(times_ms) == (None if interval_ms is None else round(times_ms[-1] / 4))
