"""Rules of who may do what: their parts, by Kafka's names and numbers.

Source: ``AclOperation``, ``ResourceType``, ``PatternType``, ``AclPermissionType``,
``StandardAcl``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from fencepost.logcore.values import dataclass


class Operation(IntEnum):
    """What is done with a resource; the numbers are those of the protocol."""

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
    """What something is done with."""

    UNKNOWN = 0
    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(IntEnum):
    """How a rule or a filter names its resources."""

    UNKNOWN = 0
    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Permission(IntEnum):
    """What a rule says."""

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
"""What can be done with a resource. A rule may say more, which then says nothing."""

CLUSTER_NAME: Final = "kafka-cluster"
"""The name of the one resource of type CLUSTER."""

ANYTHING: Final = "*"
"""As the name of a literal pattern every resource, as a host every address."""

ANYBODY: Final = "User:*"
"""The principal of a rule for everybody."""


@dataclass(frozen=True, slots=True)
class Acl:
    """One rule; ``principal`` is written ``TYPE:NAME``."""

    resource_type: ResourceType
    pattern_type: PatternType
    resource_name: str
    principal: str
    host: str
    operation: Operation
    permission: Permission

    @property
    def reason_against(self) -> str | None:
        """Why no ACL says this: only a filter may."""
        for what, value, least in (
            ("resourceType", self.resource_type, ResourceType.TOPIC),
            ("operation", self.operation, Operation.ALL),
            ("permissionType", self.permission, Permission.DENY),
            ("patternType", self.pattern_type, PatternType.LITERAL),
        ):
            if value < least:
                return f"Invalid {what} {value.name}"
        return None

    def __str__(self) -> str:
        on = resource_text(self.resource_type, self.resource_name, self.pattern_type)
        does = f"{self.permission.name} {self.operation.name}"
        return f"{does} for {self.principal} from {self.host} on {on}"


def resource_text(kind: ResourceType, name: str, pattern: PatternType = PatternType.LITERAL) -> str:
    """A resource as Kafka's log writes it: ``Topic:LITERAL:orders``."""
    return f"{kind.name.title().replace('_', '')}:{pattern.name}:{name}"


@dataclass(frozen=True, slots=True)
class AclFilter:
    """Which rules are meant: those that are like this in all that it says.

    Source: ``AclBindingFilter``.
    """

    resource_type: ResourceType = ResourceType.ANY
    pattern_type: PatternType = PatternType.ANY
    """MATCH for all patterns that the name fits."""
    resource_name: str | None = None
    principal: str | None = None
    host: str | None = None
    """To the letter; ``*`` are rules for every address, and no others."""
    operation: Operation = Operation.ANY
    permission: Permission = Permission.ANY

    @property
    def is_unknown(self) -> bool:
        """Whether it says something that nobody knows."""
        numbers = self.resource_type, self.pattern_type, self.operation, self.permission
        return 0 in numbers

    def takes(self, rule: Acl) -> bool:
        """Whether a rule about a resource that is meant is meant itself."""
        return (
            self.principal in {None, rule.principal}
            and self.host in {None, rule.host}
            and self.operation in {Operation.ANY, rule.operation}
            and self.permission in {Permission.ANY, rule.permission}
        )


@dataclass(frozen=True, slots=True)
class AclLimits:
    """How many ACLs a cluster keeps, and how long their texts are."""

    max_acls: int = 20_000
    """ACLs. Each takes about a kilobyte of memory and some 20 microseconds of a start, and the
    question if a producer may write to any topic at all can take a look at each."""

    max_changes_per_request: int = 10_000
    """ACLs that one request creates or deletes: Kafka's ``MAX_RECORDS_PER_USER_OP``."""

    max_change_bytes: int = 8 << 20
    """Bytes of the texts of ACLs that one request creates, as many as a batch of Kafka's metadata
    log may have."""

    max_text_bytes: int = 1_024
    """UTF-8 bytes of a name, a principal or a host. Topics' names end at 249, groups' at this; a
    transactional id that is longer can be named by its beginning."""
