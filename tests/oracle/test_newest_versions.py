"""API versions that are new in Apache Kafka 4.4 get equal responses; 4.4's Java client works.

``test_overlay_messages.py`` compares the encodings of their messages.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fencepost.coordinator.daemon.broker import Broker
from tests.oracle.test_traces import unexpected
from tests.oracle.tracer import Step, Tracer
from tests.support.cluster import GROUP, READ_COMMITTED, TRANSACTION, Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, run_tool, served
from tests.support.targets import SETTINGS

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools"), pytest.mark.timeout(300)]


# --- the same requests ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Apache Kafka with the feature levels of 4.3, with which Fencepost starts as well."""
    words = ["--release-version", "4.3"]
    own = Kafka(tmp_path_factory.mktemp("kafka"), SETTINGS, format_words=words)
    yield from served(own)


@pytest.fixture(scope="module")
def fencepost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    yield from served(Daemon(tmp_path_factory.mktemp("fencepost") / "data", SETTINGS))


SOFTWARE = {"client_software_name": "raw", "client_software_version": "1"}


def versions(t: Tracer) -> None:
    told = t.cluster.call("metadata", 12, topics=[])
    ours, node = told["cluster_id"], told["controller_id"]
    for cluster_id, node_id in (
        (None, -1), (ours, node), (ours, node + 1), ("another", node), ("", node), (ours, -2),
        (ours, -1), ("another", -1), (None, node), (None, -2),
    ):  # fmt: skip
        for software in (SOFTWARE, {**SOFTWARE, "client_software_name": ""}):
            answer = t.cluster.call(
                "api_versions", 5, **software, cluster_id=cluster_id, node_id=node_id
            )
            told = answer["error_code"], bool(answer["api_keys"])
            who = "ours" if cluster_id == ours else cluster_id
            t.note(f"{who} {node_id - node} {software}", told)


class Producer:
    """A TV2 producer, with the group and the topic of the offsets that it commits."""

    def __init__(self, t: Tracer, stem: str) -> None:
        self.t, self.topic, self.group, self.name = t, f"{stem}-t", f"{stem}-g", f"{stem}-x"
        t.cluster.create_topic(self.topic, 2)
        self.topic_id = t.cluster.topic_id(self.topic)
        t.cluster.coordinator(self.group, GROUP)
        t.cluster.coordinator(self.name, TRANSACTION)
        self.id, self.epoch = t.cluster.init_producer(self.name)

    def commit(self, version: int, *topics: tuple[Any, list[int]], **member: Any) -> None:
        """Commit offset 7 of partitions, by default of partition 0, and record the response."""
        generation = member.pop("generation", -1)
        self.t(
            "txn_offset_commit",
            version,
            transactional_id=self.name,
            group_id=self.group,
            producer_id=self.id,
            producer_epoch=self.epoch,
            generation_id=generation,
            generation_id_or_member_epoch=generation,
            topics=[
                {
                    "name": self.topic if topic_id == self.topic_id else f"no-{topic_id}",
                    "topic_id": topic_id,
                    "partitions": [
                        {"partition_index": index, "committed_offset": 7, "committed_metadata": ""}
                        for index in indexes
                    ],
                }
                for topic_id, indexes in topics or ((self.topic_id, [0]),)
            ],
            **member,
        )

    def end(self) -> None:
        answer = self.t.cluster.call(
            "end_txn",
            5,
            transactional_id=self.name,
            producer_id=self.id,
            producer_epoch=self.epoch,
            committed=True,
        )
        self.t.note("end", answer["error_code"])
        self.epoch = answer["producer_epoch"]
        committed = self.t.cluster.committed(self.group, self.topic, stable=True)
        self.t.note("committed", committed)


def offsets_without_members(version: int) -> Callable[[Tracer], None]:
    unknown, zero = uuid.UUID(int=1 << 64 | 77), uuid.UUID(int=0)

    def trace(t: Tracer) -> None:
        producer = Producer(t, f"alone-{version}")
        producer.commit(version, generation=1, member_id="m")
        producer.commit(version, generation=1)
        producer.commit(version, generation=0)
        for indexes in ([0], [0, 1], []):
            for topic_id in (zero, unknown):
                producer.commit(version, (topic_id, indexes))
        producer.commit(version, (producer.topic_id, [99]))
        producer.commit(version, (unknown, [0]), (producer.topic_id, [0, 99]), (zero, [3]))
        producer.end()
        producer.commit(version)
        producer.commit(version, generation=4, member_id="m")
        producer.commit(version, member_id="m")
        producer.end()

    return trace


def offsets_of_consumers(version: int) -> Callable[[Tracer], None]:
    def trace(t: Tracer) -> None:
        producer = Producer(t, f"consumers-{version}")
        told: dict[str, Any] = {
            "group_id": producer.group,
            "member_id": str(uuid.uuid4()),
            "rebalance_timeout": 60_000,
        }
        epochs = []
        for topics in ([producer.topic], [producer.topic, "more"]):
            answer = t.cluster.call(
                "consumer_group_heartbeat",
                1,
                **told,
                member_epoch=epochs[-1] if epochs else 0,
                subscribed_topic_names=topics,
                topic_partitions=[] if not epochs else None,
            )
            t.note("heartbeat", answer["error_code"])
            epochs.append(answer["member_epoch"])
        before, now = epochs
        for member in (told["member_id"], "stranger"):
            for epoch in (now, now + 1, before, before - 1, 0, -1):
                producer.commit(version, generation=epoch, member_id=member)
        producer.commit(version, (producer.topic_id, [0, 1]), generation=now, **_id(told))
        producer.end()
        t.note("delete", _deleted(t, producer.group))

    return trace


def offsets_of_classic_members(version: int) -> Callable[[Tracer], None]:
    def trace(t: Tracer) -> None:
        producer = Producer(t, f"classic-{version}")
        joined = t.cluster.call(
            "join_group",
            3,
            group_id=producer.group,
            session_timeout=30_000,
            rebalance_timeout=30_000,
            member_id="",
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b""}],
        )
        member, generation = joined["member_id"], joined["generation_id"]
        place = {"group_id": producer.group, "generation_id": generation, "member_id": member}
        t.note("sync", t.cluster.call("sync_group", 3, assignments=[], **place)["error_code"])
        for who in (member, "stranger"):
            for said in (generation, generation + 1, generation - 1, -1):
                producer.commit(version, generation=said, member_id=who)
        producer.end()
        t.note("delete", _deleted(t, producer.group))

    return trace


def _id(told: Mapping[str, Any]) -> dict[str, Any]:
    return {"member_id": told["member_id"]}


def _deleted(t: Tracer, *groups: str) -> list[Any]:
    """Delete groups; return the rows with messages, which the tracer would leave out."""
    answer = t.cluster.call("delete_groups", 3, groups_names=list(groups))
    rows = [
        (result["group_id"], result["error_code"], result["error_message"])
        for result in answer["results"]
    ]
    return sorted(map(list, rows))


def deleted_groups(t: Tracer) -> None:
    producer = Producer(t, "deleted")
    producer.commit(6)
    producer.end()
    names = (producer.group, "no-such-group", "", producer.group)
    t.note("delete", _deleted(t, *names))
    t.note("again", _deleted(t, producer.group))


def controllers(t: Tracer) -> None:
    """Send UnregisterController before and after an upgrade to the first level that allows it."""
    level = {"feature": "metadata.version", "max_version_level": 33, "upgrade_type": 1}
    for _ in range(2):
        for controller_id in (77, -1, 2**31 - 1, 1):
            answer = t.cluster.call("unregister_controller", 0, controller_id=controller_id)
            t.note(f"unregister {controller_id}", [answer["error_code"], answer["error_message"]])
        t("update_features", 2, timeout=10_000, feature_updates=[level])


TRACES = {
    "versions": versions,
    "deleted_groups": deleted_groups,
    "controllers": controllers,
    **{
        f"{make.__name__}_{version}": make(version)
        for make in (offsets_without_members, offsets_of_consumers, offsets_of_classic_members)
        for version in (5, 6)
    },
}


def run(trace: Callable[[Tracer], None], bootstrap: str) -> list[Step]:
    tracer = Tracer(bootstrap)
    try:
        trace(tracer)
    finally:
        tracer.close()
    return tracer.steps


@pytest.mark.parametrize("trace", TRACES)
def test_responses_of_the_newest_versions_are_the_same(
    trace: str, kafka: Kafka, fencepost: Daemon
) -> None:
    theirs, ours = (run(TRACES[trace], broker.bootstrap) for broker in (kafka, fencepost))
    found = unexpected(trace, ours, theirs)
    assert not found, f"{len(found)} differences:\n" + "\n".join(found)
    assert len(theirs) > 1


# --- clients -------------------------------------------------------------------------------------

RECORDS = 500


def copied_by_java(bootstrap: str) -> None:
    """Copy records with the Java client in transactions, some of them aborted."""
    with Cluster(bootstrap) as cluster:
        source, target = cluster.create_topic("copied"), cluster.create_topic("copies")
        cluster.produce(source, [b"%d" % number for number in range(RECORDS)])
        said = run_tool(
            "org.apache.kafka.tools.TransactionalMessageCopier",
            *("--broker-list", bootstrap, "--input-topic", source, "--output-topic", target),
            *("--input-partition", "0", "--consumer-group", "copier", "--use-group-metadata"),
            *("--transactional-id", "copier", "--transaction-size", "20"),
            *("--max-messages", str(RECORDS), "--enable-random-aborts"),
        )
        assert '"remaining":0' in said
        cluster.settle(target)
        assert cluster.values(target, isolation=READ_COMMITTED) == cluster.values(source)
        assert cluster.committed("copier", source, stable=True) == RECORDS
        run_tool(
            "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
            *("--bootstrap-server", bootstrap, "--delete", "--group", "copier"),
        )


async def test_java_client_copies_exactly_once(tmp_path: Path) -> None:
    """The client sends cluster id and node id, and topic ids in its offset commits."""
    settings = {**SETTINGS, "fencepost.metrics.listen": "127.0.0.1:0"}
    async with Broker(tmp_path, config=settings) as broker:
        await asyncio.to_thread(copied_by_java, broker.bootstrap)
        watch = broker.server.watch
        assert watch is not None
        answered = watch.answered
    newest = {(18, 5), (28, 6), (42, 3)}
    assert newest <= answered.keys()
    assert not {(28, version) for version in range(6)} & answered.keys()
