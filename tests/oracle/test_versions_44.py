"""The versions that Apache Kafka 4.4 adds: classes, bytes, and the same requests to both."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.protocol import overlay
from fencepost.protocol.schema import fields_of, message_class
from fencepost.protocol.writer import compile_writer
from tests.fuzz.entities import random_entity
from tests.oracle.test_traces import unexpected
from tests.oracle.tracer import Step, Tracer
from tests.support.cluster import GROUP, READ_COMMITTED, TRANSACTION, Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, java_command, run_to_end, run_tool, served
from tests.support.kafka44 import jars
from tests.support.raw import plain
from tests.support.targets import SETTINGS

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools"), pytest.mark.timeout(300)]

JUDGE = Path(__file__).with_name("MessageJudge.java")
SEED, ENTITIES = 44, 200

OURS = [one for one in overlay.messages() if one[0] >= 8]
"""The messages of Apache Kafka 4.4 that kio lacks; those before are of ZooKeeper controllers."""


# --- classes -------------------------------------------------------------------------------------


@cache
def schema(name: str) -> Mapping[str, Any]:
    """Return the schema of a message, such as ApiVersionsRequest."""
    (jar,) = jars().glob("kafka-clients-*.jar")
    with zipfile.ZipFile(jar) as archive:
        text = archive.read(f"common/message/{name}.json").decode()
    return json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))


def in_versions(versions: str, version: int) -> bool:
    if versions in ("none", ""):
        return False
    low, _, high = versions.removesuffix("+").partition("-")
    is_open = versions.endswith("+")
    return int(low) <= version and (is_open or version <= int(high or low))


def snake(name: str) -> str:
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return text.removesuffix("_ms") if name.endswith("TimeMs") else text


def default_of(field: Mapping[str, Any], kind: str) -> object:
    """Return the default of a field that is no array."""
    default = field.get("default")
    if default is None:
        return {"string": "", "bool": False, "uuid": None}.get(kind, 0)
    if default == "null":
        return None
    return default if kind == "string" else json.loads(str(default))


def rows_of_schema(fields: list[Any], version: int) -> list[tuple[Any, ...]]:
    """Return name, type, array, nullable, tag, default and inner rows of a structure's fields."""
    rows = []
    for one in fields:
        if not in_versions(one["versions"], version):
            continue
        kind = one["type"].removeprefix("[]")
        is_array = one["type"] != kind
        rows.append(
            (
                snake(one["name"]),
                "struct" if one.get("fields") else kind,
                is_array,
                in_versions(one.get("nullableVersions", "none"), version),
                one.get("tag") if in_versions(one.get("taggedVersions", "none"), version) else None,
                () if is_array else default_of(one, kind),
                rows_of_schema(one.get("fields", []), version),
            )
        )
    return rows


def rows_of_class(cls: type) -> list[tuple[Any, ...]]:
    """Return the same of a class. In these schemas the tagged fields are the last ones."""
    kinds = {"error_code": "int16", "timedelta_i32": "int32"}
    info = fields_of(cls)
    return [
        (
            one.name,
            "struct" if one.struct else kinds.get(str(one.kafka_type), one.kafka_type),
            one.is_array,
            one.nullable and one.kafka_type != "uuid",
            one.tag,
            one.default,
            rows_of_class(one.struct) if one.struct else [],
        )
        for one in (*info.plain, *info.tagged)
    ]


@pytest.mark.parametrize("message", OURS, ids=str)
def test_class_has_the_fields_of_the_schema(message: overlay.Message) -> None:
    cls = message_class(*message)
    found = schema(cls.__name__)
    assert (found["apiKey"], found["type"]) == message[::2]
    assert in_versions(found["validVersions"], message[1])
    assert not in_versions(found["validVersions"], message[1] + 1)
    assert in_versions(found["flexibleVersions"], message[1])
    assert rows_of_class(cls) == rows_of_schema(found["fields"], message[1])


def test_comparison_of_schemas_sees_each_difference() -> None:
    field = {"name": "ThrottleTimeMs", "type": "int32", "versions": "0+"}
    (row,) = rows_of_schema([field], 3)
    assert row == ("throttle_time", "int32", False, False, None, 0, [])
    for change in (
        {"name": "NodeId"}, {"type": "int64"}, {"type": "[]int32"}, {"nullableVersions": "3+"},
        {"taggedVersions": "3+", "tag": 0}, {"default": "-1"}, {"fields": [field]},
    ):  # fmt: skip
        assert rows_of_schema([{**field, **change}], 3) != [row]
    assert rows_of_schema([{**field, "versions": "4+"}], 3) == []
    assert rows_of_schema([{**field, "versions": "0-2"}], 3) == []


def camel(name: str) -> str:
    first, *rest = name.split("_")
    text = first + "".join(part.capitalize() for part in rest)
    return f"{text}Ms" if name == "throttle_time" else text


def as_json(cls: type, entity: Any) -> dict[str, Any]:
    """Return an entity as Kafka's JSON converter writes it."""
    info = fields_of(cls)
    shown: dict[str, Any] = {}
    for one in (*info.plain, *info.tagged):
        value = getattr(entity, one.name)
        if one.struct is not None:
            value = [as_json(one.struct, item) for item in value]
        elif one.kafka_type == "error_code":
            value = int(value)
        elif one.kafka_type == "uuid":
            number = uuid.UUID(int=0) if value is None else value
            value = base64.urlsafe_b64encode(number.bytes).decode().rstrip("=")
        else:
            value = plain(value)
        is_default = value == one.default or (one.is_array and not value)
        if one.tag is None or not is_default:
            shown[camel(one.name)] = value
    return shown


def ours_as_bytes(entity: Any) -> bytes:
    parts: list[Any] = []
    for _ in compile_writer(type(entity))(entity, parts.append) or ():
        pass
    return b"".join(parts)


def test_bytes_are_those_of_kafkas_classes() -> None:
    """Java reads our bytes as the same values, and writes the same bytes."""
    rng = random.Random(SEED)
    made = [
        (message[1], random_entity(message_class(*message), rng))
        for message in OURS
        for _ in range(ENTITIES)
    ]
    asked = "".join(
        f"{type(entity).__name__} {version} {ours_as_bytes(entity).hex()}\n"
        for version, entity in made
    )
    lines = run_to_end(java_command(str(JUDGE), libs=jars), deadline_s=120, said=asked).splitlines()
    assert len(lines) == len(made)
    for (_, entity), line in zip(made, lines, strict=True):
        shown, _, data = line.partition("\t")
        assert json.loads(shown) == as_json(type(entity), entity)
        assert data == ours_as_bytes(entity).hex()


# --- the same requests ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Apache Kafka 4.4 with the levels of 4.3, as a broker of Fencepost that stands alone has."""
    words = ["--release-version", "4.3"]
    own = Kafka(tmp_path_factory.mktemp("kafka"), SETTINGS, format_words=words, libs=jars)
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
    """A producer of transaction version 2, and the group and topic of its offsets."""

    def __init__(self, t: Tracer, stem: str) -> None:
        self.t, self.topic, self.group, self.name = t, f"{stem}-t", f"{stem}-g", f"{stem}-x"
        t.cluster.create_topic(self.topic, 2)
        self.topic_id = t.cluster.topic_id(self.topic)
        t.cluster.coordinator(self.group, GROUP)
        t.cluster.coordinator(self.name, TRANSACTION)
        self.id, self.epoch = t.cluster.init_producer(self.name)

    def commit(self, version: int, *topics: tuple[Any, list[int]], **member: Any) -> None:
        """Commit offset 7 of partitions, by default of partition 0; note the response."""
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
                        {"partition_index": one, "committed_offset": 7, "committed_metadata": ""}
                        for one in indexes
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
    """Delete groups; return their rows with the messages, which the tracer leaves out."""
    answer = t.cluster.call("delete_groups", 3, groups_names=list(groups))
    rows = [(one["group_id"], one["error_code"], one["error_message"]) for one in answer["results"]]
    return sorted(map(list, rows))


def deleted_groups(t: Tracer) -> None:
    producer = Producer(t, "deleted")
    producer.commit(6)
    producer.end()
    names = (producer.group, "no-such-group", "", producer.group)
    t.note("delete", _deleted(t, *names))
    t.note("again", _deleted(t, producer.group))


def controllers(t: Tracer) -> None:
    """Before and after the upgrade to the first metadata.version that allows it."""
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
def test_responses_are_the_same(trace: str, kafka: Kafka, fencepost: Daemon) -> None:
    theirs, ours = (run(TRACES[trace], one.bootstrap) for one in (kafka, fencepost))
    found = unexpected(trace, ours, theirs)
    assert not found, f"{len(found)} differences:\n" + "\n".join(found)
    assert len(theirs) > 1


def test_advertised_versions_are_those_of_4_4(kafka: Kafka, fencepost: Daemon) -> None:
    def ranges(bootstrap: str) -> dict[int, tuple[int, int]]:
        with Cluster(bootstrap) as cluster:
            answer = cluster.call("api_versions", 5, **SOFTWARE)
        return {a["api_key"]: (a["min_version"], a["max_version"]) for a in answer["api_keys"]}

    ours, theirs = ranges(fencepost.bootstrap), ranges(kafka.bootstrap)
    assert ours == {key: theirs.get(key) for key in ours}
    assert {18: (0, 5), 28: (0, 6), 42: (0, 3), 94: (0, 0)}.items() <= ours.items()


# --- clients -------------------------------------------------------------------------------------

RECORDS = 500


def copied_by_java(bootstrap: str) -> None:
    """Copy records in transactions with the Java client of 4.4, some of which it aborts."""
    with Cluster(bootstrap) as cluster:
        source, target = cluster.create_topic("copied"), cluster.create_topic("copies")
        cluster.produce(source, [b"%d" % number for number in range(RECORDS)])
        said = run_tool(
            "org.apache.kafka.tools.TransactionalMessageCopier",
            *("--broker-list", bootstrap, "--input-topic", source, "--output-topic", target),
            *("--input-partition", "0", "--consumer-group", "copier", "--use-group-metadata"),
            *("--transactional-id", "copier", "--transaction-size", "20"),
            *("--max-messages", str(RECORDS), "--enable-random-aborts"),
            libs=jars,
        )
        assert '"remaining":0' in said
        cluster.settle(target)
        assert cluster.values(target, isolation=READ_COMMITTED) == cluster.values(source)
        assert cluster.committed("copier", source, stable=True) == RECORDS
        run_tool(
            "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
            *("--bootstrap-server", bootstrap, "--delete", "--group", "copier"),
            libs=jars,
        )


async def test_java_client_of_4_4_copies_exactly_once(tmp_path: Path) -> None:
    """It names the cluster and the node, and the topics of its offsets by id."""
    settings = {**SETTINGS, "fencepost.metrics.listen": "127.0.0.1:0"}
    async with Broker(tmp_path, config=settings) as broker:
        await asyncio.to_thread(copied_by_java, broker.bootstrap)
        watch = broker.server.watch
        assert watch is not None
        answered = watch.answered
    newest = {(18, 5), (28, 6), (42, 3)}
    assert newest <= answered.keys()
    assert not {(28, version) for version in range(6)} & answered.keys()
