"""Keys that are accepted with a warning and have no effect, each with its reason.

A configuration made for Apache Kafka works unchanged; the warnings name the settings that are lost.
"""

from __future__ import annotations

from fencepost.coordinator.config.key import ConfigKey, read_key

_BROKER = """
a transaction is aborted when its timeout runs out
    transaction.abort.timed.out.transaction.cleanup.interval.ms INT 10000 low=1
one event loop serves all requests, and the number of threads beside it is fixed
    num.network.threads INT 3 low=1 dynamic
    num.io.threads INT 8 low=1 dynamic
    background.threads INT 10 low=1 dynamic
    num.recovery.threads.per.data.dir INT 2 low=1 dynamic
    log.cleaner.threads INT 1 low=0 dynamic
    group.coordinator.threads INT 4 low=1
a connection has one request at a time
    queued.max.requests INT 500 low=1
writes are complete when they are answered
    group.coordinator.append.linger.ms INT -1 low=-1
logs are read segment by segment
    offsets.load.buffer.size INT 5242880 low=1
    transaction.state.log.load.buffer.size INT 5242880 low=1
coordinator records are small
    offsets.topic.compression.codec INT 0
segments are read batch by batch
    log.cleaner.io.buffer.size INT 524288 low=0 dynamic
records are kept on the disk: tiered storage is not served
    log.local.retention.bytes LONG -2 unit=bytes low=-2 dynamic
    log.local.retention.ms LONG -2 unit=ms low=-2 dynamic
    log.remote.copy.lag.bytes LONG -1 unit=bytes low=-1 dynamic
    log.remote.copy.lag.ms LONG 0 unit=ms low=-1 dynamic
a target assignment is computed at the heartbeat that needs it, or by a custom assignor's process
    group.consumer.assignor.offload.enable BOOLEAN true dynamic internal
    group.share.assignor.offload.enable BOOLEAN true dynamic internal
the operating system sizes its buffers
    socket.send.buffer.bytes INT 102400
    socket.receive.buffer.bytes INT 102400
streams groups are not served
    group.streams.session.timeout.ms INT 45000 low=1
    group.streams.min.session.timeout.ms INT 45000 low=1
    group.streams.max.session.timeout.ms INT 60000 low=1
    group.streams.heartbeat.interval.ms INT 5000 low=1
    group.streams.min.heartbeat.interval.ms INT 5000 low=1
    group.streams.max.heartbeat.interval.ms INT 15000 low=1
    group.streams.assignment.interval.ms INT 1000 low=0 dynamic
    group.streams.min.assignment.interval.ms INT 0 low=0
    group.streams.max.assignment.interval.ms INT 15000 low=0
    group.streams.initial.rebalance.delay.ms INT 3000 low=0
    group.streams.num.standby.replicas INT 0 low=0
    group.streams.max.standby.replicas INT 2 low=0
    group.streams.max.size INT 2147483647 low=1
    group.streams.assignors LIST sticky
    group.streams.assignor.offload.enable BOOLEAN true dynamic internal
    group.streams.rack.aware.assignment.tags LIST "" form=distinct-items
    group.streams.acceptable.recovery.lag LONG 10000 low=0 internal
    group.streams.num.warmup.replicas INT 2 low=0 internal
    group.streams.max.warmup.replicas INT 20 low=0 internal
    group.streams.task.offset.interval.ms INT 60000 low=1 internal
    group.streams.min.task.offset.interval.ms INT 15000 low=1 internal
"""

_GROUP = """
a target assignment is computed at the heartbeat that needs it, or by a custom assignor's process
    consumer.assignor.offload.enable BOOLEAN - internal
    share.assignor.offload.enable BOOLEAN - internal
streams groups are not served
    streams.session.timeout.ms INT - low=1
    streams.heartbeat.interval.ms INT - low=1
    streams.assignment.interval.ms INT - low=0
    streams.initial.rebalance.delay.ms INT - low=0
    streams.num.standby.replicas INT - low=0
    streams.assignor.name STRING -
    streams.assignor.offload.enable BOOLEAN - internal
    streams.rack.aware.assignment.tags LIST - form=distinct-items
    streams.acceptable.recovery.lag LONG - low=0 internal
    streams.num.warmup.replicas INT - low=0 internal
    streams.task.offset.interval.ms INT - low=1 internal
"""

_TOPIC = """
records are kept on the disk: tiered storage is not served
    remote.storage.enable BOOLEAN false
    remote.log.copy.disable BOOLEAN false
    remote.log.delete.on.disable BOOLEAN false
"""


def _keys(table: str) -> tuple[ConfigKey, ...]:
    """Return the keys of a table; in the table a reason is followed by its keys, indented."""
    keys, reason = [], ""
    for line in table.strip().splitlines():
        if line.startswith(" "):
            keys.append(read_key(line, f"Accepted for compatibility: {reason}.", inert=reason))
        else:
            reason = line
    return tuple(keys)


UNUSED_BROKER_KEYS = _keys(_BROKER)
UNUSED_TOPIC_KEYS = _keys(_TOPIC)
"""Keys of topics for which no broker key gives the default."""
UNUSED_GROUP_KEYS = _keys(_GROUP)
"""Keys that can be set for a single group."""
