"""Apache Kafka's broker and Fencepost's in one cluster, whose controller is Fencepost's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.tools.ports import hold_port
from tests.support.cluster import Cluster, unique
from tests.support.kafka import Kafka, Quorum, run_tool
from tests.support.member import Member
from tests.support.mixed import formatted
from tests.support.waits import until

KAFKAS, OURS = 2, 101


@pytest.fixture(scope="module", params=["apart", "combined"])
def is_combined(request: pytest.FixtureRequest) -> bool:
    """Whether Fencepost's broker is the controller, too."""
    return bool(request.param == "combined")


@pytest.fixture(scope="module")
def controller(is_combined: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if is_combined:
        with closing(hold_port()) as held:
            yield f"127.0.0.1:{held.getsockname()[1]}"
        return
    directory = formatted(tmp_path_factory.mktemp("controller"), 3000)
    config = {
        "process.roles": "controller",
        "node.id": "3000",
        "listeners": "CONTROLLER://127.0.0.1:0",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT",
    }
    with BrokerThread(lambda: Broker(directory, config=config)) as running:
        yield running.bootstrap


@pytest.fixture(scope="module")
def kafka(
    member: Member, controller: str, is_combined: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kafka]:
    quorum = Quorum(OURS if is_combined else 3000, controller)
    broker = Kafka(tmp_path_factory.mktemp("kafka"), node_id=KAFKAS, controller=quorum)
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def member(
    controller: str, is_combined: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Member]:
    home, settings = tmp_path_factory.mktemp("member"), {}
    with closing(hold_port()) as held:
        if is_combined:
            own = f"PLAINTEXT://127.0.0.1:{held.getsockname()[1]}"
            settings["listeners"] = f"{own},CONTROLLER://{controller}"
            settings["process.roles"] = "broker,controller"
        one = Member(home, controller, node_id=OURS, settings=settings)
        if is_combined:
            formatted(one.data_dir, OURS)
        one.start()
        yield one
        one.kill()


def create(bootstrap: str, name: str, *assignment: tuple[int, ...]) -> str:
    topic = {
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
    """Leader and ISR of each partition."""
    with Cluster(bootstrap) as client:
        (topic,) = client.call("metadata", 8, topics=[{"name": name}])["topics"]
    parts = sorted(topic["partitions"], key=lambda one: int(one["partition_index"]))
    return [(one["leader_id"], set(one["isr_nodes"])) for one in parts]


def led(bootstrap: str, name: str, *expected: int) -> None:
    """Wait until these lead, with everybody in sync."""
    everybody = {KAFKAS, OURS}
    wanted = [(one, everybody) for one in expected]
    until(partial(_is, bootstrap, name, wanted), f"{expected} lead {name}")


def _is(bootstrap: str, name: str, expected: list[tuple[int, set[int]]]) -> bool:
    return states(bootstrap, name) == expected


def test_kafka_s_tools_describe_the_quorum(
    kafka: Kafka, controller: str, is_combined: bool
) -> None:
    told = run_tool(
        "org.apache.kafka.tools.MetadataQuorumCommand",
        "--bootstrap-controller", controller, "describe", "--replication",
    )  # fmt: skip
    rows = [line.split() for line in told.splitlines() if line.split()[-1:] != ["Status"]]
    seen = [(row[0], row[-1]) for row in rows if row]
    assert (str(OURS if is_combined else 3000), "Leader") in seen
    assert (str(KAFKAS), "Observer") in seen


def test_both_lead_and_follow(kafka: Kafka, member: Member) -> None:
    name = create(kafka.bootstrap, unique("t"), (KAFKAS, OURS), (OURS, KAFKAS))
    led(kafka.bootstrap, name, KAFKAS, OURS)
    for bootstrap, index in ((kafka.bootstrap, 0), (member.bootstrap, 1)):
        with Cluster(bootstrap) as client:
            answer = client.produce(name, [b"v"], partition=index, acks=-1)
            assert (answer["error_code"], answer["base_offset"]) == ("none", 0)


def test_leadership_goes_to_and_fro(kafka: Kafka, member: Member) -> None:
    name = create(member.bootstrap, unique("t"), (OURS, KAFKAS))
    led(member.bootstrap, name, OURS)
    run_tool(
        "org.apache.kafka.tools.LeaderElectionCommand",
        "--bootstrap-server", kafka.bootstrap, "--election-type", "preferred",
        "--topic", name, "--partition", "0",
    )  # fmt: skip
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


def test_who_stops_hands_over_first(kafka: Kafka, member: Member) -> None:
    name = create(kafka.bootstrap, unique("t"), (KAFKAS, OURS), (OURS, KAFKAS))
    led(member.bootstrap, name, KAFKAS, OURS)
    assert kafka.child is not None
    kafka.child.terminate(deadline_s=60)
    assert states(member.bootstrap, name) == [(OURS, {OURS})] * 2
    with Cluster(member.bootstrap) as client:
        for index in (0, 1):
            answer = client.produce(name, [b"v"], partition=index, acks=-1)
            assert answer["error_code"] == "none"
