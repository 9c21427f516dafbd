"""Broker keys that are accepted with a warning and change nothing, each with its reason.

A configuration that was made for Apache Kafka works without an edit, and says what it loses.
"""

from __future__ import annotations

from fencepost.coordinator.config.key import ConfigKey, ConfigType

_B, _I = ConfigType.BOOLEAN, ConfigType.INT
_SH, _L, _LI = ConfigType.SHORT, ConfigType.LONG, ConfigType.LIST

ONE_NODE = "there is one node and one copy"
_ONE_LOOP = "all work is done on one event loop"
_SAME_TURN = "writes are complete when they are answered"


def inert_key(
    name: str,
    kind: ConfigType,
    default: str | None,
    reason: str,
    *,
    low: int | None = None,
    choices: tuple[str, ...] = (),
) -> ConfigKey:
    """A key that is accepted with a warning and changes nothing, for ``reason``."""
    doc = f"Accepted for compatibility: {reason}."
    return ConfigKey(name, kind, default, doc, low=low, choices=choices, inert=reason)


INERT_KEYS = (
    inert_key("min.insync.replicas", _I, "1", ONE_NODE),
    inert_key("unclean.leader.election.enable", _B, "false", ONE_NODE),
    inert_key("auto.leader.rebalance.enable", _B, "true", ONE_NODE),
    inert_key("num.replica.fetchers", _I, "1", ONE_NODE),
    inert_key("replica.lag.time.max.ms", _L, "30000", ONE_NODE),
    inert_key("offsets.topic.replication.factor", _SH, "1", ONE_NODE),
    inert_key(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        _I,
        "10000",
        "a transaction is aborted when its timeout runs out",
        low=1,
    ),
    inert_key("transaction.state.log.replication.factor", _SH, "1", ONE_NODE),
    inert_key("transaction.state.log.min.isr", _I, "1", ONE_NODE),
    inert_key("controlled.shutdown.enable", _B, "true", ONE_NODE),
    inert_key("process.roles", _LI, "broker,controller", ONE_NODE),
    inert_key("controller.quorum.voters", _LI, "", ONE_NODE),
    inert_key("num.network.threads", _I, "3", _ONE_LOOP),
    inert_key("num.io.threads", _I, "8", _ONE_LOOP),
    inert_key("background.threads", _I, "10", _ONE_LOOP),
    inert_key("num.recovery.threads.per.data.dir", _I, "2", _ONE_LOOP),
    inert_key("log.cleaner.threads", _I, "1", _ONE_LOOP),
    inert_key("group.coordinator.threads", _I, "4", _ONE_LOOP),
    inert_key("queued.max.requests", _I, "500", "a connection has one request at a time"),
    inert_key("offsets.commit.timeout.ms", _I, "5000", _SAME_TURN),
    inert_key("group.coordinator.append.linger.ms", _I, "-1", _SAME_TURN),
    inert_key("add.partitions.to.txn.retry.backoff.ms", _I, "20", _SAME_TURN),
    inert_key("add.partitions.to.txn.retry.backoff.max.ms", _I, "100", _SAME_TURN),
    inert_key("request.timeout.ms", _I, "30000", _SAME_TURN),
    inert_key("offsets.load.buffer.size", _I, "5242880", "logs are read segment by segment"),
    inert_key(
        "transaction.state.log.load.buffer.size", _I, "5242880", "logs are read segment by segment"
    ),
    inert_key("offsets.topic.compression.codec", _I, "0", "coordinator records are small"),
    inert_key("log.cleaner.io.buffer.size", _I, "524288", "segments are read batch by batch"),
    inert_key("socket.send.buffer.bytes", _I, "102400", "the operating system sizes its buffers"),
    inert_key(
        "socket.receive.buffer.bytes", _I, "102400", "the operating system sizes its buffers"
    ),
)
