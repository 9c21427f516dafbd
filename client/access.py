"""The ACL operation that a client lacks after an authorization error, as ``kafka-acls`` names it.

Source: the authorization checks of ``KafkaApis``.
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

_TOPIC_RIGHTS: Mapping[str, str] = {
    "Fetch": "READ",
    "OffsetCommit": "READ",
    "TxnOffsetCommit": "READ",
    "Produce": "WRITE",
    "AddPartitionsToTxn": "WRITE",
    "CreateTopics": "CREATE",
    "DeleteTopics": "DELETE",
}
_DEFAULT_RIGHTS: Mapping[ErrorCode, str] = {
    ErrorCode.topic_authorization_failed: "DESCRIBE",
    # FindCoordinator needs only DESCRIBE, but the client's next requests to the coordinator need
    # more.
    ErrorCode.group_authorization_failed: "READ",
    ErrorCode.transactional_id_authorization_failed: "WRITE",
}


def missing_right(api: str, code: ErrorCode, name: str = "") -> str:
    """Return the missing right, as ``the right WRITE on the topic 't'``; "" for other errors."""
    resource = _RESOURCES.get(code)
    if resource is None:
        return ""
    right = _DEFAULT_RIGHTS.get(code)
    if code is ErrorCode.topic_authorization_failed:
        right = _TOPIC_RIGHTS.get(api, right)
    right_text = f"the right {right}" if right else "a right"
    return f"{right_text} on the {resource}" + (f" {name!r}" if name else "")
