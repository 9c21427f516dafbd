"""The parts of an ACL, with Kafka's names and numbers.

Source: ``AclOperation``, ``ResourceType``, ``PatternType``, ``AclPermissionType``,
``StandardAcl``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from fencepost.logcore.values import dataclass


class Operation(IntEnum):
    """An operation on a resource, by its number in the protocol."""

    UNKNOWN = 0
    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class ResourceType(IntEnum):
    """The type of a resource."""

    UNKNOWN = 0
    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(IntEnum):
    """How the resource name of an ACL or of a filter is matched."""

    UNKNOWN = 0
    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Permission(IntEnum):
    """Whether an ACL allows or denies an operation."""

    UNKNOWN = 0
    ANY = 1
    DENY = 2
    ALLOW = 3


OPERATIONS: Final[Mapping[ResourceType, tuple[Operation, ...]]] = {
    ResourceType.TOPIC: (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.GROUP: (
        Operation.READ,
        Operation.DELETE,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.CLUSTER: (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE,
    ),
    ResourceType.TRANSACTIONAL_ID: (
        Operation.WRITE,
        Operation.DESCRIBE,
        Operation.TWO_PHASE_COMMIT,
    ),
    ResourceType.DELEGATION_TOKEN: (Operation.DESCRIBE,),
    ResourceType.USER: (Operation.CREATE_TOKENS, Operation.DESCRIBE_TOKENS),
}
"""The operations on each type of resource. An ACL with another operation has no effect."""

CLUSTER_NAME: Final = "kafka-cluster"
"""The name of the one resource of type CLUSTER."""

ANYTHING: Final = "*"
"""As the name of a literal pattern it matches every resource, and as a host every address."""

ANYBODY: Final = "User:*"
"""The principal of an ACL for every user."""


@dataclass(frozen=True, slots=True)
class Acl:
    """One ACL; ``principal`` is written ``TYPE:NAME``."""

    resource_type: ResourceType
    pattern_type: PatternType
    resource_name: str
    principal: str
    host: str
    operation: Operation
    permission: Permission

    @property
    def reason_against(self) -> str | None:
        """Kafka's error message if a field has a value for filters only, such as ANY; else None."""
        for kind, value, least in (
            ("resourceType", self.resource_type, ResourceType.TOPIC),
            ("operation", self.operation, Operation.ALL),
            ("permissionType", self.permission, Permission.DENY),
            ("patternType", self.pattern_type, PatternType.LITERAL),
        ):
            if value < least:
                return f"Invalid {kind} {value.name}"
        return None

    def __str__(self) -> str:
        on = resource_text(self.resource_type, self.resource_name, self.pattern_type)
        does = f"{self.permission.name} {self.operation.name}"
        return f"{does} for {self.principal} from {self.host} on {on}"


def resource_text(kind: ResourceType, name: str, pattern: PatternType = PatternType.LITERAL) -> str:
    """Return a resource as Kafka's log writes it: ``Topic:LITERAL:orders``."""
    return f"{kind.name.title().replace('_', '')}:{pattern.name}:{name}"


@dataclass(frozen=True, slots=True)
class AclFilter:
    """A filter, which matches the ACLs that have all of the filter's values.

    Source: ``AclBindingFilter``.
    """

    resource_type: ResourceType = ResourceType.ANY
    pattern_type: PatternType = PatternType.ANY
    """MATCH selects every pattern that matches the resource name."""
    resource_name: str | None = None
    principal: str | None = None
    host: str | None = None
    """Compared literally: ``*`` selects only the ACLs whose host is ``*``."""
    operation: Operation = Operation.ANY
    permission: Permission = Permission.ANY

    @property
    def is_unknown(self) -> bool:
        """Whether the filter has a value of UNKNOWN."""
        numbers = self.resource_type, self.pattern_type, self.operation, self.permission
        return 0 in numbers

    def matches(self, rule: Acl) -> bool:
        """Whether the filter matches an ACL apart from the resource, which the caller compares."""
        return (
            self.principal in {None, rule.principal}
            and self.host in {None, rule.host}
            and self.operation in {Operation.ANY, rule.operation}
            and self.permission in {Permission.ANY, rule.permission}
        )


@dataclass(frozen=True, slots=True)
class AclLimits:
    """Limits on the number of ACLs of a cluster, and on the length of their texts."""

    max_acls: int = 20_000
    """The maximum number of ACLs in the cluster. Each ACL takes about a kilobyte of memory, and
    about 20 microseconds when a broker starts. To decide whether a producer may write to any topic
    at all, a broker may have to check all ACLs."""

    max_changes_per_request: int = 10_000
    """The maximum number of ACLs that one request creates or deletes: Kafka's
    ``MAX_RECORDS_PER_USER_OP``."""

    max_change_bytes: int = 8 << 20
    """The maximum total size, in bytes, of the texts of the ACLs that one request creates. The
    largest batch of Kafka's metadata log has the same size."""

    max_text_bytes: int = 1_024
    """The maximum size of a resource name, a principal or a host in bytes of UTF-8. Topic names are
    shorter, with at most 249. Group and transactional ids may be longer, but a prefixed pattern can
    match them."""
