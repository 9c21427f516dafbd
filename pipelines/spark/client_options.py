"""Options of Kafka's own clients; Spark's connector passes them on with the prefix ``kafka.``.

Source: ``configNames()`` of ``ProducerConfig``, ``ConsumerConfig`` and ``AdminClientConfig`` of
Apache Kafka 3.9 to 4.3.
"""

from __future__ import annotations

import functools
import logging

_NAMES = frozenset(
    """
    acks allow.auto.create.topics auto.commit.interval.ms auto.include.jmx.reporter
    auto.offset.reset batch.size bootstrap.controllers bootstrap.servers buffer.memory check.crcs
    client.dns.lookup client.id client.rack compression.gzip.level compression.lz4.level
    compression.type compression.zstd.level config.providers connections.max.idle.ms
    default.api.timeout.ms delivery.timeout.ms enable.auto.commit enable.idempotence
    enable.metrics.push exclude.internal.topics fetch.max.bytes fetch.max.wait.ms fetch.min.bytes
    group.id group.instance.id group.protocol group.remote.assignor heartbeat.interval.ms
    interceptor.classes isolation.level key.deserializer key.serializer linger.ms max.block.ms
    max.in.flight.requests.per.connection max.partition.fetch.bytes max.poll.interval.ms
    max.poll.records max.request.size metadata.max.age.ms metadata.max.idle.ms
    metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy metric.reporters
    metrics.num.samples metrics.recording.level metrics.sample.window.ms
    partition.assignment.strategy partitioner.adaptive.partitioning.enable
    partitioner.availability.timeout.ms partitioner.class partitioner.ignore.keys
    receive.buffer.bytes reconnect.backoff.max.ms reconnect.backoff.ms request.timeout.ms retries
    retry.backoff.max.ms retry.backoff.ms send.buffer.bytes
    session.timeout.ms share.acknowledgement.mode share.acquire.mode
    socket.connection.setup.timeout.max.ms socket.connection.setup.timeout.ms
    transaction.timeout.ms transaction.two.phase.commit.enable transactional.id value.deserializer
    value.serializer
    """.split()  # noqa: SIM905 - eighty lines of quotation marks say no more
)
_FAMILIES = ("internal.",)
"""Prefixes of internal options, whose number grows with each release."""

INSTEAD = {
    "kafka.auto.offset.reset": "startingOffsets says where a new query begins, and failOnDataLoss"
    " what happens to one whose offsets are gone",
    "kafka.enable.auto.commit": "the offsets are in Spark's checkpoint",
    "kafka.interceptor.classes": "no Java client is there to run them",
    "kafka.key.deserializer": "keys are bytes; cast them in the query",
    "kafka.value.deserializer": "values are bytes; cast them in the query",
    "kafka.key.serializer": "keys are bytes or strings; encode them in the query",
    "kafka.value.serializer": "values are bytes or strings; encode them in the query",
    "kafka.partitioner.class": "a column partition says where a row goes",
}
"""Options of a Kafka client that are refused, as by the stock connector, with an alternative."""

OF_CONNECTOR = frozenset(
    {
        "kafkaconsumer.polltimeoutms",
        "fetchoffset.numretries",
        "fetchoffset.retryintervalms",
        "groupidprefix",
    }
)
"""Options of the stock connector that have no effect here."""

_log = logging.getLogger(__name__)


def is_known(option: str) -> bool:
    """Return whether a lower-case option belongs to a Kafka client."""
    prefix, _, name = option.partition(".")
    return prefix == "kafka" and (name in _NAMES or name.startswith(_FAMILIES))


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, once per process: Spark requests a writer for every micro-batch."""
    _log.warning("%s", text)
