"""The APIs of the Kafka protocol that Fencepost serves: keys, names and versions.

Source of keys and ranges: Kafka 4.4's ``ApiKeys`` and the message schemas. Two peculiarities of
Kafka's ApiVersions response are repeated here: Produce is advertised from version 0 although 0-2
are refused (older librdkafka reads codec support from that range, KAFKA-18659), and a version that
Kafka marks unstable is served only with ``unstable.api.versions.enable``. InitProducerId 6 is also
served with ``transaction.two.phase.commit.enable``, which needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from fencepost.logcore.values import dataclass


class ApiKey(IntEnum):
    """The number of an API in request headers."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    LEADER_AND_ISR = 4
    STOP_REPLICA = 5
    UPDATE_METADATA = 6
    CONTROLLED_SHUTDOWN = 7
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    ALTER_REPLICA_LOG_DIRS = 34
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    INCREMENTAL_ALTER_CONFIGS = 44
    ALTER_PARTITION_REASSIGNMENTS = 45
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    ALTER_CLIENT_QUOTAS = 49
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    VOTE = 52
    BEGIN_QUORUM_EPOCH = 53
    END_QUORUM_EPOCH = 54
    DESCRIBE_QUORUM = 55
    ALTER_PARTITION = 56
    UPDATE_FEATURES = 57
    ENVELOPE = 58
    FETCH_SNAPSHOT = 59
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    BROKER_REGISTRATION = 62
    BROKER_HEARTBEAT = 63
    UNREGISTER_BROKER = 64
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    ALLOCATE_PRODUCER_IDS = 67
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    CONTROLLER_REGISTRATION = 70
    GET_TELEMETRY_SUBSCRIPTIONS = 71
    PUSH_TELEMETRY = 72
    ASSIGN_REPLICAS_TO_DIRS = 73
    LIST_CONFIG_RESOURCES = 74
    DESCRIBE_TOPIC_PARTITIONS = 75
    SHARE_GROUP_HEARTBEAT = 76
    SHARE_GROUP_DESCRIBE = 77
    SHARE_FETCH = 78
    SHARE_ACKNOWLEDGE = 79
    INITIALIZE_SHARE_GROUP_STATE = 83
    READ_SHARE_GROUP_STATE = 84
    WRITE_SHARE_GROUP_STATE = 85
    DELETE_SHARE_GROUP_STATE = 86
    READ_SHARE_GROUP_STATE_SUMMARY = 87
    DESCRIBE_SHARE_GROUP_OFFSETS = 90
    ALTER_SHARE_GROUP_OFFSETS = 91
    DELETE_SHARE_GROUP_OFFSETS = 92
    UNREGISTER_CONTROLLER = 94


@dataclass(frozen=True, slots=True)
class Api:
    """One API: its served versions (``min_version``-``max_version``) and its advertised ones."""

    key: ApiKey
    name: str
    """Kafka's name, such as ``OffsetCommit``."""
    min_version: int
    max_version: int
    advertised_min: int
    stable_max: int
    """The highest version served unless ``unstable.api.versions.enable`` is on."""

    @property
    def module(self) -> str:
        """Return the name in snake case: kio's schema package and our handler module."""
        return self.key.name.lower()

    def max_served(self, *, unstable: bool) -> int:
        """Return the highest version served with or without ``unstable.api.versions.enable``."""
        return self.max_version if unstable else self.stable_max


def _api(
    key: ApiKey, versions: tuple[int, int], *, from_zero: bool = False, stable_max: int = 0
) -> Api:
    low, high = versions
    name = "".join(part.capitalize() for part in key.name.split("_"))
    return Api(key, name, low, high, 0 if from_zero else low, stable_max or high)


APIS: Mapping[int, Api] = {
    api.key: api
    for api in (
        _api(ApiKey.PRODUCE, (3, 13), from_zero=True),
        _api(ApiKey.FETCH, (4, 18)),
        _api(ApiKey.LIST_OFFSETS, (1, 11)),
        _api(ApiKey.METADATA, (0, 13)),
        _api(ApiKey.OFFSET_COMMIT, (2, 10)),
        _api(ApiKey.OFFSET_FETCH, (1, 10)),
        _api(ApiKey.FIND_COORDINATOR, (0, 6)),
        _api(ApiKey.JOIN_GROUP, (0, 9)),
        _api(ApiKey.HEARTBEAT, (0, 4)),
        _api(ApiKey.LEAVE_GROUP, (0, 5)),
        _api(ApiKey.SYNC_GROUP, (0, 5)),
        _api(ApiKey.DESCRIBE_GROUPS, (0, 6)),
        _api(ApiKey.LIST_GROUPS, (0, 5)),
        _api(ApiKey.SASL_HANDSHAKE, (0, 1)),
        _api(ApiKey.API_VERSIONS, (0, 5)),
        _api(ApiKey.CREATE_TOPICS, (2, 7)),
        _api(ApiKey.DELETE_TOPICS, (1, 6)),
        _api(ApiKey.DELETE_RECORDS, (0, 2)),
        _api(ApiKey.INIT_PRODUCER_ID, (0, 6), stable_max=5),
        _api(ApiKey.OFFSET_FOR_LEADER_EPOCH, (2, 4)),
        _api(ApiKey.ADD_PARTITIONS_TO_TXN, (0, 5)),
        _api(ApiKey.ADD_OFFSETS_TO_TXN, (0, 4)),
        _api(ApiKey.END_TXN, (0, 5)),
        _api(ApiKey.WRITE_TXN_MARKERS, (1, 2)),
        _api(ApiKey.TXN_OFFSET_COMMIT, (0, 6)),
        _api(ApiKey.DESCRIBE_ACLS, (1, 3)),
        _api(ApiKey.CREATE_ACLS, (1, 3)),
        _api(ApiKey.DELETE_ACLS, (1, 3)),
        _api(ApiKey.DESCRIBE_CONFIGS, (1, 4)),
        _api(ApiKey.ALTER_CONFIGS, (0, 2)),
        _api(ApiKey.ALTER_REPLICA_LOG_DIRS, (1, 2)),
        _api(ApiKey.DESCRIBE_LOG_DIRS, (1, 5)),
        _api(ApiKey.SASL_AUTHENTICATE, (0, 2)),
        _api(ApiKey.CREATE_PARTITIONS, (0, 3)),
        _api(ApiKey.DELETE_GROUPS, (0, 3)),
        _api(ApiKey.ELECT_LEADERS, (0, 2)),
        _api(ApiKey.INCREMENTAL_ALTER_CONFIGS, (0, 1)),
        _api(ApiKey.ALTER_PARTITION_REASSIGNMENTS, (0, 1)),
        _api(ApiKey.LIST_PARTITION_REASSIGNMENTS, (0, 0)),
        _api(ApiKey.OFFSET_DELETE, (0, 0)),
        _api(ApiKey.DESCRIBE_CLIENT_QUOTAS, (0, 1)),
        _api(ApiKey.ALTER_CLIENT_QUOTAS, (0, 1)),
        _api(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, (0, 0)),
        _api(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, (0, 0)),
        _api(ApiKey.DESCRIBE_QUORUM, (0, 2)),
        _api(ApiKey.UPDATE_FEATURES, (0, 2)),
        _api(ApiKey.DESCRIBE_CLUSTER, (0, 2)),
        _api(ApiKey.DESCRIBE_PRODUCERS, (0, 0)),
        _api(ApiKey.UNREGISTER_BROKER, (0, 0)),
        _api(ApiKey.DESCRIBE_TRANSACTIONS, (0, 0)),
        _api(ApiKey.LIST_TRANSACTIONS, (0, 2)),
        _api(ApiKey.CONSUMER_GROUP_HEARTBEAT, (0, 1)),
        _api(ApiKey.CONSUMER_GROUP_DESCRIBE, (0, 1)),
        _api(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, (0, 0)),
        _api(ApiKey.PUSH_TELEMETRY, (0, 0)),
        _api(ApiKey.LIST_CONFIG_RESOURCES, (0, 1)),
        _api(ApiKey.DESCRIBE_TOPIC_PARTITIONS, (0, 0)),
        _api(ApiKey.SHARE_GROUP_HEARTBEAT, (1, 1)),
        _api(ApiKey.SHARE_GROUP_DESCRIBE, (1, 1)),
        _api(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, (0, 1)),
        _api(ApiKey.ALTER_SHARE_GROUP_OFFSETS, (0, 0)),
        _api(ApiKey.DELETE_SHARE_GROUP_OFFSETS, (0, 0)),
        _api(ApiKey.SHARE_FETCH, (1, 2)),
        _api(ApiKey.SHARE_ACKNOWLEDGE, (1, 2)),
        _api(ApiKey.INITIALIZE_SHARE_GROUP_STATE, (0, 0)),
        _api(ApiKey.READ_SHARE_GROUP_STATE, (0, 0)),
        _api(ApiKey.WRITE_SHARE_GROUP_STATE, (0, 1)),
        _api(ApiKey.DELETE_SHARE_GROUP_STATE, (0, 0)),
        _api(ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, (0, 1)),
        _api(ApiKey.UNREGISTER_CONTROLLER, (0, 0)),
    )
}
"""Every API that clients send to a broker, by key. A range is never narrowed to the versions of new
clients, because librdkafka and aiokafka stay on old versions for years."""

CONTROLLER_APIS: Mapping[int, Api] = {
    api.key: api
    for api in (
        _api(ApiKey.VOTE, (0, 2)),
        _api(ApiKey.BEGIN_QUORUM_EPOCH, (0, 1)),
        _api(ApiKey.END_QUORUM_EPOCH, (0, 1)),
        _api(ApiKey.ALTER_PARTITION, (2, 3)),
        _api(ApiKey.ENVELOPE, (0, 0)),
        _api(ApiKey.FETCH_SNAPSHOT, (0, 1)),
        _api(ApiKey.BROKER_REGISTRATION, (0, 4)),
        _api(ApiKey.BROKER_HEARTBEAT, (0, 2)),
        _api(ApiKey.ALLOCATE_PRODUCER_IDS, (0, 0)),
        _api(ApiKey.CONTROLLER_REGISTRATION, (0, 0)),
        _api(ApiKey.ASSIGN_REPLICAS_TO_DIRS, (0, 0)),
    )
}
"""APIs between nodes that only a controller's listener serves. (A broker of a ZooKeeper cluster
serves some of them; see :data:`ZOOKEEPER_APIS`.)"""

TELEMETRY_APIS: Final = frozenset({ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY})
"""APIs with which clients push their metrics (KIP-714). A setting of the broker can disable them; a
broker of a ZooKeeper cluster never serves them, as in Kafka 3.9."""

FORWARDED: frozenset[int] = frozenset(
    {
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS,
        ApiKey.CREATE_ACLS,
        ApiKey.DELETE_ACLS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.ELECT_LEADERS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        ApiKey.LIST_PARTITION_REASSIGNMENTS,
        ApiKey.ALTER_CLIENT_QUOTAS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        ApiKey.DESCRIBE_QUORUM,
        ApiKey.UPDATE_FEATURES,
        ApiKey.UNREGISTER_BROKER,
        ApiKey.UNREGISTER_CONTROLLER,
    }
)
"""APIs that a broker forwards to the active controller (KIP-590); ``ApiKeys.forwardable``."""

ZOOKEEPER_APIS: Mapping[int, Api] = {
    api.key: api
    for api in (
        _api(ApiKey.LEADER_AND_ISR, (7, 7)),
        _api(ApiKey.STOP_REPLICA, (4, 4)),
        _api(ApiKey.UPDATE_METADATA, (8, 8)),
        _api(ApiKey.CONTROLLED_SHUTDOWN, (3, 3)),
    )
}
"""APIs between a ZooKeeper controller and brokers. A broker of a ZooKeeper cluster serves them, and
the APIs of ``CONTROLLER_APIS`` that brokers send to the controller of such a cluster."""

KNOWN_APIS: Mapping[int, Api] = {
    **APIS,
    **CONTROLLER_APIS,
    **ZOOKEEPER_APIS,
}
"""All APIs whose messages can be read and written."""

_NAMED_ONLY: Final = {93: "StreamsGroupTopologyDescriptionUpdate"}
"""APIs of Apache Kafka 4.4 that are neither served nor in kio."""


def api_name(api_key: int) -> str | None:
    """Return Kafka's name of an API, served or not; None if no API has the key."""
    api = KNOWN_APIS.get(api_key)
    if api is not None:
        return api.name
    from kio.schema.index import api_key_map  # noqa: PLC0415 - few callers ask for such a key

    name = api_key_map.get(api_key)
    return _NAMED_ONLY.get(api_key) if name is None else name.title().replace("_", "")
