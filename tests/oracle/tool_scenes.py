"""Runs of Apache Kafka's tools on either broker; each tool has a function, its *scene*."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial

from tests.oracle.desk import Desk
from tests.support.cluster import GROUP
from tests.support.waits import until

PACKAGE = "org.apache.kafka.tools."
ACLS = PACKAGE + "AclCommand"
API_VERSIONS = PACKAGE + "BrokerApiVersionsCommand"
CLIENT_METRICS = PACKAGE + "ClientMetricsCommand"
CLUSTER = PACKAGE + "ClusterTool"
CONFIGS = PACKAGE + "ConfigCommand"
CONSOLE_CONSUMER = PACKAGE + "consumer.ConsoleConsumer"
CONSOLE_PRODUCER = PACKAGE + "ConsoleProducer"
CONSOLE_SHARE_CONSUMER = PACKAGE + "consumer.ConsoleShareConsumer"
CONSUMER_GROUPS = PACKAGE + "consumer.group.ConsumerGroupCommand"
CONSUMER_PERFORMANCE = PACKAGE + "ConsumerPerformance"
DELEGATION_TOKENS = PACKAGE + "DelegationTokenCommand"
DELETE_RECORDS = PACKAGE + "DeleteRecordsCommand"
DUMP_LOG = PACKAGE + "DumpLogSegments"
END_TO_END = PACKAGE + "EndToEndLatency"
FEATURES = PACKAGE + "FeatureCommand"
GET_OFFSETS = PACKAGE + "GetOffsetShell"
GROUPS = PACKAGE + "GroupsCommand"
LEADER_ELECTION = PACKAGE + "LeaderElectionCommand"
LOG_DIRS = PACKAGE + "LogDirsCommand"
METADATA_QUORUM = PACKAGE + "MetadataQuorumCommand"
PRODUCER_PERFORMANCE = PACKAGE + "ProducerPerformance"
REASSIGN = PACKAGE + "reassign.ReassignPartitionsCommand"
REPLICA_VERIFICATION = PACKAGE + "ReplicaVerificationTool"
SHARE_CONSUMER_PERFORMANCE = PACKAGE + "ShareConsumerPerformance"
SHARE_GROUPS = PACKAGE + "consumer.group.ShareGroupCommand"
STREAMS_GROUPS = PACKAGE + "streams.StreamsGroupCommand"
STREAMS_RESETTER = PACKAGE + "StreamsResetter"
TOPICS = PACKAGE + "TopicCommand"
VERIFIABLE_CONSUMER = PACKAGE + "VerifiableConsumer"
VERIFIABLE_PRODUCER = PACKAGE + "VerifiableProducer"

LATEST_METADATA = "4.4-IV2"
"""The name of the highest level of metadata.version that is stable in Apache Kafka 4.4."""

SOON_MS = 3_000
"""Time limit of tools that run until they are interrupted."""

Scene = Callable[[Desk], None]


def filled(desk: Desk, topic: str, partitions: int = 2, each: int = 5) -> str:
    """Create a topic with the same records in each partition."""
    # The raw client's records have a fixed timestamp, so retention must not delete old records.
    desk.cluster.create_topic(topic, partitions, configs={"retention.ms": "-1"})
    for partition in range(partitions):
        for number in range(each):
            desk.cluster.produce(topic, [b"value %d" % number], partition=partition)
    return topic


def committed(desk: Desk, group: str, topic: str, offsets: Mapping[int, int]) -> str:
    """Create an empty group with committed offsets."""
    desk.cluster.coordinator(group, GROUP)
    parts = [
        {"partition_index": index, "committed_offset": offset, "committed_leader_epoch": -1}
        for index, offset in offsets.items()
    ]
    desk.cluster.call(
        "offset_commit",
        8,
        group_id=group,
        generation_id_or_member_epoch=-1,
        topics=[{"name": topic, "partitions": parts}],
    )
    return group


def is_gone(desk: Desk, topic: str) -> bool:
    (found,) = desk.cluster.call("metadata", 8, topics=[{"name": topic}])["topics"]
    return bool(found["error_code"] == "unknown_topic_or_partition")


def topics(desk: Desk) -> None:
    tool = partial(desk.run, TOPICS)
    tool("--list")
    tool("--create", "--topic", "made", "--partitions", "2", "--config", "retention.ms=1000")
    tool("--create", "--topic", "made")
    tool("--create", "--topic", "made", "--if-not-exists")
    tool("--create", "--topic", "assigned", "--replica-assignment", "1,1,1")
    tool("--create", "--topic", "elsewhere", "--replica-assignment", "1:2")
    tool("--create", "--topic", "replicated", "--replication-factor", "3")
    tool("--create", "--topic", "wrong", "--config", "no.such.key=1")
    tool("--create", "--topic", "wrong", "--config", "retention.ms=soon")
    tool("--create", "--topic", "not a name")
    until(lambda: desk.cluster.leaders("assigned") == 3, "leaders")
    tool("--list")
    tool("--list", "--exclude-internal", "--topic", "ma.*")
    described = tool("--describe", "--topic", "made")
    tool("--describe", "--exclude-internal")
    topic_id = re.search(r"TopicId: (\S+)", described)
    assert topic_id is not None
    tool("--describe", "--topic-id", topic_id[1])
    tool("--describe", "--topic", "nowhere")
    tool("--describe", "--topic", "nowhere", "--if-exists")
    for only in (
        "--under-replicated-partitions",
        "--unavailable-partitions",
        "--under-min-isr-partitions",
        "--at-min-isr-partitions",
        "--topics-with-overrides",
    ):
        tool("--describe", only, "--exclude-internal")
    for count in ("4", "4", "1"):
        tool("--alter", "--topic", "made", "--partitions", count)
    tool("--alter", "--topic", "nowhere", "--partitions", "2")
    tool("--alter", "--topic", "nowhere", "--partitions", "2", "--if-exists")
    tool("--delete", "--topic", "nowhere")
    tool("--delete", "--topic", "assigned")
    tool("--delete", "--topic", "made")
    for name in ("assigned", "made"):
        until(lambda name=name: is_gone(desk, name), f"{name} is gone")
    tool("--list")
    tool("--describe", "--list")


def retention(desk: Desk) -> str:
    """Return the effective ``log.retention.ms``; Apache Kafka changes it after the response."""
    asked = {"resource_type": 4, "resource_name": "1", "configuration_keys": ["log.retention.ms"]}
    (found,) = desk.cluster.call("describe_configs", 4, resources=[asked])["results"]
    return str(found["configs"][0]["value"])


def configs(desk: Desk) -> None:
    desk.cluster.create_topic("configured")
    tool = partial(desk.run, CONFIGS)

    def change(kind: str, name: str, *words: str) -> None:
        tool("--alter", "--entity-type", kind, "--entity-name", name, *words)
        tool("--describe", "--entity-type", kind, "--entity-name", name)

    change("topics", "configured", "--add-config", "retention.ms=5,cleanup.policy=[compact,delete]")
    change("topics", "configured", "--delete-config", "cleanup.policy")
    change("topics", "configured", "--add-config", "no.such.key=1")
    change("topics", "configured", "--delete-config", "no.such.key")
    change("topics", "nowhere", "--add-config", "retention.ms=5")
    change("groups", "configured", "--add-config", "consumer.session.timeout.ms=50000")
    change("groups", "configured", "--add-config", "consumer.session.timeout.ms=1")
    here = ("--entity-type", "brokers", "--entity-name", "1")
    for how, value in (("--add-config", "log.retention.ms=100000000"), ("--delete-config", "")):
        tool("--alter", *here, how, value or "log.retention.ms")
        wanted = "100000000" if value else "-1"
        until(lambda wanted=wanted: retention(desk) == wanted, "the broker has heard of it")
        tool("--describe", *here)
    tool("--alter", "--entity-type", "brokers", "--entity-default", "--add-config", "a.b=1")
    for kind in ("topics", "brokers", "groups", "users", "clients", "ips", "client-metrics"):
        tool("--describe", "--entity-type", kind)
    for kind in ("users", "clients", "ips", "brokers"):
        tool("--describe", "--entity-type", kind, "--entity-default")
    tool("--describe", "--entity-type", "users", "--entity-name", "alice")
    tool("--describe", "--users", "alice", "--clients", "app")
    tool("--describe", "--ips", "10.0.0.1")
    tool("--describe", "--entity-type", "ips", "--entity-name", "10.0.0.1", only="quota")
    tool("--describe", "--all", "--topic", "configured", only=" retention.ms=")
    tool("--describe", "--entity-type", "nothing")
    for kind, name, quota in (
        ("users", "alice", "producer_byte_rate=1000"),
        ("clients", "app", "request_percentage=50"),
        ("ips", "10.0.0.1", "connection_creation_rate=5"),
        ("users", "alice", "SCRAM-SHA-256=[iterations=4096,password=secret]"),
        ("users", "alice", "no_such_rate=1"),
    ):
        tool("--alter", "--entity-type", kind, "--entity-name", name, "--add-config", quota)
        tool("--describe", "--entity-type", kind, "--entity-name", name)
        key = quota.split("=")[0]
        tool("--alter", "--entity-type", kind, "--entity-name", name, "--delete-config", key)


def log_dirs(desk: Desk) -> None:
    filled(desk, "sized")
    tool = partial(desk.run, LOG_DIRS, "--describe")
    sizes = tool("--topic-list", "sized")
    assert '"partition":"sized-1"' in sizes
    tool("--topic-list", "sized", "--broker-list", "1")
    tool("--topic-list", "nowhere")
    tool("--broker-list", "9")
    tool("--broker-list", "1,9")


def metadata_quorum(desk: Desk) -> None:
    tool = partial(desk.run, METADATA_QUORUM)
    tool("describe", "--status", figures=False)
    tool("describe", "--replication", figures=False)
    tool("describe", "--replication", "--human-readable", figures=False)
    tool("describe")
    some_id = "BBBBBBBBQACAAAAAAAAAAg"
    gone = ("--controller-id", "9", "--controller-directory-id", some_id)
    tool("remove-controller", *gone)
    tool("remove-controller", *gone, "--dry-run")


def reassign_partitions(desk: Desk) -> None:
    filled(desk, "placed")
    tool = partial(desk.run, REASSIGN)
    asked = desk.file("topics.json", json.dumps({"topics": [{"topic": "placed"}], "version": 1}))
    directory = str(desk.data_dir)

    def plan(name: str, *parts: Mapping[str, object]) -> str:
        return desk.file(name, json.dumps({"version": 1, "partitions": parts}))

    here = {"topic": "placed", "partition": 0, "replicas": [1]}
    stays = plan("stays.json", here, {**here, "partition": 1})
    dirs = plan("dirs.json", {**here, "log_dirs": [directory]})
    away = plan("away.json", {**here, "replicas": [1, 2]})
    nowhere = plan("nowhere.json", {**here, "topic": "nowhere"})
    elsewhere = plan("elsewhere.json", {**here, "log_dirs": ["/no/such/directory"]})
    generate = ("--generate", "--topics-to-move-json-file", asked, "--broker-list")
    tool(*generate, "1")
    tool(*generate, "1,2")
    tool("--list")
    tool("--execute", "--reassignment-json-file", away)
    for file in (stays, dirs, nowhere):
        for action in ("--execute", "--verify", "--cancel"):
            tool(action, "--reassignment-json-file", file)
    tool("--execute", "--reassignment-json-file", elsewhere, "--timeout", "1000")
    tool("--execute", "--reassignment-json-file", stays, "--throttle", "1000000")
    tool("--verify", "--reassignment-json-file", stays)
    tool("--list")


def leader_election(desk: Desk) -> None:
    filled(desk, "led")
    tool = partial(desk.run, LEADER_ELECTION)
    some = json.dumps({"partitions": [{"topic": "led", "partition": 1}]})
    wrong = json.dumps({"partitions": [{"topic": "nowhere", "partition": 0}]})
    files = [desk.file("led.json", some), desk.file("wrong.json", wrong)]
    for kind in ("preferred", "unclean"):
        tool("--election-type", kind, "--all-topic-partitions")
        tool("--election-type", kind, "--topic", "led", "--partition", "0")
        tool("--election-type", kind, "--topic", "led", "--partition", "9")
        for file in files:
            tool("--election-type", kind, "--path-to-json-file", file)
    tool("--election-type", "other", "--all-topic-partitions")


def cluster(desk: Desk) -> None:
    def tool(command: str, *words: str) -> None:
        desk.run(CLUSTER, command, "--bootstrap-server", desk.bootstrap, *words, where="")

    tool("cluster-id")
    tool("list-endpoints")
    tool("list-endpoints", "--include-fenced-brokers")
    tool("unregister", "--id", "9")


def client_metrics(desk: Desk) -> None:
    tool = partial(desk.run, CLIENT_METRICS)
    tool("--list")
    tool("--describe")
    tool("--describe", "--name", "subscribed")
    tool("--alter", "--name", "subscribed", "--metrics", "org.apache.kafka.", "--interval", "10000")
    tool("--list")
    tool("--delete", "--name", "subscribed")
    tool("--list")


def consumer_groups(desk: Desk) -> None:
    topic = filled(desk, "grouped")
    tool = partial(desk.run, CONSUMER_GROUPS)
    for group in ("g-1", "g-2"):
        committed(desk, group, topic, {0: 2, 1: 5})
    tool("--list")
    tool("--list", "--state")
    tool("--list", "--state", "empty")
    tool("--list", "--type")
    tool("--describe", "--all-groups")
    for group in ("g-1", "nowhere"):
        for what in ("--offsets", "--members", "--state", "--verbose"):
            tool("--describe", "--group", group, what)
    reset = ("--reset-offsets", "--group", "g-1", "--topic", topic)
    for to in (
        ("--to-earliest",),
        ("--to-latest",),
        ("--to-current",),
        ("--to-offset", "3"),
        ("--to-offset", "99"),
        ("--shift-by", "-1"),
        ("--to-datetime", "2000-01-01T00:00:00.000"),
        ("--by-duration", "P1D"),
    ):
        tool(*reset, *to, "--dry-run")
    tool(*reset, "--to-offset", "1", "--export", "--dry-run")
    tool(*reset, "--to-offset", "1", "--execute")
    tool("--reset-offsets", "--group", "new", "--topic", f"{topic}:1", "--to-earliest", "--execute")
    tool("--reset-offsets", "--group", "g-1", "--topic", "nowhere", "--to-earliest", "--execute")
    tool("--describe", "--group", "g-1")
    tool("--describe", "--group", "new")
    tool("--validate-regex", "a(b")
    tool("--validate-regex", "a.*b")
    tool("--delete-offsets", "--group", "g-2", "--topic", f"{topic}:0")
    tool("--delete-offsets", "--group", "g-2", "--topic", "nowhere")
    tool("--delete-offsets", "--group", "nowhere", "--topic", topic)
    tool("--describe", "--group", "g-2")
    for group in ("g-2", "g-2", "nowhere"):
        tool("--delete", "--group", group)
    tool("--list")


def other_groups(desk: Desk) -> None:
    topic = filled(desk, "others")
    committed(desk, "plain", topic, {0: 1})
    tool = partial(desk.run, GROUPS)
    tool("--list")
    for kind in ("classic", "consumer", "share", "streams", "other"):
        tool("--list", "--group-type", kind)
    tool("--list", "--protocol", "consumer")
    for kind in ("--consumer", "--share", "--streams"):
        tool("--list", kind)


def streams_groups(desk: Desk) -> None:
    topic = filled(desk, "streamed")
    tool = partial(desk.run, STREAMS_GROUPS)
    tool("--list")
    tool("--describe", "--all-groups")
    for what in ("--offsets", "--members", "--state"):
        tool("--describe", "--group", "nowhere", what)
    tool("--delete", "--group", "nowhere")
    committed(desk, "application", topic, {0: 2, 1: 2})
    reset = partial(desk.run, STREAMS_RESETTER, "--application-id", "application")
    reset("--input-topics", topic, "--to-earliest", "--dry-run")
    reset("--input-topics", topic, "--to-offset", "1")
    reset("--input-topics", "nowhere", "--to-earliest")
    desk.run(CONSUMER_GROUPS, "--describe", "--group", "application")


def acls(desk: Desk) -> None:
    tool = partial(desk.run, ACLS)
    right = ("--allow-principal", "User:alice", "--operation", "Read", "--topic", "t")
    tool("--list")
    tool("--list", "--topic", "t", "--principal", "User:alice")
    tool("--add", *right)
    tool("--remove", *right, "--force")
    tool("--list", "--cluster", "--resource-pattern-type", "any")


def delegation_tokens(desk: Desk) -> None:
    settings = desk.file("client.properties", "security.protocol=PLAINTEXT\n")
    tool = partial(desk.run, DELEGATION_TOKENS, "--command-config", settings)
    tool("--describe")
    tool("--create", "--max-life-time-period", "-1", "--renewer-principal", "User:alice")
    tool("--renew", "--renew-time-period", "-1", "--hmac", "AAAA")
    tool("--expire", "--expiry-time-period", "-1", "--hmac", "AAAA")


def delete_records(desk: Desk) -> None:
    topic = filled(desk, "trimmed")

    def trim(**offsets: int) -> None:
        parts = [{"topic": topic, "partition": int(k[1:]), "offset": v} for k, v in offsets.items()]
        plan = json.dumps({"version": 1, "partitions": parts})
        name = "-".join(f"{k}{v}" for k, v in offsets.items())
        desk.run(DELETE_RECORDS, "--offset-json-file", desk.file(f"{name}.json", plan))

    trim(p0=3, p1=-1)
    trim(p0=2)
    trim(p0=99)
    desk.run(GET_OFFSETS, "--topic", topic, "--time", "earliest")


def get_offsets(desk: Desk) -> None:
    topic = filled(desk, "offsets", 3)
    tool = partial(desk.run, GET_OFFSETS)
    for time in ("-1", "-2", "-3", "-4", "-5", "latest", "earliest", "max-timestamp", "0", "soon"):
        tool("--topic", topic, "--time", time)
    tool("--topic", topic, "--partitions", "0,2")
    tool("--topic-partitions", f"{topic}:1-,nowhere:0")
    tool("--topic", "off.*", "--exclude-internal-topics")
    tool("--topic", "nowhere")
    tool("--topic", topic, "--partitions", "9")


def all_features(desk: Desk) -> None:
    tool = partial(desk.run, FEATURES)
    # A new Fencepost broker starts at the lowest level, an Apache Kafka broker at the latest.
    tool("upgrade", "--metadata", LATEST_METADATA)
    tool("describe")
    tool("version-mapping", "--release-version", LATEST_METADATA)
    tool("feature-dependencies", "--feature", "transaction.version=2")
    tool("upgrade", "--metadata", "4.3-IV0")
    tool("upgrade", "--release-version", LATEST_METADATA, "--dry-run")
    tool("downgrade", "--metadata", "4.0-IV3", "--dry-run")
    for level in ("33", "32", "30"):
        tool("downgrade", "--feature", f"metadata.version={level}", "--dry-run")
    tool("disable", "--feature", "kraft.version", "--dry-run")
    tool("upgrade", "--feature", "kraft.version=1", "--dry-run")
    place = ("--bootstrap-server", desk.bootstrap)
    desk.run(CLUSTER, "unregister-controller", *place, "--id", "9", where="")


def api_versions(desk: Desk) -> None:
    desk.run(API_VERSIONS)
    desk.run(CLUSTER, "api-versions", "--bootstrap-server", desk.bootstrap, where="")


def console(desk: Desk) -> None:
    desk.cluster.create_topic("told", 1, configs={"retention.ms": "-1"})
    produce = partial(desk.run, CONSOLE_PRODUCER, "--topic", "told")
    produce(read="one\ntwo\n")
    keyed = ("--reader-property", "parse.key=true", "--reader-property", "parse.headers=true")
    produce(*keyed, read="a:b\tkey\tvalue\n")
    produce(*keyed, read="no key\n")
    produce("--compression-codec", "gzip", "--sync", "--request-required-acks", "1", read="three\n")
    produce("--compression-codec", "none", read="\n")
    # A consumer that gets its number of records ends at once; others wait for the whole timeout.
    consume = partial(desk.run, CONSOLE_CONSUMER, "--topic", "told", "--timeout-ms", "30000")
    consume("--from-beginning", "--max-messages", "5")
    shown = [
        word
        for name in ("key", "value", "partition", "offset", "headers", "epoch")
        for word in ("--formatter-property", f"print.{name}=true")
    ]
    consume("--from-beginning", "--max-messages", "5", *shown)
    consume("--partition", "0", "--offset", "3", "--max-messages", "2")
    consume("--partition", "0", "--offset", "earliest", "--max-messages", "1")
    isolated = ("--isolation-level", "read_committed", "--max-messages", "5")
    # The consumers commit only when they leave, because the number of periodic commits would vary.
    once = ("--group", "console", "--command-property", "auto.commit.interval.ms=600000")
    consume(*once, "--from-beginning", *isolated)
    takes_all = (CONSOLE_CONSUMER, "--timeout-ms", "10000")
    desk.run(*takes_all, "--topic", "told", *once)
    desk.run(CONSUMER_GROUPS, "--describe", "--group", "console")
    formatter = "org.apache.kafka.tools.consumer.OffsetsMessageFormatter"
    desk.run(
        *(*takes_all, "--topic", "__consumer_offsets", "--from-beginning"),
        *("--formatter", formatter),
        only='"group":"console"',
        figures=False,
    )


def performance(desk: Desk) -> None:
    desk.cluster.create_topic("fast", 1, configs={"retention.ms": "-1"})
    run = partial(desk.run, figures=False)
    run(
        *(PRODUCER_PERFORMANCE, "--topic", "fast", "--num-records", "5000", "--record-size", "100"),
        *("--throughput", "-1", "--command-property", f"bootstrap.servers={desk.bootstrap}"),
        where="",
    )
    run(
        *(PRODUCER_PERFORMANCE, "--topic", "fast", "--num-records", "500", "--record-size", "100"),
        *("--throughput", "-1", "--transactional-id", "fast", "--transaction-duration-ms", "50"),
        *("--command-property", f"bootstrap.servers={desk.bootstrap}"),
        where="",
    )
    run(CONSUMER_PERFORMANCE, "--topic", "fast", "--num-records", "5000", "--group", "read")
    run(
        *(END_TO_END, "--topic", "fast", "--num-records", "20", "--producer-acks", "all"),
        *("--record-size", "100"),
    )


def verifiable(desk: Desk) -> None:
    desk.cluster.create_topic("sure", 2, configs={"retention.ms": "-1"})
    counted = ("--topic", "sure", "--max-messages", "10")
    desk.run(VERIFIABLE_PRODUCER, *counted, figures=False)
    for protocol in ("classic", "consumer"):
        desk.run(
            *(VERIFIABLE_CONSUMER, *counted, "--group-id", f"sure-{protocol}"),
            *("--group-protocol", protocol, "--verbose"),
            only="record_data",
            limit_ms=SOON_MS,
            figures=False,
        )


def dump_log(desk: Desk) -> None:
    topic = filled(desk, "dumped", 1)
    segment = desk.data_dir / f"{topic}-0" / "00000000000000000000.log"
    tool = partial(desk.run, DUMP_LOG, where="")
    for words in ((), ("--print-data-log",), ("--deep-iteration", "--skip-record-metadata")):
        tool("--files", str(segment), *words)
    tool("--files", str(segment.with_suffix(".index")), "--index-sanity-check")


def replica_verification(desk: Desk) -> None:
    topic = filled(desk, "verified")
    desk.run(
        *(REPLICA_VERIFICATION, "--topics-include", topic, "--report-interval-ms", "60000"),
        where="--broker-list",
        limit_ms=1_000,
        stays=True,
        figures=False,
    )


SCENES: list[Scene] = [
    topics,
    configs,
    log_dirs,
    metadata_quorum,
    reassign_partitions,
    leader_election,
    cluster,
    client_metrics,
    consumer_groups,
    other_groups,
    streams_groups,
    acls,
    delegation_tokens,
    delete_records,
    get_offsets,
    all_features,
    api_versions,
    console,
    performance,
    verifiable,
    dump_log,
    replica_verification,
]
