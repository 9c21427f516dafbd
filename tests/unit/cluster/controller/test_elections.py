"""ReplicationControlManager's elections: by ElectLeaders, and by the controller itself."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from fencepost.cluster.controller.errors import (
    ElectionNotNeededError,
    EligibleLeadersNotAvailableError,
    PreferredLeaderNotAvailableError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.partition_change import RECOVERED, Election
from fencepost.cluster.image import NEVER_LED, NO_LEADER
from fencepost.cluster.records import PartitionRecord, TopicRecord
from fencepost.logcore.machine import DomainError
from tests.unit.cluster.controller.cluster_driver import SETTINGS, Cluster

Answers = dict[tuple[str, int], DomainError | None]


def elect(
    cluster: Cluster, election: Election, partitions: list[tuple[str, int]] | None
) -> Answers:
    return dict(cluster.do(cluster.controller.elect_leaders(election, partitions)))


def kinds(answers: Answers) -> list[type[object]]:
    return [type(answer) for answer in answers.values()]


def test_preferred_election_needs_preferred_replica_in_isr() -> None:
    cluster = Cluster(range(4))
    cluster.create("foo", [1, 2, 3], [2, 3, 0], [0, 2, 1])
    cluster.fence(1)
    cluster.unfence(1)
    cluster.fence(2)
    assert [cluster.partition("foo", index).leader for index in range(3)] == [3, 3, 0]
    asked = [("foo", 0), ("foo", 1), ("foo", 2), ("foo", 3), ("bar", 0)]
    # Broker 1 is unfenced, but not in the ISR yet.
    assert kinds(elect(cluster, Election.PREFERRED, asked)) == [
        PreferredLeaderNotAvailableError,
        PreferredLeaderNotAvailableError,
        ElectionNotNeededError,
        UnknownTopicOrPartitionError,
        UnknownTopicOrPartitionError,
    ]
    cluster.unfence(2)
    cluster.alter_isr("foo", [3, 1])
    epoch = cluster.partition("foo").leader_epoch
    assert kinds(elect(cluster, Election.PREFERRED, asked[:1])) == [type(None)]
    assert (cluster.partition("foo").leader, cluster.partition("foo").leader_epoch) == (
        1,
        epoch + 1,
    )
    assert cluster.causes("leader-elected", "foo-0")[-1] == "ElectLeaders"


def test_elect_leaders_of_all_partitions_omits_those_that_need_no_election() -> None:
    cluster = Cluster()
    cluster.create("foo", [1, 2], [2, 1])
    cluster.fence(1)
    cluster.unfence(1)
    assert list(elect(cluster, Election.PREFERRED, None)) == [("foo", 0)]
    assert elect(cluster, Election.UNCLEAN, None) == {}


@pytest.mark.parametrize("elr", [True, False])
def test_requested_unclean_election_needs_no_config(elr: bool) -> None:
    """An UNCLEAN election needs no permission from unclean.leader.election.enable."""
    cluster = Cluster(range(5), elr=elr)
    cluster.create("foo", [1, 2, 3], [2, 3, 4])
    cluster.fence(2, 3, 4)
    cluster.fence(1)
    for broker_id in (2, 3, 4):
        cluster.reboot(broker_id)
    assert cluster.partition("foo").leader == -1
    asked = [("foo", 0), ("foo", 1)]
    assert kinds(elect(cluster, Election.UNCLEAN, asked)) == [EligibleLeadersNotAvailableError] * 2
    cluster.unfence(3)
    assert kinds(elect(cluster, Election.UNCLEAN, asked)) == [type(None)] * 2
    for index in (0, 1):
        state = cluster.partition("foo", index)
        assert (state.leader, state.isr, state.leader_recovery_state) == (3, (3,), 1)
    assert kinds(elect(cluster, Election.UNCLEAN, asked)) == [ElectionNotNeededError] * 2


def test_kip_966_last_replica_standing_elects_elr_member() -> None:
    """The ELR member is elected, not the last ISR member, which lost records (RF 3, min ISR 2)."""
    cluster = Cluster(elr=True, min_isr=2)
    cluster.create("a", [0, 1, 2])
    cluster.fence(1)
    cluster.fence(2)
    state = cluster.partition("a")
    assert (state.leader, state.isr, state.elr) == (0, (0,), (2,))
    cluster.reboot(0)
    state = cluster.partition("a")
    assert (state.leader, state.isr, state.elr) == (-1, (), (2,))
    cluster.unfence(0, 1)
    assert cluster.partition("a").leader == -1
    cluster.unfence(2)
    state = cluster.partition("a")
    assert (state.leader, state.isr, state.elr, state.leader_recovery_state) == (2, (2,), (), 0)


@pytest.mark.parametrize("alone_is_unclean", [True, False])
def test_without_elr_last_isr_member_is_elected_even_after_unclean_shutdown(
    alone_is_unclean: bool,
) -> None:
    cluster = Cluster(min_isr=2)
    cluster.create("a", [0, 1, 2])
    cluster.fence(1, 2)
    cluster.reboot(0, clean=not alone_is_unclean)
    assert (cluster.partition("a").leader, cluster.partition("a").isr) == (-1, (0,))
    cluster.unfence(1, 2)
    assert cluster.partition("a").leader == -1
    cluster.unfence(0)
    assert cluster.partition("a").leader == 0


def test_fenced_leader_is_replaced_by_unclean_election_if_topic_allows_it() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1, 2], unclean_leader_election_enable="true")
    cluster.alter_isr("a", [0])
    cluster.fence(0)
    state = cluster.partition("a")
    assert (state.leader, state.isr, state.leader_recovery_state) == (1, (1,), 1)
    event = next(noted for noted in cluster.events if noted.kind == "leader-elected")
    assert event.detail["election"] == "unclean election"


def test_state_topic_gets_unclean_election_only_on_request() -> None:
    defaults = {**SETTINGS.topic_defaults, "unclean.leader.election.enable": "true"}
    settings = replace(SETTINGS, topic_defaults=defaults, state_topics=frozenset({"state"}))
    cluster = Cluster(settings=settings)
    for topic in ("state", "ordinary"):
        cluster.create(topic, [0, 1, 2])
        cluster.alter_isr(topic, [0])
    cluster.fence(0)
    assert cluster.partition("ordinary").leader == 1
    cluster.set_config("state", "unclean.leader.election.enable", "true")
    cluster.pass_time(settings.unclean_check_interval_ms, beating=(1, 2))
    assert cluster.partition("state").leader == -1
    assert kinds(elect(cluster, Election.UNCLEAN, [("state", 0)])) == [type(None)]
    assert cluster.partition("state").leader == 1


def test_unclean_election_runs_when_the_topic_config_is_enabled() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1])
    cluster.create("b", [0, 1])
    cluster.alter_isr("a", [0])
    cluster.alter_isr("b", [0])
    cluster.fence(0)
    assert cluster.partition("a").leader == -1
    cluster.set_config("a", "unclean.leader.election.enable", "true")
    cluster.do(cluster.controller.run_task(cluster.now_ms))
    assert (cluster.partition("a").leader, cluster.partition("b").leader) == (1, -1)


def test_unclean_election_after_leader_unregistered_runs_once_enabled() -> None:
    """With ZooKeeper, a broker without a session is not registered."""
    cluster = Cluster((0, 1))
    cluster.create("a", [0, 1])
    cluster.alter_isr("a", [0])
    cluster.do(cluster.controller.broker_gone(0, "its session has ended"))
    assert (list(cluster.image.brokers), cluster.partition("a").leader) == ([1], -1)
    cluster.set_config("a", "unclean.leader.election.enable", "true")
    assert cluster.controller.next_task_ms() == cluster.now_ms
    cluster.do(cluster.controller.run_task(cluster.now_ms))
    assert cluster.partition("a").leader == 1


def imbalanced(settings_of: dict[str, object]) -> Cluster:
    cluster = Cluster(settings=replace(SETTINGS, **settings_of))  # type: ignore[arg-type]
    cluster.create("a", *([0, 1, 2] for _ in range(5)))
    cluster.fence(0)
    cluster.unfence(0)
    for index in range(5):
        cluster.alter_isr("a", [1, 2, 0], index)
    return cluster


def leaders(cluster: Cluster) -> list[int]:
    return [cluster.partition("a", index).leader for index in range(5)]


def test_leader_rebalance_elects_preferred_leaders_after_its_interval() -> None:
    cluster = imbalanced({})
    cluster.pass_time(299_000, beating=(0, 1, 2))
    assert leaders(cluster) == [1] * 5
    cluster.pass_time(1_000, beating=(0, 1, 2))
    assert leaders(cluster) == [0] * 5
    assert cluster.causes("leader-elected", "a-4")[-1] == "the preferred leader was not leading"


def test_leader_rebalance_step_is_limited_to_max_elections() -> None:
    cluster = imbalanced({"max_elections": 2})
    cluster.now_ms += 300_000
    cluster.controller.heartbeats.extend(300_000)
    seen = []
    while cluster.do(cluster.controller.run_task(cluster.now_ms)):
        seen.append(leaders(cluster).count(0))
    assert seen == [2, 4, 5]


@pytest.mark.parametrize(("percentage", "leader"), [(59, 0), (60, 1)])
def test_leader_rebalance_on_zookeeper_waits_for_imbalance_percentage(
    percentage: int, leader: int
) -> None:
    cluster = imbalanced({"leader_imbalance_percentage": percentage})
    cluster.do(cluster.controller.elect_leaders(Election.PREFERRED, [("a", 3), ("a", 4)]))
    assert leaders(cluster) == [1, 1, 1, 0, 0]
    cluster.pass_time(300_000, beating=(0, 1, 2))
    assert leaders(cluster) == [leader] * 3 + [0] * 2


def test_leader_rebalance_does_not_run_if_disabled() -> None:
    cluster = imbalanced({"leader_rebalance": False})
    cluster.pass_time(400_000, beating=(0, 1, 2))
    assert leaders(cluster) == [1] * 5


def test_controller_activated_again_queues_one_election_per_partition() -> None:
    """Each ``begin`` replaces the election queue with the leaderless partitions of the image."""
    cluster = Cluster()
    cluster.create("a", [0], [1])
    cluster.fence(0, 1)
    cluster.controller.begin(cluster.now_ms)
    cluster.unfence(1)
    cluster.controller.begin(cluster.now_ms)
    waiting, cause = cluster.controller.heartbeats.take_elections(1_000)
    assert [index for _, index in waiting] == [0]
    assert cause == "the controller has become active"


# --- partitions that never had a leader (ZooKeeper) ---


def assigned_elsewhere(cluster: Cluster, name: str, *assignment: tuple[int, ...]) -> None:
    """Add a topic as if another program had written its assignment to ZooKeeper."""
    topic_id = UUID(int=(1 << 100) + len(cluster.log))
    partitions = [
        PartitionRecord(
            topic_id=topic_id,
            partition_id=index,
            replicas=replicas,
            isr=(),
            removing_replicas=(),
            adding_replicas=(),
            leader=NO_LEADER,
            leader_epoch=-1,
            partition_epoch=NEVER_LED,
        )
        for index, replicas in enumerate(assignment)
    ]
    cluster.append([TopicRecord(name, topic_id), *partitions])


def check_first_leader(cluster: Cluster, name: str, leader: int, *isr: int) -> None:
    found = cluster.partition(name)
    assert (found.leader, found.isr, found.leader_epoch) == (leader, isr, 0)
    assert found.leader_recovery_state == RECOVERED


def test_new_controller_elects_first_leaders_of_partitions_that_never_had_one() -> None:
    cluster = Cluster()
    assigned_elsewhere(cluster, "foo", (1, 2, 0))
    cluster.fence(1)
    cluster.restart()
    cluster.controller.begin(cluster.now_ms)
    cluster.pass_time(1_000, beating=(0, 2))
    check_first_leader(cluster, "foo", 2, 2, 0)


def test_leader_that_restarted_unnoticed_gets_a_new_leader_epoch() -> None:
    cluster = Cluster(settings=replace(SETTINGS, needs_leader_epoch_bump=True))
    cluster.create("foo", [1, 2], [2, 1])
    first, second = cluster.controller.image.topics["foo"].partitions
    outcome = cluster.controller.elect_restarted_leaders([("foo", 0), ("deleted", 0)])
    cluster.append(outcome.records)
    again, untouched = cluster.controller.image.topics["foo"].partitions
    assert (again.leader, again.isr) == (first.leader, first.isr)
    assert again.leader_epoch == first.leader_epoch + 1
    assert untouched == second


def test_first_leaders_of_a_large_topic_are_elected_in_several_decisions() -> None:
    cluster = Cluster(settings=replace(SETTINGS, max_elections=2))
    assigned_elsewhere(cluster, "foo", (1, 2), (1,), (0, 2), (2, 1), (0, 1))
    cluster.fence(1)
    topic_id = cluster.controller.image.topics["foo"].topic_id
    counts, is_more = list[int](), True
    while is_more:
        outcome = cluster.controller.elect_first_leaders(topic_id)
        counts.append(len(outcome.records))
        cluster.append(outcome.records)
        is_more = outcome.answer
    assert counts == [2, 2, 0]
    found = cluster.controller.image.topics["foo"].partitions
    assert [partition.leader for partition in found] == [2, NO_LEADER, 0, 2, 0]
    assert [partition.isr for partition in found] == [(2,), (), (0, 2), (2,), (0,)]
    assert [partition.leader_epoch for partition in found] == [0, -1, 0, 0, 0]


def test_partition_that_never_had_a_leader_waits_for_a_live_replica() -> None:
    cluster = Cluster()
    assigned_elsewhere(cluster, "foo", (1, 2))
    cluster.fence(1, 2)
    cluster.restart()
    cluster.controller.begin(cluster.now_ms)
    cluster.pass_time(1_000, beating=(0,))
    found = cluster.partition("foo")
    assert (found.leader, found.isr, found.partition_epoch) == (NO_LEADER, (), NEVER_LED)
    cluster.unfence(2)
    check_first_leader(cluster, "foo", 2, 2)


@pytest.mark.parametrize("election", [Election.PREFERRED, Election.UNCLEAN])
def test_requested_election_elects_the_first_leader_cleanly(election: Election) -> None:
    cluster = Cluster()
    assigned_elsewhere(cluster, "foo", (1, 2))
    assert elect(cluster, election, [("foo", 0)]) == {("foo", 0): None}
    check_first_leader(cluster, "foo", 1, 1, 2)
