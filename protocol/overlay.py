"""Messages that kio lacks: of a ZooKeeper controller, and of Apache Kafka 4.4.

kio's schemas are older than 4.4, and newer than the last release with ZooKeeper. For all other
messages kio's classes are used.

In ``_TEXT`` the first line of a message contains its name, API key and version. Its fields follow;
the fields of a structure are indented under it. The classes correspond to those that kio would
generate.

Source: ``common/message/*.json`` of branch 3.9 for the APIs that Kafka 4 has removed, which a
broker of a ZooKeeper cluster serves, and of 4.4 for the others (KIP-1242, KIP-1312, KIP-1319).

Three messages of 4.4 are left out: version 1 of StreamsGroupHeartbeat (88) and StreamsGroupDescribe
(89), and StreamsGroupTopologyDescriptionUpdate (93). No part of Fencepost needs them: brokers serve
no streams groups and never forward these requests, and Fencepost's client does not send them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, make_dataclass
from functools import cache
from types import ModuleType
from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.schema.request_header.v2.header import RequestHeader
from kio.schema.response_header.v0.header import ResponseHeader as ResponseHeaderWithoutTags
from kio.schema.response_header.v1.header import ResponseHeader
from kio.static.constants import EntityType
from kio.static.primitive import i8, i16, i32, i32Timedelta, i64

from fencepost.protocol.api import ApiKey

_TEXT: Final = """
LeaderAndIsrRequest 4 7
  controller_id int32
  is_k_raft_controller bool
  controller_epoch int32
  broker_epoch int64 default=-1
  type_ int8
  topic_states []LeaderAndIsrTopicState
    topic_name string
    topic_id uuid
    partition_states []LeaderAndIsrPartitionState
      partition_index int32
      controller_epoch int32
      leader int32
      leader_epoch int32
      isr []int32
      partition_epoch int32
      replicas []int32
      adding_replicas []int32
      removing_replicas []int32
      is_new bool
      leader_recovery_state int8
  live_leaders []LeaderAndIsrLiveLeader
    broker_id int32
    host_name string
    port int32
LeaderAndIsrResponse 4 7
  error_code error_code
  topics []LeaderAndIsrTopicError
    topic_id uuid
    partition_errors []LeaderAndIsrPartitionError
      partition_index int32
      error_code error_code
StopReplicaRequest 5 4
  controller_id int32
  is_k_raft_controller bool
  controller_epoch int32
  broker_epoch int64 default=-1
  topic_states []StopReplicaTopicState
    topic_name string
    partition_states []StopReplicaPartitionState
      partition_index int32
      leader_epoch int32 default=-1
      delete_partition bool
StopReplicaResponse 5 4
  error_code error_code
  partition_errors []StopReplicaPartitionError
    topic_name string
    partition_index int32
    error_code error_code
UpdateMetadataRequest 6 8
  controller_id int32
  is_k_raft_controller bool
  type_ int8 tag=0
  controller_epoch int32
  broker_epoch int64 default=-1
  topic_states []UpdateMetadataTopicState
    topic_name string
    topic_id uuid
    partition_states []UpdateMetadataPartitionState
      partition_index int32
      controller_epoch int32
      leader int32
      leader_epoch int32
      isr []int32
      zk_version int32
      replicas []int32
      offline_replicas []int32
  live_brokers []UpdateMetadataBroker
    id int32
    endpoints []UpdateMetadataEndpoint
      port int32
      host string
      listener string
      security_protocol int16
    rack string nullable
UpdateMetadataResponse 6 8
  error_code error_code
ControlledShutdownRequest 7 3
  broker_id int32
  broker_epoch int64 default=-1
ControlledShutdownResponse 7 3
  error_code error_code
  remaining_partitions []RemainingPartition
    topic_name string
    partition_index int32
ApiVersionsRequest 18 5
  client_software_name string
  client_software_version string
  cluster_id string nullable default=null
  node_id int32 default=-1
ApiVersionsResponse 18 5
  error_code error_code
  api_keys []ApiVersion
    api_key int16
    min_version int16
    max_version int16
  throttle_time timedelta_i32
  supported_features []SupportedFeatureKey tag=0
    name string
    min_version int16
    max_version int16
  finalized_features_epoch int64 tag=1 default=-1
  finalized_features []FinalizedFeatureKey tag=2
    name string
    max_version_level int16
    min_version_level int16
  zk_migration_ready bool tag=3
TxnOffsetCommitRequest 28 6
  transactional_id string
  group_id string
  producer_id int64
  producer_epoch int16
  generation_id_or_member_epoch int32 default=-1
  member_id string default=
  group_instance_id string nullable default=null
  topics []TxnOffsetCommitRequestTopic
    topic_id uuid
    partitions []TxnOffsetCommitRequestPartition
      partition_index int32
      committed_offset int64
      committed_leader_epoch int32 default=-1
      committed_metadata string nullable
TxnOffsetCommitResponse 28 6
  throttle_time timedelta_i32
  topics []TxnOffsetCommitResponseTopic
    topic_id uuid
    partitions []TxnOffsetCommitResponsePartition
      partition_index int32
      error_code error_code
DeleteGroupsRequest 42 3
  groups_names []string
DeleteGroupsResponse 42 3
  throttle_time timedelta_i32
  results []DeletableGroupResult
    group_id string
    error_code error_code
    error_message string nullable default=null
UnregisterControllerRequest 94 0
  controller_id int32
UnregisterControllerResponse 94 0
  throttle_time timedelta_i32
  error_code error_code
  error_message string nullable
"""

_TYPES: Final[Mapping[str, Any]] = {
    "bool": bool,
    "int8": i8,
    "int16": i16,
    "int32": i32,
    "int64": i64,
    "timedelta_i32": i32Timedelta,
    "string": str,
    "uuid": uuid.UUID | None,
    "error_code": ErrorCode,
}

Message = tuple[int, int, str]
"""API key, version, and ``request`` or ``response``."""


@cache
def _texts() -> Mapping[Message, Sequence[str]]:
    """Return the lines of each message, its name first."""
    texts: dict[Message, list[str]] = {}
    rows: list[str] = []
    for line in _TEXT.strip().splitlines():
        if line.startswith(" "):
            rows.append(line)
            continue
        name, key, version = line.split()
        side = "request" if name.endswith("Request") else "response"
        rows = texts[int(key), int(version), side] = [name]
    return texts


def messages() -> Iterator[Message]:
    """Yield every message of this module."""
    yield from _texts()


@cache
def module_of(api_key: int, version: int, side: str) -> ModuleType | None:
    """Return a module with the classes of one message; None if kio has them."""
    lines = _texts().get((api_key, version, side))
    if lines is None:
        return None
    module = ModuleType(f"{__name__}.{lines[0]}.v{version}")
    for cls in _classes(api_key, version, side, lines):
        cls.__module__ = module.__name__
        setattr(module, cls.__name__, cls)
    return module


def _classes(key: int, version: int, side: str, lines: Sequence[str]) -> Iterator[type]:
    """Yield the classes: each structure before the one that contains it, the message last."""
    # KIP-511: a client reads this response before it knows which versions the broker serves.
    untagged = key == ApiKey.API_VERSIONS
    response_header = ResponseHeaderWithoutTags if untagged else ResponseHeader
    facts = {
        "__version__": i16(version),
        "__flexible__": True,
        "__api_key__": i16(key),
        "__header_schema__": RequestHeader if side == "request" else response_header,
    }
    classes: dict[str, type] = {}

    def build(cls_name: str, kind: EntityType, rows: Sequence[str]) -> None:
        members: list[Any] = []
        depth = len(rows[0]) - len(rows[0].lstrip())
        starts = [at for at, row in enumerate(rows) if row[depth] != " "]
        for at, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            field_name, type_name, *more = rows[at].split()
            if end > at + 1:
                build(type_name[2:], EntityType.nested, rows[at + 1 : end])
            members.append(_member(field_name, type_name, more, classes))
        classes[cls_name] = make_dataclass(
            cls_name,
            members,
            namespace={"__type__": kind, **facts},
            frozen=True,
            slots=True,
            kw_only=True,
        )

    build(lines[0], EntityType[side], lines[1:])
    yield from classes.values()


def _member(name: str, kind: str, more: list[str], classes: Mapping[str, type]) -> tuple[Any, ...]:
    """Return a field's name, annotation and default, as ``make_dataclass`` takes them."""
    options = dict(option.partition("=")[::2] for option in more)
    element = kind.removeprefix("[]")
    of_element: Any = classes.get(element) or _TYPES[element]
    annotation: Any = of_element if kind == element else tuple[of_element, ...]
    if "nullable" in options:
        annotation |= None
    settings: dict[str, Any] = {"metadata": {} if element in classes else {"kafka_type": element}}
    if "tag" in options:
        settings["metadata"]["tag"] = int(options["tag"])
        settings["default"] = () if kind != element else of_element(0)
    if "default" in options:
        text = options["default"]
        settings["default"] = None if text == "null" else of_element(_value(element, text))
    return name, annotation, field(**settings)


def _value(kind: str, text: str) -> str | int:
    return text if kind == "string" else int(text)
