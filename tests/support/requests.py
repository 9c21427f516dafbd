"""Bodies of requests: one function per API, named as the API in ``kio.schema``.

Each returns the smallest valid body with the fields of all versions; keyword arguments replace
fields or add some. :meth:`tests.support.raw.RawClient.ask` and :func:`tests.support.raw.fitted`
drop the fields that the version of a request does not have.

Further functions make the rows of a body, such as :func:`fetch_topic`. Each item of their argument
``partitions`` is a whole row, or a number: its row gets the keyword arguments as fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

Body = dict[str, Any]
Partition = int | Mapping[str, Any]
"""The number of a partition, or a whole row."""
Producer = tuple[int | Callable[..., Any], int | Callable[..., Any]]
"""Producer id and epoch. In random tests each may be a function, which is called when the request
is sent.
"""

TIMEOUT_MS: Final = 10_000
SESSION_MS: Final = 60_000
"""Session, rebalance and transaction timeout, long enough for a stall of the machine."""
NO_TOPICS: Final = b"\0\0\0\0\0\0\xff\xff\xff\xff"
"""The subscription of a classic consumer: version 0, without topics and user data."""
NO_EPOCH: Final = -1
CONSUMER: Final = -1
"""The replica id of consumers."""
LATEST: Final = -1
NO_SESSION: Final = -1
MAX_BYTES: Final = 1 << 20
MAX_PARTITIONS: Final = 2000
SET: Final = 0
NO_PRODUCER: Final = (-1, -1)
ANY: Final = 1
TOPIC: Final = 2
LITERAL: Final = 3
READ: Final = 3
ALLOW: Final = 3
MIN_ITERATIONS: Final = 4096
BROKERS: Final = 1
UPGRADE: Final = 1


def _rows(key: str, partitions: tuple[Partition, ...], fields: Mapping[str, Any]) -> list[Body]:
    """Return the rows of ``partitions``. A row made from a number has it in the field ``key``."""
    return [
        {**fields, **partition} if isinstance(partition, Mapping) else {key: partition, **fields}
        for partition in partitions
    ]


def _id_of(topic_id: Any) -> Body:
    """Return the field of a topic id, or nothing for None."""
    return {} if topic_id is None else {"topic_id": topic_id}


def indexes_of(name: str | None, *partitions: int, **fields: Any) -> Body:
    """Return a topic with partition numbers, in the form that several APIs share."""
    return {"name": name, "partition_indexes": list(partitions), **fields}


# --- the leaders of partitions ---


def produce(*topics: Body, **fields: Any) -> Body:
    return {
        "transactional_id": None,
        "acks": -1,
        "timeout": TIMEOUT_MS,
        "topic_data": list(topics),
        **fields,
    }


def produce_topic(
    name: str, records: Any, *, partition: int = 0, topic_id: Any = None, **fields: Any
) -> Body:
    """Return a topic with one batch for ``partition``, or with the batches of a mapping."""
    by_partition = records if isinstance(records, Mapping) else {partition: records}
    data = [{"index": index, "records": batch} for index, batch in by_partition.items()]
    return {"name": name, **_id_of(topic_id), "partition_data": data, **fields}


def fetch(*topics: Body, **fields: Any) -> Body:
    return {
        "replica_id": CONSUMER,
        "max_wait": 0,
        "min_bytes": 1,
        "max_bytes": MAX_BYTES,
        "session_epoch": NO_SESSION,
        "topics": list(topics),
        **fields,
    }


def fetch_topic(
    name: str | None, *partitions: Partition, topic_id: Any = None, **fields: Any
) -> Body:
    row = {
        "fetch_offset": 0,
        "partition_max_bytes": MAX_BYTES,
        "current_leader_epoch": NO_EPOCH,
        **fields,
    }
    return {
        "topic": name,
        **_id_of(topic_id),
        "partitions": _rows("partition", partitions, row),
    }


def forgotten_topic(name: str | None, *partitions: int, topic_id: Any = None) -> Body:
    """Return a topic that a Fetch request removes from its session."""
    return {"topic": name, **_id_of(topic_id), "partitions": list(partitions)}


def list_offsets(*topics: Body, **fields: Any) -> Body:
    return {
        "replica_id": CONSUMER,
        "timeout": TIMEOUT_MS,
        "topics": list(topics),
        **fields,
    }


def list_offsets_topic(name: str, *partitions: Partition, **fields: Any) -> Body:
    row = {"timestamp": LATEST, "current_leader_epoch": NO_EPOCH, **fields}
    return {"name": name, "partitions": _rows("partition_index", partitions, row)}


def offset_for_leader_epoch(*topics: Body, **fields: Any) -> Body:
    return {"replica_id": CONSUMER, "topics": list(topics), **fields}


def offset_for_leader_epoch_topic(name: str, *partitions: Partition, **fields: Any) -> Body:
    row = {"current_leader_epoch": NO_EPOCH, "leader_epoch": 0, **fields}
    return {"topic": name, "partitions": _rows("partition", partitions, row)}


def delete_records(*topics: Body, **fields: Any) -> Body:
    return {"timeout": TIMEOUT_MS, "topics": list(topics), **fields}


def delete_records_topic(name: str, *partitions: Partition, **fields: Any) -> Body:
    """Return a topic whose partitions lose their records below ``offset``, by default all."""
    row = {"offset": LATEST, **fields}
    return {"name": name, "partitions": _rows("partition_index", partitions, row)}


# --- topics ---


def named(name: str | None, topic_id: Any = None) -> Body:
    """Return a topic with a name, with an id or with both."""
    return {"name": name, "topic_id": topic_id}


def _topics(topics: Iterable[str | Body]) -> list[Body]:
    return [named(topic) if isinstance(topic, str) else topic for topic in topics]


def metadata(*topics: str | Body, **fields: Any) -> Body:
    return {"topics": _topics(topics), "allow_auto_topic_creation": False, **fields}


def describe_topic_partitions(*topics: str, **fields: Any) -> Body:
    return {
        "topics": [{"name": name} for name in topics],
        "response_partition_limit": MAX_PARTITIONS,
        **fields,
    }


def create_topics(*topics: Body, **fields: Any) -> Body:
    return {"timeout": TIMEOUT_MS, "topics": list(topics), **fields}


def new_topic(
    name: str,
    partitions: int = 1,
    replicas: int = 1,
    *,
    configs: Mapping[str, str | None] | None = None,
    **fields: Any,
) -> Body:
    """Return a row of CreateTopics."""
    rows = [{"name": key, "value": value} for key, value in (configs or {}).items()]
    given = {} if configs is None else {"configs": rows}
    return {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": replicas,
        **given,
        **fields,
    }


def assigned(name: str, *replicas: list[int], **fields: Any) -> Body:
    """Return a row of CreateTopics with the replicas of each partition."""
    rows = [{"partition_index": index, "broker_ids": ids} for index, ids in enumerate(replicas)]
    return new_topic(name, -1, -1, assignments=rows, **fields)


def create_partitions(*topics: Body, **fields: Any) -> Body:
    return {"timeout": TIMEOUT_MS, "topics": list(topics), **fields}


def grown_topic(name: str, count: int, *replicas: list[int], **fields: Any) -> Body:
    """Return a row of CreatePartitions, with the replicas of each new partition or with none."""
    rows = [{"broker_ids": ids} for ids in replicas]
    return {"name": name, "count": count, "assignments": rows or None, **fields}


def delete_topics(*topics: str | Body, **fields: Any) -> Body:
    """Return the body of a DeleteTopics request, which before version 6 has names only."""
    rows = _topics(topics)
    return {
        "timeout": TIMEOUT_MS,
        "topic_names": [row["name"] for row in rows if row["name"] is not None],
        "topics": rows,
        **fields,
    }


# --- configs ---


def describe_configs(*resources: Body, **fields: Any) -> Body:
    return {"resources": list(resources), **fields}


def described_resource(kind: int, name: str, *keys: str, **fields: Any) -> Body:
    """Return a row of DescribeConfigs, for all keys if none is given."""
    return {
        "resource_type": kind,
        "resource_name": name,
        "configuration_keys": list(keys) or None,
        **fields,
    }


def config_op(name: str, value: str | None, operation: int | None = SET) -> Body:
    """Return one change; AlterConfigs has no operations (None)."""
    op = {} if operation is None else {"config_operation": operation}
    return {"name": name, **op, "value": value}


def altered_resource(kind: int, name: str, *changes: Body) -> Body:
    """Return a row of IncrementalAlterConfigs and of AlterConfigs."""
    return {"resource_type": kind, "resource_name": name, "configs": list(changes)}


def incremental_alter_configs(*resources: Body, **fields: Any) -> Body:
    return {"resources": list(resources), **fields}


def alter_configs(*resources: Body, **fields: Any) -> Body:
    """Return the body for the same rows as IncrementalAlterConfigs, without the operations."""
    rows = [
        {
            **row,
            "configs": [
                {key: value for key, value in config.items() if key != "config_operation"}
                for config in row["configs"]
            ],
        }
        for row in resources
    ]
    return {"resources": rows, **fields}


def list_config_resources(*kinds: int) -> Body:
    return {"resource_types": list(kinds)}


# --- groups ---


def find_coordinator(*keys: str, key_type: int = 0, **fields: Any) -> Body:
    """Return the body of a FindCoordinator request, which before version 4 has one key."""
    return {
        "key": keys[0] if keys else "",
        "key_type": key_type,
        "coordinator_keys": list(keys),
        **fields,
    }


def join_group(group: str, member: Any = "", **fields: Any) -> Body:
    return {
        "group_id": group,
        "member_id": member,
        "session_timeout": SESSION_MS,
        "rebalance_timeout": SESSION_MS,
        "protocol_type": "consumer",
        "protocols": [join_protocol()],
        **fields,
    }


def join_protocol(name: str = "range", metadata: bytes = NO_TOPICS) -> Body:
    return {"name": name, "metadata": metadata}


def sync_group(group: str, generation: Any, member: Any, **fields: Any) -> Body:
    return {"group_id": group, "generation_id": generation, "member_id": member, **fields}


def sync_assignment(member: str, assignment: bytes) -> Body:
    return {"member_id": member, "assignment": assignment}


def heartbeat(group: str, generation: Any, member: Any, **fields: Any) -> Body:
    return {"group_id": group, "generation_id": generation, "member_id": member, **fields}


def leave_group(group: str, *members: str | Body, **fields: Any) -> Body:
    """Return the body of a LeaveGroup request, which before version 3 has the first member only."""
    rows = [leaving_member(member) if isinstance(member, str) else member for member in members]
    first = {"member_id": rows[0]["member_id"]} if rows else {}
    return {"group_id": group, **first, "members": rows, **fields}


def leaving_member(member: Any = "", instance: str | None = None, **fields: Any) -> Body:
    return {"member_id": member, "group_instance_id": instance, **fields}


def consumer_group_heartbeat(group: str, member: Any, epoch: Any, **fields: Any) -> Body:
    return {
        "group_id": group,
        "member_id": member,
        "member_epoch": epoch,
        "rebalance_timeout": -1,
        **fields,
    }


def join_consumer_group(group: str, member: Any, *topics: str, **fields: Any) -> Body:
    """Return the first heartbeat of a member."""
    joining = {
        "rebalance_timeout": SESSION_MS,
        "subscribed_topic_names": list(topics),
        "topic_partitions": [],
        **fields,
    }
    return consumer_group_heartbeat(group, member, 0, **joining)


def describe_groups(*groups: str, **fields: Any) -> Body:
    return {"groups": list(groups), **fields}


def consumer_group_describe(*groups: str, **fields: Any) -> Body:
    return {"group_ids": list(groups), **fields}


def share_group_heartbeat(group: str, member: Any, epoch: Any, **fields: Any) -> Body:
    return {"group_id": group, "member_id": member, "member_epoch": epoch, **fields}


def join_share_group(group: str, member: Any, *topics: str, **fields: Any) -> Body:
    """Return the first heartbeat of a member."""
    return share_group_heartbeat(group, member, 0, subscribed_topic_names=list(topics), **fields)


def share_group_describe(*groups: str, **fields: Any) -> Body:
    return {"group_ids": list(groups), **fields}


def list_groups(**fields: Any) -> Body:
    return {**fields}


def delete_groups(*groups: str) -> Body:
    return {"groups_names": list(groups)}


# --- offsets of groups ---


def offset_commit(group: str, *topics: Body, **fields: Any) -> Body:
    """Return the body of an OffsetCommit request without a member."""
    return {
        "group_id": group,
        "generation_id_or_member_epoch": NO_EPOCH,
        "member_id": "",
        "topics": list(topics),
        **fields,
    }


def offset_commit_topic(
    name: str | None, *partitions: Partition, topic_id: Any = None, **fields: Any
) -> Body:
    """Return a topic of OffsetCommit and of TxnOffsetCommit."""
    row = {
        "committed_offset": 0,
        "committed_leader_epoch": NO_EPOCH,
        "committed_metadata": "",
        **fields,
    }
    return {
        "name": name,
        **_id_of(topic_id),
        "partitions": _rows("partition_index", partitions, row),
    }


def offset_fetch(*groups: str | Body, **fields: Any) -> Body:
    """Return the body of an OffsetFetch request, which before version 8 has the first group only.

    A group that is given by its name fetches all its offsets.
    """
    rows = [offset_fetch_group(group) if isinstance(group, str) else group for group in groups]
    first = {key: rows[0][key] for key in ("group_id", "topics")} if rows else {}
    return {**first, "groups": rows, **fields}


def offset_fetch_group(group: str, *topics: Body, **fields: Any) -> Body:
    """Return a group with some topics, or with all topics if none is given."""
    return {
        "group_id": group,
        "member_epoch": NO_EPOCH,
        "topics": list(topics) or None,
        **fields,
    }


def offset_fetch_topic(name: str | None, *partitions: int, topic_id: Any = None) -> Body:
    return {**_id_of(topic_id), **indexes_of(name, *partitions)}


def offset_delete(group: str, *topics: Body) -> Body:
    return {"group_id": group, "topics": list(topics)}


def offset_delete_topic(name: str, *partitions: int) -> Body:
    return {"name": name, "partitions": _rows("partition_index", partitions, {})}


def describe_share_group_offsets(group: str, *topics: tuple[str, Sequence[int]] | None) -> Body:
    """Return the body for these topics, or for all topics of a group if the only topic is None."""
    named = [
        {"topic_name": topic[0], "partitions": list(topic[1])}
        for topic in topics
        if topic is not None
    ]
    return {"groups": [{"group_id": group, "topics": None if topics == (None,) else named}]}


def alter_share_group_offsets(group: str, topic: str, offsets: Mapping[int, int]) -> Body:
    rows = [{"partition_index": index, "start_offset": at} for index, at in offsets.items()]
    return {"group_id": group, "topics": [{"topic_name": topic, "partitions": rows}]}


def delete_share_group_offsets(group: str, *topics: str) -> Body:
    return {"group_id": group, "topics": [{"topic_name": topic} for topic in topics]}


# --- transactions and producers ---


def _claim(transactional_id: str | None, producer: Producer) -> Body:
    return {
        "transactional_id": transactional_id,
        "producer_id": producer[0],
        "producer_epoch": producer[1],
    }


def init_producer_id(
    transactional_id: str | None = None, producer: Producer = NO_PRODUCER, **fields: Any
) -> Body:
    return {
        **_claim(transactional_id, producer),
        "transaction_timeout": SESSION_MS,
        **fields,
    }


def add_partitions_to_txn(*transactions: Body, **fields: Any) -> Body:
    """Return the body of a request, which before version 4 has the first transaction only."""
    first = {
        f"v3_and_below_{key}": value
        for key, value in transactions[0].items()
        if key != "verify_only"
    }
    return {**first, "transactions": list(transactions), **fields}


def added_partitions(
    transactional_id: str, producer: Producer, *topics: tuple[str, list[int]], **fields: Any
) -> Body:
    """Return a transaction of an AddPartitionsToTxn request, with topics and their partitions."""
    return {
        **_claim(transactional_id, producer),
        "topics": [{"name": name, "partitions": partitions} for name, partitions in topics],
        **fields,
    }


def add_offsets_to_txn(transactional_id: str, producer: Producer, group: str) -> Body:
    return {**_claim(transactional_id, producer), "group_id": group}


def txn_offset_commit(
    transactional_id: str,
    producer: Producer,
    group: str,
    *topics: Body,
    generation: Any = NO_EPOCH,
    **fields: Any,
) -> Body:
    """Return the body of a request without a member; ``offset_commit_topic`` makes its topics."""
    return {
        **_claim(transactional_id, producer),
        "group_id": group,
        "generation_id": generation,
        "generation_id_or_member_epoch": generation,
        "member_id": "",
        "topics": list(topics),
        **fields,
    }


def end_txn(transactional_id: str, producer: Producer, *, committed: bool = True) -> Body:
    return {**_claim(transactional_id, producer), "committed": committed}


def write_txn_markers(*markers: Body) -> Body:
    return {"markers": list(markers)}


def marker(producer: Producer, *topics: Body, **fields: Any) -> Body:
    """Return an abort marker; ``indexes_of`` makes its topics."""
    return {
        "producer_id": producer[0],
        "producer_epoch": producer[1],
        "transaction_result": False,
        "topics": list(topics),
        "coordinator_epoch": 0,
        **fields,
    }


def describe_transactions(*transactional_ids: str) -> Body:
    return {"transactional_ids": list(transactional_ids)}


def list_transactions(**fields: Any) -> Body:
    return {"duration_filter": -1, **fields}


def describe_producers(*topics: Body) -> Body:
    """Return the body of a DescribeProducers request; ``indexes_of`` makes its topics."""
    return {"topics": list(topics)}


# --- ACLs, quotas, users and logins ---


def acl(name: str, **fields: Any) -> Body:
    """Return a row of CreateAcls: a user may read a topic."""
    return {
        "resource_type": TOPIC,
        "resource_name": name,
        "resource_pattern_type": LITERAL,
        "principal": "User:a",
        "host": "*",
        "operation": READ,
        "permission_type": ALLOW,
        **fields,
    }


def create_acls(*acls: Body) -> Body:
    return {"creations": list(acls)}


def acl_filter(name: str | None = None, **fields: Any) -> Body:
    """Return a filter for the ACLs of a topic with this name, or of all topics."""
    return {
        "resource_type_filter": TOPIC,
        "pattern_type_filter": LITERAL,
        "operation": ANY,
        "permission_type": ANY,
        "resource_name_filter": name,
        **fields,
    }


def describe_acls(**fields: Any) -> Body:
    """Return a filter that all ACLs match, with ``fields`` replaced."""
    return {
        "resource_type_filter": ANY,
        "pattern_type_filter": ANY,
        "operation": ANY,
        "permission_type": ANY,
        **fields,
    }


def delete_acls(*filters: Body) -> Body:
    return {"filters": list(filters)}


def describe_client_quotas(*components: Body, **fields: Any) -> Body:
    return {"components": list(components), "strict": False, **fields}


def quota_component(entity_type: str, match_type: int, match: str | None = None) -> Body:
    return {"entity_type": entity_type, "match_type": match_type, "match": match}


def alter_client_quotas(*entries: Body, **fields: Any) -> Body:
    return {"entries": list(entries), **fields}


def quota_entry(
    entity: Mapping[str, str | None] | Sequence[tuple[str, str | None]],
    *ops: Body,
    **values: float | None,
) -> Body:
    """Return the entry of ``entity``, with ops for ``values``; the value None removes a quota."""
    parts = entity.items() if isinstance(entity, Mapping) else entity
    return {
        "entity": [{"entity_type": kind, "entity_name": name} for kind, name in parts],
        "ops": [*ops, *(quota_op(key, value) for key, value in values.items())],
    }


def quota_op(key: str, value: float | None, *, remove: bool | None = None) -> Body:
    """Return a change of one quota; the value None removes it."""
    return {
        "key": key,
        "value": value or 0.0,
        "remove": value is None if remove is None else remove,
    }


def describe_user_scram_credentials(users: Sequence[str] | None = None) -> Body:
    """Return the body for ``users``, or for all users."""
    return {"users": None if users is None else [{"name": name} for name in users]}


def alter_user_scram_credentials(
    deletions: Sequence[Body] = (), upsertions: Sequence[Body] = ()
) -> Body:
    return {"deletions": list(deletions), "upsertions": list(upsertions)}


def scram_deletion(name: str, mechanism: int) -> Body:
    return {"name": name, "mechanism": mechanism}


def scram_upsertion(name: str, mechanism: int, **fields: Any) -> Body:
    return {
        "name": name,
        "mechanism": mechanism,
        "iterations": MIN_ITERATIONS,
        "salt": b"salt",
        "salted_password": b"password",
        **fields,
    }


def sasl_handshake(mechanism: str) -> Body:
    return {"mechanism": mechanism}


def sasl_authenticate(token: bytes) -> Body:
    return {"auth_bytes": token}


# --- brokers, replicas, directories and features ---


def api_versions(**fields: Any) -> Body:
    return {"client_software_name": "raw", "client_software_version": "1", **fields}


def describe_cluster(**fields: Any) -> Body:
    return {"endpoint_type": BROKERS, **fields}


def describe_quorum(*topics: Body) -> Body:
    return {"topics": list(topics or [quorum_topic("__cluster_metadata", 0)])}


def quorum_topic(name: str, *partitions: int) -> Body:
    return {"topic_name": name, "partitions": _rows("partition_index", partitions, {})}


def topic_partitions(name: str, *partitions: int) -> Body:
    """Return a topic with partitions, as DescribeLogDirs and ElectLeaders have it."""
    return {"topic": name, "partitions": list(partitions)}


def describe_log_dirs(*topics: Body) -> Body:
    return {"topics": list(topics)}


def alter_replica_log_dirs(*dirs: Body) -> Body:
    return {"dirs": list(dirs)}


def log_dir(path: str, *topics: tuple[str, list[int]]) -> Body:
    """Return a directory with the partitions that move there."""
    named = [{"name": name, "partitions": partitions} for name, partitions in topics]
    return {"path": path, "topics": named}


def elect_leaders(*topics: Body, **fields: Any) -> Body:
    """Return the body of an ElectLeaders request, by default for preferred leaders."""
    return {
        "timeout": TIMEOUT_MS,
        "election_type": 0,
        "topic_partitions": list(topics),
        **fields,
    }


def alter_partition_reassignments(*topics: Body, **fields: Any) -> Body:
    return {"timeout": TIMEOUT_MS, "topics": list(topics), **fields}


def reassigned_topic(name: str, *partitions: tuple[int, list[int] | None]) -> Body:
    """Return a topic with (partition, new replicas) pairs; None cancels a reassignment."""
    moved = [{"partition_index": index, "replicas": replicas} for index, replicas in partitions]
    return {"name": name, "partitions": moved}


def list_partition_reassignments(*topics: Body, **fields: Any) -> Body:
    """Return the body for ``topics``, made by ``indexes_of``, or for all topics."""
    return {"timeout": TIMEOUT_MS, "topics": list(topics) or None, **fields}


def update_features(*updates: Body, **fields: Any) -> Body:
    return {"timeout": TIMEOUT_MS, "feature_updates": list(updates), **fields}


def feature_update(feature: str, level: int, upgrade_type: int = UPGRADE, **fields: Any) -> Body:
    """Return an update with the fields of all versions."""
    return {
        "feature": feature,
        "max_version_level": level,
        "allow_downgrade": upgrade_type != UPGRADE,
        "upgrade_type": upgrade_type,
        **fields,
    }


def unregister_broker(broker_id: int) -> Body:
    return {"broker_id": broker_id}


def unregister_controller(controller_id: int) -> Body:
    return {"controller_id": controller_id}


def share_fetch(group: str, member: str, *topics: tuple[Any, Iterable[int]], **fields: Any) -> Body:
    """Return a request for records of (topic id, partitions), in a new share session."""
    rows = [
        {
            "topic_id": topic_id,
            "partitions": [
                {"partition_index": index, "acknowledgement_batches": []} for index in partitions
            ],
        }
        for topic_id, partitions in topics
    ]
    return {
        "group_id": group,
        "member_id": member,
        "share_session_epoch": 0,
        "max_wait": 0,
        "min_bytes": 1,
        "max_bytes": MAX_BYTES,
        "max_records": 500,
        "batch_size": 500,
        "share_acquire_mode": 0,
        "is_renew_ack": False,
        "topics": rows,
        "forgotten_topics_data": [],
        **fields,
    }


def share_acknowledge(
    group: str, member: str, *topics: tuple[Any, Iterable[int]], **fields: Any
) -> Body:
    """Return a request that accepts the record at offset 0 of (topic id, partitions)."""
    accepted = {"first_offset": 0, "last_offset": 0, "acknowledge_types": [1]}
    rows = [
        {
            "topic_id": topic_id,
            "partitions": [
                {"partition_index": index, "acknowledgement_batches": [accepted]}
                for index in partitions
            ],
        }
        for topic_id, partitions in topics
    ]
    return {
        "group_id": group,
        "member_id": member,
        "share_session_epoch": 1,
        "is_renew_ack": False,
        "topics": rows,
        **fields,
    }


SHARE_STATE_FIELDS: Final[Mapping[str, Body]] = {
    "initialize_share_group_state": {"state_epoch": 1, "start_offset": 0},
    "read_share_group_state": {"leader_epoch": 0},
    "write_share_group_state": {
        "state_epoch": 1,
        "leader_epoch": 0,
        "start_offset": 0,
        "delivery_complete_count": 0,
        "state_batches": [],
    },
    "delete_share_group_state": {},
    "read_share_group_state_summary": {"leader_epoch": 0},
}
"""The fields of a partition in the requests to the share coordinator, by API."""


def share_group_state(api: str, group: str, topic_id: Any, **fields: Any) -> Body:
    """Return a request to the share coordinator about partition 0 of a topic."""
    part = {"partition": 0, **SHARE_STATE_FIELDS[api], **fields}
    return {"group_id": group, "topics": [{"topic_id": topic_id, "partitions": [part]}]}
