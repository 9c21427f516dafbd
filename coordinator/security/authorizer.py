"""Who may do what, decided from rules.

Source: ``StandardAuthorizer``, ``StandardAuthorizerData``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fencepost.coordinator.security.acl import (
    ANYBODY,
    ANYTHING,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.coordinator.security.principal import Principal, Session

_IMPLY: dict[Operation, frozenset[Operation]] = {
    Operation.DESCRIBE: frozenset(
        {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}
    ),
    Operation.DESCRIBE_CONFIGS: frozenset({Operation.ALTER_CONFIGS}),
}
"""What also allows an operation; nothing implies that it is denied."""


class Authorizer:
    """The rules that hold now."""

    def __init__(
        self, *, super_users: Collection[Principal] = (), allows_without_rules: bool = False
    ) -> None:
        self._super_users = frozenset(super_users)
        self._allows_without_rules = allows_without_rules
        self._acls: list[Acl] = []

    def replace(self, acls: Iterable[Acl]) -> None:
        """Let these be all rules."""
        self._acls = list(acls)

    def allows(
        self,
        session: Session,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        *,
        audited: bool = True,  # noqa: ARG002 - who asks may want no line about it
    ) -> bool:
        """Whether a client may do that with the resource ``name``."""
        if session.principal in self._super_users:
            return True
        found = [one for one in self._acls if _is_about(one, resource_type, name)]
        if not found:
            return self._allows_without_rules
        principal = str(session.principal)
        mine = [
            one
            for one in found
            if one.principal in {ANYBODY, principal} and one.host in {ANYTHING, session.host}
        ]
        denied = {Operation.ALL, operation}
        allowed = denied | _IMPLY.get(operation, frozenset())
        if any(one.permission is Permission.DENY and one.operation in denied for one in mine):
            return False
        return any(one.permission is Permission.ALLOW and one.operation in allowed for one in mine)

    def allows_some(
        self, session: Session, operation: Operation, resource_type: ResourceType
    ) -> bool:
        """Whether a client may do that with at least one resource of this type."""
        raise NotImplementedError


def _is_about(acl: Acl, resource_type: ResourceType, name: str) -> bool:
    if acl.resource_type is not resource_type:
        return False
    if acl.pattern_type is PatternType.PREFIXED:
        return name.startswith(acl.resource_name)
    return acl.resource_name in {name, ANYTHING}
