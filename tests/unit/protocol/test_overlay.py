"""Messages that kio lacks, compared with tables of Kafka's schemas and kio's older versions."""

from __future__ import annotations

from dataclasses import is_dataclass

import pytest
from kio.schema.errors import ErrorCode

from fencepost.protocol import added_errors, overlay
from fencepost.protocol.api import KNOWN_APIS, ApiKey, api_name
from fencepost.protocol.codec import decode_response, encode_response
from fencepost.protocol.messages import response_factory
from fencepost.protocol.schema import (
    FieldInfo,
    all_fields,
    is_known,
    message_class,
    module_of,
    response_header_is_tagged,
)

Row = tuple[str, str, object]
"""Name; type with ``[]`` for an array, ``?`` if it may be null and ``@N`` for tag N; default."""

_FEATURE: list[Row] = [("name", "string", "")]
TABLE: dict[overlay.Message, dict[str, list[Row]]] = {
    (18, 5, "request"): {
        "ApiVersionsRequest": [
            ("client_software_name", "string", ""),
            ("client_software_version", "string", ""),
            ("cluster_id", "string?", None),
            ("node_id", "int32", -1),
        ],
    },
    (18, 5, "response"): {
        "ApiVersionsResponse": [
            ("error_code", "error_code", 0),
            ("api_keys", "[]ApiVersion", ()),
            ("throttle_time", "timedelta_i32", 0),
            ("supported_features", "[]SupportedFeatureKey@0", ()),
            ("finalized_features_epoch", "int64@1", -1),
            ("finalized_features", "[]FinalizedFeatureKey@2", ()),
            ("zk_migration_ready", "bool@3", False),
        ],
        "ApiVersion": [
            ("api_key", "int16", 0), ("min_version", "int16", 0), ("max_version", "int16", 0),
        ],
        "SupportedFeatureKey": [
            *_FEATURE, ("min_version", "int16", 0), ("max_version", "int16", 0),
        ],
        "FinalizedFeatureKey": [
            *_FEATURE, ("max_version_level", "int16", 0), ("min_version_level", "int16", 0),
        ],
    },
    (28, 6, "request"): {
        "TxnOffsetCommitRequest": [
            ("transactional_id", "string", ""),
            ("group_id", "string", ""),
            ("producer_id", "int64", 0),
            ("producer_epoch", "int16", 0),
            ("generation_id_or_member_epoch", "int32", -1),
            ("member_id", "string", ""),
            ("group_instance_id", "string?", None),
            ("topics", "[]TxnOffsetCommitRequestTopic", ()),
        ],
        "TxnOffsetCommitRequestTopic": [
            ("topic_id", "uuid?", None),
            ("partitions", "[]TxnOffsetCommitRequestPartition", ()),
        ],
        "TxnOffsetCommitRequestPartition": [
            ("partition_index", "int32", 0),
            ("committed_offset", "int64", 0),
            ("committed_leader_epoch", "int32", -1),
            ("committed_metadata", "string?", ""),
        ],
    },
    (28, 6, "response"): {
        "TxnOffsetCommitResponse": [
            ("throttle_time", "timedelta_i32", 0),
            ("topics", "[]TxnOffsetCommitResponseTopic", ()),
        ],
        "TxnOffsetCommitResponseTopic": [
            ("topic_id", "uuid?", None),
            ("partitions", "[]TxnOffsetCommitResponsePartition", ()),
        ],
        "TxnOffsetCommitResponsePartition": [
            ("partition_index", "int32", 0), ("error_code", "error_code", 0),
        ],
    },
    (42, 3, "request"): {"DeleteGroupsRequest": [("groups_names", "[]string", ())]},
    (42, 3, "response"): {
        "DeleteGroupsResponse": [
            ("throttle_time", "timedelta_i32", 0),
            ("results", "[]DeletableGroupResult", ()),
        ],
        "DeletableGroupResult": [
            ("group_id", "string", ""),
            ("error_code", "error_code", 0),
            ("error_message", "string?", None),
        ],
    },
    (94, 0, "request"): {"UnregisterControllerRequest": [("controller_id", "int32", 0)]},
    (94, 0, "response"): {
        "UnregisterControllerResponse": [
            ("throttle_time", "timedelta_i32", 0),
            ("error_code", "error_code", 0),
            ("error_message", "string?", ""),
        ],
    },
}  # fmt: skip
"""Structures of Apache Kafka 4.4's messages. kio's zero uuid is None, so a uuid may always be null.
"""

OF_ZOOKEEPER = {(4, 7), (5, 4), (6, 8), (7, 3)}
"""Keys and versions of the APIs between a ZooKeeper controller and brokers."""


def row(info: FieldInfo) -> Row:
    kind = info.kafka_type or (info.struct.__name__ if info.struct else "")
    text = ("[]" if info.is_array else "") + kind + ("?" if info.nullable else "")
    return info.name, text if info.tag is None else f"{text}@{info.tag}", info.default


def structures(message: overlay.Message) -> dict[str, list[Row]]:
    module = module_of(*message)
    return {
        cls.__name__: [row(info) for info in all_fields(cls)]
        for cls in vars(module).values()
        if is_dataclass(cls) and cls.__module__ == module.__name__
    }


def test_tables_cover_every_message_of_4_4() -> None:
    assert {
        message for message in overlay.messages() if message[:2] not in OF_ZOOKEEPER
    } == TABLE.keys()


@pytest.mark.parametrize("message", TABLE, ids=str)
def test_added_message_has_kafkas_fields_types_tags_and_defaults(message: overlay.Message) -> None:
    assert structures(message) == TABLE[message]


@pytest.mark.parametrize("message", TABLE, ids=str)
def test_added_message_class_has_its_api_key_version_and_header(message: overlay.Message) -> None:
    key, version, side = message
    cls = message_class(*message)
    assert (cls.__api_key__, cls.__version__, cls.__flexible__) == (key, version, True)
    header = cls.__header_schema__.__module__
    if side == "request":
        assert header == "kio.schema.request_header.v2.header"
    else:
        number = int(response_header_is_tagged(key, version))
        assert number == int(key != ApiKey.API_VERSIONS)
        assert header == f"kio.schema.response_header.v{number}.header"


@pytest.mark.parametrize(
    "message",
    [(18, 4, "response"), (42, 2, "request"), (42, 2, "response"), (28, 5, "request")],
    ids=str,
)
def test_added_version_changes_only_the_fields_of_its_kip(message: overlay.Message) -> None:
    key, version, side = message
    before, after = structures(message), structures((key, version + 1, side))
    changes: dict[overlay.Message, set[Row]] = {
        (42, 2, "response"): {("error_message", "string?", None)},
        (28, 5, "request"): {
            ("name", "string", ""), ("topic_id", "uuid?", None),
            ("generation_id", "int32", -1), ("generation_id_or_member_epoch", "int32", -1),
        },
    }  # fmt: skip
    rows = [{field for of in found.values() for field in of} for found in (before, after)]
    assert before.keys() == after.keys()
    assert rows[0] ^ rows[1] == changes.get(message, set())


def test_names_of_added_versions_are_known() -> None:
    known = response_factory(ApiKey.DELETE_GROUPS, 0)
    assert not hasattr(known.DeletableGroupResult(error_message="dropped"), "error_message")
    assert is_known(ApiKey.DELETE_GROUPS, "response", "DeletableGroupResult", "error_message")
    assert is_known(ApiKey.UNREGISTER_CONTROLLER, "request", "UnregisterControllerRequest")
    assert not is_known(ApiKey.UNREGISTER_CONTROLLER, "request", "UnregisterController")


def test_module_of_refuses_versions_that_are_not_served() -> None:
    for key, version in ((18, 6), (28, 7), (42, 4), (94, 1)):
        with pytest.raises(KeyError):
            module_of(key, version, "request")
    assert overlay.module_of(18, 4, "request") is None


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (added_errors.GROUP_DELETION_FAILED, 134, "group_deletion_failed"),
        (
            added_errors.STREAMS_TOPOLOGY_DESCRIPTION_UPDATE_FAILED,
            135,
            "streams_topology_description_update_failed",
        ),
        (added_errors.CONTROLLER_ID_NOT_REGISTERED, 136, "controller_id_not_registered"),
    ],
)
def test_error_code_of_4_4_is_decoded_and_named(error: ErrorCode, code: int, name: str) -> None:
    assert (int(error), error.name, error.retriable) == (code, name, False)
    assert error is ErrorCode(code) is ErrorCode[name] is getattr(ErrorCode, name)
    assert error in ErrorCode
    assert code in ErrorCode.__members__.values()
    entity = response_factory(ApiKey.HEARTBEAT, 4).message(error_code=error)
    frame = b"".join(encode_response(ApiKey.HEARTBEAT, 4, 1, entity))
    assert decode_response(ApiKey.HEARTBEAT, 4, frame[4:])[1].error_code is error


def test_every_api_has_a_name() -> None:
    assert api_name(93) == "StreamsGroupTopologyDescriptionUpdate"
    assert api_name(76) == "ShareGroupHeartbeat"
    assert api_name(95) is None
    assert all(api_name(key) == api.name for key, api in KNOWN_APIS.items())
