"""All broker-level configuration keys, with Kafka's names and defaults.

Some of the listed keys have no effect; ``inert`` is the reason. These keys and those in
``ignored_keys.py`` are accepted with a warning. A key that is not listed in either file is refused.
If a default differs from Kafka's, the description says so.

Source of names, types and defaults: ``LogConfig``, ``ServerLogConfigs``, ``TopicConfig``,
``GroupCoordinatorConfig``, ``TransactionLogConfig``, ``TransactionStateManagerConfig``,
``SocketServerConfigs``, ``ReplicationConfigs``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.coordinator.config.cluster_keys import CLUSTER_KEYS
from fencepost.coordinator.config.group_keys import GROUP_KEYS
from fencepost.coordinator.config.key import ConfigKey, read_keys
from fencepost.coordinator.config.replication_keys import REPLICATION_KEYS
from fencepost.coordinator.config.security_keys import SECURITY_KEYS
from fencepost.coordinator.config.share_keys import SHARE_KEYS
from fencepost.coordinator.config.unused_keys import UNUSED_BROKER_KEYS

_LOG = """
log.segment.bytes INT 1073741824 unit=bytes low=1048576 dynamic
    A segment is rolled before it grows larger.
log.roll.ms LONG - unit=ms low=1 dynamic
    A segment older than this is rolled at the next append.
log.roll.hours INT 168 unit=hours low=1 dynamic
    log.roll.ms in hours; used if log.roll.ms is not set.
log.roll.jitter.ms LONG - unit=ms low=0 dynamic
    At most this much is taken off the age at which a segment is rolled.
log.roll.jitter.hours INT 0 unit=hours low=0 dynamic
    log.roll.jitter.ms in hours; used if log.roll.jitter.ms is not set.
log.retention.ms LONG - unit=ms low=-1 dynamic
    Segments whose newest record is older are deleted; -1 keeps them.
log.retention.minutes INT - unit=minutes low=-1 dynamic
    log.retention.ms in minutes; used if log.retention.ms is not set.
log.retention.hours INT 168 unit=hours low=-1 dynamic
    log.retention.ms in hours; used if neither log.retention.ms nor log.retention.minutes is
    set.
log.retention.bytes LONG -1 unit=bytes dynamic
    The oldest segments of a larger partition are deleted; a negative number sets no bound.
log.cleanup.policy LIST delete of=delete,compact dynamic
    What happens to old records: delete, compact, both, or nothing.
log.index.size.max.bytes INT 10485760 unit=bytes low=4 dynamic
    A segment is rolled when one of its indexes would grow larger.
log.index.interval.bytes INT 4096 unit=bytes low=0 dynamic
    Bytes of records between two index entries.
log.flush.interval.messages LONG 9223372036854775807 unit=records low=1 dynamic
    The number of appended records after which the file is flushed; with 1, acknowledged
    records survive power loss.
log.flush.interval.ms LONG - unit=ms low=0 dynamic
    The longest time that an append stays unflushed; checked every 250 ms.
log.flush.scheduler.interval.ms LONG 9223372036854775807 unit=ms low=1
    The value of log.flush.interval.ms if that is not set.
log.segment.delete.delay.ms LONG 60000 unit=ms low=0 dynamic
    How long the files of a deleted segment stay under another name.
log.preallocate BOOLEAN false dynamic
    Make a new segment's file at its full size; it is trimmed when the segment is done with.
log.message.timestamp.type STRING CreateTime of=CreateTime,LogAppendTime dynamic
    Whether a record's timestamp is the producer's or the broker's.
log.message.timestamp.before.max.ms LONG 9223372036854775807 unit=ms low=0 dynamic
    A producer's timestamp may lie at most this far in the past.
log.message.timestamp.after.max.ms LONG 3600000 unit=ms low=0 dynamic
    A producer's timestamp may lie at most this far in the future.
message.max.bytes INT 1048588 unit=bytes low=0 dynamic
    The largest record batch that is accepted, after compression.
max.decompressed.message.bytes INT 2147483639 unit=bytes low=1 high=2147483639 dynamic
    The largest record of a compressed batch, decompressed. A larger one is refused, and if it is
    stored already, compaction and lookups by timestamp fail. A whole batch
    may have at most 128 MiB, decompressed.
compression.type STRING producer of=uncompressed,zstd,lz4,snappy,gzip,producer dynamic
    The codec batches are stored with; producer keeps what was sent.
compression.gzip.level INT -1 of=-1,1,2,3,4,5,6,7,8,9 dynamic
    Effort of gzip, 1 to 9; -1 is its default.
compression.lz4.level INT 9 low=1 high=17 dynamic
    Effort of lz4.
compression.zstd.level INT 3 low=-131072 high=22 dynamic
    Effort of zstd.
log.cleaner.delete.retention.ms LONG 86400000 unit=ms low=0 dynamic
    How long tombstones outlive compaction.
log.cleaner.min.compaction.lag.ms LONG 0 unit=ms low=0 dynamic
    Records younger than this are not compacted.
log.cleaner.max.compaction.lag.ms LONG 9223372036854775807 unit=ms low=1 dynamic
    Records older than this are compacted even if the dirty ratio is low.
log.cleaner.min.cleanable.ratio DOUBLE 0.5 low=0 high=1 dynamic
    The share of dirty bytes from which a partition is compacted.
"""

_BROKER = """
node.id INT 1 low=0
    This broker's number; it is fixed by the first start of a data directory.
broker.rack STRING -
    The rack that Metadata shows for this broker.
listeners LIST -
    NAME://HOST:PORT where clients connect, separated by commas; --listen overrides it. Without
    HOST, every address. Kafka's default is PLAINTEXT://:9092.
advertised.listeners LIST -
    NAME://HOST:PORT that clients of a listener are told to connect to; by default, the address
    at which the listener listens.
controller.listener.names LIST ""
    Names of the listeners for requests to the controller, which are not for clients; this node
    connects to controllers with the first one. Without it, a node that is broker and
    controller forms a cluster of one.
listener.security.protocol.map STRING \
SASL_SSL:SASL_SSL,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT
    The protocol of each listener, NAME:PROTOCOL, where it is not its name: PLAINTEXT, SSL,
    SASL_PLAINTEXT or SASL_SSL.
fencepost.insecure BOOLEAN false
    Allow a listener without authentication to be reachable from other machines.
num.partitions INT 1 low=1
    Partitions of a topic that is created without a number.
fencepost.max.topics INT 100000 unit=topics low=1
    The largest number of topics of a standalone broker or of a cluster on ZooKeeper. Fencepost's
    own.
fencepost.max.partitions INT 200000 unit=partitions low=1
    The largest number of partitions, over all topics, of a standalone broker or of a cluster on
    ZooKeeper. Fencepost's own.
default.replication.factor INT 1 low=1
    Replicas of a topic that is created without a number; at most the number of brokers.
unclean.leader.election.enable BOOLEAN false dynamic
    Let a replica lead that may lack records, where no other is left.
auto.leader.rebalance.enable BOOLEAN true
    Whether the controller elects preferred leaders (the first replica) by itself.
leader.imbalance.check.interval.seconds LONG 300 unit=seconds low=1
    How often a controller looks for partitions that their preferred replica does not lead.
unclean.leader.election.interval.ms LONG 300000 unit=ms low=1 internal
    How often a controller looks for partitions without a leader that may get an unclean one.
metadata.max.idle.interval.ms INT 500 unit=ms low=0
    A controller that has written no record for this long writes a NoOpRecord if a broker reads the
    metadata log; 0 writes none.
auto.create.topics.enable BOOLEAN true
    Create a topic when it is first asked for.
delete.topic.enable BOOLEAN true
    Whether topics may be deleted.
fetch.max.bytes INT 57671680 unit=bytes low=1024
    The most bytes of records in one Fetch response; the first batch may exceed it.
max.incremental.fetch.session.cache.slots INT 1000 unit=sessions low=0
    Fetch sessions that are kept; 0 keeps none.
log.retention.check.interval.ms LONG 300000 unit=ms low=1
    How often retention looks for segments to delete.
log.cleaner.enable BOOLEAN true
    Whether compacted logs are cleaned.
log.cleaner.backoff.ms LONG 15000 unit=ms low=0 dynamic
    How long the cleaner waits before it looks again, when there was nothing to clean.
log.cleaner.dedupe.buffer.size LONG 134217728 unit=bytes low=1024 dynamic
    Memory for the keys of one round; with more keys a log takes several rounds.
log.cleaner.io.max.bytes.per.second DOUBLE 1.7976931348623157E308 unit=bytes/s low=1 dynamic
    The rate of the cleaner's reads and writes together.
log.initial.task.delay.ms LONG 30000 unit=ms low=0 internal
    How long after the start retention first runs.
log.flush.offset.checkpoint.interval.ms INT 60000 unit=ms low=0
    How often recovery points are written.
log.flush.start.offset.checkpoint.interval.ms INT 60000 unit=ms low=0
    How often log start offsets are written.
replica.high.watermark.checkpoint.interval.ms LONG 5000 unit=ms low=1
    How often high watermarks are written.
min.insync.replicas INT 1 low=1 dynamic
    In-sync replicas that acks=all requires; no more than the topic has replicas.
replica.lag.time.max.ms LONG 30000 unit=ms
    A replica that has not had all of its leader's log for this long is out of sync.
replica.selector.class STRING - form=replica-selector
    The class that chooses the replica from which a consumer reads (KIP-392); the leader by default.
producer.id.expiration.ms INT 86400000 unit=ms low=1 dynamic
    A partition forgets a producer that wrote nothing for this long.
max.producer.ids INT 100000 unit=producers low=1 dynamic
    Producers remembered, once for each partition; beyond it the longest idle is forgotten.
producer.id.expiration.check.interval.ms INT 600000 unit=ms low=1 internal
    How often partitions look for producers to forget.
socket.request.max.bytes INT 104857600 unit=bytes low=1
    The largest request; a larger one closes its connection.
queued.max.request.bytes LONG 268435456 unit=bytes low=-1
    Requests above 64 KiB, of all connections together; -1 sets no bound, as Kafka's default.
queued.max.response.bytes LONG 67108864 unit=bytes low=-1
    Responses in memory that clients have not taken yet, of all connections together. Beyond it,
    requests with large answers wait; -1 sets no bound. Fencepost's own.
connections.max.idle.ms LONG 600000 unit=ms low=-1
    A connection without requests is closed after this long; -1 keeps it.
max.connections.per.ip INT 10000 low=0 dynamic
    Open connections of one address; Kafka's default sets no bound.
unstable.api.versions.enable BOOLEAN false internal
    Serve versions that Kafka calls unstable (InitProducerId 6).
telemetry.max.bytes INT 1048576 unit=bytes low=1
    Bytes of the metrics in one PushTelemetry request, compressed and decompressed.
fencepost.client.telemetry.enable BOOLEAN false
    Serve GetTelemetrySubscriptions and PushTelemetry, with which clients push their metrics. Kafka
    serves them only with a plugin, too.
fencepost.history.enable BOOLEAN true
    Keep the causes of the coordinators' decisions in __fencepost_history.
fencepost.history.commits BOOLEAN false
    Record each commit of a transaction in __fencepost_history, too, with the time for which it
    was open. Without it, commits that a producer requested are only counted.
fencepost.history.requests.enable BOOLEAN false dynamic
    Also keep the requests of groups and transactional ids, without records, in __fencepost_history,
    for fencepost record.
fencepost.history.retention.bytes LONG 67108864 unit=bytes low=1048576
    retention.bytes of __fencepost_history when it is created; later the topic's own setting
    counts.
fencepost.history.retention.ms LONG 604800000 unit=ms low=1
    retention.ms of __fencepost_history when it is created; later the topic's own setting
    counts.
fencepost.metrics.listen STRING -
    HOST:PORT, or PORT on 127.0.0.1, where /metrics, /healthz and /readyz are served over HTTP;
    not served if not set.
fencepost.metrics.certificate STRING -
    A PEM file with the certificate chain of the metrics listener.
fencepost.metrics.key STRING -
    A PEM file with the private key of fencepost.metrics.certificate, unless that file has it.
fencepost.metrics.users.file STRING -
    A file with NAME:PASSWORD lines for the users that may read /metrics, by HTTP's basic
    authentication. /healthz and /readyz need no password.
fencepost.metrics.insecure BOOLEAN false
    Let other machines read the metrics without a password, or send one that is not encrypted.
fencepost.metrics.compat LIST "" of=kafka-exporter,kminion,jmx
    Other exporters whose names /metrics has as well, for dashboards that ask for them.
fencepost.metrics.max.series INT 200000 unit=series low=1000
    The most series of one scrape; further ones are left out and counted.
"""

_TRANSACTIONS = """
transactional.id.expiration.ms INT 604800000 unit=ms low=1
    A transactional id that is not used for this long is forgotten.
transaction.max.timeout.ms INT 900000 unit=ms low=1
    The longest transaction timeout a producer may ask for.
fencepost.transactional.ids.max.bytes LONG 536870912 unit=bytes low=1
    Memory of all transactional ids with the partitions of open transactions; beyond it no id
    and no partition is added. Fencepost's own.
transaction.remove.expired.transaction.cleanup.interval.ms INT 3600000 unit=ms low=1
    How often expired transactional ids are looked for.
transaction.partition.verification.enable BOOLEAN true dynamic
    Ask the coordinator before a transaction first writes to a partition.
add.partitions.to.txn.retry.backoff.ms INT 20 unit=ms low=1
    The pause before the broker asks the coordinator again about a transaction whose
    predecessor is being completed.
add.partitions.to.txn.retry.backoff.max.ms INT 100 unit=ms low=0
    How long the broker keeps asking the coordinator about such a transaction before the
    producer has to retry.
request.timeout.ms INT 30000 unit=ms low=0
    How long a request to another broker, or one to the transaction coordinator, waits for replicas.
transaction.two.phase.commit.enable BOOLEAN false
    Serve InitProducerId 6: transactions that wait for the decision of another store.
transaction.state.log.num.partitions INT 50 low=1
    Partitions of __transaction_state; fixed once the topic exists.
transaction.state.log.segment.bytes INT 104857600 unit=bytes low=1048576
    Segment size of __transaction_state.
"""

BROKER_KEYS: Mapping[str, ConfigKey] = {
    key.name: key
    for key in (
        *read_keys(_BROKER),
        *read_keys(_LOG),
        *GROUP_KEYS,
        *SHARE_KEYS,
        *read_keys(_TRANSACTIONS),
        *SECURITY_KEYS,
        *REPLICATION_KEYS,
        *CLUSTER_KEYS,
        *UNUSED_BROKER_KEYS,
    )
}
"""Broker keys by name."""

REPLACED: Mapping[str, str] = {
    "port": "set the addresses with listeners or --listen",
    "log.dir": "set the data directory with --data-dir",
    "log.dirs": "set the data directory with --data-dir",
}
"""Kafka keys that the broker refuses, and what to set instead.

``fencepost serve`` removes ``log.dir`` and ``log.dirs`` from the settings before they are checked.
"""

SYNONYMS: Mapping[str, str] = {"broker.id": "node.id"}
"""Older names that Kafka still accepts."""
