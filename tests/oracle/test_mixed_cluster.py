"""Brokers of Apache Kafka and Fencepost in one cluster, whose controller is Fencepost's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from fencepost.cluster.records import PartitionChangeRecord
from fencepost.tools.ports import hold_port
from tests.oracle.desk import Tools, tools_at_hand
from tests.oracle.test_joining import brokers, until_unfenced
from tests.oracle.tool_scenes import CONFIGS, LEADER_ELECTION, METADATA_QUORUM
from tests.support import kafka43
from tests.support.cluster import Cluster, unique
from tests.support.controllers import Pretender
from tests.support.kafka import CLUSTER_ID, Kafka, Quorum, jars
from tests.support.member import Member
from tests.support.mixed import formatted
from tests.support.waits import until

KAFKAS, OURS, LATE = 2, 101, 3
SESSION_MS = 4_000
MANY = 2_500
"""Number of records of the metadata log that makes the controller write a snapshot at its stop."""


@pytest.fixture(scope="module", params=["apart", "combined"])
def is_combined(request: pytest.FixtureRequest) -> bool:
    """Return whether Fencepost's broker is also the controller."""
    return bool(request.param == "combined")


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    with tools_at_hand() as started:
        yield started


@pytest.fixture(scope="module")
def controller(is_combined: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    """Yield the active controller: a separate process, or a process that is also a broker."""
    home = tmp_path_factory.mktemp("controller")
    with closing(hold_port()) as held, closing(hold_port()) as clients:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        plain = f"PLAINTEXT://127.0.0.1:{clients.getsockname()[1]},"
        settings = {
            "process.roles": "broker,controller" if is_combined else "controller",
            "listeners": f"{plain if is_combined else ''}CONTROLLER://{address}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "broker.session.timeout.ms": str(SESSION_MS),
        }
        broker = Member(home, address, node_id=OURS if is_combined else 3000, settings=settings)
        formatted(broker.data_dir, broker.node_id)
        broker.start()
        yield broker
        broker.kill()


@pytest.fixture(scope="module")
def quorum(controller: Member) -> Quorum:
    return Quorum(controller.node_id, controller.quorum)


@pytest.fixture(scope="module")
def kafka(
    member: Member, quorum: Quorum, is_combined: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kafka]:
    """Yield a broker of release 4.3 if the controller is also a broker, otherwise of 4.4."""
    home = tmp_path_factory.mktemp("kafka")
    libs = kafka43.jars if is_combined else jars
    broker = Kafka(home, node_id=KAFKAS, controller=quorum, libs=libs)
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def member(
    controller: Member,
    quorum: Quorum,
    is_combined: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Member]:
    if is_combined:
        yield controller
        return
    broker = Member(tmp_path_factory.mktemp("member"), quorum.controller, node_id=OURS)
    broker.start()
    yield broker
    broker.kill()


def create(
    bootstrap: str,
    name: str,
    *assignment: tuple[int, ...],
    configs: Mapping[str, str] | None = None,
) -> str:
    topic = {
        "configs": [{"name": key, "value": value} for key, value in (configs or {}).items()],
        "name": name,
        "num_partitions": -1,
        "replication_factor": -1,
        "assignments": [
            {"partition_index": index, "broker_ids": ids} for index, ids in enumerate(assignment)
        ],
    }
    with Cluster(bootstrap) as client:
        answer = client.call("create_topics", 5, timeout=10_000, topics=[topic])
    assert answer["topics"][0]["error_code"] == "none", answer
    return name


def states(bootstrap: str, name: str) -> list[tuple[int, set[int]]]:
    """Return leader and ISR of each partition."""
    with Cluster(bootstrap) as client:
        (topic,) = client.call("metadata", 8, topics=[{"name": name}])["topics"]
    parts = sorted(topic["partitions"], key=lambda partition: int(partition["partition_index"]))
    return [(partition["leader_id"], set(partition["isr_nodes"])) for partition in parts]


def led(bootstrap: str, name: str, *expected: int) -> None:
    """Wait until these brokers lead, and all replicas are in sync."""
    everybody = {KAFKAS, OURS}
    wanted = [(leader, everybody) for leader in expected]
    until(partial(_is, bootstrap, name, wanted), f"{expected} lead {name}")


def _is(bootstrap: str, name: str, expected: list[tuple[int, set[int]]]) -> bool:
    return states(bootstrap, name) == expected


def test_kafkas_tools_describe_the_quorum(
    kafka: Kafka, controller: Member, quorum: Quorum, tools: Tools
) -> None:
    asked = ("--bootstrap-controller", quorum.controller, "describe", "--replication")
    status, told = tools.run(METADATA_QUORUM, asked)
    assert status == 0, told
    rows = [line.split() for line in told.splitlines() if line.split()[-1:] != ["Status"]]
    seen = [(row[0], row[-1]) for row in rows if row]
    assert (str(controller.node_id), "Leader") in seen
    assert (str(KAFKAS), "Observer") in seen


def test_kafkas_broker_is_registered_with_the_same_features(kafka: Kafka, member: Member) -> None:
    assert brokers(kafka) == brokers(member) == {KAFKAS: False, OURS: False}
    levels = []
    for bootstrap in (kafka.bootstrap, member.bootstrap):
        with Cluster(bootstrap) as client:
            told = client.call(
                "api_versions", 4, client_software_name="a", client_software_version="1"
            )
        levels.append(
            {
                feature["name"]: feature["max_version_level"]
                for feature in told["finalized_features"]
            }
        )
    assert levels[0] == levels[1]
    assert levels[0]["metadata.version"] == 30


def test_settings_take_effect_on_kafkas_broker(kafka: Kafka, member: Member, tools: Tools) -> None:
    """Cluster, broker and topic settings; kafka-configs prints the same through both brokers."""
    name = create(member.bootstrap, unique("t"), (KAFKAS,))
    until(lambda: states(kafka.bootstrap, name) == [(KAFKAS, {KAFKAS})], "the leader")
    everybody = ("--entity-type", "brokers", "--entity-default")
    it = ("--entity-type", "brokers", "--entity-name", str(KAFKAS))
    topic = ("--entity-type", "topics", "--entity-name", name)

    def configs(*words: str, of: Kafka | Member = member) -> str:
        status, told = tools.run(CONFIGS, ("--bootstrap-server", of.bootstrap, *words))
        assert status == 0, told
        return told

    def takes(size: int) -> bool:
        with Cluster(kafka.bootstrap) as client:
            code = client.produce(name, [b"x" * size], acks=-1)["error_code"]
        assert code in ("none", "message_too_large")
        return bool(code == "none")

    for where, key, limit in (
        (everybody, "message.max.bytes", 1_000),
        (it, "message.max.bytes", 3_000),
        (topic, "max.message.bytes", 2_000),
    ):
        configs("--alter", *where, "--add-config", f"{key}={limit}")
        until(lambda limit=limit: takes(limit - 500) and not takes(limit + 500), f"{key}={limit}")
        shown = [configs("--describe", *where, of=broker) for broker in (kafka, member)]
        assert f"{key}={limit}" in shown[0]
        if where != topic:  # for a topic, the synonyms of the two brokers differ
            assert shown[0] == shown[1]
    for where, key in ((topic, "max.message.bytes"), (it, "message.max.bytes")):
        configs("--alter", *where, "--delete-config", key, of=kafka)
    until(lambda: not takes(2_500), "the setting of all brokers again")
    configs("--alter", *everybody, "--delete-config", "message.max.bytes", of=kafka)
    until(lambda: takes(10_000), "no setting")


def test_brokers_of_both_kinds_lead_and_follow(kafka: Kafka, member: Member) -> None:
    name = create(kafka.bootstrap, unique("t"), (KAFKAS, OURS), (OURS, KAFKAS))
    for broker in (kafka, member):  # each broker replays the change independently
        led(broker.bootstrap, name, KAFKAS, OURS)
    for bootstrap, index in ((kafka.bootstrap, 0), (member.bootstrap, 1)):
        with Cluster(bootstrap) as client:
            answer = client.produce(name, [b"v"], partition=index, acks=-1)
            assert (answer["error_code"], answer["base_offset"]) == ("none", 0)


def test_leadership_moves_by_election_and_reassignment(
    kafka: Kafka, member: Member, tools: Tools
) -> None:
    name = create(member.bootstrap, unique("t"), (OURS, KAFKAS))
    led(member.bootstrap, name, OURS)
    status, told = tools.run(
        LEADER_ELECTION,
        (
            "--bootstrap-server",
            kafka.bootstrap,
            "--election-type",
            "preferred",
            "--topic",
            name,
            "--partition",
            "0",
        ),
    )
    assert status == 0, told
    for replicas in ([KAFKAS], [OURS]):
        with Cluster(kafka.bootstrap) as client:
            answer = client.call(
                "alter_partition_reassignments",
                0,
                timeout=10_000,
                topics=[
                    {"name": name, "partitions": [{"partition_index": 0, "replicas": replicas}]}
                ],
            )
        assert answer["responses"][0]["partitions"][0]["error_code"] == "none", answer
        alone = [(replicas[0], set(replicas))]
        until(partial(_is, kafka.bootstrap, name, alone), f"{replicas} alone")


def test_controlled_shutdown_of_kafkas_broker_moves_leadership_first(
    kafka: Kafka, member: Member
) -> None:
    name = create(kafka.bootstrap, unique("t"), (KAFKAS, OURS), (OURS, KAFKAS))
    led(member.bootstrap, name, KAFKAS, OURS)
    assert kafka.child is not None
    kafka.child.terminate(deadline_s=60)
    assert states(member.bootstrap, name) == [(OURS, {OURS})] * 2
    with Cluster(member.bootstrap) as client:
        for index in (0, 1):
            answer = client.produce(name, [b"v"], partition=index, acks=-1)
            assert answer["error_code"] == "none"
    kafka.start()
    led(member.bootstrap, name, OURS, OURS)


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_killed_broker_leaves_the_elr_when_it_registers_again(
    kafka: Kafka, member: Member, quorum: Quorum, way: str
) -> None:
    """A killed broker is fenced when its session expires, and leaves the ELR when it registers."""
    until_unfenced(member, KAFKAS)
    strict = {"min.insync.replicas": "2"}
    name = create(member.bootstrap, unique("t"), (KAFKAS, OURS), configs=strict)
    led(member.bootstrap, name, KAFKAS)
    with closing(Pretender(quorum.controller, 999, CLUSTER_ID)) as reader:
        begin = reader.end()
        assert kafka.child is not None
        kafka.kill() if way == "kill" else kafka.child.terminate(deadline_s=60)
        until(lambda: brokers(member)[KAFKAS], "it is fenced")
        until(lambda: states(member.bootstrap, name) == [(OURS, {OURS})], "the other one leads")
        with Cluster(member.bootstrap) as client:
            assert client.produce(name, [b"v"], acks=-1)["error_code"] == "not_enough_replicas"
            topic_id = client.topic_id(name)
        kafka.start()
        until_unfenced(member, KAFKAS)
        led(kafka.bootstrap, name, OURS)
        changes = [
            record.eligible_leader_replicas
            for record in reader.records(begin)
            if isinstance(record, PartitionChangeRecord)
            and record.topic_id == topic_id
            and (record.eligible_leader_replicas is not None or record.isr == (OURS, KAFKAS))
        ]
    # The broker entered the ELR when it left the ISR. When it registered after the kill, it left
    # the ELR, and only later joined the ISR again.
    assert changes == ([(KAFKAS,), (), None] if way == "kill" else [(KAFKAS,), ()])
    with Cluster(member.bootstrap) as client:
        assert client.values(name) == []


def test_brokers_survive_a_kill_of_their_controller(
    kafka: Kafka, member: Member, controller: Member
) -> None:
    """The controller, which may also be a broker, is killed, and handles requests afterwards."""
    alone, shared = (
        create(member.bootstrap, unique("t"), ids) for ids in ((KAFKAS,), (KAFKAS, OURS))
    )
    led(kafka.bootstrap, shared, KAFKAS)
    controller.kill()
    with Cluster(kafka.bootstrap) as client:
        assert client.produce(alone, [b"v"], acks=-1)["error_code"] == "none"
    controller.start()
    until_unfenced(member, KAFKAS)
    led(kafka.bootstrap, create(kafka.bootstrap, unique("t"), (OURS, KAFKAS)), OURS)
    with Cluster(kafka.bootstrap) as client:
        assert client.produce(shared, [b"w"], acks=-1)["error_code"] == "none"
        assert client.values(alone) == [b"v"]


def test_late_broker_starts_from_a_metadata_snapshot(
    kafka: Kafka, member: Member, controller: Member, quorum: Quorum, tmp_path: Path
) -> None:
    """The controller wrote the snapshot when it stopped; only the late broker needs it."""
    directory = controller.data_dir / "__cluster_metadata-0"
    before = set(directory.glob("*.checkpoint"))
    kept = create(member.bootstrap, unique("t"), (KAFKAS, OURS), (KAFKAS, OURS))
    gone = unique("t")
    with closing(Pretender(quorum.controller, 103, CLUSTER_ID)) as nobody:
        nobody.join()
        create(quorum.controller, gone, *[(103,)] * MANY)
        with Cluster(member.bootstrap) as client:
            client.call("delete_topics", 5, topic_names=[gone], timeout=10_000)
    controller.stop()
    assert set(directory.glob("*.checkpoint")) - before
    controller.start()
    until_unfenced(member, KAFKAS)
    late = Kafka(tmp_path, node_id=LATE, controller=quorum)
    try:
        late.start()
        led(late.bootstrap, kept, KAFKAS, KAFKAS)
        with Cluster(late.bootstrap) as client:
            (found,) = client.call("metadata", 8, topics=[{"name": gone}])["topics"]
        assert found["error_code"] == "unknown_topic_or_partition"
        name = create(kafka.bootstrap, unique("t"), (LATE,))
        until(lambda: states(kafka.bootstrap, name) == [(LATE, {LATE})], "it leads")
        with Cluster(late.bootstrap) as client:
            until(
                lambda: client.produce(name, [b"v"], acks=-1)["error_code"] == "none", "it serves"
            )
    finally:
        late.stop()
