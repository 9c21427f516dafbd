"""The catalogue of causes: real requests produce each cause, and one command must name it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import confluent_kafka
import pytest
from jsonschema import Draft202012Validator

from docs.catalogue import CATALOGUE, CLUSTER_CATALOGUE, Cause
from fencepost import Broker
from fencepost.cli.history_schema import schema as history_schema
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.testing.clock import TestClock
from fencepost.testing.cluster import Cluster as Brokers
from fencepost.tools.ports import hold_port
from tests.support import requests
from tests.support.cluster import Cluster, unique
from tests.support.share import FINAL, REJECT, RELEASE, Member, acquired, parts_of
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.clients import confluent_consumer, confluent_producer
from tests.wire.command_line import cli
from tests.wire.test_doctor import Copy
from tests.wire.test_history import heartbeat

LIMITS = {
    "group.share.delivery.count.limit": "2",
    "group.share.min.delivery.count.limit": "2",
    "share.coordinator.state.topic.replication.factor": "1",
}
SESSION_MS, REBALANCE_MS = 10_000, 60_000
CONSUMER_SESSION_S = 46
LOCK_S = 31


class World:
    """A client, and a broker whose clock advances as a cause requires."""

    def __init__(self, broker: Any, clock: TestClock, client: Cluster) -> None:
        self.broker, self.clock, self.client = broker, clock, client
        self.bootstrap: str = broker.bootstrap
        self.close = contextlib.ExitStack()
        """Closes the connections that a cause leaves open."""

    def other(self) -> Cluster:
        """Return a connection that stays open until the command has run."""
        return self.close.enter_context(Cluster(self.bootstrap))

    def group(self) -> str:
        name = unique("causes")
        self.client.coordinator(name, 0)
        return name

    def topic(self, partitions: int = 1) -> str:
        return self.client.create_topic(unique("causes"), partitions)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    clock = TestClock()
    folder, config = tmp_path_factory.mktemp("causes"), {**SETTINGS, **LIMITS}
    with (
        Broker.in_thread(folder, config=config, clock=clock) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        yield World(broker, clock, client)


Names = Mapping[str, str]
Injection = Callable[[World], Names]
INJECTIONS: dict[str, Injection] = {}


def injects(key: str) -> Callable[[Injection], Injection]:
    def keep(function: Injection) -> Injection:
        INJECTIONS[key] = function
        return function

    return keep


# --- classic groups ---


def joining(group: str, member: str, metadata: bytes = b"", **more: Any) -> dict[str, Any]:
    return {
        "group_id": group,
        "session_timeout": SESSION_MS,
        "rebalance_timeout": REBALANCE_MS,
        "member_id": member,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": metadata}],
        **more,
    }


def join(client: Cluster, group: str, member: str = "", **more: Any) -> Any:
    return client.call("join_group", 5, **joining(group, member, **more))


def stable(world: World, **more: Any) -> dict[str, str]:
    """Form a group of one member that has its assignment."""
    group = world.group()
    joined = join(world.client, group, join(world.client, group, **more)["member_id"], **more)
    synced = world.client.call(
        "sync_group",
        3,
        group_id=group,
        generation_id=joined["generation_id"],
        member_id=joined["member_id"],
        assignments=[],
    )
    assert synced["error_code"] == "none"
    return {"GROUP": group, "MEMBER": joined["member_id"]}


@injects("classic-joined")
def _(world: World) -> Names:
    return stable(world)


@injects("classic-left")
def _(world: World) -> Names:
    names = stable(world)
    world.client.call("leave_group", 2, group_id=names["GROUP"], member_id=names["MEMBER"])
    return names


@injects("classic-silent")
def _(world: World) -> Names:
    names = stable(world)
    world.clock.advance(ms=SESSION_MS + 1)
    return names


@injects("classic-late-join")
def _(world: World) -> Names:
    names = stable(world, session_timeout=300_000)
    other = world.other()
    second = join(other, names["GROUP"])["member_id"]
    other.send("join_group", 5, **joining(names["GROUP"], second, session_timeout=300_000))

    def is_waiting() -> bool:
        told = cli(world.bootstrap, "groups", "history", names["GROUP"]).stdout
        return "rebalance-waits" in told

    until(is_waiting, "the second member has joined")
    world.clock.advance(ms=REBALANCE_MS + 1)
    return names


@injects("classic-late-sync")
def _(world: World) -> Names:
    group = world.group()
    first = join(world.client, group, session_timeout=300_000)["member_id"]
    join(world.client, group, first, session_timeout=300_000)
    world.clock.advance(ms=REBALANCE_MS + 1)
    return {"GROUP": group, "MEMBER": first}


@injects("classic-unused-id")
def _(world: World) -> Names:
    group = world.group()
    member = join(world.client, group)["member_id"]
    world.clock.advance(ms=SESSION_MS + 1)
    return {"GROUP": group, "MEMBER": member}


@injects("classic-rejoined")
def _(world: World) -> Names:
    names = stable(world)
    join(world.client, names["GROUP"], names["MEMBER"], metadata=b"other")
    return names


@injects("classic-replaced")
def _(world: World) -> Names:
    group = world.group()
    first = join(world.client, group, group_instance_id="i")["member_id"]
    join(world.client, group, group_instance_id="i")
    return {"GROUP": group, "MEMBER": first}


# --- consumer groups ---


def consumer(world: World, partitions: int = 2, **more: Any) -> dict[str, str]:
    """Form a consumer group of the member ``first``."""
    names = {"GROUP": world.group(), "TOPIC": world.topic(partitions), "MEMBER": unique("member")}
    heartbeat(
        *(world.client, names["GROUP"], names["MEMBER"], 0),
        subscribed_topic_names=[names["TOPIC"]],
        **more,
    )
    return names


@injects("consumer-joined")
def _(world: World) -> Names:
    return consumer(world)


@injects("consumer-left")
def _(world: World) -> Names:
    names = consumer(world)
    heartbeat(world.client, names["GROUP"], names["MEMBER"], -1)
    return names


@injects("consumer-silent")
def _(world: World) -> Names:
    names = consumer(world)
    world.clock.advance(seconds=CONSUMER_SESSION_S)
    return names


@injects("consumer-resubscribed")
def _(world: World) -> Names:
    names = consumer(world)
    other = world.topic()
    heartbeat(*(world.client, names["GROUP"], names["MEMBER"], 2), subscribed_topic_names=[other])
    return names


@injects("consumer-topic-grew")
def _(world: World) -> Names:
    names = consumer(world)
    cli(world.bootstrap, "topics", "add-partitions", names["TOPIC"], "--to", "3", "--execute")
    epoch = 2

    def grew() -> bool:
        nonlocal epoch
        epoch = heartbeat(world.client, names["GROUP"], names["MEMBER"], epoch)
        return epoch > 2

    until(grew, "the group has the new partition")
    return names


@injects("consumer-late-revocation")
def _(world: World) -> Names:
    names = consumer(world)
    group, second = names["GROUP"], unique("member")
    assigned = [{"topic_id": world.client.topic_id(names["TOPIC"]), "partitions": [0, 1]}]
    heartbeat(*(world.client, group, names["MEMBER"], 2), topic_partitions=assigned)
    heartbeat(*(world.client, group, second, 0), subscribed_topic_names=[names["TOPIC"]])
    for _ in range(3):
        # Both members stay alive, and the first member keeps its partitions.
        heartbeat(*(world.client, group, names["MEMBER"], 2), topic_partitions=assigned)
        heartbeat(world.client, group, second, 3)
        world.clock.advance(seconds=25)
    return names


@injects("consumer-replaced")
def _(world: World) -> Names:
    names = consumer(world, instance_id="i")
    group, who = names["GROUP"], {"subscribed_topic_names": [names["TOPIC"]], "instance_id": "i"}
    heartbeat(world.client, group, names["MEMBER"], -2, instance_id="i")
    heartbeat(world.client, group, unique("member"), 0, **who)
    return names


# --- offsets, groups ---


@injects("group-deleted")
def _(world: World) -> Names:
    names = stable(world)
    world.client.call("leave_group", 2, group_id=names["GROUP"], member_id=names["MEMBER"])
    cli(world.bootstrap, "groups", "delete", names["GROUP"], "--execute")
    return names


@injects("offsets-of-deleted-topic")
def _(world: World) -> Names:
    group, topic = world.group(), world.topic()
    world.client.produce(topic, [b"1"])
    with confluent_consumer(world.bootstrap, group_id=group) as reader:
        place = confluent_kafka.TopicPartition(topic, 0, 1)
        reader.commit(offsets=[place], asynchronous=False)
    cli(world.bootstrap, "topics", "delete", topic, "--execute")
    return {"GROUP": group}


# --- transactions ---


@contextlib.contextmanager
def transaction(world: World, **conf: Any) -> Iterator[tuple[dict[str, str], Any]]:
    names = {"ID": unique("causes"), "TOPIC": world.topic()}
    conf = {"transactional_id": names["ID"], **conf}
    with confluent_producer(world.bootstrap, **conf) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(names["TOPIC"], b"1")
        producer.flush(60)
        yield names, producer


@injects("txn-timeout")
def _(world: World) -> Names:
    with transaction(world, transaction_timeout_ms=20_000) as (names, _):
        world.clock.advance(seconds=25)
    return names


@injects("txn-new-producer")
def _(world: World) -> Names:
    with transaction(world) as (names, _):
        world.client.init_producer(names["ID"])
    return names


@injects("txn-fenced")
def _(world: World) -> Names:
    name = unique("causes")
    first, _ = world.client.init_producer(name), world.client.init_producer(name)
    refused = world.client.call(
        "end_txn",
        3,
        transactional_id=name,
        producer_id=first[0],
        producer_epoch=first[1],
        committed=True,
    )
    assert refused["error_code"] == "producer_fenced"
    return {"ID": name}


@injects("txn-client-abort")
def _(world: World) -> Names:
    with transaction(world) as (names, producer):
        producer.abort_transaction(60)
    return names


@injects("txn-terminated")
def _(world: World) -> Names:
    with transaction(world) as (names, _):
        cli(world.bootstrap, "txns", "terminate", names["ID"], "--execute")
    return names


@injects("txn-blocks-readers")
def _(world: World) -> Names:
    names, _ = world.close.enter_context(transaction(world))
    return names


# --- share groups ---


class Queue:
    """A share group with a record that a member has acquired."""

    def __init__(self, world: World, client: Cluster | None = None) -> None:
        self.world, group, topic = world, world.group(), world.topic()
        self.topic_id = world.client.topic_id(topic)
        # The request creates the group, which no member joins.
        alter = requests.alter_share_group_offsets(group, topic, {0: 0})

        def is_altered() -> bool:
            answer = world.client.call("alter_share_group_offsets", 0, **alter)
            return bool(answer["error_code"] == "none")

        until(is_altered, "the group exists")
        world.client.produce(topic, [b"a"])
        self.member = Member(client or world.client, group)
        self.names = {"GROUP": group, "TOPIC": topic, "MEMBER": self.member.member}
        self.acquire(1)

    def acquire(self, delivery: int) -> None:
        fetched = parts_of(self.member.fetch({self.topic_id: {0: []}}))[0]
        assert acquired(fetched) == [(0, 0, delivery)]

    def acknowledge(self, *batches: Any) -> None:
        answer = self.member.acknowledge({self.topic_id: {0: batches}})
        assert answer["error_code"] == "none"


@injects("share-released")
def _(world: World) -> Names:
    queue = Queue(world)
    queue.acknowledge((0, 0, RELEASE))
    return queue.names


@injects("share-lock-expired")
def _(world: World) -> Names:
    queue = Queue(world)
    world.clock.advance(seconds=LOCK_S)
    return queue.names


@injects("share-rejected")
def _(world: World) -> Names:
    queue = Queue(world)
    queue.acknowledge((0, 0, REJECT))
    return queue.names


@injects("share-limit")
def _(world: World) -> Names:
    queue = Queue(world)
    queue.acknowledge((0, 0, RELEASE))
    queue.acquire(2)
    queue.acknowledge((0, 0, RELEASE))
    return queue.names


@injects("share-session-closed")
def _(world: World) -> Names:
    queue = Queue(world)
    queue.member.epoch = FINAL
    queue.acknowledge()
    return queue.names


@injects("share-connection-closed")
def _(world: World) -> Names:
    with Cluster(world.bootstrap) as client:
        return Queue(world, client).names


@injects("share-in-flight")
def _(world: World) -> Names:
    return Queue(world).names


# --- the doctor, the cluster ---


@injects("doctor-reads-uncommitted")
def _(world: World) -> Names:
    copy = Copy(world.broker, world.client)
    copy.once(isolation_level="read_uncommitted")
    return {"GROUP": copy.name, "TOPIC": copy.source}


@injects("doctor-offsets-outside")
def _(world: World) -> Names:
    copy = Copy(world.broker, world.client)
    copy.feed()
    with copy.consumer() as reader:
        copy.run(reader, copy.producer(), sends_offsets=False)
        reader.commit(asynchronous=False)
    return {"GROUP": copy.name, "TOPIC": copy.source}


@injects("doctor-timeout")
def _(world: World) -> Names:
    name = unique("causes")
    with transaction(world):  # the history has an observation only of transactions
        pass
    settings = {"bootstrap.servers": world.bootstrap, "transactional.id": name}
    producer = confluent_kafka.Producer({**settings, "transaction.timeout.ms": 900_001})
    with pytest.raises(confluent_kafka.KafkaException, match="TIMEOUT"):
        producer.init_transactions(60)
    return {"ID": name}


@injects("feature-changed")
def _(world: World) -> Names:
    cli(world.bootstrap, "features", "set", "share.version=2", "--execute")
    return {}


@injects("broker-down")
def _(world: World) -> Names:
    port = world.close.enter_context(hold_port())
    return {"ADDRESS": f"127.0.0.1:{port.getsockname()[1]}"}


def test_catalogue_has_thirty_causes_and_each_is_injected() -> None:
    assert len(CATALOGUE) >= 30
    assert [cause.key for cause in CATALOGUE] == list(INJECTIONS)


def filled(text: str, names: Names) -> str:
    return re.sub(r"[A-Z]{2,}", lambda found: names.get(found[0], found[0]), text)


def check_command(bootstrap: str, cause: Cause, names: Names) -> None:
    """Check that a line of the command's output names the cause."""
    words = [filled(word, names) for word in cause.command.split()]
    pattern = ".*".join(re.escape(part) for part in filled(cause.says, names).split("…"))
    printed = ""

    def is_named() -> bool:
        nonlocal printed
        printed = cli(bootstrap, *words, status=None).output
        return any(re.search(pattern, line) for line in printed.splitlines())

    try:
        until(is_named, cause.says)
    except TimeoutError as error:
        raise AssertionError(f"{' '.join(words)} says\n{printed}") from error


@pytest.mark.parametrize("cause", CATALOGUE, ids=lambda cause: cause.key)
def test_injected_cause_is_named_by_its_command(world: World, cause: Cause) -> None:
    with world.close:
        check_command(world.bootstrap, cause, INJECTIONS[cause.key](world))


# --- clusters ---


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    with Brokers(3) as cluster:
        yield cluster


ClusterInjection = Callable[[Brokers, str], Names]


def leader_fails(brokers: Brokers, topic: str) -> Names:
    former = brokers.leader(topic)
    brokers.kill(former)
    return _moved(brokers, topic, former)


def leader_stops(brokers: Brokers, topic: str) -> Names:
    former = brokers.leader(topic)
    brokers.stop(former)
    return _moved(brokers, topic, former)


def _moved(brokers: Brokers, topic: str, former: int) -> Names:
    leader = until(
        lambda: (now := brokers.leader(topic)) != former and now, "another replica leads"
    )
    brokers.restart(former)
    brokers.wait_for_isr(topic, size=3)
    return {"FORMER": str(former), "LEADER": str(leader)}


def elect_preferred(brokers: Brokers, topic: str) -> None:
    elect = ("topics", "elect", topic, "--execute")
    until(
        lambda: cli(brokers.bootstrap, *elect, status=None).exit_code == 0,
        "the preferred leaders are elected",
    )


def preferred_leader_is_elected(brokers: Brokers, topic: str) -> Names:
    names = leader_fails(brokers, topic)
    elect_preferred(brokers, topic)
    return {"FORMER": names["LEADER"], "LEADER": names["FORMER"]}


def all_replicas_fail(brokers: Brokers, topic: str) -> Names:
    nodes = brokers.partition(topic).replicas
    for node in nodes:
        brokers.kill(node)
    for node in nodes:
        brokers.restart(node)
    return {"LEADER": str(brokers.leader(topic))}


def follower_is_cut_off(brokers: Brokers, topic: str) -> Names:
    leader = brokers.leader(topic)
    follower = next(node for node in brokers.partition(topic).replicas if node != leader)
    brokers.partition_network([leader], [follower])
    brokers.produce(topic, "tea")
    brokers.wait_for_isr(topic, size=2)
    brokers.heal()
    brokers.wait_for_isr(topic, size=3)
    return {"FOLLOWER": str(follower)}


CLUSTER_INJECTIONS: dict[str, ClusterInjection] = {
    "leader-failed": leader_fails,
    "leader-stopped": leader_stops,
    "leader-preferred": preferred_leader_is_elected,
    "leader-none": all_replicas_fail,
    "isr-shrunk": follower_is_cut_off,
    "isr-expanded": follower_is_cut_off,
}


@pytest.mark.parametrize("cause", CLUSTER_CATALOGUE, ids=lambda cause: cause.key)
def test_injected_cause_in_a_cluster_is_named_by_its_command(
    brokers: Brokers, cause: Cause
) -> None:
    topic = unique("causes")
    brokers.topic(topic, 1)
    names = {"TOPIC": topic, **CLUSTER_INJECTIONS[cause.key](brokers, topic)}
    # A restarted broker writes entries only when it leads a partition of the history topic.
    elect_preferred(brokers, HISTORY_TOPIC)
    check_command(brokers.bootstrap, cause, names)


def test_history_notes_a_broker_that_leads_none_of_its_partitions(brokers: Brokers) -> None:
    topic = unique("causes")
    brokers.topic(topic, 1)
    node = brokers.leader(topic)
    brokers.kill(node)
    until(lambda: brokers.leader(topic) != node, "another replica leads")
    brokers.restart(node)
    brokers.wait_for_isr(topic, size=3)
    note = f"so that their latest entries may be missing: {node};"
    assert note in cli(brokers.bootstrap, "topics", "history", topic).output
    elect_preferred(brokers, HISTORY_TOPIC)
    until(
        lambda: note not in cli(brokers.bootstrap, "topics", "history", topic).output,
        "the broker leads a partition again",
    )


def test_entries_of_the_causes_match_the_schema(world: World) -> None:
    keys = ("classic-late-join", "consumer-late-revocation", "txn-new-producer", "share-limit")
    with world.close:
        for key in keys:
            INJECTIONS[key](world)
    done = set()
    schema = Draft202012Validator(history_schema())

    def are_written() -> bool:
        for value in world.client.values(HISTORY_TOPIC):
            assert value is not None
            entry = json.loads(value)
            assert [error.message for error in schema.iter_errors(entry)] == []
            done.add(entry["what"])
        return {"member-expired", "transaction-aborted", "share-records-given-up"} <= done

    until(are_written, "the entries")
