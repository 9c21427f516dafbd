"""The messages of a ZooKeeper controller, which Kafka 4 has removed.

kio is generated from newer schemas. These classes correspond to those that kio would have generated
for the newest versions of the removed messages. The first line of a message contains its name, API
key and version; its fields follow, and the fields of a structure are indented under it.

Source: branch 3.9, ``clients/src/main/resources/common/message/{LeaderAndIsr,StopReplica,
UpdateMetadata,ControlledShutdown}{Request,Response}.json``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import field, make_dataclass
from functools import cache
from types import ModuleType
from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.schema.request_header.v2.header import RequestHeader
from kio.schema.response_header.v1.header import ResponseHeader
from kio.static.constants import EntityType
from kio.static.primitive import i8, i16, i32, i64

_TEXT: Final = """
LeaderAndIsrRequest 4 7
  controller_id int32
  is_k_raft_controller bool
  controller_epoch int32
  broker_epoch int64
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
  broker_epoch int64
  topic_states []StopReplicaTopicState
    topic_name string
    partition_states []StopReplicaPartitionState
      partition_index int32
      leader_epoch int32
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
  broker_epoch int64
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
  broker_epoch int64
ControlledShutdownResponse 7 3
  error_code error_code
  remaining_partitions []RemainingPartition
    topic_name string
    partition_index int32
"""

_TYPES: Final[Mapping[str, Any]] = {
    "bool": bool,
    "int8": i8,
    "int16": i16,
    "int32": i32,
    "int64": i64,
    "string": str,
    "uuid": uuid.UUID | None,
    "error_code": ErrorCode,
}


@cache
def modules() -> Mapping[tuple[int, str], ModuleType]:
    """Return the classes of each message, by the API's key and ``request`` or ``response``."""
    found: dict[tuple[int, str], ModuleType] = {}
    lines = _TEXT.strip().splitlines()
    starts = [at for at, line in enumerate(lines) if not line.startswith(" ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        name, key, version = lines[start].split()
        side = "request" if name.endswith("Request") else "response"
        module = ModuleType(f"{__name__}.{name}")
        for cls in _classes(name, int(key), int(version), side, lines[start + 1 : end]):
            cls.__module__ = module.__name__
            setattr(module, cls.__name__, cls)
        found[int(key), side] = module
    return found


def _classes(name: str, key: int, version: int, side: str, lines: list[str]) -> Iterator[type]:
    """Yield the classes: each structure before the one that contains it, the message last."""
    facts = {
        "__version__": i16(version),
        "__flexible__": True,
        "__api_key__": i16(key),
        "__header_schema__": RequestHeader if side == "request" else ResponseHeader,
    }
    made: dict[str, type] = {}

    def build(cls_name: str, kind: EntityType, rows: list[str]) -> None:
        members: list[Any] = []
        depth = len(rows[0]) - len(rows[0].lstrip())
        own = [at for at, row in enumerate(rows) if row[depth] != " "]
        for at, end in zip(own, [*own[1:], len(rows)], strict=True):
            field_name, type_name, *more = rows[at].split()
            if end > at + 1:
                build(type_name[2:], EntityType.nested, rows[at + 1 : end])
            members.append(_member(field_name, type_name, more, made))
        made[cls_name] = make_dataclass(
            cls_name,
            members,
            namespace={"__type__": kind, **facts},
            frozen=True,
            slots=True,
            kw_only=True,
        )

    build(name, EntityType[side], lines)
    yield from made.values()


def _member(name: str, kind: str, more: list[str], made: Mapping[str, type]) -> tuple[Any, ...]:
    element = kind.removeprefix("[]")
    annotation = made.get(element) or _TYPES[element]
    metadata: dict[str, Any] = {} if element in made else {"kafka_type": element}
    if kind != element:
        return name, tuple[annotation, ...], field(metadata=metadata)  # type: ignore[valid-type]
    if "nullable" in more:
        return name, annotation | None, field(metadata=metadata)
    for one in more:
        if one.startswith("tag="):
            metadata["tag"] = int(one[len("tag=") :])
            return name, annotation, field(metadata=metadata, default=i8(0))
    return name, annotation, field(metadata=metadata)
