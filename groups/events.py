"""The kinds of group events in the event history."""

from __future__ import annotations

from enum import StrEnum


class EventKind(StrEnum):
    """The kinds of events; the subject of each event is the group id."""

    GROUP_CREATED = "group-created"
    GROUP_DELETED = "group-deleted"
    GROUP_UPGRADED = "group-upgraded"
    GROUP_DOWNGRADED = "group-downgraded"
    REBALANCE_STARTED = "rebalance-started"
    REBALANCE_WAITS = "rebalance-waits"
    GENERATION_STARTED = "generation-started"
    ASSIGNMENT_REFUSED = "assignment-refused"
    MEMBER_JOINED = "member-joined"
    MEMBER_LEFT = "member-left"
    MEMBER_EXPIRED = "member-expired"
    MEMBER_FENCED = "member-fenced"
    PENDING_MEMBER_EXPIRED = "pending-member-expired"
    PENDING_MEMBER_EVICTED = "pending-member-evicted"
    GROUP_EPOCH_BUMPED = "group-epoch-bumped"
    TARGET_ASSIGNED = "target-assigned"
    ASSIGNOR_FAILED = "assignor-failed"
    MEMBER_RECONCILED = "member-reconciled"
    REGEX_RESOLVED = "regex-resolved"
    REGEX_REFUSED = "regex-refused"
    OFFSETS_EXPIRED = "offsets-expired"
    OFFSETS_OF_DELETED_TOPIC = "offsets-of-deleted-topic"
    SHARE_STATE_INITIALIZED = "share-state-initialized"
    SHARE_OFFSETS_ALTERED = "share-offsets-altered"
    SHARE_STATE_DELETED = "share-state-deleted"
    RECORDS_SKIPPED = "records-skipped"
