"""ACLs written as text, and a model: an authorizer that scans all ACLs for each decision."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address, ip_network

from fencepost.cluster.acl import (
    ANYBODY,
    ANYTHING,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.coordinator.security.principal import ClientSession, Principal, canonical_host

IMPLY = {
    Operation.DESCRIBE: {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER},
    Operation.DESCRIBE_CONFIGS: {Operation.ALTER_CONFIGS},
}


def rule(text: str) -> Acl:
    """Parse an ACL like ``ALLOW READ User:bob * TOPIC PREFIXED foo``."""
    permission, operation, principal, host, kind, pattern, name = text.split(" ")
    return Acl(
        ResourceType[kind],
        PatternType[pattern],
        name,
        principal,
        host,
        Operation[operation],
        Permission[permission],
    )


def session(user: str, host: str = "127.0.0.1") -> ClientSession:
    return ClientSession(host, "PLAINTEXT", Principal("User", user))


def _is_about(acl: Acl, kind: ResourceType, name: str) -> bool:
    if acl.resource_type is not kind:
        return False
    if acl.pattern_type is PatternType.PREFIXED:
        return name.startswith(acl.resource_name)
    return acl.resource_name in {name, ANYTHING}


def _is_for(acl: Acl, who: ClientSession) -> bool:
    if acl.principal not in {ANYBODY, str(who.principal)}:
        return False
    if "/" in acl.host:
        return ip_address(who.host) in ip_network(acl.host, strict=False)
    return canonical_host(acl.host) in {
        ANYTHING,
        who.host,
    }


def allows(
    acls: Iterable[Acl],
    who: ClientSession,
    operation: Operation,
    kind: ResourceType,
    name: str,
    *,
    allows_without_rules: bool = False,
) -> bool:
    found = [acl for acl in acls if _is_about(acl, kind, name)]
    if not found:
        return allows_without_rules
    mine = [acl for acl in found if _is_for(acl, who)]
    denied = {Operation.ALL, operation}
    allowed = denied | IMPLY.get(operation, set())
    if any(acl.permission is Permission.DENY and acl.operation in denied for acl in mine):
        return False
    return any(acl.permission is Permission.ALLOW and acl.operation in allowed for acl in mine)


def allows_some(
    acls: Iterable[Acl],
    who: ClientSession,
    operation: Operation,
    kind: ResourceType,
    *,
    allows_without_rules: bool = False,
) -> bool:
    """Decide as ``Authorizer.authorizeByResourceType`` does, step by step."""
    every = list(acls)
    if allows(every, who, operation, kind, "hardcode", allows_without_rules=allows_without_rules):
        return True
    mine = [
        acl
        for acl in every
        if acl.resource_type is kind
        and _is_for(acl, who)
        and acl.operation in {Operation.ALL, operation}
    ]
    deny = {(o.pattern_type, o.resource_name) for o in mine if o.permission is Permission.DENY}
    allow = {(o.pattern_type, o.resource_name) for o in mine if o.permission is Permission.ALLOW}
    everything = (PatternType.LITERAL, ANYTHING)
    if everything in deny:
        return False
    if everything in allow:
        return True
    for how, name in allow:
        if how is PatternType.LITERAL and (how, name) in deny:
            continue
        begins = {(PatternType.PREFIXED, name[: end + 1]) for end in range(len(name))}
        if not begins & deny:
            return True
    return False
