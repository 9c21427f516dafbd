"""Paths and JSON formats of the znodes of Apache Kafka.

Source: ``ZkData.scala`` of branch 3.9.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from fencepost.cluster.image import BROKER_RESOURCE, TOPIC_RESOURCE
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator.zookeeper.errors import NotOurFormatError
from fencepost.logcore.values import dataclass

CLUSTER_ID: Final = "/cluster/id"
CONTROLLER: Final = "/controller"
CONTROLLER_EPOCH: Final = "/controller_epoch"
BROKER_IDS: Final = "/brokers/ids"
TOPICS: Final = "/brokers/topics"
CONFIGS: Final = "/config"
CONFIG_CHANGES: Final = "/config/changes"
CONFIG_CHANGE_PREFIX: Final = f"{CONFIG_CHANGES}/config_change_"
DELETE_TOPICS: Final = "/admin/delete_topics"
REASSIGN_PARTITIONS: Final = "/admin/reassign_partitions"
PREFERRED_ELECTION: Final = "/admin/preferred_replica_election"
ISR_CHANGES: Final = "/isr_change_notification"
LOG_DIR_EVENTS: Final = "/log_dir_event_notification"
PRODUCER_IDS: Final = "/latest_producer_id_block"

DEFAULT_ENTITY: Final = "<default>"
"""The path element for the default entity, whose name is empty in Kafka's records."""

_KINDS: Final[Mapping[int, str]] = {TOPIC_RESOURCE: "topics", BROKER_RESOURCE: "brokers"}
_RESOURCES: Final = {kind: resource for resource, kind in _KINDS.items()}

PERSISTENT: Final = (
    "/consumers",
    BROKER_IDS,
    TOPICS,
    CONFIG_CHANGES,
    "/config/topics",
    "/config/clients",
    "/config/users",
    "/config/brokers",
    "/config/ips",
    DELETE_TOPICS,
    "/brokers/seqid",
    ISR_CHANGES,
    PRODUCER_IDS,
    LOG_DIR_EVENTS,
)
"""Znodes that every broker creates when it starts (kafka: ``PersistentZkPaths``)."""

_TAKES_ENVELOPES: Final = "takes_envelopes"
"""A key of Fencepost; Apache Kafka ignores unknown keys."""

_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")


def written(value: Mapping[str, Any]) -> bytes:
    """Return an object as the JSON that Kafka writes."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def read_json(data: bytes, path: str) -> dict[str, Any]:
    """Return the object in the znode ``path``. Raises NotOurFormatError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotOurFormatError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise NotOurFormatError(f"{path} is not a JSON object")
    return value


def _number(value: Any) -> int:
    """Return a number that fits into 32 bits, as in requests. Raises ValueError, TypeError."""
    if isinstance(value, float) or not -(1 << 31) <= (number := int(value)) < 1 << 31:
        raise ValueError(f"{value!r:.40} is not a 32-bit number")
    return number


# --- the cluster and its controller ---


def cluster_id_data(cluster_id: str) -> bytes:
    """Return the data of ``/cluster/id``."""
    return written({"version": "1", "id": cluster_id})


def cluster_id_of(data: bytes) -> str:
    """Return the id in ``/cluster/id``. Raises NotOurFormatError."""
    cluster_id = read_json(data, CLUSTER_ID).get("id")
    if not isinstance(cluster_id, str):
        raise NotOurFormatError(f"{CLUSTER_ID} has no id")
    return cluster_id


def controller_data(broker_id: int, timestamp_ms: int) -> bytes:
    """Return the data of ``/controller``."""
    return written(
        {
            "version": 2,
            "brokerid": broker_id,
            "timestamp": str(timestamp_ms),
            "kraftControllerEpoch": -1,
        }
    )


def controller_of(data: bytes) -> int:
    """Return the broker that ``/controller`` names. Raises NotOurFormatError."""
    controller_id = read_json(data, CONTROLLER).get("brokerid")
    if not isinstance(controller_id, int):
        raise NotOurFormatError(f"{CONTROLLER} names no broker")
    return controller_id


# --- brokers ---


@dataclass(frozen=True, slots=True)
class BrokerZnode:
    """A broker's registration."""

    broker_id: int
    end_points: tuple[BrokerEndpoint, ...]
    rack: str | None
    takes_envelopes: bool = False
    """Whether this broker, as controller, accepts requests that other brokers forward for clients.

    Apache Kafka 3.9 has no such key. Its brokers close a connection on which an Envelope arrives,
    although their ApiVersions response lists Envelope.
    """


def broker_path(broker_id: int) -> str:
    """Return the path of a broker's registration."""
    return f"{BROKER_IDS}/{broker_id}"


def broker_data(node: BrokerZnode, timestamp_ms: int) -> bytes:
    """Return the data of ``/brokers/ids/<id>``, version 5."""
    plain = next(
        (end_point for end_point in node.end_points if end_point.security_protocol == 0), None
    )
    value: dict[str, Any] = {
        "version": 5,
        "host": None if plain is None else plain.host,
        "port": -1 if plain is None else plain.port,
        "jmx_port": -1,
        "timestamp": str(timestamp_ms),
        "endpoints": [
            f"{end_point.name}://{_host(end_point.host)}:{end_point.port}"
            for end_point in node.end_points
        ],
    }
    if node.rack is not None:
        value["rack"] = node.rack
    value["listener_security_protocol_map"] = {
        end_point.name: _PROTOCOLS[end_point.security_protocol] for end_point in node.end_points
    }
    value["features"] = {}
    if node.takes_envelopes:
        value[_TAKES_ENVELOPES] = True
    return written(value)


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def broker_of(broker_id: int, data: bytes) -> BrokerZnode:
    """Return a registration of version 2 or later. Raises NotOurFormatError."""
    path = broker_path(broker_id)
    value = read_json(data, path)
    protocols = value.get("listener_security_protocol_map", {})
    try:
        end_points = tuple(_end_point(text, protocols) for text in value["endpoints"])
    except (KeyError, ValueError, TypeError) as error:
        raise NotOurFormatError(f"{path} has no endpoints: {error!r}") from None
    takes_envelopes = value.get(_TAKES_ENVELOPES) is True
    return BrokerZnode(broker_id, end_points, value.get("rack"), takes_envelopes)


def _end_point(text: str, protocols: Mapping[str, str]) -> BrokerEndpoint:
    name, _, address = text.partition("://")
    host, _, port = address.rpartition(":")
    protocol = _PROTOCOLS.index(protocols.get(name, name))
    return BrokerEndpoint(name, host.strip("[]"), int(port), protocol)


# --- topics ---


@dataclass(frozen=True, slots=True)
class TopicZnode:
    """A topic and its replica assignment, by partition."""

    topic_id: UUID | None
    """None for a topic created by an older release; the controller assigns an id."""
    replicas: Mapping[int, tuple[int, ...]]
    adding: Mapping[int, tuple[int, ...]]
    removing: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PartitionStateZnode:
    """A partition's leader and ISR; the version of its znode is the partition epoch."""

    leader: int
    isr: tuple[int, ...]
    leader_epoch: int
    controller_epoch: int
    leader_recovery_state: int = 0
    written_zxid: int = 0
    """The zxid of the znode's last write; it is not part of the znode's data."""


def topic_path(topic: str) -> str:
    """Return the path of a topic's assignment."""
    return f"{TOPICS}/{topic}"


def partitions_path(topic: str) -> str:
    """Return the parent path of a topic's partitions."""
    return f"{TOPICS}/{topic}/partitions"


def partition_path(topic: str, index: int) -> str:
    """Return the parent path of a partition's state."""
    return f"{TOPICS}/{topic}/partitions/{index}"


def state_path(topic: str, index: int) -> str:
    """Return the path of a partition's state."""
    return f"{TOPICS}/{topic}/partitions/{index}/state"


def topic_data(node: TopicZnode) -> bytes:
    """Return the data of ``/brokers/topics/<topic>``, version 3."""
    return written(
        {
            "removing_replicas": _by_partition(node.removing),
            "partitions": _by_partition(node.replicas),
            "topic_id": "" if node.topic_id is None else id_to_text(node.topic_id),
            "adding_replicas": _by_partition(node.adding),
            "version": 3,
        }
    )


def _by_partition(replicas: Mapping[int, Sequence[int]]) -> dict[str, list[int]]:
    return {str(index): list(broker_ids) for index, broker_ids in sorted(replicas.items())}


def topic_of(topic: str, data: bytes) -> TopicZnode:
    """Return a topic's assignment, of version 1 or later. Raises NotOurFormatError."""
    value = read_json(data, topic_path(topic))
    try:
        text = value.get("topic_id")
        znode = TopicZnode(
            id_from_text(text) if text else None,
            _assignment(value["partitions"]),
            _assignment(value.get("adding_replicas", {})),
            _assignment(value.get("removing_replicas", {})),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise NotOurFormatError(f"{topic_path(topic)} is not a topic: {error!r}") from None
    if sorted(znode.replicas) != list(range(len(znode.replicas))):
        raise NotOurFormatError(f"the partitions of {topic_path(topic)} have gaps")
    return znode


def _assignment(value: Mapping[str, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    return {_number(index): tuple(map(_number, replicas)) for index, replicas in value.items()}


def state_data(state: PartitionStateZnode) -> bytes:
    """Return the data of ``…/state``, version 1."""
    return written(
        {
            "controller_epoch": state.controller_epoch,
            "leader": state.leader,
            "version": 1,
            "leader_epoch": state.leader_epoch,
            "isr": list(state.isr),
            "leader_recovery_state": state.leader_recovery_state,
        }
    )


def state_of(path: str, data: bytes) -> PartitionStateZnode:
    """Return a partition's state. Raises NotOurFormatError."""
    value = read_json(data, path)
    try:
        return PartitionStateZnode(
            leader=_number(value["leader"]),
            isr=tuple(map(_number, value["isr"])),
            leader_epoch=_number(value["leader_epoch"]),
            controller_epoch=_number(value["controller_epoch"]),
            leader_recovery_state=_number(value.get("leader_recovery_state", 0)),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise NotOurFormatError(f"{path} is not a partition state: {error!r}") from None


def delete_path(topic: str) -> str:
    """Return the path that marks a topic for deletion."""
    return f"{DELETE_TOPICS}/{topic}"


# --- settings ---


def config_path(kind: int, name: str) -> str | None:
    """Return the path of a resource's settings; None for a kind that has no znodes."""
    folder = _KINDS.get(kind)
    return None if folder is None else f"{CONFIGS}/{folder}/{name or DEFAULT_ENTITY}"


def config_data(values: Mapping[str, str]) -> bytes:
    """Return the data of ``/config/<kind>/<name>``."""
    return written({"version": 1, "config": dict(sorted(values.items()))})


def config_of(path: str, data: bytes) -> dict[str, str]:
    """Return a resource's settings; none for an empty znode. Raises NotOurFormatError."""
    values = read_json(data, path).get("config", {}) if data else {}
    if not isinstance(values, dict):
        raise NotOurFormatError(f"{path} has no settings")
    return {str(key): str(value) for key, value in values.items()}


def config_change_data(kind: int, name: str) -> bytes:
    """Return the notification that a resource's settings have changed."""
    return entity_change_data(f"{_KINDS[kind]}/{name or DEFAULT_ENTITY}")


def entity_change_data(entity: str) -> bytes:
    """Return the data of ``/config/changes/config_change_<n>``.

    ``entity`` is the path of the changed settings, relative to ``/config``.
    """
    return written({"version": 2, "entity_path": entity})


def config_change_of(path: str, data: bytes) -> str:
    """Return the path of the changed settings below ``/config``. Raises NotOurFormatError."""
    value = read_json(data, path)
    entity = value.get("entity_path")
    if value.get("version") == 1:
        entity = f"{value.get('entity_type')}/{value.get('entity_name')}"
    if not isinstance(entity, str):
        raise NotOurFormatError(f"{path} names no entity")
    return entity


def resource_of(entity: str) -> tuple[int, str] | None:
    """Return the kind and name of a topic or broker; None for any other entity."""
    folder, _, name = entity.partition("/")
    kind = _RESOURCES.get(folder)
    return None if kind is None else (kind, "" if name == DEFAULT_ENTITY else name)


def config_folder(kind: int) -> str:
    """Return the parent path of all settings of a kind."""
    return f"{CONFIGS}/{_KINDS[kind]}"


# --- others ---


def producer_ids_data(broker_id: int, first: int, size: int) -> bytes:
    """Return the data of ``/latest_producer_id_block``."""
    return written(
        {
            "version": 1,
            "broker": broker_id,
            "block_start": str(first),
            "block_end": str(first + size - 1),
        }
    )


def next_producer_id_of(data: bytes) -> int:
    """Return the first producer id after the latest block; 0 if there is no block.

    Raises NotOurFormatError.
    """
    if not data:
        return 0
    try:
        return int(read_json(data, PRODUCER_IDS)["block_end"]) + 1
    except (KeyError, ValueError, TypeError) as error:
        raise NotOurFormatError(
            f"{PRODUCER_IDS} is not a block of producer ids: {error!r}"
        ) from None


def partitions_of(path: str, data: bytes) -> list[tuple[str, int]]:
    """Return the partitions in the znode of an ISR notification or a preferred election.

    Raises NotOurFormatError.
    """
    try:
        rows = read_json(data, path)["partitions"]
        return [(str(row["topic"]), _number(row["partition"])) for row in rows]
    except (KeyError, ValueError, TypeError) as error:
        raise NotOurFormatError(f"{path} names no partitions: {error!r}") from None


def reassignments_of(data: bytes) -> dict[tuple[str, int], tuple[int, ...]]:
    """Return the target replicas in ``/admin/reassign_partitions``, by partition.

    Raises NotOurFormatError.
    """
    try:
        rows = read_json(data, REASSIGN_PARTITIONS)["partitions"]
        return {
            (str(row["topic"]), _number(row["partition"])): tuple(map(_number, row["replicas"]))
            for row in rows
        }
    except (KeyError, ValueError, TypeError) as error:
        raise NotOurFormatError(f"{REASSIGN_PARTITIONS} is not an assignment: {error!r}") from None


def reassignments_data(targets: Mapping[tuple[str, int], Sequence[int]]) -> bytes:
    """Return the data of ``/admin/reassign_partitions``."""
    rows = [
        {"topic": topic, "partition": index, "replicas": list(replicas)}
        for (topic, index), replicas in targets.items()
    ]
    return written({"version": 1, "partitions": rows})


def log_dir_event_of(path: str, data: bytes) -> int:
    """Return the broker that lost a log directory. Raises NotOurFormatError."""
    broker_id = read_json(data, path).get("broker")
    if not isinstance(broker_id, int):
        raise NotOurFormatError(f"{path} names no broker")
    return broker_id


def id_to_text(topic_id: UUID) -> str:
    """Return a topic's id as Kafka writes it."""
    return base64.urlsafe_b64encode(topic_id.bytes).rstrip(b"=").decode()


def id_from_text(text: str) -> UUID:
    """Return the topic id in a text that Kafka wrote. Raises ValueError."""
    return UUID(bytes=base64.urlsafe_b64decode(text + "=="))
