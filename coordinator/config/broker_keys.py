"""Every broker-level configuration key, with Kafka's names and defaults.

A key is here for one of two reasons: it has an effect, or it says why it has none (``inert``) and
is accepted with a warning. Everything else is refused by name. Where a default differs from
Kafka's, its description says so.

Source of names, types and defaults: ``LogConfig``, ``ServerLogConfigs``, ``TopicConfig``,
``GroupCoordinatorConfig``, ``TransactionLogConfig``, ``TransactionStateManagerConfig``,
``SocketServerConfigs``, ``ReplicationConfigs``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.coordinator.config.group_keys import GROUP_KEYS
from fencepost.coordinator.config.key import LONG_MAX, ConfigKey, ConfigType
from fencepost.coordinator.config.unused_keys import UNUSED_BROKER_KEYS

_B, _S, _I = ConfigType.BOOLEAN, ConfigType.STRING, ConfigType.INT
_SH, _L, _D, _LI = ConfigType.SHORT, ConfigType.LONG, ConfigType.DOUBLE, ConfigType.LIST


_POLICIES = ("delete", "compact")
_CODECS = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
_TIMESTAMPS = ("CreateTime", "LogAppendTime")
_MIB = 1 << 20


def _dynamic(
    name: str,
    kind: ConfigType,
    default: str | None,
    doc: str,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> ConfigKey:
    """A key that can be changed while the broker runs."""
    return ConfigKey(name, kind, default, doc, unit, low, high, choices, updatable=True)


_LOG_KEYS = (
    _dynamic(
        "log.segment.bytes",
        _I,
        str(1 << 30),
        "A segment is rolled before it grows larger.",
        "bytes",
        _MIB,
    ),
    _dynamic(
        "log.roll.ms", _L, None, "A segment older than this is rolled at the next append.", "ms", 1
    ),
    _dynamic(
        "log.roll.hours", _I, "168", "The same in hours, where log.roll.ms is not set.", "hours", 1
    ),
    _dynamic(
        "log.roll.jitter.ms",
        _L,
        None,
        "At most this much is taken off the age at which a segment is rolled.",
        "ms",
        0,
    ),
    _dynamic(
        "log.roll.jitter.hours",
        _I,
        "0",
        "The same in hours, where log.roll.jitter.ms is not set.",
        "hours",
        0,
    ),
    _dynamic(
        "log.retention.ms",
        _L,
        None,
        "Segments whose newest record is older are deleted; -1 keeps them.",
        "ms",
        -1,
    ),
    _dynamic(
        "log.retention.minutes",
        _I,
        None,
        "The same in minutes, where log.retention.ms is not set.",
        "minutes",
        -1,
    ),
    _dynamic(
        "log.retention.hours",
        _I,
        "168",
        "The same in hours, where neither of the others is set.",
        "hours",
        -1,
    ),
    _dynamic(
        "log.retention.bytes",
        _L,
        "-1",
        "The oldest segments of a larger partition are deleted; a negative number sets no bound.",
        "bytes",
    ),
    _dynamic(
        "log.cleanup.policy",
        _LI,
        "delete",
        "What happens to old records: delete, compact, both, or nothing.",
        choices=_POLICIES,
    ),
    _dynamic(
        "log.index.size.max.bytes",
        _I,
        str(10 * _MIB),
        "A segment is rolled when one of its indexes would grow larger.",
        "bytes",
        4,
    ),
    _dynamic(
        "log.index.interval.bytes",
        _I,
        "4096",
        "Bytes of records between two index entries.",
        "bytes",
        0,
    ),
    _dynamic(
        "log.flush.interval.messages",
        _L,
        str(LONG_MAX),
        "Appended records after which the file is forced to disk; 1 survives power loss.",
        "records",
        1,
    ),
    _dynamic(
        "log.flush.interval.ms",
        _L,
        None,
        "Longest time an append stays unforced; it is looked at every 250 ms.",
        "ms",
        0,
    ),
    ConfigKey(
        "log.flush.scheduler.interval.ms",
        _L,
        str(LONG_MAX),
        "What log.flush.interval.ms is where that is not set.",
        "ms",
        1,
    ),
    _dynamic(
        "log.segment.delete.delay.ms",
        _L,
        "60000",
        "How long the files of a deleted segment stay under another name.",
        "ms",
        0,
    ),
    _dynamic(
        "log.preallocate",
        _B,
        "false",
        "Make a new segment's file at its full size; it is trimmed when the segment is done with.",
    ),
    _dynamic(
        "log.message.timestamp.type",
        _S,
        "CreateTime",
        "Whether a record's time is the producer's or the broker's.",
        choices=_TIMESTAMPS,
    ),
    _dynamic(
        "log.message.timestamp.before.max.ms",
        _L,
        str(LONG_MAX),
        "A producer's time may lie at most this far in the past.",
        "ms",
        0,
    ),
    _dynamic(
        "log.message.timestamp.after.max.ms",
        _L,
        "3600000",
        "A producer's time may lie at most this far in the future.",
        "ms",
        0,
    ),
    _dynamic(
        "message.max.bytes",
        _I,
        "1048588",
        "The largest record batch that is accepted, after compression.",
        "bytes",
        0,
    ),
    _dynamic(
        "compression.type",
        _S,
        "producer",
        "The codec batches are stored with; producer keeps what was sent.",
        choices=_CODECS,
    ),
    _dynamic(
        "compression.gzip.level", _I, "-1", "Effort of gzip, 1 to 9; -1 is its default.", "", -1, 9
    ),
    _dynamic("compression.lz4.level", _I, "9", "Effort of lz4.", "", 1, 17),
    _dynamic("compression.zstd.level", _I, "3", "Effort of zstd.", "", -131072, 22),
    _dynamic(
        "log.cleaner.delete.retention.ms",
        _L,
        "86400000",
        "How long tombstones outlive compaction.",
        "ms",
        0,
    ),
    _dynamic(
        "log.cleaner.min.compaction.lag.ms",
        _L,
        "0",
        "Younger records are not compacted.",
        "ms",
        0,
    ),
    _dynamic(
        "log.cleaner.max.compaction.lag.ms",
        _L,
        str(LONG_MAX),
        "Older records are compacted whatever the dirty ratio.",
        "ms",
        1,
    ),
    _dynamic(
        "log.cleaner.min.cleanable.ratio",
        _D,
        "0.5",
        "Share of dirty bytes from which on a partition is compacted.",
        "",
        0,
        1,
    ),
)

_BROKER_KEYS = (
    ConfigKey(
        "node.id",
        _I,
        "1",
        "This broker's number; it is fixed by the first start of a data directory.",
        low=0,
    ),
    ConfigKey("broker.rack", _S, None, "The rack that Metadata shows for this broker."),
    ConfigKey(
        "advertised.listeners",
        _S,
        None,
        "PLAINTEXT://HOST:PORT that clients are told to connect to; not set means where we listen.",
    ),
    ConfigKey(
        "num.partitions", _I, "1", "Partitions of a topic that is created without a number.", low=1
    ),
    ConfigKey(
        "default.replication.factor",
        _I,
        "1",
        "Replicas of a topic that is created without a number; more than one node can't be met.",
        low=1,
    ),
    ConfigKey(
        "auto.create.topics.enable", _B, "true", "Create a topic when it is first asked for."
    ),
    ConfigKey("delete.topic.enable", _B, "true", "Whether topics may be deleted."),
    ConfigKey(
        "fetch.max.bytes",
        _I,
        "57671680",
        "The most records one fetch answers with, give or take a batch.",
        "bytes",
        1024,
    ),
    ConfigKey(
        "max.incremental.fetch.session.cache.slots",
        _I,
        "1000",
        "Fetch sessions that are kept; 0 keeps none.",
        "sessions",
        0,
    ),
    ConfigKey(
        "log.retention.check.interval.ms",
        _L,
        "300000",
        "How often retention looks for segments to delete.",
        "ms",
        1,
    ),
    ConfigKey("log.cleaner.enable", _B, "true", "Whether compacted logs are cleaned."),
    ConfigKey(
        "log.cleaner.backoff.ms",
        _L,
        "15000",
        "How long the cleaner waits before it looks again, when there was nothing to clean.",
        "ms",
        1,
    ),
    ConfigKey(
        "log.cleaner.dedupe.buffer.size",
        _L,
        "134217728",
        "Memory for the keys of one round; with more keys a log takes several rounds.",
        "bytes",
        1024,
    ),
    ConfigKey(
        "log.cleaner.io.max.bytes.per.second",
        _D,
        "1.7976931348623157E308",
        "What the cleaner may read and write together.",
        "bytes/s",
        1,
    ),
    ConfigKey(
        "log.initial.task.delay.ms",
        _L,
        "30000",
        "How long after the start retention first runs.",
        "ms",
        0,
    ),
    ConfigKey(
        "log.flush.offset.checkpoint.interval.ms",
        _I,
        "60000",
        "How often recovery points are written.",
        "ms",
        1,
    ),
    ConfigKey(
        "log.flush.start.offset.checkpoint.interval.ms",
        _I,
        "60000",
        "How often log start offsets are written.",
        "ms",
        1,
    ),
    ConfigKey(
        "replica.high.watermark.checkpoint.interval.ms",
        _L,
        "5000",
        "How often high watermarks are written.",
        "ms",
        1,
    ),
    _dynamic(
        "producer.id.expiration.ms",
        _I,
        "86400000",
        "A partition forgets a producer that wrote nothing for this long.",
        "ms",
        1,
    ),
    _dynamic(
        "max.producer.ids",
        _I,
        "100000",
        "Producers remembered, once for each partition; beyond it the longest idle is forgotten.",
        "producers",
        1,
    ),
    ConfigKey(
        "producer.id.expiration.check.interval.ms",
        _I,
        "600000",
        "How often partitions look for producers to forget.",
        "ms",
        1,
    ),
    ConfigKey(
        "socket.request.max.bytes",
        _I,
        "104857600",
        "The largest request; a larger one closes its connection.",
        "bytes",
        1,
    ),
    ConfigKey(
        "queued.max.request.bytes",
        _L,
        "268435456",
        "Requests above 64 KiB, of all connections together; -1 sets no bound, as Kafka's default.",
        "bytes",
        -1,
    ),
    ConfigKey(
        "queued.max.response.bytes",
        _L,
        "67108864",
        "Responses in memory that clients have not taken yet, of all connections together. Beyond "
        "it, requests with large answers wait; -1 sets no bound. Fencepost's own.",
        "bytes",
        -1,
    ),
    ConfigKey(
        "connections.max.idle.ms",
        _L,
        "600000",
        "A connection without requests is closed after this long.",
        "ms",
        1,
    ),
    ConfigKey(
        "max.connections",
        _I,
        "10000",
        "Open connections in all; Kafka's default sets no bound.",
        low=0,
    ),
    ConfigKey(
        "max.connections.per.ip",
        _I,
        "10000",
        "Open connections of one address; Kafka's default sets no bound.",
        low=0,
    ),
    ConfigKey(
        "unstable.api.versions.enable",
        _B,
        "false",
        "Serve versions that Kafka calls unstable (InitProducerId 6).",
    ),
    ConfigKey(
        "fencepost.history.enable",
        _B,
        "true",
        "Keep the causes of the coordinators' decisions in __fencepost_history.",
    ),
    ConfigKey(
        "fencepost.history.retention.bytes",
        _L,
        "67108864",
        "Size of that topic when it is created; later its own retention.bytes counts.",
        "bytes",
        _MIB,
    ),
    ConfigKey(
        "fencepost.history.retention.ms",
        _L,
        "604800000",
        "Age of its records when it is created; later its own retention.ms counts.",
        "ms",
        1,
    ),
)

_TXN_KEYS = (
    ConfigKey(
        "transactional.id.expiration.ms",
        _I,
        "604800000",
        "A transactional id that is not used for this long is forgotten.",
        "ms",
        1,
    ),
    ConfigKey(
        "transaction.max.timeout.ms",
        _I,
        "900000",
        "The longest transaction timeout a producer may ask for.",
        "ms",
        1,
    ),
    ConfigKey(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        _I,
        "3600000",
        "How often expired transactional ids are looked for.",
        "ms",
        1,
    ),
    _dynamic(
        "transaction.partition.verification.enable",
        _B,
        "true",
        "Ask the coordinator before a transaction first writes to a partition.",
    ),
    ConfigKey(
        "transaction.two.phase.commit.enable",
        _B,
        "false",
        "Serve InitProducerId 6: transactions that wait for the decision of another store.",
    ),
    ConfigKey(
        "transaction.state.log.num.partitions",
        _I,
        "50",
        "Partitions of __transaction_state; fixed once the topic exists.",
        low=1,
    ),
    ConfigKey(
        "transaction.state.log.segment.bytes",
        _I,
        "104857600",
        "Segment size of __transaction_state.",
        "bytes",
        _MIB,
    ),
)


BROKER_KEYS: Mapping[str, ConfigKey] = {
    key.name: key
    for key in (
        *_BROKER_KEYS,
        *_LOG_KEYS,
        *GROUP_KEYS,
        *_TXN_KEYS,
        *UNUSED_BROKER_KEYS,
    )
}
"""Broker keys by name."""

REPLACED: Mapping[str, str] = {
    "listeners": "where to listen is said with --listen",
    "port": "where to listen is said with --listen",
    "log.dir": "the data directory is said with --data-dir",
    "log.dirs": "the data directory is said with --data-dir",
    "metadata.log.dir": "the data directory is said with --data-dir",
    "broker.id": "its name is node.id",
    "zookeeper.connect": "there is no ZooKeeper",
}
"""Kafka keys that do not fit this broker, and what to do instead."""
