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
    found = [one for one in acls if _is_about(one, kind, name)]
    if not found:
        return allows_without_rules
    mine = [one for one in found if _is_for(one, who)]
    denied = {Operation.ALL, operation}
    allowed = denied | IMPLY.get(operation, set())
    if any(one.permission is Permission.DENY and one.operation in denied for one in mine):
        return False
    return any(one.permission is Permission.ALLOW and one.operation in allowed for one in mine)


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
        one
        for one in every
        if one.resource_type is kind
        and _is_for(one, who)
        and one.operation in {Operation.ALL, operation}
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
