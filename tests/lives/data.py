"""Requests of readers and of administrators."""

from __future__ import annotations

from tests.lives.draw import UNKNOWN_ID, Draw, Later, Request
from tests.lives.knowledge import NO_TOPIC
from tests.support import requests
from tests.support.requests import Body

TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32

TOPIC_SETTINGS = (
    ("retention.ms", ("-1", "100000000", "1", "x", None)),
    ("retention.bytes", ("-1", "1000", "-2")),
    ("cleanup.policy", ("delete", "compact", "compact,delete", "", "nonsense")),
    ("max.message.bytes", ("1048588", "100", "0", "-1")),
    ("min.insync.replicas", ("1", "1", "1", "1", "1", "2", "0")),
    ("segment.bytes", ("1048576", "1", "2000000")),
    ("segment.ms", ("1000", "604800000")),
    ("compression.type", ("producer", "gzip", "lz4", "zstd", "snappy", "uncompressed", "best")),
    ("message.timestamp.type", ("CreateTime", "LogAppendTime")),
    ("delete.retention.ms", ("86400000", "0", "9223372036854775807")),
    ("flush.messages", ("9223372036854775807", "1", "0")),
    ("message.timestamp.after.max.ms", ("3600000", "0", "9223372036854775807")),
    ("min.cleanable.dirty.ratio", ("0.5", "0.01", "2")),
    ("no.such.setting", ("1",)),
)
GROUP_SETTINGS = (
    ("consumer.session.timeout.ms", ("45000", "500", "1", "60000")),
    ("consumer.heartbeat.interval.ms", ("5000", "200", "100000")),
    ("no.such.setting", ("1",)),
)
BROKER_SETTINGS = (
    ("log.retention.ms", ("-1", "100000000")),
    ("message.max.bytes", ("1048588", "2000000", "-1")),
    ("node.id", ("7",)),
    ("no.such.setting", ("1",)),
)


def _offset(d: Draw, at: tuple[str, int]) -> Later:
    """Draw an offset near the start or the end."""
    fixed = d.pick([0, 0, 0, 0, 0, 1, 5, -1, 2**40])
    shift = d.pick([0, 0, -1, -3, 1])
    near_end = d.chance(0.5)
    return lambda k: max(0, k.ends.get(at, 0) + shift) if near_end else fixed


def _epoch(d: Draw) -> int:
    return d.rng.choices((-1, 0, 1, 2, 9), (90, 3, 3, 2, 2))[0]


def _fetched_id(d: Draw, name: str) -> Later:
    drawn = d.topic_id(name)
    # Apache Kafka's fetch sessions sometimes fail on the zero id.
    return lambda k: UNKNOWN_ID if d.calm and drawn(k) == NO_TOPIC else drawn(k)


def fetch(d: Draw, client: int) -> Request:
    """Draw a Fetch without a session, at the start of a session, or within a session."""

    def topic() -> Body:
        name, index = d.readable(), d.partition()
        return requests.fetch_topic(
            name,
            index,
            topic_id=_fetched_id(d, name),
            current_leader_epoch=_epoch(d),
            fetch_offset=_offset(d, (name, index)),
            last_fetched_epoch=_epoch(d),
            log_start_offset=-1,
            partition_max_bytes=d.pick([1, 100, 1 << 20, 0]),
        )

    kind = d.rng.choices(("none", "first", "next", "wrong"), (4, 2, 4, 1))[0]
    session: tuple[Later, Later]
    if kind == "none":
        session = lambda _: 0, lambda _: -1
    elif kind == "first":
        session = lambda k: k.sessions.get(client, (0, 0))[0], lambda _: 0
    elif kind == "next":
        session = (
            lambda k: k.sessions.get(client, (0, 0))[0],
            lambda k: k.sessions.get(client, (0, 0))[1],
        )
    else:
        number = d.pick([1, -1, 4711 if d.calm else 2**31 - 1])
        epoch = d.pick([0, 1, 5, -1])
        session = lambda _: number, lambda _: epoch
    outside = kind == "none" or not d.calm
    topics = [topic() for _ in range(d.rng.choices((0, 1, 2), (1, 6, 2))[0])]
    forgotten = [d.readable() for _ in range(d.pick([0, 0, 0, 1]))]
    wait = 0 if d.calm else d.rng.choices((0, 20, 300, -1), (6, 4, 2, 0.2))[0]
    return Request(
        "fetch",
        d.version("fetch"),
        requests.fetch(
            *topics,
            replica_id=d.rng.choices((-1, -2, 0, 1), (97, 1, 1, 1))[0],
            max_wait=wait,
            min_bytes=d.pick([0, 1, 1, 1_000]),
            max_bytes=d.pick([1, 1_000, 1 << 20, 0]),
            # In Apache Kafka, even a Fetch with an invalid isolation level can begin a session.
            isolation_level=d.rng.choices((0, 1, 2), (5, 5, 0.2 if outside else 0))[0],
            session_id=session[0],
            session_epoch=session[1],
            forgotten_topics_data=[
                requests.forgotten_topic(name, d.partition(), topic_id=topic_id)
                for name, topic_id in ((name, _fetched_id(d, name)) for name in forgotten)
            ],
        ),
        notes={"client": client},
    )


def list_offsets(d: Draw) -> Request:
    def topic() -> Body:
        return requests.list_offsets_topic(
            d.readable(),
            d.partition(),
            current_leader_epoch=_epoch(d),
            timestamp=d.pick([-1, -2, -3, -4, -5, -6, 0, 10**12, 10**13, 2**62]),
        )

    return Request(
        "list_offsets",
        d.version("list_offsets"),
        requests.list_offsets(
            replica_id=d.rng.choices((-1, -2, 1), (97, 2, 1))[0],
            isolation_level=d.rng.choices((0, 1, 2), (5, 5, 0.2))[0],
            topics=d.some(topic),
            timeout=1_000,
        ),
    )


def offset_for_leader_epoch(d: Draw) -> Request:
    return Request(
        "offset_for_leader_epoch",
        d.version("offset_for_leader_epoch"),
        requests.offset_for_leader_epoch(
            replica_id=d.rng.choices((-1, -2, 1), (8, 1, 1))[0],
            topics=d.some(
                lambda: requests.offset_for_leader_epoch_topic(
                    d.readable(),
                    d.partition(),
                    current_leader_epoch=_epoch(d),
                    leader_epoch=d.pick([0, 1, 2, -1, 99]),
                )
            ),
        ),
    )


def _some_id(d: Draw, name: str) -> Later:
    """Draw a topic id, or no id if the request names the topic."""
    return d.topic_id(name) if d.chance(0.4) else lambda _: NO_TOPIC


def metadata(d: Draw) -> Request:
    # Apache Kafka responds with a single row if the name and the id of a topic are both sent.
    all_by_id = d.calm and d.chance(0.3)

    def topic() -> Body:
        name = d.topic()
        topic_id = _some_id(d, name)
        by_id = all_by_id if d.calm else d.chance(0.3)
        return requests.named(None, topic_id) if by_id else requests.named(name)

    version = d.version("metadata")
    wanted = None if d.chance(0.15) and version >= 1 else d.some(topic)
    if version < 10 and wanted:
        for row in wanted:
            row["name"] = row["name"] or d.pools.topics[0]
    return Request(
        "metadata",
        version,
        requests.metadata(
            topics=wanted,
            allow_auto_topic_creation=d.chance(0.1),
            include_topic_authorized_operations=d.chance(0.1),
            include_cluster_authorized_operations=d.chance(0.1),
        ),
    )


def describe_topic_partitions(d: Draw) -> Request:
    names = d.some(d.topic)
    if d.calm and not names:
        names = [d.topic()]
    cursor = {"topic_name": d.topic(), "partition_index": d.partition()}
    return Request(
        "describe_topic_partitions",
        0,
        requests.describe_topic_partitions(
            *names,
            response_partition_limit=d.pick([2_000, 1, 2, 0, -1]),
            cursor=cursor if d.chance(0.2) else None,
        ),
    )


def _settings(d: Draw, kind: int) -> tuple[tuple[str, tuple[str | None, ...]], ...]:
    if kind == TOPIC:
        return TOPIC_SETTINGS
    return GROUP_SETTINGS if kind == GROUP else BROKER_SETTINGS


def _resource(d: Draw) -> tuple[int, str]:
    kind = d.rng.choices(
        (TOPIC, GROUP, BROKER, BROKER_LOGGER, CLIENT_METRICS, 0, 99), (20, 6, 3, 1, 1, 1, 1)
    )[0]
    if kind == TOPIC:
        return kind, d.topic()
    if kind == GROUP:
        return kind, d.group()
    return kind, d.pick(["", "1", "2", "1", "metrics", d.odd()])


def create_topics(d: Draw, name: str | None = None) -> Request:
    """Draw a CreateTopics of several topics, or a valid CreateTopics of ``name``."""

    def topic() -> Body:
        own = name or d.topic()
        proper = name is not None or d.chance(0.8)
        configs: dict[str, str | None] = {}
        if d.chance(0.2):
            key, values = d.pick(TOPIC_SETTINGS)
            configs[key] = d.pick(values)
        if name is not None:
            configs = {}
        if not proper and d.chance(0.3):
            replicas = d.pick([[1], [2], [], [1, 1]])
            return requests.assigned(own, replicas, configs=configs)
        return requests.new_topic(
            own,
            d.pick([3, 3, 3, 1, 2]) if proper else d.small(),
            1 if proper else d.pick([-1, 1, 2, 0]),
            configs=configs,
        )

    return Request(
        "create_topics",
        d.version("create_topics"),
        requests.create_topics(
            topics=[topic()] if name else d.some(topic, 2),
            validate_only=name is None and d.chance(0.1),
        ),
    )


def delete_topics(d: Draw) -> Request:
    # Apache Kafka would delete coordinators' topics, and merges the rows of a name and its id.
    names = d.some(d.readable, 2)
    by_id = [d.chance(0.4)] * len(names) if d.calm else [d.chance(0.4) for _ in names]
    return Request(
        "delete_topics",
        d.version("delete_topics"),
        requests.delete_topics(
            topic_names=names,
            topics=[
                requests.named(None, d.topic_id(name)) if with_id else requests.named(name)
                for name, with_id in zip(names, by_id, strict=True)
            ],
        ),
    )


def create_partitions(d: Draw) -> Request:
    def topic() -> Body:
        name, count = d.topic(), d.pick([2, 3, 4, 4, 0, -1, 1])
        replicas: list[list[int]] = [] if d.chance(0.9) else [d.pick([[1], [2], []])]
        return requests.grown_topic(name, count, *replicas)

    return Request(
        "create_partitions",
        d.version("create_partitions"),
        requests.create_partitions(topics=d.some(topic, 2), validate_only=d.chance(0.1)),
    )


def delete_records(d: Draw) -> Request:
    def topic() -> Body:
        name, index = d.topic(), d.partition()
        return requests.delete_records_topic(name, index, offset=_offset(d, (name, index)))

    version = d.version("delete_records")
    return Request("delete_records", version, requests.delete_records(*d.some(topic)))


def describe_configs(d: Draw) -> Request:
    def resource() -> Body:
        kind, name = _resource(d)
        keys = [key for key, _ in _settings(d, kind)]
        wanted = None if d.chance(0.3) else d.some(lambda: d.pick(keys))
        return requests.described_resource(kind, name, configuration_keys=wanted)

    return Request(
        "describe_configs",
        d.version("describe_configs"),
        requests.describe_configs(
            resources=d.some(resource, 2),
            include_synonyms=d.chance(0.3),
            include_documentation=d.chance(0.1),
        ),
    )


def alter_configs(d: Draw) -> Request:
    def resource() -> Body:
        kind, name = _resource(d)
        rows = [d.pick(_settings(d, kind)) for _ in range(d.rng.randint(0, 2))]
        changes = [requests.config_op(key, d.pick(values)) for key, values in rows]
        return requests.altered_resource(kind, name, *changes)

    version = d.version("alter_configs")
    resources = d.some(resource, 2)
    body = requests.alter_configs(*resources, validate_only=d.chance(0.2))
    return Request("alter_configs", version, body)


def incremental_alter_configs(d: Draw) -> Request:
    def change(key: str, values: tuple[str | None, ...]) -> Body:
        operation = d.rng.choices((0, 1, 2, 3, 9), (6, 4, 1, 1, 0.3))[0]
        return requests.config_op(key, d.pick(values), operation)

    def resource() -> Body:
        kind, name = _resource(d)
        rows = [d.pick(_settings(d, kind)) for _ in range(d.rng.randint(0, 2))]
        return requests.altered_resource(kind, name, *(change(*row) for row in rows))

    return Request(
        "incremental_alter_configs",
        d.version("incremental_alter_configs"),
        requests.incremental_alter_configs(
            resources=d.some(resource, 2), validate_only=d.chance(0.2)
        ),
    )


def update_features(d: Draw) -> Request:
    level = d.rng.choices((2, 1, 0, 3, -1), (8, 3, 2, 1, 0.5))[0]
    name = "transaction.version" if d.chance(0.85) else d.pick(["group.version", "nonsense", ""])
    return Request(
        "update_features",
        d.version("update_features"),
        requests.update_features(
            requests.feature_update(
                name,
                level,
                d.rng.choices((1, 2, 3, 0, 9), (5, 5, 1, 0.3, 0.3))[0],
                allow_downgrade=d.chance(0.7),
            ),
            validate_only=d.chance(0.1),
        ),
    )


def describe_cluster(d: Draw) -> Request:
    return Request(
        "describe_cluster",
        d.version("describe_cluster"),
        requests.describe_cluster(
            include_cluster_authorized_operations=d.chance(0.2),
            endpoint_type=d.rng.choices((1, 2, 0), (8, 1, 1))[0],
            include_fenced_brokers=d.chance(0.2),
        ),
    )


def api_versions(d: Draw) -> Request:
    return Request(
        "api_versions",
        d.version("api_versions"),
        requests.api_versions(
            client_software_name=d.pick(["lives", "a.b-c", "", "bad name", d.odd()]),
            client_software_version=d.pick(["1", "", "?"]),
            cluster_id=d.pick([None, d.odd()]),
            node_id=d.pick([-1, 1]),
        ),
    )
