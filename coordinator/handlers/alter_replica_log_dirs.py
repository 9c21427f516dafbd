"""AlterReplicaLogDirs (34): move replicas between log directories; a broker has only one.

Each partition is already in the requested directory, or the directory does not exist
(LOG_DIR_NOT_FOUND).

Source: ``ReplicaManager.alterReplicaLogDirs``; KIP-113.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


@handles(ApiKey.ALTER_REPLICA_LOG_DIRS, versions=(1, 2), permission="ALTER Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Respond with one result per partition; the last directory named for a partition counts."""
    make, may = ctx.respond, ctx.may_on_cluster(Operation.ALTER)
    refused = ErrorCode.cluster_authorization_failed
    directories: dict[str, dict[int, str]] = {}
    for directory in ctx.body.dirs:
        for topic in directory.topics:
            for index in topic.partitions:
                directories.setdefault(topic.name, {})[index] = directory.path
                yield
            yield
        yield
    results = []
    for name, partitions in directories.items():
        parts = []
        for index, path in partitions.items():
            parts.append(
                make.AlterReplicaLogDirPartitionResult(
                    partition_index=index,
                    error_code=_code(ctx, name, index, path) if may else refused,
                )
            )
            yield
        results.append(make.AlterReplicaLogDirTopicResult(topic_name=name, partitions=tuple(parts)))
    return make.AlterReplicaLogDirsResponse(results=tuple(results))


def _code(ctx: Context, topic: str, index: int, path: str) -> ErrorCode:
    if path != ctx.broker.log_dir:
        return ErrorCode.log_dir_not_found
    if ctx.broker.logs.is_offline(topic, index):
        return ErrorCode.kafka_storage_error
    try:
        ctx.broker.metadata.having(topic, index)
    except DomainError as error:
        return error_code(error)
    return ErrorCode.none
