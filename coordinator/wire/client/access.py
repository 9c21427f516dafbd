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

_OF_TOPICS: Mapping[str, str] = {
    "Fetch": "READ",
    "OffsetCommit": "READ",
    "TxnOffsetCommit": "READ",
    "Produce": "WRITE",
    "AddPartitionsToTxn": "WRITE",
    "CreateTopics": "CREATE",
    "DeleteTopics": "DELETE",
}
_ELSE: Mapping[ErrorCode, str] = {
    ErrorCode.topic_authorization_failed: "DESCRIBE",
    # Whoever looks for a coordinator, for which DESCRIBE is enough, means to do more.
    ErrorCode.group_authorization_failed: "READ",
    ErrorCode.transactional_id_authorization_failed: "WRITE",
}


def missing_right(api: str, code: ErrorCode, name: str = "") -> str:
    """``the right WRITE on the topic 't'``; empty for a code that is not about rights."""
    resource = _RESOURCES.get(code)
    if resource is None:
        return ""
    right = _ELSE.get(code)
    if code is ErrorCode.topic_authorization_failed:
        right = _OF_TOPICS.get(api, right)
    told = f"the right {right}" if right else "a right"
    return f"{told} on the {resource}" + (f" {name!r}" if name else "")
