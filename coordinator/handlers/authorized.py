"""The bit fields of "authorised operations": everything, since there is no authorizer yet.

A bit's position is the operation's code in ``AclOperation``. Source: ``AclEntry``'s operations per
resource type (KIP-430).
"""

from __future__ import annotations

from typing import Final

NOT_ASKED: Final = -(2**31)
"""The request did not ask."""

_READ, _WRITE, _CREATE, _DELETE, _ALTER, _DESCRIBE = 3, 4, 5, 6, 7, 8
_CLUSTER_ACTION, _DESCRIBE_CONFIGS, _ALTER_CONFIGS, _IDEMPOTENT_WRITE = 9, 10, 11, 12


def _bits(*operations: int) -> int:
    return sum(1 << operation for operation in operations)


TOPIC: Final = _bits(
    _READ, _WRITE, _CREATE, _DELETE, _ALTER, _DESCRIBE, _DESCRIBE_CONFIGS, _ALTER_CONFIGS
)
"""What can be done with a topic."""

GROUP: Final = _bits(_READ, _DELETE, _DESCRIBE, _DESCRIBE_CONFIGS, _ALTER_CONFIGS)
"""What can be done with a group."""

CLUSTER: Final = _bits(
    _CREATE, _ALTER, _DESCRIBE, _CLUSTER_ACTION, _DESCRIBE_CONFIGS, _ALTER_CONFIGS,
    _IDEMPOTENT_WRITE,
)  # fmt: skip
"""What can be done with the cluster."""
