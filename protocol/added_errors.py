"""Error codes of Apache Kafka 4.4 that kio's enumeration lacks.

kio's native reader refuses a message with an error code that is not in the enumeration, so this
module adds the missing ones. ``schema.py`` imports this module because the reader copies the
enumeration when it reads the first message.

Source: 4.4, ``org.apache.kafka.common.protocol.Errors``.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.static.primitive import i16


def _added(name: str, code: int) -> ErrorCode:
    """Return the error of this name; if kio lacks it, add it, marked as not retriable."""
    existing = ErrorCode.__members__.get(name)
    if existing is not None:
        return existing
    value = i16(code)
    error: Any = int.__new__(ErrorCode, value)
    error._name_, error._value_ = name, value
    error._sort_order_ = len(ErrorCode)
    error.retriable = False
    setattr(ErrorCode, name, error)
    ErrorCode._member_names_.append(name)
    ErrorCode._member_map_[name] = error
    ErrorCode._value2member_map_[value] = error
    # Since Python 3.13 ``code in ErrorCode`` looks in this list.
    getattr(ErrorCode, "_hashable_values_", []).append(value)
    added: ErrorCode = error
    return added


GROUP_DELETION_FAILED: Final = _added("group_deletion_failed", 134)
STREAMS_TOPOLOGY_DESCRIPTION_UPDATE_FAILED: Final = _added(
    "streams_topology_description_update_failed", 135
)
CONTROLLER_ID_NOT_REGISTERED: Final = _added("controller_id_not_registered", 136)
