"""Error codes of Apache Kafka 4.4 that kio's enumeration lacks.

This module adds them to it: kio's native reader looks codes up there, and refuses a response that
contains any other code. ``schema.py`` imports this module, since the reader takes the enumeration
as it is when the first message is read.

Source: 4.4, ``org.apache.kafka.common.protocol.Errors``.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.static.primitive import i16


def _added(name: str, code: int) -> ErrorCode:
    """Return the error with this code; if kio has none, add it as one that is not retried."""
    found = ErrorCode.__members__.get(name)
    if found is not None:
        return found
    value = i16(code)
    error: Any = int.__new__(ErrorCode, value)
    error._name_, error._value_ = name, value
    error._sort_order_ = len(ErrorCode)
    error.retriable = False
    setattr(ErrorCode, name, error)
    ErrorCode._member_names_.append(name)
    ErrorCode._member_map_[name] = error
    ErrorCode._value2member_map_[value] = error
    # Since Python 3.13 ``code in ErrorCode`` looks here.
    getattr(ErrorCode, "_hashable_values_", []).append(value)
    added: ErrorCode = error
    return added


GROUP_DELETION_FAILED: Final = _added("group_deletion_failed", 134)
STREAMS_TOPOLOGY_DESCRIPTION_UPDATE_FAILED: Final = _added(
    "streams_topology_description_update_failed", 135
)
CONTROLLER_ID_NOT_REGISTERED: Final = _added("controller_id_not_registered", 136)
