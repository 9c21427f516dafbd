"""What an authorization error asks for, in the words of ``kafka-acls``.

Source: the checks of ``KafkaApis``, as its answers tell of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from kio.schema.errors import ErrorCode

_RESOURCES: Mapping[ErrorCode, str] = {
    ErrorCode.topic_authorization_failed: "topic",
    ErrorCode.group_authorization_failed: "group",
    ErrorCode.cluster_authorization_failed: "cluster",
    ErrorCode.transactional_id_authorization_failed: "transactional id",
}

_RIGHTS: Mapping[tuple[str, ErrorCode], str] = {
    (api, code): right
    for code, rights in {
        ErrorCode.topic_authorization_failed: {
            "Fetch": "READ",
            "OffsetCommit": "READ",
            "TxnOffsetCommit": "READ",
            "Produce": "WRITE",
            "AddPartitionsToTxn": "WRITE",
            "CreateTopics": "CREATE",
            "DeleteTopics": "DELETE",
        },
        ErrorCode.group_authorization_failed: {
            "OffsetFetch": "DESCRIBE",
            "FindCoordinator": "DESCRIBE",
        },
        ErrorCode.cluster_authorization_failed: {"InitProducerId": "IDEMPOTENT_WRITE"},
        ErrorCode.transactional_id_authorization_failed: {"FindCoordinator": "DESCRIBE"},
    }.items()
    for api, right in rights.items()
}
_ELSE: Mapping[ErrorCode, str] = {
    ErrorCode.topic_authorization_failed: "DESCRIBE",
    ErrorCode.group_authorization_failed: "READ",
    ErrorCode.transactional_id_authorization_failed: "WRITE",
}


def missing_right(api: str, code: ErrorCode, name: str = "") -> str:
    """``the right WRITE on the topic 't'``; empty for a code that is not about rights."""
    resource = _RESOURCES.get(code)
    if resource is None:
        return ""
    right = _RIGHTS.get((api, code)) or _ELSE.get(code)
    told = f"the right {right}" if right else "a right"
    return f"{told} on the {resource}" + (f" {name!r}" if name else "")
