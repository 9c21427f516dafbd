"""A controller's decisions as znodes and requests, and the brokers' handling of the requests.

The model has the controller's state machine, a dictionary instead of ZooKeeper, and brokers that
apply the requests. Sockets and ZooKeeper sessions are not simulated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from fencepost.cluster.controller.errors import (
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
)
from fencepost.cluster.controller.isr import ProposedIsr
from fencepost.cluster.controller.machine import Controller as Machine
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.partition_change import Election
from fencepost.cluster.controller.reassignments import ReassignablePartition
from fencepost.cluster.controller.topics import NewTopic
from fencepost.cluster.controller.view import ControllerSettings
from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import MetadataImage, PartitionRegistration
from fencepost.cluster.image_records import partition_record
from fencepost.cluster.records import (
    BrokerEndpoint,
    FeatureLevelRecord,
    MetadataRecord,
    PartitionChangeRecord,
    TopicRecord,
    UnregisterBrokerRecord,
)
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.errors import NotInZooKeeperError
from fencepost.coordinator.zookeeper.loading import broker_record
from fencepost.coordinator.zookeeper.request_batch import (
    ControllerIdentity,
    replicas_of,
    requests_after,
)
from fencepost.coordinator.zookeeper.requests import (
    ControllerRequestApplier,
    without_leaders,
)
from fencepost.coordinator.zookeeper.session import Create, Delete, Put, Set, Write
from fencepost.coordinator.zookeeper.writes import ZnodeWriter, check_storable, fenced
from fencepost.logcore.steps import finish
from fencepost.protocol.api import ApiKey
from tests.support.controller_requests import apply_leader_and_isr, apply_update_metadata

STALE_CONTROLLER_EPOCH, STALE_BROKER_EPOCH = 11, 77
FENCED_LEADER_EPOCH, INCONSISTENT_TOPIC_ID = 74, 103

CONNECTED_S = 10.0
"""The time when the controller connected."""


class Broker:
    """The part of a broker that applies the controller's requests."""

    def __init__(self, broker_id: int, epoch: int, image: MetadataImage) -> None:
        self.broker_id, self.epoch = broker_id, epoch
        self.request_applier = ControllerRequestApplier(broker_id, lambda: None)
        self.image = finish(without_leaders(image, broker_id))

    def take(self, request: Any) -> None:
        assert self.request_applier.refuses(request, self.epoch, CONNECTED_S) == 0
        key = request.__api_key__
        if key == ApiKey.LEADER_AND_ISR:
            leaders = {
                state.leader for topic in request.topic_states for state in topic.partition_states
            }
            unknown = leaders - {-1, self.broker_id} - self.image.brokers.keys()
            assert not unknown, "Apache Kafka's brokers do not follow whom they do not know"
            records, errors = apply_leader_and_isr(self.request_applier, self.image, request)
            assert all(code == 0 for each in errors.values() for code in each.values())
        elif key == ApiKey.UPDATE_METADATA:
            records = apply_update_metadata(self.request_applier, self.image, request, self.epoch)
        else:
            records, stopped = self.request_applier.stop_replica(self.image, request)
            assert all(code == 0 for _, _, code in stopped)
        self.replay(records)

    def replay(self, records: Sequence[MetadataRecord]) -> None:
        delta = MetadataDelta(self.image)
        for record in records:
            delta.replay(record)
        self.image = delta.apply(self.image.offset + 1, 1)


class Scene:
    """Three brokers, and a controller that sends them requests."""

    def __init__(self) -> None:
        settings = ControllerSettings("cluster", needs_leader_epoch_bump=True)
        self.machine = Machine(settings, MetadataImage(), 0)
        self.controller = ControllerIdentity(1, 1, "PLAINTEXT")
        self.nodes: dict[str, tuple[bytes, int]] = {}
        """Path → data and version of the znode."""
        self.brokers: dict[int, Broker] = {}
        self.requests: list[tuple[int, Any]] = []
        self.clock = 10
        for broker_id in (1, 2, 3):
            self.come(broker_id)

    def decide(self, decision: Callable[[Machine], ControllerResult[Any]]) -> Any:
        outcome = decision(self.machine)
        before = self.machine.image
        if outcome.records:
            self.machine.replay(outcome.records, before.offset + 1, 1, 0)
            after = self.machine.image
            for write in finish(ZnodeWriter(before, after, 1).write(outcome.records)):
                self.write(write)
            self.requests = list(requests_after(before, after, self.controller))
            for broker_id, request in self.requests:
                self.brokers[broker_id].take(request)
        return outcome.answer

    def write(self, write: Write) -> None:
        match write:
            case Create(sequence=False):
                assert write.path not in self.nodes, f"{write.path} is there"
                self.nodes[write.path] = write.data, 0
            case Put():
                _, version = self.nodes.get(write.path, (b"", -1))
                self.nodes[write.path] = write.data, version + 1
            case Set():
                _, version = self.nodes.get(write.path, (b"", 0))
                assert write.version in (-1, version), f"{write.path} has {version}"
                self.nodes[write.path] = write.data, version + 1
            case Delete():
                del self.nodes[write.path]

    def come(self, broker_id: int) -> None:
        self.clock += 1
        node = znodes.BrokerZnode(
            broker_id, (BrokerEndpoint("PLAINTEXT", "h", broker_id, 0),), None
        )
        seen = broker_record(node, self.clock)
        self.brokers[broker_id] = Broker(broker_id, self.clock, self.machine.image)
        while self.decide(lambda controller: controller.broker_discovered(seen, "there")):
            pass

    def go(self, broker_id: int) -> None:
        self.decide(lambda controller: controller.broker_gone(broker_id, "gone"))
        del self.brokers[broker_id]

    def create(self, name: str, *assignment: Sequence[int]) -> UUID:
        topic_id = uuid4()
        self.decide(
            lambda controller: controller.create_topic(
                NewTopic(name, -1, -1, list(enumerate(assignment)), {}),
                topic_id=topic_id,
                draw=random.Random(1),
                check_configs=lambda *_: None,
            )
        )
        return topic_id

    def state(self, name: str, index: int = 0) -> PartitionRegistration:
        return self.machine.image.topics[name].partitions[index]

    def check(self) -> None:
        """Check that ZooKeeper and all live brokers agree with the controller."""
        for topic in self.machine.image.topics.values():
            held = znodes.topic_of(topic.name, self.nodes[znodes.topic_path(topic.name)][0])
            for index, partition in enumerate(topic.partitions):
                path = znodes.state_path(topic.name, index)
                state = znodes.state_of(path, self.nodes[path][0])
                assert (state.leader, state.isr, state.leader_epoch) == (
                    partition.leader,
                    partition.isr,
                    partition.leader_epoch,
                )
                assert self.nodes[path][1] == partition.partition_epoch, "the version is the epoch"
                assert held.replicas[index] == partition.replicas
                assert held.adding.get(index, ()) == partition.adding_replicas
                assert held.removing.get(index, ()) == partition.removing_replicas
                for broker in self.brokers.values():
                    known = broker.image.topics[topic.name].partitions[index]
                    assert (known.leader, known.isr, known.leader_epoch, known.replicas) == (
                        partition.leader,
                        partition.isr,
                        partition.leader_epoch,
                        partition.replicas,
                    ), f"broker {broker.broker_id}"
                    assert known.partition_epoch == partition.partition_epoch
        names = self.machine.image.topics.keys()
        for broker in self.brokers.values():
            assert broker.image.topics.keys() == names
            assert broker.image.brokers.keys() == self.brokers.keys()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def _alter(scene: Scene, topic_id: UUID, *isr: int, name: str = "t") -> Any:
    now = scene.state(name)
    item = ProposedIsr(
        topic_id,
        0,
        now.leader_epoch,
        now.partition_epoch,
        tuple((broker_id, -1) for broker_id in isr),
    )
    epoch = scene.brokers[now.leader].epoch
    return scene.decide(lambda controller: controller.alter_partition(now.leader, epoch, [item]))


def test_created_topic_is_sent_to_all_brokers_and_led_by_first_replica(scene: Scene):
    scene.create("t", (2, 3), (3, 1), (1, 2))
    scene.check()
    assert [scene.state("t", index).leader for index in range(3)] == [2, 3, 1]
    led = [broker_id for broker_id, request in scene.requests if request.__api_key__ == 4]
    assert led == [1, 2, 3], "each that has a replica"


def test_failed_leader_is_replaced_by_next_in_sync_replica_of_assignment(scene: Scene):
    topic_id = scene.create("t", (2, 3, 1))
    _alter(scene, topic_id, 2, 1, 3)
    assert scene.state("t").isr == (2, 1, 3), "another order than the assignment's"
    scene.go(2)
    scene.check()
    assert (scene.state("t").leader, scene.state("t").leader_epoch) == (3, 1)
    scene.come(2)
    scene.check()
    assert scene.state("t").leader == 3, "who comes back takes nothing"


def test_failed_follower_raises_the_leader_epoch(
    scene: Scene,
):
    scene.create("t", (1, 2, 3))
    scene.go(3)
    scene.check()
    assert (scene.state("t").leader, scene.state("t").leader_epoch) == (1, 1)
    assert [broker_id for broker_id, request in scene.requests if request.__api_key__ == 4] == [
        1,
        2,
    ]


def test_isr_change_by_leader_keeps_the_leader_epoch(scene: Scene):
    topic_id = scene.create("t", (1, 2, 3))
    _alter(scene, topic_id, 1, 2)
    scene.check()
    assert (scene.state("t").leader_epoch, scene.state("t").partition_epoch) == (0, 1)
    assert {request.__api_key__ for _, request in scene.requests} == {ApiKey.UPDATE_METADATA}


def test_bounced_broker_loses_leadership_and_leaves_the_isr(scene: Scene):
    """KAFKA-7235: the controller missed the end of the session, and only sees the new epoch."""
    scene.create("t", (1, 2), (2, 1))
    scene.come(1)
    scene.check()
    assert (scene.state("t").leader, scene.state("t").isr) == (2, (2,))


def test_last_isr_member_stays_in_isr_and_leads_after_its_return(scene: Scene):
    topic_id = scene.create("t", (1, 2))
    _alter(scene, topic_id, 1)
    scene.go(1)
    scene.check()
    assert (scene.state("t").leader, scene.state("t").isr) == (-1, (1,))
    scene.come(1)
    scene.check()
    assert scene.state("t").leader == 1


def test_new_controller_removes_unregistered_broker_from_isrs(scene: Scene):
    """The broker failed with the former controller, so it is in ISRs but not in /brokers/ids."""
    scene.create("t", (1, 2), (2, 1))
    delta = MetadataDelta(scene.machine.image)
    delta.replay(UnregisterBrokerRecord(1, scene.brokers.pop(1).epoch))
    image = delta.apply(scene.machine.image.offset + 1, 2)
    for broker in scene.brokers.values():
        broker.replay([UnregisterBrokerRecord(1, -1)])
    scene.machine = Machine(scene.machine.settings, image, 0)
    scene.decide(lambda controller: controller.broker_gone(1, "gone"))
    scene.check()
    assert [scene.state("t", index).leader for index in (0, 1)] == [2, 2]
    assert [scene.state("t", index).isr for index in (0, 1)] == [(2,), (2,)]


def test_reassignment_completes_once_added_replica_is_in_sync(scene: Scene):
    topic_id = scene.create("t", (1, 2))
    scene.decide(
        lambda controller: controller.alter_partition_reassignments(
            [ReassignablePartition("t", 0, (3, 2))]
        )
    )
    scene.check()
    now = scene.state("t")
    assert (now.adding_replicas, now.removing_replicas, now.leader_epoch) == ((3,), (1,), 1)
    _alter(scene, topic_id, 1, 2, 3)
    scene.check()
    now = scene.state("t")
    assert (now.replicas, now.adding_replicas, now.leader) == ((3, 2), (), 3)
    stopped = [(to, request) for to, request in scene.requests if request.__api_key__ == 5]
    assert [to for to, _ in stopped] == [1]
    assert stopped[0][1].topic_states[0].partition_states[0].delete_partition


def test_controlled_shutdown_moves_leadership_and_stops_replicas(scene: Scene):
    scene.create("t", (1, 2), (2, 1))
    scene.decide(lambda controller: controller.begin_shutdown(1, scene.brokers[1].epoch))
    scene.check()
    assert [scene.state("t", index).leader for index in (0, 1)] == [2, 2]
    kept = [request for to, request in scene.requests if request.__api_key__ == 5 and to == 1]
    assert not any(
        part.delete_partition for topic in kept[0].topic_states for part in topic.partition_states
    )


def test_broker_in_shutdown_keeps_partitions_without_another_isr_member(scene: Scene):
    topic_id = scene.create("t", (1, 2), (1, 2))
    scene.create("alone", (1,))
    _alter(scene, topic_id, 1)
    scene.decide(lambda controller: controller.begin_shutdown(1, scene.brokers[1].epoch))
    scene.check()
    assert [scene.state("t", index).leader for index in (0, 1)] == [1, 2]
    assert scene.state("alone").leader == 1
    assert scene.machine.led_by(1) == [("t", 0)], "what has no other replica is not asked about"
    scene.decide(lambda controller: controller.elect_leaders(Election.PREFERRED, None))
    assert scene.state("t").leader == 1
    scene.go(1)
    assert [scene.state("t", index).leader for index in (0, 1)] == [-1, 2]
    assert scene.state("alone").leader == -1


def test_topic_creation_does_not_use_a_failed_broker(scene: Scene):
    scene.go(3)
    with pytest.raises(InvalidReplicationFactorError):
        scene.decide(
            lambda controller: controller.create_topic(
                NewTopic("t", 1, 3),
                topic_id=uuid4(),
                draw=random.Random(1),
                check_configs=lambda *_: None,
            )
        )


def test_reassignment_from_znode_may_wait_for_a_failed_broker(scene: Scene):
    scene.create("t", (1, 2))
    scene.go(3)
    wanted = [ReassignablePartition("t", 0, (2, 3))]
    (refused,) = scene.decide(lambda controller: controller.alter_partition_reassignments(wanted))
    assert isinstance(refused, InvalidReplicaAssignmentError)
    for nonsense in ((), (1, 1), (-1,)):
        items = [ReassignablePartition("t", 0, nonsense)]
        (refused,) = scene.decide(
            lambda controller, items=items: controller.alter_partition_reassignments(
                items, may_wait=True
            )
        )
        assert isinstance(refused, InvalidReplicaAssignmentError)
    scene.decide(lambda controller: controller.alter_partition_reassignments(wanted, may_wait=True))
    scene.check()
    assert scene.state("t").adding_replicas == (3,)


def test_new_controller_resumes_reassignments(scene: Scene):
    """The former controller failed with the target in sync, or before brokers knew it."""
    topic_id = scene.create("t", (1, 2), (2, 1))
    items = [ReassignablePartition("t", index, (3, 2)) for index in (0, 1)]
    scene.decide(lambda controller: controller.alter_partition_reassignments(items))
    in_sync = PartitionChangeRecord(topic_id, 0, isr=(1, 2, 3))
    path = znodes.state_path("t", 0)
    held = znodes.state_of(path, scene.nodes[path][0])
    scene.write(Set(path, znodes.state_data(replace(held, isr=(1, 2, 3)))))
    scene.machine.replay([in_sync], scene.machine.image.offset + 1, 1, 0)
    epochs = [scene.state("t", index).leader_epoch for index in (0, 1)]
    scene.decide(lambda controller: controller.resume_reassignments([("t", 0), ("t", 1)]))
    scene.check()
    done, waits = (scene.state("t", index) for index in (0, 1))
    assert (done.replicas, done.adding_replicas, done.leader) == ((3, 2), (), 3)
    assert (waits.replicas, waits.leader_epoch) == ((3, 2, 1), epochs[1] + 1), "all hear of it"


def test_replica_in_lost_directory_does_not_lead_until_it_is_online(scene: Scene):
    lost = [(scene.create("t", (1, 2)), 0), (scene.create("alone", (1,)), 0)]
    scene.decide(lambda controller: controller.record_lost_replicas(1, lost, ()))
    scene.check()
    assert [scene.state(name).leader for name in ("t", "alone")] == [2, -1]
    assert [scene.state(name).isr for name in ("t", "alone")] == [(2,), (1,)]
    for topic in _last(scene, ApiKey.UPDATE_METADATA).topic_states:
        assert topic.partition_states[0].offline_replicas == (1,)
    epochs = [scene.state(name).leader_epoch for name in ("t", "alone")]
    scene.decide(lambda controller: controller.record_lost_replicas(1, lost, ()))
    assert [scene.state(name).leader_epoch for name in ("t", "alone")] == epochs, "no news"
    scene.decide(lambda controller: controller.record_lost_replicas(1, (), lost))
    scene.check()
    assert [scene.state(name).leader for name in ("t", "alone")] == [2, 1]


def test_changed_listener_of_a_broker_is_sent_to_all_brokers(scene: Scene):
    node = znodes.BrokerZnode(2, (BrokerEndpoint("PLAINTEXT", "moved", 9, 0),), None)
    seen = broker_record(node, scene.brokers[2].epoch)
    assert not scene.decide(lambda controller: controller.broker_discovered(seen, "there"))
    for broker in scene.brokers.values():
        assert broker.image.brokers[2].listeners["PLAINTEXT"].host == "moved"
    scene.requests = []
    scene.decide(lambda controller: controller.broker_discovered(seen, "there"))
    assert scene.requests == []


def test_replicas_of_a_broker_are_sent_again_in_one_request(scene: Scene):
    scene.create("t", (1, 2), (2, 3))
    assert replicas_of(MetadataImage(), scene.controller, 1) is None
    request = replicas_of(scene.machine.image, scene.controller, 1)
    assert request is not None
    (topic,) = request.topic_states
    assert [state.partition_index for state in topic.partition_states] == [0]
    assert request.broker_epoch == scene.brokers[1].epoch


def test_deleted_topic_is_marked_in_zookeeper_and_stopped_on_brokers(scene: Scene):
    topic_id = scene.create("t", (1, 2))
    scene.decide(lambda controller: controller.delete_topic(topic_id))
    assert znodes.delete_path("t") in scene.nodes
    assert znodes.topic_path("t") in scene.nodes, "until every replica is gone"
    for broker in scene.brokers.values():
        assert "t" not in broker.image.topics
    assert [to for to, request in scene.requests if request.__api_key__ == 5] == [1, 2]


def test_starting_broker_leads_nothing_before_leader_and_isr(scene: Scene):
    scene.create("t", (1, 2))
    scene.go(3)
    starting = Broker(1, 99, scene.machine.image)
    mine = starting.image.topics["t"].partitions[0]
    assert (mine.leader, mine.partition_epoch, mine.replicas) == (-1, -1, (1, 2))
    assert not starting.image.brokers


def test_large_topic_is_written_and_loaded_one_partition_per_step(scene: Scene) -> None:
    """No turn of the event loop must convert more partitions than it has time for."""
    before = scene.machine.image
    scene.create("t", *[(1, 2)] * 50)
    after = scene.machine.image
    records = [
        TopicRecord("t", after.topics["t"].topic_id),
        *(
            partition_record(after.topics["t"].topic_id, index, partition)
            for index, partition in enumerate(after.topics["t"].partitions)
        ),
    ]
    assert sum(1 for _ in ZnodeWriter(before, after, 1).write(records)) == 1 + 50
    assert sum(1 for _ in without_leaders(after, 1)) == 50


def test_starting_broker_ignores_reassignments_of_other_brokers(scene: Scene):
    """The broker learns of other partitions only by UpdateMetadata, which omits cancellations."""
    image = scene.machine.image
    delta = MetadataDelta(image)
    topic_id = UUID(int=77)
    delta.replay(TopicRecord("moving", topic_id))
    moving = PartitionRegistration(
        (2, 3), (2, 3), 2, 0, 0, removing_replicas=(2,), adding_replicas=(3,)
    )
    delta.replay(partition_record(topic_id, 0, moving))
    other, mine = (
        Broker(broker_id, 99, delta.apply(image.offset + 2, 1)).image.topics["moving"].partitions[0]
        for broker_id in (1, 2)
    )
    assert (other.adding_replicas, other.removing_replicas) == ((), ())
    assert (other.leader, other.replicas) == (2, (2, 3))
    assert (mine.adding_replicas, mine.removing_replicas) == ((3,), (2,)), "LeaderAndIsr tells it"


# --- requests that a broker refuses ---


def _last(scene: Scene, key: int) -> Any:
    return next(request for _, request in scene.requests if request.__api_key__ == key)


def test_request_with_stale_controller_or_broker_epoch_is_refused(scene: Scene):
    scene.create("t", (1, 2))
    request, request_applier = _last(scene, 4), scene.brokers[1].request_applier
    request_applier.controller_epoch = 2
    assert request_applier.refuses(request, 0, CONNECTED_S) == STALE_CONTROLLER_EPOCH
    request_applier.controller_epoch = 1
    epoch = request.broker_epoch
    assert request_applier.refuses(request, epoch + 1, CONNECTED_S) == STALE_BROKER_EPOCH
    assert request_applier.refuses(request, epoch, CONNECTED_S) == 0


def test_request_over_a_superseded_controller_connection_is_refused(scene: Scene):
    """A late UpdateMetadata has no epoch that shows that its list of live brokers is outdated."""
    scene.create("t", (1, 2))
    request, request_applier = _last(scene, 6), scene.brokers[1].request_applier
    epoch = request.broker_epoch
    assert request_applier.refuses(request, epoch, CONNECTED_S + 1) == 0
    assert request_applier.refuses(request, epoch, CONNECTED_S) == STALE_CONTROLLER_EPOCH
    # A newer controller epoch is accepted, whenever the new controller connected.
    request_applier.controller_epoch -= 1
    assert request_applier.refuses(request, epoch, CONNECTED_S - 1) == 0


def test_late_leader_and_isr_is_a_stale_controller_epoch(scene: Scene):
    topic_id = scene.create("t", (1, 2, 3))
    late, broker = _last(scene, 4), scene.brokers[1]
    scene.go(3)
    records, errors = apply_leader_and_isr(broker.request_applier, broker.image, late)
    assert (records, errors) == ([], {topic_id: {0: STALE_CONTROLLER_EPOCH}})


def test_late_update_metadata_changes_no_partition(scene: Scene):
    scene.create("t", (1, 2, 3))
    late, broker = _last(scene, 6), scene.brokers[1]
    scene.go(3)
    before = broker.image.topics["t"]
    broker.replay(apply_update_metadata(broker.request_applier, broker.image, late, broker.epoch))
    assert broker.image.topics["t"] is before


def test_leader_and_isr_for_recreated_topic_is_an_inconsistent_topic_id(scene: Scene):
    scene.create("t", (1, 2))
    request, broker = _last(scene, 4), scene.brokers[1]
    first = scene.machine.image.topics["t"].topic_id
    scene.decide(lambda controller: controller.delete_topic(first))
    scene.nodes = {path: node for path, node in scene.nodes.items() if "/t" not in path}
    second = scene.create("t", (1, 2))
    _, errors = apply_leader_and_isr(broker.request_applier, broker.image, request)
    assert errors == {first: {0: INCONSISTENT_TOPIC_ID}}
    assert broker.image.topics["t"].topic_id == second


def test_late_stop_replica_is_a_fenced_leader_epoch(scene: Scene):
    scene.create("t", (1, 2, 3))
    scene.decide(
        lambda controller: controller.alter_partition_reassignments(
            [ReassignablePartition("t", 0, (1, 2))]
        )
    )
    late, broker = _last(scene, 5), scene.brokers[3]
    scene.decide(
        lambda controller: controller.alter_partition_reassignments(
            [ReassignablePartition("t", 0, (1, 2, 3))]
        )
    )
    scene.check()
    records, errors = broker.request_applier.stop_replica(broker.image, late)
    assert (records, errors) == ([], [("t", 0, FENCED_LEADER_EPOCH)])


def test_partitions_missing_in_leader_and_isr_have_no_replicas_until_update(scene: Scene):
    """LeaderAndIsr has one broker's partitions; UpdateMetadata has all of them."""
    scene.create("t", (1,), (2,), (3,))
    broker = Broker(3, 99, MetadataImage())
    first = next(request for to, request in scene.requests if to == 3 and request.__api_key__ == 4)
    records, _ = apply_leader_and_isr(broker.request_applier, broker.image, first)
    broker.replay(records)
    known = broker.image.topics["t"].partitions
    assert [partition.replicas for partition in known] == [(), (), (3,)]
    broker.replay(apply_update_metadata(broker.request_applier, broker.image, _last(scene, 6), 99))
    assert [partition.leader for partition in broker.image.topics["t"].partitions] == [1, 2, 3]


# --- writes to ZooKeeper ---


def test_each_zookeeper_transaction_checks_the_controller_epoch():
    writes = [Create(f"/{number}") for number in range(1_001)]
    transactions = list(fenced(writes, 7))
    assert [len(transaction) for transaction in transactions] == [501, 501, 2]
    assert all(
        (transaction[0].path, transaction[0].version) == ("/controller_epoch", 7)
        for transaction in transactions
    )  # type: ignore[union-attr]


def test_record_without_a_znode_is_refused():
    with pytest.raises(NotInZooKeeperError):
        check_storable([FeatureLevelRecord("group.version", 1)])
