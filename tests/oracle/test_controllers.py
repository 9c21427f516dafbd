"""The controllers of Fencepost and Apache Kafka get the same requests from simulated brokers.

Their responses must be equal, and so must the records that they write.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from fencepost.cluster.records import NoOpRecord, PartitionChangeRecord
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from tests.support.controllers import Pretender, anonymous
from tests.support.kafka import Kafka

KAFKAS_CLUSTER = "AAAAAAAAQACAAAAAAAAAAQ"
Seen = list[tuple[str, Any]]


class Scene:
    """Requests of the brokers 101, 102 and 103, and their results, with names for random ids."""

    def __init__(self, controller: str, cluster_id: str) -> None:
        self.controller, self.cluster_id = controller, cluster_id
        self.seen: Seen = []
        self.names: dict[Any, str] = {}
        self.one, self.two, self.three = (self.broker(broker_id) for broker_id in (101, 102, 103))

    def broker(self, broker_id: int) -> Pretender:
        made = Pretender(self.controller, broker_id, self.cluster_id)
        made.learn_epoch()
        self.names[made.incarnation_id] = f"incarnation of {broker_id}"
        self.names[made.directory_id] = f"directory of {broker_id}"
        return made

    def tell(self, what: str, answer: Any) -> None:
        self.seen.append((what, self.plain(answer)))

    def plain(self, value: Any, name: str = "") -> Any:
        """Return a value with names in place of random ids and broker epochs."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return type(value).__name__, self.plain(fields)
        if isinstance(value, dict):
            gone = {"throttle_time", "error_message"}
            return {key: self.plain(item, key) for key, item in value.items() if key not in gone}
        if isinstance(value, list | tuple):
            return [self.plain(item, name) for item in value]
        if isinstance(value, uuid.UUID):
            return self.names.get(value, str(value))
        return self.names.get(("epoch", value), value) if name.endswith("epoch") else value

    def join(self, broker: Pretender, **changes: Any) -> None:
        answer = broker.register(**changes)
        self.names["epoch", broker.broker_epoch] = f"an epoch of {broker.broker_id}"
        self.tell(f"{broker.broker_id} registers", answer)
        self.tell("it lives", broker.heartbeat(cordoned_log_dirs=[]))

    def topic(self, name: str, *assignment: tuple[int, ...]) -> uuid.UUID:
        topic_id = self.one.topic(name, *assignment)
        self.names[topic_id] = f"topic {name}"
        return topic_id


def observe(scene: Scene) -> None:
    one = scene.one
    epoch = one.quorum_epoch
    one.quorum_epoch = 0
    for what, changes in (
        ("epoch 0", {}),
        ("an epoch to come", {"current_leader_epoch": epoch + 5}),
    ):
        part = one.part(**changes)
        leader = part["current_leader"]
        scene.tell(what, (part["error_code"], leader["leader_epoch"] == epoch))
    one.quorum_epoch = epoch
    for what, changes in (
        ("another cluster", {"cluster_id": "another"}),
        ("another topic", {"topic_id": uuid.UUID(int=9)}),
        ("a negative offset", {"fetch_offset": -1}),
        ("a negative epoch", {"last_fetched_epoch": -1}),
        ("no partition", {"partition": 1}),
    ):
        answer = one.fetch(**changes)
        parts = [
            part["error_code"] for topic in answer["responses"] for part in topic["partitions"]
        ]
        scene.tell(what, (answer["error_code"], parts))
    part = one.part(1 << 30, epoch)
    end = part["diverging_epoch"]["end_offset"]
    scene.tell("far behind the end", (part["diverging_epoch"]["epoch"] == epoch, end > 0))
    # An unknown snapshot is not requested: Kafka's error is UNKNOWN_SERVER_ERROR, ours is specific.
    answer = one.controller.call(
        "fetch_snapshot",
        1,
        cluster_id="another",
        topics=[{"name": "__cluster_metadata", "partitions": [{"partition": 0}]}],
    )
    scene.tell("a snapshot of another cluster", answer["error_code"])


def join(scene: Scene) -> None:
    one = scene.one
    low = [{"name": "metadata.version", "min_supported_version": 7, "max_supported_version": 29}]
    only = [{"name": "metadata.version", "min_supported_version": 7, "max_supported_version": 30}]
    for what, changes in (
        ("another cluster", {"cluster_id": "another"}),
        ("no directory", {"log_dirs": []}),
        ("a reserved directory", {"log_dirs": [uuid.UUID(int=1)]}),
        ("a directory twice", {"log_dirs": [one.directory_id] * 2}),
        ("no features", {"features": []}),
        ("too old", {"features": low}),
        ("without what is finalized", {"features": only}),
    ):
        scene.tell(what, one.register(**changes)["error_code"])
    scene.tell("a stranger lives", one.heartbeat(0)["error_code"])
    end = one.end()
    scene.tell("it registers", one.register()["error_code"])
    scene.names["epoch", one.broker_epoch] = "an epoch of 101"
    for what, offset, changes in (
        ("it lags", 0, {}),
        ("it waits", None, {"want_fence": True}),
        ("it is ready", None, {"cordoned_log_dirs": []}),
        ("again", None, {"cordoned_log_dirs": []}),
        ("with another epoch", None, {"broker_epoch": one.broker_epoch + 1}),
    ):
        scene.tell(what, one.heartbeat(offset, **changes))
    other = scene.broker(101)
    scene.tell("another process", other.register()["error_code"])
    scene.tell("the same again", one.register(rack="r")["broker_epoch"] == one.broker_epoch)
    shared = scene.two.register(log_dirs=[one.directory_id])
    scene.tell("a directory of another", shared["error_code"])
    records(scene, end)
    for broker in (scene.two, scene.three):
        scene.join(broker)


def change_isr(scene: Scene) -> None:
    one, two, three = scene.one, scene.two, scene.three
    topic_id = scene.topic("isr", (101, 102, 103))
    end = one.end()
    me, second, third = ((each.broker_id, each.broker_epoch) for each in (one, two, three))
    for what, arguments in (
        ("it shrinks", (topic_id, 0, 0, [me, second])),
        ("the same request again", (topic_id, 0, 0, [me, second])),
        ("the same ISR again", (topic_id, 0, 1, [me, second])),
        ("a leader epoch to come", (topic_id, 1, 1, [me])),
        ("a partition epoch to come", (topic_id, 0, 9, [me])),
        ("a leader epoch of before", (topic_id, -1, 1, [me])),
        ("no ISR", (topic_id, 0, 1, [])),
        ("without the leader", (topic_id, 0, 1, [second])),
        ("one twice", (topic_id, 0, 1, [me, me])),
        ("who has no replica", (topic_id, 0, 1, [me, (1, -1)])),
        ("another life", (topic_id, 0, 1, [me, (102, second[1] + 1)])),
        ("any life", (topic_id, 0, 1, [me, (102, -1), third])),
        ("an unknown topic", (uuid.UUID(int=9), 0, 0, [me])),
    ):
        scene.tell(what, one.alter_partition(*arguments))  # type: ignore[arg-type]
    scene.tell("who does not lead", two.alter_partition(topic_id, 0, 2, [second]))
    scene.tell("no partition", one.alter_partition(topic_id, 0, 0, [me], index=7))
    stale = one.alter_partition(topic_id, 0, 2, [me], broker_epoch=0)
    scene.tell("a stale broker", stale["error_code"])
    two.heartbeat(want_fence=True)
    scene.tell("a fenced one", one.alter_partition(topic_id, 0, 3, [me, second, third]))
    two.heartbeat()
    scene.tell("unfenced", one.alter_partition(topic_id, 0, 3, [me, second, third]))
    one.heartbeat(want_fence=True)
    scene.tell("a leader of before", one.alter_partition(topic_id, 0, 4, [me, second, third]))
    one.heartbeat()
    records(scene, end)


def elect(scene: Scene) -> None:
    one = scene.one
    topic_id = scene.topic("elected", (101, 102), (102, 101))
    end = one.end()

    def ask(what: str, kind: int, *indexes: int) -> None:
        answer = one.controller.call(
            "elect_leaders",
            2,
            election_type=kind,
            timeout=10_000,
            topic_partitions=[{"topic": "elected", "partitions": list(indexes)}],
        )
        scene.tell(what, answer)

    ask("nothing to elect", 0, 0, 1, 2)
    ask("nothing unclean to elect", 1, 0, 2)
    one.heartbeat(want_fence=True)
    ask("the preferred one is fenced", 0, 0)
    one.heartbeat()
    ask("the preferred one is not in sync", 0, 0)
    both = [(each.broker_id, each.broker_epoch) for each in (scene.two, one)]
    scene.tell("it is", scene.two.alter_partition(topic_id, 1, 1, both))
    ask("the preferred one leads", 0, 0)
    ask("of no type", 7, 0)
    records(scene, end)


def move(scene: Scene) -> None:
    one, two, three = scene.one, scene.two, scene.three
    topic_id = scene.topic("moved", (101,))
    end = one.end()

    def ask(what: str, replicas: list[int] | None, index: int = 0, **changes: Any) -> None:
        answer = one.controller.call(
            "alter_partition_reassignments",
            1,
            timeout=10_000,
            topics=[
                {
                    "name": "moved",
                    "partitions": [{"partition_index": index, "replicas": replicas}],
                }
            ],
            **{"allow_replication_factor_change": True, **changes},
        )
        answer.pop("allow_replication_factor_change")
        scene.tell(what, answer)
        listed = one.controller.call("list_partition_reassignments", 0, topics=None)
        scene.tell("under way", listed)

    ask("nothing to cancel", None)
    ask("to nobody", [])
    ask("to a stranger", [9])
    ask("to one twice", [102, 102])
    ask("of no partition", [102], 5)
    ask("with more replicas", [101, 102], allow_replication_factor_change=False)
    ask("to another", [102])
    ask("cancelled", None)
    ask("again", [102, 103])
    all_three = [(each.broker_id, each.broker_epoch) for each in (one, two, three)]
    # The first step, the cancellation, and the first step again.
    epochs = partition_epochs(scene, end)
    scene.tell("some of them", one.alter_partition(topic_id, *epochs, all_three[:2]))
    leader_epoch, partition_epoch = epochs
    scene.tell(
        "all of them", one.alter_partition(topic_id, leader_epoch, partition_epoch + 1, all_three)
    )
    ask("in another order", [103, 102])
    records(scene, end)


def partition_epochs(scene: Scene, begin: int) -> tuple[int, int]:
    """Return leader and partition epoch of the only partition, from the records since ``begin``."""
    changes = [
        record for record in scene.one.records(begin) if isinstance(record, PartitionChangeRecord)
    ]
    return sum(change.leader != -2 for change in changes), len(changes)


def leave(scene: Scene) -> None:
    one, two, three = scene.one, scene.two, scene.three
    scene.topic("left", (103, 101))
    scene.topic("alone", (103,))
    end = one.end()
    scene.tell("it leaves", three.heartbeat(want_shut_down=True))
    scene.tell("not yet", three.heartbeat(want_shut_down=True))
    one.heartbeat()
    two.heartbeat()
    records(scene, end)


def hand_on(scene: Scene) -> None:
    one = scene.one
    topics = [{"name": "handed", "num_partitions": 1, "replication_factor": 9}]
    bare = anonymous()[2:]
    for what, changes in (
        ("an envelope", {}),
        ("with half a principal", {"principal": bare}),
        ("with half an address", {"host": b"\1\2\3"}),
    ):
        error, inside = one.envelope("create_topics", 7, topics=topics, **changes)
        codes = None if inside is None else [topic["error_code"] for topic in inside["topics"]]
        scene.tell(what, (error, codes))
    error, _ = one.envelope("broker_heartbeat", 2, cordoned_log_dirs=None)
    scene.tell("what is not handed on", error)
    fields = {"broker_id": 101, "broker_epoch": 0}
    stale = one.controller.call("allocate_producer_ids", 0, **fields)
    scene.tell("ids for a stale broker", stale["error_code"])
    fields["broker_epoch"] = one.broker_epoch
    block = one.controller.call("allocate_producer_ids", 0, **fields)
    scene.tell("ids", (block["error_code"], block["producer_id_len"]))
    gone = one.controller.call("unregister_broker", 0, broker_id=77)
    scene.tell("nobody is forgotten", gone["error_code"])
    described = one.controller.call("describe_cluster", 2, endpoint_type=1)
    scene.tell("brokers of a controller", described["error_code"])


def records(scene: Scene, begin: int) -> None:
    """Keep the records from ``begin`` on, without the NoOpRecords of an idle controller.

    Consecutive partition changes are sorted, because their order depends on a hash table.
    """
    written = [record for record in scene.one.records(begin) if not isinstance(record, NoOpRecord)]
    told: list[Any] = []
    for is_change, some in groupby(
        written, lambda record: isinstance(record, PartitionChangeRecord)
    ):
        plain = [scene.plain(record) for record in some]
        told += sorted(plain, key=str) if is_change else plain
    scene.tell("records", told)


SCENES = (observe, join, change_isr, elect, move, leave, hand_on)


def play(controller: str, cluster_id: str) -> Seen:
    scene = Scene(controller, cluster_id)
    for part in SCENES:
        scene.seen.append(("scene", part.__name__))
        part(scene)
    return scene.seen


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    kafka = Kafka(tmp_path_factory.mktemp("kafka"), {"broker.session.timeout.ms": "60000"})
    kafka.start()
    try:
        yield play(kafka.controller, KAFKAS_CLUSTER)
    finally:
        kafka.stop()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    config = {
        "process.roles": "controller",
        "node.id": "1",
        "listeners": "CONTROLLER://127.0.0.1:0",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT",
        "broker.session.timeout.ms": "60000",
    }
    broker = Broker(tmp_path_factory.mktemp("ours"), config=config)
    thread = BrokerThread(lambda: broker)

    async def cluster_id() -> str:
        return broker.services.cluster_id

    with thread:
        return play(thread.bootstrap, thread.call(cluster_id))


@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_both_controllers_respond_and_write_the_same(ours: Seen, theirs: Seen, scene: str) -> None:
    def part(seen: Seen) -> Seen:
        begin = seen.index(("scene", scene)) + 1
        rest = [index for index, entry in enumerate(seen) if entry[0] == "scene" and index >= begin]
        return seen[begin : rest[0] if rest else None]

    assert part(ours) == part(theirs)
