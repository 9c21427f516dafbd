"""The initial state of the controllers after a broker is promoted, and interrupted promotions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fencepost.cluster.controller.handover import (
    as_standalone,
    reasons_against_successor,
    without_leaders,
)
from fencepost.cluster.image import NO_LEADER, MetadataImage
from fencepost.cluster.image_loader import ImageLoader
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    ClientQuotaRecord,
    EntityData,
    FeatureLevelRecord,
    RegisterBrokerRecord,
    RegisterControllerRecord,
    UserScramCredentialRecord,
)
from fencepost.coordinator.config import properties
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.metadata.control_records import described_control
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.framing import data_batch
from fencepost.coordinator.metadata.metadata import FEATURES
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.quorum_state import is_of_member, note_membership, promoted_as
from fencepost.coordinator.metadata.snapshots import load_snapshot, snapshots
from fencepost.coordinator.metadata.stopped import read_stopped
from fencepost.logcore.batch import decode_records, iter_headers
from fencepost.logcore.checkpoints import (
    MetaProperties,
    read_meta_properties,
    uuid_to_text,
    write_clean_shutdown,
    write_meta_properties,
)
from fencepost.logcore.fs import write_file
from fencepost.tools import demotion, promotion
from fencepost.tools.promotion import (
    ControllerAddress,
    PromotionError,
    PromotionPlan,
    PromotionRequest,
)
from tests.support import old_metadata
from tests.support.memory_disk import MemoryDisk
from tests.support.metadata_changes import (
    create_topic,
    delete_topic,
    set_broker_configs,
    set_group_configs,
)
from tests.unit.coordinator.metadata.test_metadata_files import (
    DATA,
    LOG,
    OLD,
    each_end,
    known,
    start,
)
from tests.unit.coordinator.services.coordinators import allocate_producer_ids, storage

OUT = "/home/out"
NOW_MS = 1_700_000_000_000
CLUSTER = uuid_to_text(uuid.UUID(int=77 << 70))
ONE = (ControllerAddress(100, "10.0.0.1", 9093),)
THREE = tuple(ControllerAddress(100 + n, f"10.0.0.{n}", 9093) for n in range(1, 4))


def grown() -> MemoryDisk:
    """Return the directory of a stopped broker with metadata records of every type."""
    disk = MemoryDisk()
    for path in (DATA, "/home"):
        disk.make_directory(path)
    write_meta_properties(disk, DATA, MetaProperties(CLUSTER, 1, uuid.UUID(int=5 << 70)))
    store = start(disk)
    metadata = store.metadata_log
    set_broker_configs(metadata, "", {"log.retention.ms": "8"})
    set_broker_configs(metadata, "1", {"log.retention.ms": "7"})
    create_topic(metadata, "orders.eu", 3, {"retention.ms": "5"})
    create_topic(metadata, "wide", 300, {})
    create_topic(metadata, "gone", 1, {})
    delete_topic(metadata, "gone")
    set_group_configs(metadata, "g", {"consumer.session.timeout.ms": "50000"})
    allocate_producer_ids(store)
    metadata.append(
        [
            FeatureLevelRecord("transaction.version", 1),
            ClientQuotaRecord((EntityData("user", "alice"),), "producer_byte_rate", 1e6, False),
            AccessControlEntryRecord(uuid.UUID(int=9), 2, "orders", 4, "User:alice", "*", 3, 3),
            UserScramCredentialRecord("alice", 2, b"salt", b"stored", b"server", 8192),
        ]
    )
    storage(Path(DATA), fs=disk).logs.close()  # restarted, for leader epochs above 0
    write_clean_shutdown(disk, DATA, 1)
    return disk


def wanted(
    controllers: tuple[ControllerAddress, ...] = ONE,
    settings: Mapping[str, str] | None = None,
    *,
    static: bool = False,
    output: str = OUT,
) -> PromotionRequest:
    listen = "10.0.0.9:9092"
    told = {} if settings is None else settings
    return PromotionRequest(Path(DATA), Path(output), controllers, told, listen, {}, static=static)


def promote(disk: MemoryDisk, asked: PromotionRequest | None = None) -> PromotionPlan:
    plan = promotion.make_plan(disk, wanted() if asked is None else asked)
    promotion.carry_out(disk, plan, NOW_MS)
    return plan


def log_of(controller: int, output: str = OUT) -> str:
    return f"{output}/controller-{controller}/metadata/{METADATA_TOPIC}-0"


def given(disk: MemoryDisk, controller: int = 100) -> MetadataImage:
    """Return the image from which a controller starts."""
    (snapshot,) = snapshots(disk, log_of(controller))
    loader = ImageLoader()
    load_snapshot(disk, log_of(controller), snapshot, loader)
    return loader.publish()


def owner(disk: MemoryDisk, controller: int) -> MetaProperties | None:
    return read_meta_properties(disk, f"{OUT}/controller-{controller}/metadata")


def head_of(disk: MemoryDisk, controller: int) -> list[dict[str, Any] | None]:
    """Return the control records at the beginning of a controller's snapshot."""
    (snapshot,) = snapshots(disk, log_of(controller))
    data = disk.read_file(f"{log_of(controller)}/{snapshot.file_name}") or b""
    position, header = next(iter_headers(data))
    return [*map(described_control, decode_records(data, position, header))]


def settings_in(disk: MemoryDisk, name: str) -> dict[str, str]:
    return properties.parse(disk.read_file(f"{OUT}/{name}") or b"")


# --- the handover ---


def test_controllers_start_with_all_metadata_of_the_broker() -> None:
    disk = grown()
    before = read_stopped(disk, LOG)
    assert before is not None
    promote(disk, wanted(THREE))
    for controller in (101, 102, 103):
        after = given(disk, controller)
        assert after == without_leaders(before.image, 1)
        assert (after.offset, after.epoch) == (before.image.offset, before.image.epoch)
        meta = owner(disk, controller)
        assert meta is not None
        assert (meta.cluster_id, meta.node_id) == (CLUSTER, controller)


def test_promoted_broker_is_fenced_and_leads_no_partition() -> None:
    before = start(grown()).metadata.image
    after = without_leaders(before, 1)
    assert after.brokers[1].fenced
    assert after.brokers[1].epoch == before.brokers[1].epoch
    for name, topic in before.topics.items():
        for was, partition in zip(topic.partitions, after.topics[name].partitions, strict=True):
            assert (partition.leader, partition.leader_epoch) == (NO_LEADER, was.leader_epoch + 1)
            assert partition.partition_epoch == was.partition_epoch + 1
            assert (partition.replicas, partition.isr, partition.directories) == (
                (1,),
                (1,),
                was.directories,
            )
    fields = ("features", "configs", "acls", "scram", "quotas", "next_producer_id")
    assert [getattr(after, field) for field in fields] == [
        getattr(before, field) for field in fields
    ]
    assert after.next_producer_id == 1000
    assert after.features["transaction.version"] == 1


def test_voters_are_in_the_snapshot_of_each_controller() -> None:
    disk = grown()
    promote(disk, wanted(THREE))
    heads = [head_of(disk, node_id) for node_id in (101, 102, 103)]
    assert heads[0] == heads[1] == heads[2]
    header, version, voters = (record or {} for record in heads[0])
    assert header["type"] == "SNAPSHOT_HEADER"
    assert version["data"]["kRaftVersion"] == 1
    for controller, row in zip(THREE, voters["data"]["voters"], strict=True):
        meta = owner(disk, controller.node_id)
        assert meta is not None
        assert row["voterId"] == controller.node_id
        assert row["voterDirectoryId"] == uuid_to_text(meta.directory_id)
        assert row["endpoints"] == [{"name": "CONTROLLER", "host": controller.host, "port": 9093}]
        assert row["kRaftVersionFeature"] == {"minSupportedVersion": 0, "maxSupportedVersion": 1}


def test_static_voters_are_in_the_properties_files() -> None:
    disk = grown()
    promote(disk, wanted(THREE, static=True))
    assert [record["type"] for record in head_of(disk, 102) if record] == ["SNAPSHOT_HEADER"]
    voters = "101@10.0.0.1:9093,102@10.0.0.2:9093,103@10.0.0.3:9093"
    for name in ("broker.properties", "controller-102/controller.properties"):
        found = settings_in(disk, name)
        assert found["controller.quorum.voters"] == voters
        assert "controller.quorum.bootstrap.servers" not in found


def test_broker_keeps_its_configs_and_controllers_get_those_they_need() -> None:
    disk = grown()
    told = {
        "listeners": "CLIENTS://:9092,INSIDE://10.0.0.9:9094",
        "advertised.listeners": "CLIENTS://broker.example:9092",
        "listener.security.protocol.map": "CLIENTS:SASL_SSL,INSIDE:PLAINTEXT",
        "inter.broker.listener.name": "INSIDE",
        "listener.name.clients.ssl.keystore.location": "/keys/k\u00e9y=1 #x",
        "broker.rack": "a",
        "min.insync.replicas": "2",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:admin;User:ANONYMOUS",
        "fencepost.history.retention.ms": "1000",
        "offsets.topic.replication.factor": "3",
    }
    promote(disk, wanted(settings=told))
    broker = settings_in(disk, "broker.properties")
    assert broker["process.roles"] == "broker"
    assert broker["node.id"] == "1"
    assert broker["log.dirs"] == DATA
    assert broker["listeners"] == "CLIENTS://0.0.0.0:9092,INSIDE://10.0.0.9:9094"
    assert broker["advertised.listeners"] == (
        "CLIENTS://broker.example:9092,INSIDE://10.0.0.9:9094"
    )
    protocols = "CLIENTS:SASL_SSL,INSIDE:PLAINTEXT,CONTROLLER:PLAINTEXT"
    assert broker["listener.security.protocol.map"] == protocols
    assert broker["controller.quorum.bootstrap.servers"] == "10.0.0.1:9093"
    same = told.keys() - {"listeners", "advertised.listeners", "listener.security.protocol.map"}
    assert {key: broker[key] for key in same} == {key: told[key] for key in same}
    controller = settings_in(disk, "controller-100/controller.properties")
    assert controller["process.roles"] == "controller"
    assert controller["node.id"] == "100"
    assert controller["listeners"] == "CONTROLLER://10.0.0.1:9093"
    assert controller["log.dirs"] == f"{OUT}/controller-100/metadata"
    for key in ("min.insync.replicas", "authorizer.class.name", "super.users"):
        assert controller[key] == told[key]
    for key in ("fencepost.history.retention.ms", "broker.rack", "inter.broker.listener.name"):
        assert key not in controller
    assert not any(key.startswith("listener.name.clients") for key in controller)


def test_broker_without_configs_gets_default_properties() -> None:
    disk = grown()
    assert not [warning for warning in promote(disk).warnings if "clean" in warning]
    broker = settings_in(disk, "broker.properties")
    assert broker["listeners"] == broker["advertised.listeners"] == "PLAINTEXT://10.0.0.9:9092"
    assert broker["inter.broker.listener.name"] == "PLAINTEXT"
    assert broker["offsets.topic.replication.factor"] == "1"


# --- refusals and messages ---


def with_another_broker(disk: MemoryDisk) -> None:
    start(disk).metadata.append([RegisterBrokerRecord(7, uuid.uuid4(), 1, (), ())])


REFUSED = {
    "a cluster needs a controller": (wanted(()), None),
    "two controllers have the same id": (wanted((*ONE, ControllerAddress(100, "b", 1))), None),
    "two controllers have the same address": (wanted((*ONE, ONE[0]._replace(node_id=3))), None),
    "the id 1 is the broker's own": (wanted((ControllerAddress(1, "10.0.0.1", 9093),)), None),
    "belongs to node.id 1, but the configuration has 2": (wanted(settings={"node.id": "2"}), None),
    "controller of other brokers \\[7\\]": (None, with_another_broker),
    "has already joined controllers": (None, lambda disk: note_membership(disk, LOG)),
    "is not the data directory": (None, lambda disk: disk.remove(f"{LOG}/quorum-state")),
    "meta.properties is damaged": (
        None,
        lambda disk: write_file(disk, f"{DATA}/meta.properties", b"#crc32c=1\n", sync=True),
    ),
    "the controller 100 has been started": (
        None,
        lambda disk: (
            disk.make_directory(log_of(100)),
            write_file(disk, f"{log_of(100)}/quorum-state", b"{}", sync=True),
        ),
    ),
    "holds controller-5 of other controllers": (
        None,
        lambda disk: disk.make_directory(f"{OUT}/controller-5"),
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_promotion_changes_nothing(words: str) -> None:
    asked, harm = REFUSED[words]
    disk = grown()
    if harm is not None:
        harm(disk)
    done = len(disk.steps)
    with pytest.raises(PromotionError, match=words):
        promote(disk, asked)
    assert len(disk.steps) == done


def test_promotion_with_contradictory_configs_is_refused() -> None:
    with pytest.raises(ConfigError):
        promote(grown(), wanted(settings={"listeners": "X://:9092"}))


@pytest.mark.parametrize(
    ("settings", "controllers", "words"),
    [
        ({"listeners": "PLAINTEXT://127.0.0.1:9092"}, ONE, "other machines cannot reach"),
        ({"listeners": "PLAINTEXT://10.0.0.9:0"}, ONE, "another port after each start"),
        ({"authorizer.class.name": "A"}, ONE, "no broker can register"),
        ({"listeners": "SASL_PLAINTEXT://10.0.0.9:1"}, ONE, "requires a login"),
    ],
)
def test_promotion_plan_warns_of_unsuitable_configs(
    settings: dict[str, str], controllers: tuple[ControllerAddress, ...], words: str
) -> None:
    if settings.get("authorizer.class.name"):
        name = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
        settings = {**settings, "authorizer.class.name": name}
    found = promotion.make_plan(grown(), wanted(controllers, settings)).warnings
    assert [warning for warning in found if words in warning]
    plain = promotion.make_plan(grown(), wanted(controllers)).warnings
    assert not [warning for warning in plain if words in warning]


def test_promotion_warns_of_a_broker_that_was_not_stopped_cleanly() -> None:
    disk = grown()
    disk.remove(f"{DATA}/.kafka_cleanshutdown")
    assert [warning for warning in promote(disk).warnings if "not stopped cleanly" in warning]


def test_promotion_at_metadata_version_33_needs_controllers_of_4_4() -> None:
    disk = grown()
    assert not [warning for warning in promote(disk).warnings if "4.4" in warning]
    start(disk).metadata_log.append([FeatureLevelRecord("metadata.version", 33)])
    assert [
        warning for warning in promote(disk).warnings if "must be of Apache Kafka 4.4" in warning
    ]
    assert given(disk).features["metadata.version"] == 33


# --- repeated and interrupted promotions ---


def test_repeated_promotion_only_adds_new_metadata() -> None:
    disk = grown()
    promote(disk, wanted(THREE))
    owners = [
        read_meta_properties(disk, f"{OUT}/controller-{controller.node_id}/metadata")
        for controller in THREE
    ]
    files = {name: disk.read_file(f"{OUT}/{name}") for name in ("broker.properties",)}
    promote(disk, wanted(THREE))
    again = [
        read_meta_properties(disk, f"{OUT}/controller-{controller.node_id}/metadata")
        for controller in THREE
    ]
    assert again == owners
    assert {name: disk.read_file(f"{OUT}/{name}") for name in files} == files
    metadata = start(disk).metadata  # the standalone broker runs for a while
    assert promoted_as(disk, LOG) is not None, "a storage is no broker"
    create_topic(metadata, "later", 1, {})
    plan = promote(disk, wanted(THREE))
    for controller in THREE:
        (snapshot,) = snapshots(disk, log_of(controller.node_id))
        assert snapshot == plan.snapshot == promoted_as(disk, LOG)
        assert "later" in given(disk, controller.node_id).topics


@pytest.mark.slow
def test_promotion_interrupted_at_any_step_can_be_repeated() -> None:
    before = grown()
    expected = known(start(before.after_kill()).metadata.image)
    asked = wanted(THREE)
    whole = before.after_kill()
    plan = promote(whole, asked)
    image = given(whole, 101)
    ends = 0

    def judge(left: MemoryDisk) -> None:
        nonlocal ends
        assert known(start(left.after_kill()).metadata.image) == expected, "the broker itself"
        ready = []
        for controller in THREE:
            meta = owner(left, controller.node_id)
            if meta is not None:
                assert given(left, controller.node_id) == image, "Apache Kafka would start on it"
                ready.append(meta)
        if promoted_as(left, LOG) is not None:
            ends += 1
            assert promoted_as(left, LOG) == plan.snapshot
            assert len(ready) == len(THREE)
            assert settings_in(left, "broker.properties")
        promote(left, asked)
        assert promoted_as(left, LOG) == plan.snapshot
        for controller in THREE:
            assert given(left, controller.node_id) == image
            meta = owner(left, controller.node_id)
            assert meta is not None
            assert all(meta == known for known in ready if known.node_id == controller.node_id)
        assert len({str(head_of(left, controller.node_id)[1:]) for controller in THREE}) == 1

    assert each_end(before, lambda disk: promote(disk, asked), judge) > 60
    assert ends > 0


# --- demotion ---

METADATA = Path(OUT) / "controller-100" / "metadata"


def joined() -> MemoryDisk:
    """Return the directories of a stopped broker that has joined a controller."""
    disk = grown()
    promote(disk)
    note_membership(disk, LOG)
    return disk


def plan_back(disk: MemoryDisk, *controllers: Path) -> demotion.Demotion:
    return demotion.make_plan(disk, Path(DATA), controllers or [METADATA])


def test_demotion_interrupted_at_any_step_can_be_repeated() -> None:
    before = joined()
    expected = known(start(grown()).metadata.image)

    def back(disk: MemoryDisk) -> None:
        demotion.carry_out(disk, plan_back(disk), NOW_MS)

    def judge(left: MemoryDisk) -> None:
        if is_of_member(left, LOG):
            back(left)
        now = start(left).metadata
        assert {*now.topics} == {*expected.topics}
        assert known(now.image).configs == expected.configs
        assert (now.image.scram, now.image.acls) == (expected.scram, expected.acls)
        assert now.image.next_producer_id == 1000
        create_topic(now, "next", 1, {})
        assert "next" in start(left).metadata.topics

    assert each_end(before, back, judge) > 5


def test_standalone_metadata_has_no_replicas_on_other_brokers() -> None:
    image = start(grown()).metadata.image
    topic = image.topics["orders.eu"]
    mixed = replace(
        topic.partitions[0], replicas=(2, 1), isr=(1, 2), leader=2, adding_replicas=(3,)
    )
    topics = {**image.topics, topic.name: replace(topic, partitions=(mixed, *topic.partitions[1:]))}
    levels = {"share.version": 2, "group.version": 9, "metadata.version": 33, "of.tomorrow": 1}
    features = {**image.features, **levels}
    configs = {**image.configs, (4, "2"): {"x": "y"}}
    wide = replace(image, topics=topics, features=features, configs=configs)
    supported = {name: (low, high) for name, (low, high, _) in FEATURES.items()}
    directory = uuid.UUID(int=4)
    after, reasons = as_standalone(wide, 1, directory, supported)
    assert reasons == ["group.version is at level 9, and a standalone broker supports 0-1"]
    assert after.features["metadata.version"] == 33
    assert after.features["share.version"] == 2
    assert "of.tomorrow" not in after.features
    assert (4, "2") not in after.configs
    partition = after.topics["orders.eu"].partitions[0]
    assert (partition.replicas, partition.isr, partition.leader) == ((1,), (1,), 1)
    assert (partition.directories, partition.adding_replicas) == ((directory,), ())
    assert partition.leader_epoch == mixed.leader_epoch
    assert after.topics_by_id[topic.topic_id] is after.topics["orders.eu"]
    apart = replace(mixed, isr=(2,))
    stopped = replace(mixed, isr=(), elr=(1,), leader=NO_LEADER)
    topics = {topic.name: replace(topic, partitions=(apart, stopped, apart))}
    _, reasons = as_standalone(replace(image, topics=topics), 1, directory, {})
    assert reasons == ["it is not in the ISR of orders.eu, partitions 0, 2"]


def kill(disk: MemoryDisk) -> None:
    disk.remove(f"{DATA}/.kafka_cleanshutdown")


def without_snapshot(disk: MemoryDisk) -> None:
    (snapshot,) = snapshots(disk, log_of(100))
    disk.remove(f"{log_of(100)}/{snapshot.file_name}")


def of_another_cluster(disk: MemoryDisk) -> None:
    meta = MetaProperties("x" * 22, 100, uuid.UUID(int=5))
    write_meta_properties(disk, str(METADATA), meta)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (kill, "not stopped cleanly"),
        (of_another_cluster, "of another cluster"),
        (lambda disk: disk.remove(f"{METADATA}/meta.properties"), "is not a data directory"),
        (without_snapshot, "has no metadata log"),
        (lambda disk: disk.remove(f"{LOG}/quorum-state"), "has never been standalone"),
    ],
)
def test_refused_demotion_changes_nothing(harm: Any, words: str) -> None:
    disk = joined()
    harm(disk)
    done = len(disk.steps)
    with pytest.raises(PromotionError, match=words):
        plan_back(disk)
    assert len(disk.steps) == done


def test_demotion_needs_the_directories_of_a_majority_of_controllers() -> None:
    disk = grown()
    metadata = start(disk).metadata
    metadata.append(
        [
            RegisterControllerRecord(controller_id, uuid.uuid4(), False, (), ())
            for controller_id in (101, 102, 103)
        ]
    )
    write_clean_shutdown(disk, DATA, 1)
    promote(disk, wanted(THREE))
    note_membership(disk, LOG)
    rooms = [Path(OUT) / f"controller-{controller_id}" / "metadata" for controller_id in (101, 102)]
    with pytest.raises(PromotionError, match="the cluster has 3 controllers: the directories of 2"):
        plan_back(disk, rooms[0])
    with pytest.raises(PromotionError, match="name them"):
        demotion.make_plan(disk, Path(DATA), [])
    assert plan_back(disk, *rooms).image is not None


def test_successor_with_missing_or_older_metadata_is_refused() -> None:
    before = start(grown()).metadata.image
    after = without_leaders(before, 1)
    assert reasons_against_successor(before, after) == []
    assert reasons_against_successor(before, replace(after, next_producer_id=0)) == [
        "its next producer id is 0, but this broker has reserved all ids below 1000"
    ]
    ids = {
        topic_id: topic for topic_id, topic in after.topics_by_id.items() if topic.name != "wide"
    }
    assert reasons_against_successor(before, replace(after, topics_by_id=ids)) == [
        "it has no topic wide with this id"
    ]
    assert reasons_against_successor(before, before) == [
        "its topic orders.eu is in an earlier state",
        "its topic wide is in an earlier state",
    ]


@pytest.mark.parametrize(
    "text", ["", " a b ", "\ttab", "a\\b", "k\u00e9y \U0001f600", "line\nfeed", "=:#!", "#x", "a=b"]
)
def test_properties_survive_writing_and_reading(text: str) -> None:
    settings = {"a": text, f"k{text}": "b", "last": "c"}
    assert properties.parse(properties.text_of(settings)) == settings


# --- a metadata log without a writer ---


def test_torn_end_of_the_metadata_log_is_ignored() -> None:
    disk = grown()
    before = read_stopped(disk, LOG)
    (name,) = sorted(file for file in disk.list_directory(LOG) or () if file.endswith(".log"))
    content = disk.contents[disk.names[LOG][name]]
    content.extend(data_batch([b"\x01\x02\x00"], 5, base_offset=10_000)[:-3])
    assert read_stopped(disk, LOG) == before
    content.extend(bytes(5000))
    assert read_stopped(disk, LOG) == before


def test_metadata_log_is_read_from_snapshot_and_segments() -> None:
    disk = grown()
    now = start(disk)
    now.metadata.partition.flushes.roll(0)
    create_topic(now.metadata, "second", 1, {})
    now.metadata.write_snapshot()
    create_topic(now.metadata, "third", 1, {})
    now.metadata.partition.flushes.roll(0)
    create_topic(now.metadata, "fourth", 1, {})
    found = read_stopped(disk, LOG)
    assert found is not None
    assert found.image == replace(now.metadata.image, step=None)
    assert found.last_timestamp_ms == NOW_MS


def test_metadata_log_with_a_missing_segment_is_refused() -> None:
    disk = grown()
    now = start(disk)
    first = {file for file in disk.list_directory(LOG) or () if file.endswith(".log")}
    now.metadata.partition.flushes.roll(0)
    create_topic(now.metadata, "second", 1, {})
    for name in first:
        disk.remove(f"{LOG}/{name}")
    with pytest.raises(MetadataError, match="are missing"):
        read_stopped(disk, LOG)


def test_metadata_log_of_an_older_release_is_refused() -> None:
    disk = MemoryDisk()
    old_metadata.write_old_log(disk, DATA, OLD)
    with pytest.raises(MetadataError, match="older release"):
        read_stopped(disk, LOG)


def test_missing_metadata_log_is_read_as_none() -> None:
    assert read_stopped(MemoryDisk(), LOG) is None
