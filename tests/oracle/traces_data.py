"""Request sequences for partitions, topics, and their settings."""

from __future__ import annotations

import gzip
import struct
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import cramjam

from tests.oracle.tracer import Tracer
from tests.support import cluster, requests
from tests.support.batches import CONTROL, NOW_MS, batch, seal
from tests.support.raw import Answer
from tests.support.waits import until

UNKNOWN_ID = uuid.UUID(int=4711)


def produce(
    t: Tracer,
    version: int,
    topic: str,
    records: bytes | None,
    *,
    partition: int = 0,
    topic_id: uuid.UUID | None = None,
    **fields: Any,
) -> Answer:
    row = requests.produce_topic(topic, records, partition=partition, topic_id=topic_id)
    return t("produce", version, **requests.produce(row, **fields))


def refused_batches(t: Tracer) -> None:
    t.cluster.create_topic("refused", configs={"max.message.bytes": "500"})
    topic_id = t.cluster.topic_id("refused")
    good = batch([b"good"])
    torn = bytearray(good)
    torn[30] ^= 1
    for version in range(3, 14):
        name = {"topic_id": topic_id} if version == 13 else {}
        produce(t, version, "refused", good, **name)
        produce(t, version, "refused", bytes(torn), **name)
        produce(t, version, "no-such-topic", good, topic_id=UNKNOWN_ID)
        produce(t, version, "refused", good, partition=9, **name)
        produce(t, version, "refused", good, acks=2, **name)
        produce(t, version, "refused", batch([bytes(1000)]), **name)
    for version in (3, 8, 9):
        produce(t, version, "refused", b"")
        produce(t, version, "refused", good + good)
        produce(t, version, "refused", good[:-3])
        produce(t, version, "refused", good[:20])
        produce(t, version, "refused", seal(b"", count=0))
        produce(t, version, "refused", seal(good[61:], count=1, attributes=CONTROL))
        produce(t, version, "refused", seal(good[61:], count=1, attributes=7))
        produce(t, version, "refused", batch([b"from the future"], timestamp_ms=NOW_MS * 2))
        produce(t, version, "refused", seal(good[61:], count=1, magic=3))
        produce(t, version, "refused", batch([b"v"], producer_id=5, producer_epoch=-1, sequence=0))
    produce(t, 9, "__consumer_offsets", good)
    produce(t, 9, "__transaction_state", good)
    t.note("written", t.cluster.offset("refused"))


GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
XERIAL = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
COMPRESSORS: dict[int, Callable[[bytes], bytes]] = {
    GZIP: gzip.compress,
    SNAPPY: lambda data: bytes(cramjam.snappy.compress_raw(data)),
    ZSTD: lambda data: bytes(cramjam.zstd.compress(data)),
}


def records_that_lie(t: Tracer) -> None:
    """Batches with a valid CRC and a plausible header whose records do not match the header."""
    t.cluster.create_topic("liars")
    one, two = batch([b"one"])[61:], batch([b"one", b"two"])[61:]
    longer = bytes([one[0] + 2]) + one[1:]
    for records, count in ((one, 2), (one, 8), (two, 1), (b"junk" * 9, 1), (longer, 1)):
        produce(t, 9, "liars", seal(records, count=count))
        for codec, compress in COMPRESSORS.items():
            produce(t, 9, "liars", seal(compress(records), count=count, attributes=codec))
    for codec in (GZIP, SNAPPY):
        # Some clients never decompress the second part.
        parts = [COMPRESSORS[codec](part) for part in (one[:5], one[5:])]
        if codec == SNAPPY:
            parts = [XERIAL + struct.pack(">i", len(part)) + part for part in parts]
        produce(t, 9, "liars", seal(b"".join(parts), count=1, attributes=codec))
    produce(t, 9, "liars", seal(one[:20], count=15_000_000))
    produce(t, 9, "liars", seal(gzip.compress(one), count=15_000_000, attributes=GZIP))
    t.note("written", t.cluster.offset("liars"))


def records_that_do_not_inflate(t: Tracer) -> None:
    t.cluster.create_topic("packed")
    record = batch([b"one"])[61:]
    linked = bytes(cramjam.lz4.compress(record))
    for codec in (GZIP, SNAPPY, LZ4, ZSTD):
        produce(t, 9, "packed", seal(b"junk" * 9, count=1, attributes=codec))
        produce(t, 9, "packed", seal(b"", count=1, attributes=codec))
    produce(t, 9, "packed", seal(linked, count=1, attributes=LZ4))
    for codec, compress in COMPRESSORS.items():
        produce(t, 9, "packed", seal(compress(record)[:-2], count=1, attributes=codec))
    t.note("written", t.cluster.offset("packed"))


def offset_deltas_that_lie(t: Tracer) -> None:
    t.cluster.create_topic("deltas")
    one, two = batch([b"one"])[61:], batch([b"one", b"two"])[61:]
    for records in (one + one, two[len(one) :] + one):
        produce(t, 9, "deltas", seal(records, count=2))
        produce(t, 9, "deltas", seal(gzip.compress(records), count=2, attributes=GZIP))
    t.note("written", t.cluster.offset("deltas"))


def times_out_of_bounds(t: Tracer) -> None:
    """The response lists the invalid records, but at most a hundred."""
    settings = {"message.timestamp.before.max.ms": "1000", "message.timestamp.after.max.ms": "1000"}
    t.cluster.create_topic("bounded", configs=settings)
    for timestamp_ms in (NOW_MS * 2, NOW_MS // 2):
        late = batch([b"a", b"b", b"c"], timestamp_ms=timestamp_ms)
        for version in (7, 8, 9):
            produce(t, version, "bounded", late)
        packed = seal(gzip.compress(late[61:]), count=3, attributes=GZIP, timestamp_ms=timestamp_ms)
        produce(t, 9, "bounded", packed)
    many = batch([b"v"] * 150, timestamp_ms=NOW_MS * 2)
    answer = t.quietly("produce", 9, **requests.produce(requests.produce_topic("bounded", many)))
    part = answer["responses"][0]["partition_responses"][0]
    t.note("listed", len(part["record_errors"]))


def keyless_in_a_compacted_topic(t: Tracer) -> None:
    t.cluster.create_topic("compacted", configs={"cleanup.policy": "compact"})
    for version in (3, 8, 9):
        produce(t, version, "compacted", batch([b"no key"]))
        produce(t, version, "compacted", batch([b"no key", b"nor here"]))
        produce(t, version, "compacted", batch([b"v"], key=b"k"))


def fetch(
    t: Tracer,
    version: int,
    topic: str,
    offset: int,
    *,
    quietly: bool = False,
    partition: int = 0,
    partition_max_bytes: int = requests.MAX_BYTES,
    epoch: int = -1,
    topic_id: uuid.UUID | None = None,
    **fields: Any,
) -> Answer:
    row = requests.fetch_topic(
        topic,
        partition,
        topic_id=topic_id,
        fetch_offset=offset,
        partition_max_bytes=partition_max_bytes,
        current_leader_epoch=epoch,
    )
    return (t.quietly if quietly else t)("fetch", version, **requests.fetch(row, **fields))


def fetching_less_than_a_batch(t: Tracer) -> None:
    """The first batch is returned whole regardless of the limit, the second only if it fits."""
    t.cluster.create_topic("limited")
    for value in (b"one", b"two"):
        t.cluster.produce("limited", [value])
    size = len(batch([b"one"]))
    for limit in (0, 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1):
        for bounded in ("partition_max_bytes", "max_bytes"):
            answer = fetch(t, 12, "limited", 0, quietly=True, **{bounded: limit})
            part = answer["responses"][0]["partitions"][0]
            t.note(f"{bounded} {limit - size} beyond a batch", len(part["records"]))


def fetching(t: Tracer) -> None:
    t.cluster.create_topic("fetched")
    topic_id = t.cluster.topic_id("fetched")
    for i in range(4):
        t.cluster.produce("fetched", [b"%d" % i, b"%d again" % i])
    for version in range(4, 19):
        topic = {"topic_id": topic_id} if version >= 13 else {}
        for offset in (0, 3, 8, 9, -1):
            fetch(t, version, "fetched", offset, **topic)
        fetch(t, version, "fetched", 0, isolation_level=1, **topic)
        fetch(t, version, "fetched", 0, partition=9, **topic)
        fetch(t, version, "no-such-topic", 0, topic_id=UNKNOWN_ID)
        fetch(t, version, "fetched", 0, epoch=0, **topic)
        fetch(t, version, "fetched", 0, epoch=7, **topic)
        fetch(t, version, "fetched", 0, partition_max_bytes=1, **topic)
        fetch(t, version, "fetched", 0, max_bytes=1, **topic)
        fetch(t, version, "fetched", 0, session_id=4711, session_epoch=1, **topic)
        fetch(t, version, "fetched", 0, isolation_level=2, **topic)
        for epoch in (-1, 0, 7):
            for replica in (0, 1):
                state = {"replica_id": replica, "replica_state": {"replica_id": replica}}
                fetch(t, version, "fetched", 0, epoch=epoch, **state, **topic)
    for version in (7, 12):
        fetch(t, version, "fetched", 0, topics=[])


def fetch_sessions(t: Tracer) -> None:
    for version in (7, 11, 12, 13, 18):
        name = f"sessions-{version}"
        t.cluster.create_topic(name, 3)
        _one_session(t, version, name, t.cluster.topic_id(name))


def _one_session(t: Tracer, version: int, name: str, topic_id: str) -> None:
    session = 0

    def ask(epoch: int, *partitions: int, offset: int = 0, forget: tuple[int, ...] = ()) -> int:
        asked = requests.fetch_topic(name, *partitions, topic_id=topic_id, fetch_offset=offset)
        forgotten = requests.forgotten_topic(name, *forget, topic_id=topic_id)
        body = requests.fetch(
            *([asked] if partitions else []),
            session_id=session,
            session_epoch=epoch,
            forgotten_topics_data=[forgotten] if forget else [],
        )
        answer = t.quietly("fetch", version, **body)
        t.note(f"fetch v{version} of session at {epoch}: {partitions} from {offset}", answer)
        return int(answer["session_id"])

    ask(1, 0)  # there is no session 0
    session = ask(0, 0, 1)
    ask(1)
    ask(1)  # a repeated request
    t.cluster.produce(name, [b"a"], partition=1)
    ask(2)
    ask(3, 1, offset=1)
    ask(4, 2)
    ask(5)
    ask(6, 9)  # a partition that does not exist
    ask(7)
    ask(8, forget=(9, 0))
    t.cluster.produce(name, [b"b"], partition=0)
    t.cluster.produce(name, [b"c"], partition=2)
    ask(9)
    ask(10, 2, offset=7)  # out of range, until the offset is corrected
    ask(11, 2, offset=1)
    ask(12)
    ask(14)  # one epoch too far
    if version == 12:
        t.note("by id", t.quietly("fetch", 13, session_id=session, session_epoch=13, topics=[]))
    ask(13, forget=(1, 2))
    ask(14)  # the session was closed because it had no partitions
    session = ask(0, 1)
    session = ask(0, 2)  # closes one session and opens another one
    ask(-1, 0)
    ask(1)


def listing_offsets(t: Tracer) -> None:
    listed = partial(requests.list_offsets_topic, "listed")
    t.cluster.create_topic("listed", 2)
    for i in range(4):
        t.cluster.produce("listed", batch([b"v"], timestamp_ms=NOW_MS + i))
    for version in range(1, 12):
        for isolation in (0, 1):
            body = requests.list_offsets(listed(0), isolation_level=isolation)
            t("list_offsets", version, **body)
        for stamp in (-2, -3, -4, -5, -6, -7, 0, NOW_MS, NOW_MS + 2, NOW_MS + 4):
            t("list_offsets", version, **requests.list_offsets(listed(0, 1, timestamp=stamp)))
        for name, index, epoch in (
            ("no-such-topic", 0, -1),
            ("listed", 9, -1),
            ("listed", 0, 0),
            ("listed", 0, 7),
        ):
            row = requests.list_offsets_topic(name, index, current_leader_epoch=epoch)
            t("list_offsets", version, **requests.list_offsets(row))


def the_largest_time_of_what_is_left(t: Tracer) -> None:
    t.cluster.create_topic("left")
    for time_ms in (NOW_MS, NOW_MS - 2, NOW_MS - 1):
        t.cluster.produce("left", batch([b"v"], timestamp_ms=time_ms))
    for start in range(4):
        row = requests.delete_records_topic("left", 0, offset=start)
        t("delete_records", 2, **requests.delete_records(row))
        latest = requests.list_offsets_topic("left", 0, timestamp=-3)
        answer = t.quietly("list_offsets", 7, **requests.list_offsets(latest))
        t.note(f"from {start} on", answer["topics"][0]["partitions"][0]["offset"])


def leader_epochs(t: Tracer) -> None:
    t.cluster.create_topic("epochs", 2)
    t.cluster.produce("epochs", [b"v"])
    twice = requests.list_offsets_topic("epochs", 0, 0)
    t("list_offsets", 5, **requests.list_offsets(twice))
    rows = [requests.list_offsets_topic("epochs", index) for index in (0, 1, 0)]
    for named in (rows[:2], rows):
        t("list_offsets", 5, **requests.list_offsets(*named))
    t("list_offsets", 5, **requests.list_offsets(rows[0], isolation_level=2))
    for version in (2, 3, 4):
        for epoch, asked in ((-1, 0), (-1, 5), (0, 0), (7, 0), (-1, -1)):
            known = {"partition": 0, "current_leader_epoch": epoch, "leader_epoch": asked}
            row = requests.offset_for_leader_epoch_topic("epochs", known, 9)
            t("offset_for_leader_epoch", version, **requests.offset_for_leader_epoch(row))


def _metadata(t: Tracer, version: int, *topics: tuple[str | None, uuid.UUID | None]) -> None:
    """Request topics by name or id. The broker may create a topic that does not exist."""
    rows = [requests.named(name, topic_id) for name, topic_id in topics]
    t("metadata", version, **requests.metadata(*rows, allow_auto_topic_creation=True))


def metadata(t: Tracer) -> None:
    t.cluster.create_topic("described", 2)
    topic_id = t.cluster.topic_id("described")
    for version in range(14):
        topics = ["described"]
        if version < 13:
            topics += ["no-such-topic", "bad name", "__cluster_metadata"]
        t("metadata", version, **requests.metadata(*topics))
        _metadata(t, version, ("no-such-topic", None))
        if version >= 1:
            t("metadata", version, topics=[])
            everything = t.quietly("metadata", version, topics=None)
            t.note(
                f"metadata v{version} of all",
                [
                    x
                    for x in everything["topics"]
                    if x["name"] in ("described", "__consumer_offsets")
                ]
                and [x["is_internal"] for x in everything["topics"] if x["name"] == "described"],
            )
        named = partial(_metadata, t, version)
        if version >= 10:
            named((None, topic_id))
            named(("", topic_id))
            named(("no-such-topic", topic_id))
        if version >= 12:
            named((None, UNKNOWN_ID))
        elif version >= 10:
            named(("described", None), (None, None))
            named(("described", topic_id))
        if version >= 8:
            names = ("described", "no-such-topic", "no/such")
            body = requests.metadata(
                *names, allow_auto_topic_creation=True, include_topic_authorized_operations=True
            )
            t("metadata", version, **body)
    for version in range(3):
        t("describe_cluster", version, **requests.describe_cluster())
    t("describe_cluster", 1, **requests.describe_cluster(endpoint_type=2))
    body = requests.describe_topic_partitions("described", "no-such-topic")
    t("describe_topic_partitions", 0, **body)
    for names, at, index in (
        (["described", "no-such-topic"], "described", 1),
        (["described", "no-such-topic"], "described", 7),
        (["described", "no-such-topic"], "no-such-topic", 0),
        (["described", "no-such-topic"], "absent", 0),
        (["described", "no-such-topic"], "described", -1),
        ([], "described", -1),
    ):
        cursor = {"topic_name": at, "partition_index": index}
        body = requests.describe_topic_partitions(*names, cursor=cursor)
        t("describe_topic_partitions", 0, **body)


def finding_coordinators(t: Tracer) -> None:
    t.cluster.coordinator("g", 0)
    t.cluster.coordinator("x", 1)
    for version in range(7):
        for kind in (0, 1, 2, 3, -1):
            if version == 0 and kind:
                continue
            for key in ("g", ""):
                body = requests.find_coordinator(key, "another", key_type=kind)
                t("find_coordinator", version, **body)


TOPICS_TO_MAKE = (
    requests.new_topic("twice"),
    requests.new_topic("twice"),
    requests.new_topic("bad name"),
    requests.new_topic(""),
    requests.new_topic("__cluster_metadata"),
    requests.new_topic("none", 0),
    requests.new_topic("minus", -2),
    requests.new_topic("copies", 1, 2),
    requests.new_topic("nocopies", 1, 0),
    requests.new_topic("config", configs={"retention.ms": "x"}),
    requests.new_topic("nullconfig", configs={"retention.ms": None}),
    requests.assigned("both", [1], num_partitions=1, replication_factor=1),
    requests.new_topic("gap", -1, -1, assignments=[{"partition_index": 1, "broker_ids": [1]}]),
)
"""Invalid topics, which are refused for different reasons, and a valid topic."""


def creating_topics(t: Tracer) -> None:
    def create(version: int, *topics: requests.Body, **fields: Any) -> None:
        t("create_topics", version, **requests.create_topics(*topics, timeout=5000, **fields))

    for version in range(2, 8):
        made = requests.new_topic(f"made-v{version}", 2)
        create(version, made, *TOPICS_TO_MAKE, validate_only=False)
        create(version, made)
    create(5, requests.new_topic("defaults", -1, -1))
    create(7, requests.new_topic("with.dot"))
    # In the names of metrics, dots and underscores are the same.
    create(7, requests.new_topic("with_dot"))


def growing_and_deleting_topics(t: Tracer) -> None:
    t.cluster.create_topic("grown", 2)

    def grow(version: int, *topics: tuple[str, int], **fields: Any) -> None:
        rows = [requests.grown_topic(*topic) for topic in topics]
        t("create_partitions", version, **requests.create_partitions(*rows, **fields))

    for version in range(4):
        for name, count in (("grown", 2), ("grown", 1), ("no-such-topic", 3), ("grown", 0)):
            grow(version, (name, count))
        larger = "grown", 3 + version
        grow(version, larger, validate_only=True)
        grow(version, larger)
        until(lambda version=version: t.cluster.leaders("grown") == 3 + version, "more")
        grow(version, larger, larger)
    for version in range(1, 6):
        name = t.cluster.create_topic(f"deleted-v{version}")
        t("delete_topics", version, **requests.delete_topics(name, "no-such-topic"))
    t.cluster.create_topic("deleted-v6")
    unknown, nothing = requests.named(None, UNKNOWN_ID), requests.named(None)
    body = requests.delete_topics("deleted-v6", unknown, "no-such-topic", nothing)
    t("delete_topics", 6, **body)


TOPIC, BROKER, GROUP = 2, 4, 32


SETTINGS_SHOWN = [
    "cleanup.policy",
    "compression.type",
    "max.message.bytes",
    "message.timestamp.type",
    "min.insync.replicas",
    "retention.bytes",
    "retention.ms",
    "segment.bytes",
    "segment.ms",
    "delete.retention.ms",
    "flush.messages",
    "index.interval.bytes",
    "unclean.leader.election.enable",
]

SET, DELETE, APPEND, SUBTRACT = range(4)

GROUP_VALUES = {
    "share.session.timeout.ms": ("44999", "45000", "60000", "60001", "x", ""),
    "share.heartbeat.interval.ms": ("4999", "5000", "15000", "15001"),
    "share.assignment.interval.ms": ("-1", "0", "15000", "15001"),
    "share.record.lock.duration.ms": ("14999", "15000", "60000", "60001"),
    "share.delivery.count.limit": ("1", "2", "10", "11", " 7 "),
    "share.partition.max.record.locks": ("99", "100", "4000", "4001"),
    "share.auto.offset.reset": (
        *("earliest", "latest", "LATEST", "none", "", "by_duration", "by_duration:"),
        *("by_duration:PT1H", "by_duration:P1D", "by_duration:P1DT2H3M4.5S", "by_duration:pt1h"),
        *("by_duration:PT-1H", "by_duration:-PT1H", "by_duration:-PT-1H", "by_duration:PT2H-30M"),
        *(
            "by_duration:P",
            "by_duration:PT",
            "by_duration:PT1",
            "by_duration:P1H",
            "BY_DURATION:P1D",
        ),
        *("by_duration:P1DT", "by_duration:PT0S", "by_duration:PT1.S", "by_duration:PT.5S"),
    ),
    "share.isolation.level": ("read_committed", "read_uncommitted", "READ_COMMITTED", "x"),
    "share.renew.acknowledge.enable": ("true", "false", "FALSE", "x"),
    "streams.session.timeout.ms": ("44999", "45000", "60000", "60001"),
    "streams.heartbeat.interval.ms": ("4999", "5000", "15000", "15001"),
    "streams.assignment.interval.ms": ("-1", "0", "15000", "15001"),
    "streams.initial.rebalance.delay.ms": ("-1", "0", "100000000", "2147483648"),
    "streams.num.standby.replicas": ("-1", "0", "2", "3"),
    "share.no.such.key": ("1",),
    "group.share.session.timeout.ms": ("45000",),
}
"""Values of GROUP keys on both sides of the limits that the broker's settings impose."""


def shown(t: Tracer, version: int, kind: int, name: str, wanted: list[str] | None) -> None:
    row = requests.described_resource(kind, name, configuration_keys=wanted)
    body = requests.describe_configs(row, include_synonyms=True)
    answer = t.quietly("describe_configs", version, **body)
    (result,) = answer["results"]
    t.note(
        f"describe_configs v{version} {kind} {name} {wanted and len(wanted)}",
        [
            result["error_code"],
            *sorted(
                (
                    c["name"],
                    c["value"],
                    c["read_only"],
                    c.get("config_source"),
                    c["is_sensitive"],
                    tuple((s["name"], s["value"], s["source"]) for s in c["synonyms"]),
                    c.get("config_type"),
                )
                for c in result["configs"]
            ),
        ],
    )


def change(
    t: Tracer, version: int, kind: int, name: str, *configs: tuple[str, int, str | None]
) -> None:
    changes = [requests.config_op(key, value, operation) for key, operation, value in configs]
    row = requests.altered_resource(kind, name, *changes)
    t("incremental_alter_configs", version, **requests.incremental_alter_configs(row))


def describing_settings(t: Tracer) -> None:
    t.cluster.create_topic("set", configs={"retention.ms": "1000"})
    for version in range(1, 5):
        shown(t, version, TOPIC, "set", SETTINGS_SHOWN)
        shown(t, version, TOPIC, "no-such-topic", SETTINGS_SHOWN)
        shown(t, version, TOPIC, "bad name", SETTINGS_SHOWN)
        shown(t, version, TOPIC, "set", ["no.such.key"])
        shown(t, version, TOPIC, "set", [])
    shown(t, 4, BROKER, "99", ["log.retention.ms"])
    shown(t, 4, BROKER, "x", ["log.retention.ms"])
    shown(t, 4, 99, "set", SETTINGS_SHOWN)


def settings_of_every_kind_of_group(t: Tracer) -> None:
    """Set all keys of GROUP resources to values on both sides of their bounds, and delete them."""
    shown(t, 4, GROUP, "sg", None)
    for name, values in GROUP_VALUES.items():
        for value in values:
            change(t, 1, GROUP, "sg-tried", (name, SET, value))
    shown(t, 4, GROUP, "sg-tried", None)
    change(t, 1, GROUP, "sg", ("share.auto.offset.reset", SET, "earliest"), ("x", SET, "1"))
    change(
        *(t, 1, GROUP, "sg", ("share.auto.offset.reset", SET, "earliest")),
        ("streams.num.standby.replicas", SET, "1"),
        ("share.delivery.count.limit", SET, "7"),
        ("consumer.session.timeout.ms", SET, "50000"),
    )
    for operation in (APPEND, SUBTRACT):
        change(t, 1, GROUP, "sg", ("share.isolation.level", operation, "read_committed"))

    def is_known() -> bool:
        asked = requests.describe_configs(requests.described_resource(GROUP, "sg"))
        (found,) = t.quietly("describe_configs", 4, **asked)["results"]
        return {c["name"]: c["value"] for c in found["configs"]}[
            "share.delivery.count.limit"
        ] == "7"

    until(is_known, "the settings have arrived")
    for version in range(1, 5):
        shown(t, version, GROUP, "sg", None)
        shown(t, version, GROUP, "sg", ["share.delivery.count.limit", "no.such.key"])
    shown(t, 4, GROUP, "", None)
    change(t, 1, GROUP, "", ("share.delivery.count.limit", SET, "7"))
    change(t, 1, GROUP, "sg", ("share.delivery.count.limit", DELETE, None))
    change(t, 1, GROUP, "sg", ("no.such.key", DELETE, None))
    until(lambda: not is_known(), "one has gone")
    shown(t, 4, GROUP, "sg", None)


def changing_settings(t: Tracer) -> None:
    t.cluster.create_topic("changed", configs={"retention.ms": "1000"})
    for version in (0, 1):
        change(t, version, TOPIC, "changed", ("retention.ms", SET, "2000"))
        change(t, version, TOPIC, "changed", ("retention.ms", SET, "x"))
        change(t, version, TOPIC, "changed", ("retention.ms", SET, None))
        change(t, version, TOPIC, "changed", ("no.such.key", SET, "1"))
        change(t, version, TOPIC, "changed", ("cleanup.policy", APPEND, "compact"))
        change(t, version, TOPIC, "changed", ("cleanup.policy", SUBTRACT, "compact"))
        change(t, version, TOPIC, "changed", ("retention.ms", APPEND, "1"))
        change(t, version, TOPIC, "changed", ("retention.ms", 9, "1"))
        change(
            t, version, TOPIC, "changed", ("retention.ms", SET, "1"), ("retention.ms", DELETE, None)
        )
        change(t, version, TOPIC, "no-such-topic", ("retention.ms", SET, "1"))
        change(t, version, 99, "changed", ("retention.ms", SET, "1"))
        change(t, version, TOPIC, "changed", ("retention.ms", DELETE, None))
    for name in ("no-such-topic", "no/such", ""):
        change(t, 1, TOPIC, name, ("retention.ms", APPEND, "1"))
        change(t, 1, TOPIC, name, ("cleanup.policy", APPEND, "compact"))
        change(t, 1, TOPIC, name, ("retention.ms", SET, "x"))
        change(t, 1, TOPIC, name)
    for version in range(3):
        for name, key, value in (
            ("changed", "retention.ms", "3000"),
            ("changed", "retention.ms", "x"),
            ("changed", "retention.bytes", "-2"),
            ("no-such-topic", "retention.ms", "1"),
            ("no-such-topic", "retention.ms", "x"),
            ("", "retention.ms", "1"),
            ("changed", "retention.ms", "3000"),
        ):
            row = requests.altered_resource(TOPIC, name, requests.config_op(key, value))
            t("alter_configs", version, **requests.alter_configs(row))

    def is_changed() -> bool:
        row = requests.described_resource(TOPIC, "changed", "retention.ms")
        answer = t.cluster.ask("describe_configs", 4, requests.describe_configs(row))
        return bool(answer["results"][0]["configs"][0]["value"] == "3000")

    until(is_changed, "the last change")
    shown(t, 4, TOPIC, "changed", SETTINGS_SHOWN)


def settings_of_state_topics(t: Tracer) -> None:
    """Change settings, but only to values with which no state is lost until they are reset."""
    t.cluster.coordinator("state", cluster.GROUP)
    name = "__consumer_offsets"
    for key, value in (
        ("retention.bytes", "9000000000"),
        ("delete.retention.ms", "80000000"),
        ("max.message.bytes", "1000000"),
        ("min.compaction.lag.ms", "9000000000"),
        ("message.timestamp.after.max.ms", "3000000"),
    ):
        change(t, 1, TOPIC, name, (key, SET, value))
        change(t, 1, TOPIC, name, (key, DELETE, None))
    change(t, 1, TOPIC, name, ("delete.retention.ms", SET, "86400000"))
    change(t, 1, TOPIC, name, ("delete.retention.ms", DELETE, None))
    shown(t, 4, TOPIC, name, ["cleanup.policy", "max.message.bytes", "delete.retention.ms"])


def deleting_records(t: Tracer) -> None:
    t.cluster.create_topic("trimmed")
    t.cluster.create_topic("trimmed-compact", configs={"cleanup.policy": "compact"})
    for i in range(6):
        t.cluster.produce("trimmed", [b"%d" % i])
    for version in range(3):
        for name, index, offset in (
            ("trimmed", 0, 2 + version),
            ("trimmed", 0, 1),
            ("trimmed", 0, 7),
            ("trimmed", 0, -2),
            ("trimmed", 9, 0),
            ("no-such-topic", 0, 0),
            ("trimmed-compact", 0, 0),
            ("__consumer_offsets", 0, 0),
        ):
            row = requests.delete_records_topic(name, index, offset=offset)
            t("delete_records", version, **requests.delete_records(row))
    t("delete_records", 2, **requests.delete_records(requests.delete_records_topic("trimmed", 0)))
    fetch(t, 11, "trimmed", 0)
    fetch(t, 11, "trimmed", 6)


def old_message_formats(t: Tracer) -> None:
    """From Produce v3 on, the formats 0 and 1 are refused."""
    t.cluster.create_topic("old-format")
    body = struct.pack(">bb", 1, 0) + struct.pack(">q", NOW_MS) + struct.pack(">i", -1)
    body += struct.pack(">i", 1) + b"v"
    message = struct.pack(">qiI", 0, 4 + len(body), 0) + body
    for version in (3, 9):
        produce(t, version, "old-format", message)


def names_as_long_as_a_string_may_be(t: Tracer) -> None:
    """Error messages contain the names, and the responses must fit the encoding of strings."""
    name = "w" * 32_767
    for version in (1, 2, 4):
        resource = requests.described_resource(TOPIC, name, configuration_keys=[])
        t("describe_configs", version, **requests.describe_configs(resource))
    for version in (0, 1, 2):
        resource = requests.altered_resource(TOPIC, name)
        t("alter_configs", version, **requests.alter_configs(resource))
    for version in (0, 3):
        body = requests.create_partitions(requests.grown_topic(name, 2))
        t("create_partitions", version, **body)
    for version in (2, 5, 7):
        t("create_topics", version, **requests.create_topics(requests.new_topic(name)))
    for version in (3, 8, 9):
        produce(t, version, name, batch([b"v"]))
    change(t, 0, TOPIC, name, ("retention.ms", 0, "1000"))


TRACES = [
    names_as_long_as_a_string_may_be,
    refused_batches,
    records_that_lie,
    records_that_do_not_inflate,
    offset_deltas_that_lie,
    times_out_of_bounds,
    keyless_in_a_compacted_topic,
    fetching,
    fetching_less_than_a_batch,
    fetch_sessions,
    listing_offsets,
    the_largest_time_of_what_is_left,
    leader_epochs,
    metadata,
    finding_coordinators,
    creating_topics,
    growing_and_deleting_topics,
    describing_settings,
    settings_of_every_kind_of_group,
    changing_settings,
    settings_of_state_topics,
    deleting_records,
    old_message_formats,
]
