"""No admin request blocks the event loop, not even the largest of each API."""

from __future__ import annotations

import pytest

from fencepost.cluster.controller.quotas import MAX_CHANGES
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.handlers.controller_decisions import MAX_ITEMS
from fencepost.protocol.api import ApiKey
from tests.wire.test_stalls import (
    ALL,
    HALF,
    MOST,
    NOWHERE,
    UNKNOWN,
    Case,
    Make,
    check_largest,
    crowded,
)

__all__ = ["crowded"]


def log_dirs(make: Make, topics: object) -> dict[str, object]:
    return {
        "topics": [
            make.DescribableLogDirTopic(topic=topic, partitions=list(many))
            for topic, many in topics
        ]
    }


def moves(make: Make, topics: object) -> dict[str, object]:
    named = [
        make.AlterReplicaLogDirTopic(name=topic, partitions=list(many)) for topic, many in topics
    ]
    return {"dirs": [make.AlterReplicaLogDir(path="/elsewhere", topics=named)]}


def elections(make: Make, topics: object) -> dict[str, object]:
    return {
        "election_type": 0,
        "topic_partitions": [
            make.TopicPartitions(topic=topic, partitions=list(many)) for topic, many in topics
        ],
        "timeout_ms": 1000,
    }


def reassignments(
    make: Make, replicas: list[int] | None, count: int = HALF - 2
) -> dict[str, object]:
    parts = [
        make.ReassignablePartition(partition_index=index, replicas=replicas)
        for index in range(count)
    ]
    return {
        "timeout_ms": 1000,
        "topics": [make.ReassignableTopic(name="wide", partitions=parts)],
    }


ACL = {"resource_type": 2, "principal": "a", "host": "*", "operation": 3, "permission_type": 3}
FILTER = {
    "resource_type_filter": 2,
    "resource_name_filter": None,
    "principal_filter": None,
    "host_filter": None,
    "operation": 3,
    "permission_type": 3,
}
PASSWORD = {"iterations": 4096, "salt": b"", "salted_password": b""}


def quotas(make: Make, count: int, *, remove: bool) -> dict[str, object]:
    """Return a request that sets or removes a quota for each of ``count`` unconnected users."""
    return {
        "entries": [
            make.EntryData(
                entity=[make.EntityData(entity_type="user", entity_name=f"user-{number}")],
                ops=[make.OpData(key="producer_byte_rate", value=1e9, remove=remove)],
            )
            for number in range(count)
        ],
        "validate_only": False,
    }


CASES = {
    "sizes of everything": Case(ApiKey.DESCRIBE_LOG_DIRS, 5, lambda _: {"topics": None}),
    "sizes of all partitions": Case(ApiKey.DESCRIBE_LOG_DIRS, 5, lambda make: log_dirs(make, ALL)),
    "sizes of unknown partitions": Case(
        ApiKey.DESCRIBE_LOG_DIRS, 5, lambda make: log_dirs(make, NOWHERE)
    ),
    "moves": Case(ApiKey.ALTER_REPLICA_LOG_DIRS, 2, lambda make: moves(make, ALL)),
    "unknown moves": Case(ApiKey.ALTER_REPLICA_LOG_DIRS, 2, lambda make: moves(make, NOWHERE)),
    "quorums": Case(
        ApiKey.DESCRIBE_QUORUM,
        2,
        lambda make: {
            "topics": [
                make.TopicData(
                    topic_name="nowhere",
                    partitions=[
                        make.PartitionData(partition_index=index) for index in range(MOST - 2)
                    ],
                )
            ]
        },
    ),
    "elections": Case(ApiKey.ELECT_LEADERS, 2, lambda make: elections(make, ALL)),
    "unknown elections": Case(ApiKey.ELECT_LEADERS, 2, lambda make: elections(make, NOWHERE)),
    "elections of everything": Case(
        ApiKey.ELECT_LEADERS,
        2,
        lambda _: {"election_type": 0, "topic_partitions": None, "timeout_ms": 1000},
    ),
    "reassignments": Case(
        ApiKey.ALTER_PARTITION_REASSIGNMENTS, 1, lambda make: reassignments(make, [9])
    ),
    "reassignments to the same broker": Case(
        ApiKey.ALTER_PARTITION_REASSIGNMENTS, 1, lambda make: reassignments(make, [0], MAX_ITEMS)
    ),
    "a reassignment to many": Case(
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        1,
        lambda make: {
            "timeout_ms": 1000,
            "topics": [
                make.ReassignableTopic(
                    name="wide",
                    partitions=[
                        make.ReassignablePartition(
                            partition_index=0, replicas=list(range(MOST - 2))
                        )
                    ],
                )
            ],
        },
    ),
    "resources": Case(ApiKey.LIST_CONFIG_RESOURCES, 1, lambda _: {"resource_types": [2] * MOST}),
    "rights": Case(
        ApiKey.CREATE_ACLS,
        3,
        lambda make: {
            "creations": [
                make.AclCreation(resource_name="a", resource_pattern_type=3, **ACL)
                for _ in range(MOST)
            ]
        },
    ),
    "rights taken away": Case(
        ApiKey.DELETE_ACLS,
        3,
        lambda make: {
            "filters": [make.DeleteAclsFilter(pattern_type_filter=3, **FILTER) for _ in range(MOST)]
        },
    ),
    "a quota of many": Case(
        ApiKey.ALTER_CLIENT_QUOTAS,
        1,
        lambda make: {
            "entries": [
                make.EntryData(
                    entity=[make.EntityData(entity_type="user", entity_name=None)] * HALF,
                    ops=[make.OpData(key="producer_byte_rate", value=1.0, remove=True)]
                    * (HALF - 2),
                )
            ],
            "validate_only": False,
        },
    ),
    "quotas of too many": Case(
        ApiKey.ALTER_CLIENT_QUOTAS, 1, lambda make: quotas(make, MOST // 3, remove=False)
    ),
    "quotas of many": Case(
        ApiKey.ALTER_CLIENT_QUOTAS, 1, lambda make: quotas(make, MAX_CHANGES, remove=False)
    ),
    "all quotas": Case(
        ApiKey.DESCRIBE_CLIENT_QUOTAS, 1, lambda _: {"components": [], "strict": False}
    ),
    "quotas that are taken away": Case(
        ApiKey.ALTER_CLIENT_QUOTAS, 1, lambda make: quotas(make, MAX_CHANGES, remove=True)
    ),
    "quotas": Case(
        ApiKey.DESCRIBE_CLIENT_QUOTAS,
        1,
        lambda make: {
            "components": [make.ComponentData(entity_type="user", match_type=2, match=None)] * MOST,
            "strict": False,
        },
    ),
    "users": Case(
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
        0,
        lambda make: {"users": [make.UserName(name=user) for user in UNKNOWN]},
    ),
    "passwords": Case(
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        0,
        lambda make: {
            "deletions": [],
            "upsertions": [
                make.ScramCredentialUpsertion(name=user, mechanism=1, **PASSWORD)
                for user in UNKNOWN
            ],
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_largest_admin_request_does_not_block_the_event_loop(
    case: Case, crowded: BrokerThread
) -> None:
    check_largest(case, crowded)
