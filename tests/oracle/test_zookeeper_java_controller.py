"""Brokers of Fencepost and Apache Kafka with a controller of Apache Kafka 3.9."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import Consumer, ElectionType, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from fencepost.logcore.batch import decode_records
from tests.support.cluster import READ_COMMITTED, unique
from tests.support.epochs import check_epochs, check_runs, runs_of
from tests.support.mixed import JAVA, PYTHON
from tests.support.replica_cluster import batches_in
from tests.support.waits import until
from tests.support.zookeeper import ZooKeeper
from tests.support.zookeeper_brokers import Brokers

J, P, Q, K = 1, 2, 3, 4
"""Two brokers of Apache Kafka, J and K, and two of Fencepost."""

ROTATED = [J, P, Q], [P, Q, K], [Q, K, J], [K, J, P]
"""The replicas of four partitions. Each broker leads one of the partitions."""

TOPIC, BROKER = 2, 4
"""Resources that have settings."""

SESSION_MS = 18_000
"""Kafka's default, long enough that no session expires only because the machine is busy."""

SETTINGS = {
    "zookeeper.session.timeout.ms": str(SESSION_MS),
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "auto.leader.rebalance.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "default.replication.factor": "3",
    "controlled.shutdown.retry.backoff.ms": "2000",
    # When its session expires, a controller of Apache Kafka drops queued AlterPartition requests
    # without a response. The brokers that sent them retry after this time.
    "controller.socket.timeout.ms": "10000",
}


@pytest.fixture(scope="module")
def brokers(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    layout = {J: JAVA, P: PYTHON, Q: PYTHON, K: JAVA}
    found = Brokers(tmp_path_factory.mktemp("brokers"), zookeeper, layout, SETTINGS)
    found.start()
    yield found
    found.close()


def everybody_lives(brokers: Brokers) -> None:
    for node_id in brokers.nodes:
        until(
            lambda node_id=node_id: brokers.live_brokers(node_id) == {*brokers.nodes},  # type: ignore[misc]
            f"broker {node_id} knows all",
        )


def everywhere(brokers: Brokers) -> str:
    """Return the addresses of all brokers, separated by commas."""
    return ",".join(node.bootstrap for node in brokers.nodes.values())


def write(brokers: Brokers, topic: str, count: int) -> None:
    """Produce ``count`` records to each partition with acks=all, through its leader."""
    for index, leader in enumerate(brokers.leaders(topic)):
        with brokers.client(leader) as client:
            until(lambda: client.leaders(topic) > 0, "it knows of its office")
            values = [b"%d" % number for number in range(count)]
            found = client.produce(topic, values, partition=index, acks=-1)
        assert found["error_code"] == "none", (index, leader, found)


def alter(brokers: Brokers, via: int, kind: int, name: str, values: Mapping[str, str]) -> str:
    """Change settings through the broker ``via``; return the error's name."""
    configs = [
        {"name": key, "config_operation": 0, "value": value} for key, value in values.items()
    ]
    resource = {"resource_type": kind, "resource_name": name, "configs": configs}
    with brokers.client(via) as client:
        answer = client.call(
            "incremental_alter_configs", 0, resources=[resource], validate_only=False
        )
    return str(answer["responses"][0]["error_code"])


def setting(brokers: Brokers, via: int, kind: int, name: str, key: str) -> str | None:
    """Return a setting's value as a broker describes it, None if the broker does not show it."""
    asked = {"resource_type": kind, "resource_name": name, "configuration_keys": [key]}
    with brokers.client(via) as client:
        (found,) = client.call("describe_configs", 1, resources=[asked])["results"]
    return found["configs"][0]["value"] if found["configs"] else None


def test_every_broker_knows_the_controller_and_the_cluster_id(brokers: Brokers):
    assert brokers.controller == J, "who came first"
    everybody_lives(brokers)
    for node_id in brokers.nodes:
        with brokers.client(node_id) as client:
            cluster = client.call("describe_cluster", 0)
        assert cluster["controller_id"] == J
        assert cluster["cluster_id"] == brokers.node("/cluster/id")["id"]


def test_replicas_are_identical_whichever_broker_leads(brokers: Brokers):
    name = brokers.create(*ROTATED)
    assert brokers.leaders(name) == [J, P, Q, K]
    write(brokers, name, 50)
    brokers.all_equal(name)
    for index, leader in enumerate(brokers.leaders(name)):
        with brokers.client(leader) as client:
            assert len(client.values(name, partition=index)) == 50


@pytest.mark.parametrize("via", [P, K], ids=["fencepost", "kafka"])
def test_controller_requests_to_other_brokers_get_not_controller(brokers: Brokers, via: int):
    """All brokers but the controller answer NOT_CONTROLLER; Metadata names the controller."""
    name = unique("asked")
    with brokers.client(via) as client:
        topic = {"name": name, "num_partitions": 1, "replication_factor": 1}
        made = client.call("create_topics", 5, timeout=30_000, topics=[topic])
        assert made["topics"][0]["error_code"] == "not_controller"
        moved = client.call("list_partition_reassignments", 0, timeout=30_000, topics=None)
        assert moved["error_code"] == "not_controller"
        admin = AdminClient({"bootstrap.servers": brokers.nodes[via].bootstrap})
        admin.create_topics([NewTopic(name, 2, 3)])[name].result(60)
        admin.create_partitions([NewPartitions(name, 4)])[name].result(60)
        until(lambda: len(brokers.leaders_and_epochs(via, name)) == 4, "the broker is told of four")
        until(lambda: client.call("metadata", 9, topics=None)["controller_id"] == J, "of J too")
    write(brokers, name, 3)
    admin.delete_topics([name])[name].result(60)
    until(lambda: brokers.node(f"/brokers/topics/{name}") is None, "it is deleted")
    for node_id, node in brokers.nodes.items():
        until(
            lambda node=node: not [*node.data_dir.glob(f"{name}-?")], f"broker {node_id} has none"
        )  # type: ignore[misc]
        assert not brokers.leaders_and_epochs(node_id, name)


@pytest.mark.parametrize("via", [P, K], ids=["fencepost", "kafka"])
def test_any_broker_alters_settings_without_the_controller(brokers: Brokers, via: int):
    name = brokers.create(ROTATED[0])
    assert alter(brokers, via, TOPIC, name, {"retention.ms": "70000"}) == "none"
    other = P + Q - via if via == P else J
    assert alter(brokers, other, TOPIC, name, {"max.message.bytes": "2000"}) == "none"
    assert brokers.node(f"/config/topics/{name}") == {
        "version": 1,
        "config": {"retention.ms": "70000", "max.message.bytes": "2000"},
    }, "the other broker has read what this one wrote"
    assert alter(brokers, via, BROKER, "", {"message.max.bytes": str(1_100_000 + via)}) == "none"
    assert alter(brokers, via, BROKER, str(via), {"log.retention.ms": "600000000"}) == "none"
    assert alter(brokers, via, TOPIC, name, {"segment.bytes": "x"}) == "invalid_config"
    assert alter(brokers, via, TOPIC, unique("no"), {"retention.ms": "1000000"}) == (
        "unknown_topic_or_partition"
    )
    assert alter(brokers, via, BROKER, "9", {"log.retention.ms": "1"}) == "invalid_request"
    for node_id in brokers.nodes:
        for kind, resource, key, value in (
            (TOPIC, name, "retention.ms", "70000"),
            (TOPIC, name, "max.message.bytes", "2000"),
            (BROKER, str(node_id), "message.max.bytes", str(1_100_000 + via)),
        ):
            until(
                lambda asked=(node_id, kind, resource, key), value=value: (  # type: ignore[misc]
                    setting(brokers, *asked) == value
                ),
                f"{key} holds on broker {node_id}",
            )
    assert setting(brokers, via, BROKER, str(via), "log.retention.ms") == "600000000"


def test_reassignment_moves_replicas_between_both_kinds_of_brokers(brokers: Brokers):
    name = brokers.create([J, P], [P, K])
    write(brokers, name, 200)
    wanted = {0: [Q, K], 1: [J, Q]}
    rows = [{"partition_index": index, "replicas": replicas} for index, replicas in wanted.items()]
    with brokers.client(J) as client:
        answer = client.call(
            "alter_partition_reassignments",
            0,
            timeout=30_000,
            topics=[{"name": name, "partitions": rows}],
        )
    assert answer["error_code"] == "none", answer
    until(
        lambda: (
            brokers.node(f"/brokers/topics/{name}")
            | {
                "partitions": {"0": [Q, K], "1": [J, Q]},
                "adding_replicas": {},
                "removing_replicas": {},
            }
            == brokers.node(f"/brokers/topics/{name}")
        ),
        "the new replicas are all",
    )
    brokers.all_equal(name)
    for node_id, index in ((J, 0), (P, 0), (P, 1), (K, 1)):
        folder = brokers.nodes[node_id].data_dir / f"{name}-{index}"
        until(lambda folder=folder: not folder.exists(), f"{folder} is gone")  # type: ignore[misc]
    for index, leader in enumerate(brokers.leaders(name)):
        with brokers.client(leader) as client:
            assert len(client.values(name, partition=index)) == 200


def keys_of(brokers: Brokers, internal: str, kind: int) -> dict[int, str]:
    """Return a group id or a transactional id for each coordinator."""
    found: dict[int, str] = {}

    def all_found() -> bool:
        key = unique("key")
        with brokers.client(P) as client:
            answer = client.call("find_coordinator", 2, key=key, key_type=kind)
        if answer["error_code"] == "none":
            found.setdefault(answer["node_id"], key)
        return found.keys() == {*brokers.nodes}

    until(all_found, f"each broker leads a partition of {internal}")
    return found


class Pairs:
    """A transactional producer and a group for each broker, which coordinates them."""

    def __init__(self, brokers: Brokers, topic: str) -> None:
        self._topic = topic
        groups = keys_of(brokers, "__consumer_offsets", 0)
        writers = keys_of(brokers, "__transaction_state", 1)
        common = {"bootstrap.servers": everywhere(brokers)}
        self._producers: list[Producer] = []
        self._consumers: dict[int, Consumer] = {}
        for node_id in brokers.nodes:
            named = {"transactional.id": writers[node_id], "connections.max.idle.ms": 3_000}
            producer = Producer({**common, **named})
            producer.init_transactions(60)
            self._producers.append(producer)
            reading = {"auto.offset.reset": "earliest", "isolation.level": "read_committed"}
            consumer = Consumer(
                {**common, **reading, "group.id": groups[node_id], "enable.auto.commit": False}
            )
            consumer.subscribe([topic])
            self._consumers[node_id] = consumer
        self.seen = dict.fromkeys(brokers.nodes, 0)
        """Number of records that each group has read."""

    def begin(self, value: bytes) -> None:
        """Begin a transaction of each producer, and write one record to each partition."""
        for producer in self._producers:
            producer.begin_transaction()
            for index in range(len(ROTATED)):
                producer.produce(self._topic, value, partition=index)
            assert producer.flush(60) == 0

    def commit(self) -> None:
        for producer in self._producers:
            producer.commit_transaction(60)

    def abort(self) -> None:
        for producer in self._producers:
            producer.abort_transaction(60)

    def read(self, count: int) -> None:
        """Let each group read ``count`` more records and commit its position."""
        for node_id, consumer in self._consumers.items():
            expected = self.seen[node_id] + count

            def is_read(
                node_id: int = node_id, reader: Consumer = consumer, expected: int = expected
            ) -> bool:
                message = reader.poll(0.2)
                if message is not None and message.error() is None:
                    assert message.value() == b"committed"
                    self.seen[node_id] += 1
                return self.seen[node_id] >= expected

            until(is_read, f"the group of {node_id} has read {expected}", deadline_s=120)
            consumer.commit(asynchronous=False)

    def close(self) -> None:
        for consumer in self._consumers.values():
            consumer.close()


def test_groups_and_transactions_survive_coordinator_moves(brokers: Brokers):
    """Each broker coordinates a transaction and a group; P's coordinators move away and back."""
    name = brokers.create(*ROTATED)
    pairs = Pairs(brokers, name)
    each = len(ROTATED) * len(brokers.nodes)
    pairs.begin(b"committed")
    pairs.commit()
    pairs.begin(b"aborted")
    pairs.abort()
    pairs.read(each)
    pairs.begin(b"committed")
    brokers.stop(P)
    pairs.commit()
    pairs.read(each)
    brokers.nodes[P].start()
    pairs.begin(b"committed")
    pairs.commit()
    pairs.read(each)
    assert {*pairs.seen.values()} == {3 * each}, "nothing twice"
    pairs.close()
    for topic in ("__consumer_offsets", "__transaction_state"):
        brokers.all_in_sync(topic)
    brokers.all_equal(name)


def test_broker_retries_its_controlled_shutdown(brokers: Brokers):
    """No other broker can lead P's partition: P serves until its last shutdown retry has failed."""
    name = brokers.create([P, K])
    brokers.stop(K)
    until(lambda: brokers.isrs(name) == [{P}], "it is alone")
    child = brokers.nodes[P].child
    assert child is not None
    since = len(child.lines)
    ending = threading.Thread(target=brokers.stop, args=(P,))
    ending.start()
    child.wait_for_line("still leads partitions", deadline_s=60, since=since)
    with brokers.client(P) as client:
        assert client.produce(name, [b"x"], acks=-1)["error_code"] == "none", "it serves"
    ending.join(120)
    said = [line for line in child.lines[since:] if "still leads partitions" in line]
    assert len(said) == 3, "as often as controlled.shutdown.max.retries says"
    brokers.nodes[K].start()
    assert brokers.state(name)["leader"] == -1, "it was not in sync"
    brokers.nodes[P].start()
    brokers.all_equal(name)
    with brokers.client(P) as client:
        until(lambda: client.leaders(name) == 1, "it leads")
        assert client.values(name) == [b"x"]


FAULTS = 6
"""How many brokers are killed, stopped or suspended while ``Load`` writes."""

UNANSWERED = 5_000
"""The maximum of unacknowledged records per partition; the client's queue holds 100,000."""


class Load(threading.Thread):
    """Writes to all partitions of a topic until :meth:`end`."""

    def __init__(self, brokers: Brokers, topic: str, partitions: int) -> None:
        super().__init__(daemon=True)
        self._topic = topic
        self._producer = Producer(
            {
                "bootstrap.servers": everywhere(brokers),
                "enable.idempotence": True,
                "max.in.flight.requests.per.connection": 1,
                "delivery.timeout.ms": 300_000,
                # After this time, the client sends a request that a suspended broker has not
                # answered to another broker. The default is as long as the tests' deadlines.
                "socket.timeout.ms": SESSION_MS + 2_000,
                "linger.ms": 5,
            }
        )
        self._ends = threading.Event()
        self.sent = dict.fromkeys(range(partitions), 0)
        self.kept: dict[int, list[bytes]] = {index: [] for index in self.sent}
        """The acknowledged values, in order."""
        self.refused: list[str] = []

    def run(self) -> None:
        """Produce until :meth:`end`; see :class:`threading.Thread`."""
        while not self._ends.is_set():
            for index, sent in self.sent.items():
                if sent - len(self.kept[index]) < UNANSWERED:
                    value = b"%d" % sent
                    self.sent[index] += 1
                    self._producer.produce(
                        self._topic, value, partition=index, on_delivery=self._delivered
                    )
            self._producer.poll(0.01)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is None:
            self.kept[message.partition()].append(message.value())
        else:
            self.refused.append(f"{message.partition()}: {error}")

    def goes_on(self) -> None:
        """Wait until each partition has acknowledged further records."""
        before = {index: len(values) for index, values in self.kept.items()}

        def more() -> dict[int, int]:
            return {index: len(self.kept[index]) - count for index, count in before.items()}

        def all_take_more() -> bool:
            assert self.is_alive(), "the producer has died"
            assert self.refused == []
            return min(more().values()) > 0

        try:
            until(all_take_more, "all partitions take records")
        except TimeoutError as error:
            error.add_note(f"sent {self.sent}, and acknowledged since it was asked: {more()}")
            raise

    def end(self) -> None:
        """Stop writing, and wait for all acknowledgements."""
        self._ends.set()
        self.join(60)
        assert self._producer.flush(300) == 0
        assert self.refused == []


def check_log(brokers: Brokers, topic: str, index: int, leader: int, load: Load) -> None:
    """Check that every record was acknowledged, and is in the log once and in order.

    librdkafka's own retries under another epoch do not count; see ``tests/support/epochs.py``.
    """
    where = f"partition {index} of {leader}"
    sent = [b"%d" % number for number in range(load.sent[index])]
    assert sorted(load.kept[index], key=int) == sent, f"{where}: not all was acknowledged"
    runs = runs_of(
        (header, [record.value or b"" for record in decode_records(batch, 0, header)])
        for header, batch in batches_in(brokers.nodes[leader].data_dir / f"{topic}-{index}")
    )
    check_runs(where, runs.values(), sent)
    check_epochs(where, len(runs), FAULTS)
    with brokers.client(leader) as client:
        values = client.values(topic, partition=index, isolation=READ_COMMITTED)
    assert values == [value for run in runs.values() for value in run], where


def prefer(brokers: Brokers, topic: str, *, via: int) -> None:
    """Elect the preferred leaders, by a client that is connected to the broker ``via``.

    Wait for the new leaders, not for the response, which Apache Kafka may delay until the request
    times out. If Kafka handles the UpdateMetadata before the delayed operation is on its timer, no
    later event completes the operation (``hasDelayedElectionOperations`` counts the timer only).
    """
    with brokers.client(via) as client:
        until(
            lambda: client.call("metadata", 9, topics=None)["controller_id"] == brokers.controller,
            f"broker {via} is told who the controller is",
        )
    parts = [TopicPartition(topic, index) for index in range(len(ROTATED))]
    admin = AdminClient({"bootstrap.servers": brokers.nodes[via].bootstrap})
    asked = admin.elect_leaders(ElectionType.PREFERRED, parts)

    def they_lead() -> bool:
        is_refused = asked.done() and asked.exception() is not None
        assert not is_refused, asked.exception()
        return brokers.leaders(topic) == [J, P, Q, K]

    until(they_lead, "the preferred leaders lead")


def test_controller_and_leader_failures_lose_no_records(brokers: Brokers):
    """Under load, the controller moves between brokers of both kinds, and brokers fail."""
    name = brokers.create(*ROTATED)
    brokers.all_in_sync(name)
    load = Load(brokers, name, len(ROTATED))
    load.start()
    load.goes_on()
    # A controlled shutdown: the leadership moves before the broker stops.
    for node_id in (P, K):
        brokers.stop(node_id)
        assert node_id not in brokers.leaders(name)
        load.goes_on()
        brokers.nodes[node_id].start()
        brokers.all_in_sync(name)
    prefer(brokers, name, via=Q)
    for wanted in (K, P, J, Q, J):
        epoch = brokers.controller_epoch
        brokers.elect(wanted)
        assert brokers.controller_epoch > epoch
        load.goes_on()
    # The controller and a broker of Fencepost are suspended for longer than their sessions.
    brokers.all_in_sync(name)
    before = {node_id: brokers.registered(node_id) for node_id in (J, Q)}
    with brokers.frozen(J), brokers.frozen(Q):
        until(lambda: brokers.controller in {P, K}, "another one is the controller")
        until(lambda: not {J, Q} & {*brokers.leaders(name)}, "those that live lead")
        load.goes_on()
    for node_id, epoch in before.items():
        until(
            lambda node_id=node_id, epoch=epoch: brokers.registered(node_id) > epoch,  # type: ignore[misc]
            f"broker {node_id} has come back with a later epoch",
        )
    brokers.all_in_sync(name)
    # The controller and a broker of Fencepost are killed.
    brokers.elect(K)
    for node_id in (K, P):
        brokers.nodes[node_id].kill()
    until(lambda: brokers.controller in {J, Q}, "another one is the controller")
    until(lambda: not {K, P} & {*brokers.leaders(name)}, "those that live lead")
    load.goes_on()
    for node_id in (K, P):
        brokers.nodes[node_id].launch()
    for node_id in (K, P):
        brokers.nodes[node_id].wait_until_listening()
    everybody_lives(brokers)
    brokers.all_in_sync(name)
    brokers.elect(J)
    prefer(brokers, name, via=P)
    load.end()
    brokers.all_equal(name)
    for index, leader in enumerate(brokers.leaders(name)):
        check_log(brokers, name, index, leader, load)
