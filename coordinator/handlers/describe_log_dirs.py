"""DescribeLogDirs (35): the log directory, its disk space, and the size of each partition.

Version 3 adds a top-level error, version 4 the space of the file system, version 5 whether the
directory is cordoned (KIP-1066). A partition that was never written has size 0. An offline
partition is left out, as Kafka leaves out the partitions of an offline directory.

Source: ``ReplicaManager.describeLogDirs``; KIP-113, KIP-827.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection, Mapping

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(ApiKey.DESCRIBE_LOG_DIRS, versions=(1, 5), permission="DESCRIBE Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Describe the only log directory, with the requested partitions or all of them."""
    make, directory = ctx.respond, ctx.broker.log_dir
    if not ctx.may_on_cluster(Operation.DESCRIBE):
        code = ErrorCode.cluster_authorization_failed
        return make.DescribeLogDirsResponse(error_code=code, results=())
    # The call may block on the file system.
    usage = asyncio.get_running_loop().run_in_executor(None, shutil.disk_usage, directory)
    yield usage
    code, topics, total, usable = ErrorCode.none, (), -1, -1
    try:
        total, _, usable = usage.result()
    except OSError:
        code = ErrorCode.kafka_storage_error
    else:
        topics = yield from _topics(ctx)
    result = make.DescribeLogDirsResult(
        error_code=code,
        log_dir=directory,
        topics=topics,
        total_bytes=total,
        usable_bytes=usable,
        is_cordoned=False,
    )
    return make.DescribeLogDirsResponse(error_code=ErrorCode.none, results=(result,))


def _topics(ctx: Context) -> Steps[tuple[Entity, ...]]:
    make, logs, replicas = ctx.respond, ctx.broker.logs, ctx.broker.replicas
    topics = []
    for name, indexes in (yield from _asked_for(ctx)).items():
        parts = []
        for index in indexes:
            if replicas.has_one(name, index) and not logs.is_offline(name, index):
                partition = logs.find_open((name, index))
                parts.append(
                    make.DescribeLogDirsPartition(
                        partition_index=index,
                        partition_size=0 if partition is None else partition.log.size_bytes,
                        offset_lag=0,
                        is_future_key=False,
                    )
                )
            yield
        if parts:
            topics.append(make.DescribeLogDirsTopic(name=name, partitions=tuple(parts)))
    return tuple(topics)


def _asked_for(ctx: Context) -> Steps[Mapping[str, Collection[int]]]:
    """Return, by topic, the indexes of the requested partitions that exist."""
    topics = ctx.broker.metadata.topics
    if ctx.body.topics is None:
        return {topic.name: range(len(topic.partitions)) for topic in topics.values()}
    requested: dict[str, set[int]] = {}
    for topic_request in ctx.body.topics:
        topic = topics.get(topic_request.topic)
        existing = range(0 if topic is None else len(topic.partitions))
        # One set per topic, even if the request repeats the topic: copying sets would take
        # quadratic time.
        indexes = requested.setdefault(topic_request.topic, set())
        for index in topic_request.partitions:
            if index in existing:
                indexes.add(index)
            yield
        yield
    return requested
