"""The APIs whose requests the history can record, and the kinds of such entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fencepost.coordinator.history.entries import GROUP_REQUEST, TRANSACTION_REQUEST
from fencepost.protocol.api import ApiKey

SUBJECTS: Final[Mapping[ApiKey, tuple[str, str]]] = {
    **dict.fromkeys(
        (
            *(ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT, ApiKey.LEAVE_GROUP),
            *(ApiKey.OFFSET_COMMIT, ApiKey.CONSUMER_GROUP_HEARTBEAT),
            *(ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE),
        ),
        (GROUP_REQUEST, "group_id"),
    ),
    **dict.fromkeys(
        (
            *(ApiKey.INIT_PRODUCER_ID, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT),
            *(ApiKey.END_TXN, ApiKey.PRODUCE),
        ),
        (TRANSACTION_REQUEST, "transactional_id"),
    ),
    # Up to version 3; later versions are sent by brokers.
    ApiKey.ADD_PARTITIONS_TO_TXN: (TRANSACTION_REQUEST, "v3_and_below_transactional_id"),
}
"""The recorded APIs, each with its scope and the field that has the group or transactional id."""

CONNECTION_CLOSED: Final = "connection-closed"
REQUEST: Final = "request"
"""The kinds of entries."""
