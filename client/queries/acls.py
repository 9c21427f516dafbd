"""Find, create and delete ACLs (rules), and find the rule that decides a request.

Source: ``AclCommand`` of Kafka; DescribeAcls, CreateAcls and DeleteAcls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fencepost.client.client import ApiError
from fencepost.client.queries.session import check
from fencepost.client.queries.settings import describe_configs
from fencepost.cluster.acl import (
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.coordinator.security.principal import canonical_host
from fencepost.coordinator.security.rules import RuleTable

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

RULES_AT_ONCE = 1_000
"""The maximum number of rules or filters in one request."""

NO_ADDRESS = ""
"""Stands for an unknown client address, which a rule for a single address does not match."""


def find(session: ClusterSession, filters: Iterable[AclFilter]) -> list[Acl]:
    """Return the distinct rules that match any of ``filters``. Raises :class:`ApiError`."""
    rules: dict[Acl, None] = {}
    for acl_filter in filters:
        answer = session.client.call(
            "DescribeAcls",
            **_fields(acl_filter),
        )
        for resource in answer.resources:
            rules.update(dict.fromkeys(_rule(resource, acl) for acl in resource.acls))
    return sorted(rules, key=_order)


def _fields(acl: Acl | AclFilter) -> dict[str, Any]:
    """Return the filter fields of DescribeAcls and DeleteAcls for ``acl``.

    The filter made from a rule matches only that rule.
    """
    return {
        "resource_type_filter": int(acl.resource_type),
        "resource_name_filter": acl.resource_name,
        "pattern_type_filter": int(acl.pattern_type),
        "principal_filter": acl.principal,
        "host_filter": acl.host,
        "operation": int(acl.operation),
        "permission_type": int(acl.permission),
    }


def create(session: ClusterSession, rules: Sequence[Acl]) -> None:
    """Create rules. Raises :class:`ApiError` for the first rule that the broker refuses."""
    for at in range(0, len(rules), RULES_AT_ONCE):
        chunk = rules[at : at + RULES_AT_ONCE]
        answer = session.client.call(
            "CreateAcls",
            check=False,
            entity=lambda f, chunk=chunk: f.message(
                creations=[
                    f.AclCreation(
                        resource_type=int(acl.resource_type),
                        resource_name=acl.resource_name,
                        resource_pattern_type=int(acl.pattern_type),
                        principal=acl.principal,
                        host=acl.host,
                        operation=int(acl.operation),
                        permission_type=int(acl.permission),
                    )
                    for acl in chunk
                ]
            ),
        )
        for rule, result in zip(chunk, answer.results, strict=True):
            check(result.error_code, "CreateAcls", rule, result.error_message)


def delete(session: ClusterSession, rules: Sequence[Acl]) -> int:
    """Delete rules and return how many existed. Raises :class:`ApiError`."""
    count = 0
    for at in range(0, len(rules), RULES_AT_ONCE):
        chunk = rules[at : at + RULES_AT_ONCE]
        answer = session.client.call(
            "DeleteAcls",
            check=False,
            entity=lambda f, chunk=chunk: f.message(
                filters=[f.DeleteAclsFilter(**_fields(acl)) for acl in chunk]
            ),
        )
        for rule, result in zip(chunk, answer.filter_results, strict=True):
            check(result.error_code, "DeleteAcls", rule, result.error_message)
            count += len(result.matching_acls)
    return count


class AclVerdict(NamedTuple):
    """Whether a principal is authorized, and why."""

    is_allowed: bool
    because: str
    rule: Acl | None
    notes: list[str]
    """Sentences about unknown settings and addresses that could change the verdict."""


def why(
    session: ClusterSession,
    principal: str,
    host: str | None,
    operation: Operation,
    resource: tuple[ResourceType, str],
) -> AclVerdict:
    """Decide as the broker would; ``host`` None stands for an unknown address. Raises ApiError."""
    kind, name = resource
    rules = find(session, [AclFilter(kind, PatternType.MATCH, name)])
    settings, notes = _settings(session)
    if principal in [text.strip() for text in settings.get("super.users", "").split(";")]:
        return AclVerdict(True, "super user", None, notes)
    place = NO_ADDRESS if host is None else canonical_host(host)
    decision = RuleTable.of(rules).decide(principal, place, operation, kind, name)
    if host is None and any(rule.host != "*" and rule.principal == principal for rule in rules):
        notes.append("some rules apply to single addresses: name one with --host")
    if decision.allowed is None:
        everyone = settings.get("allow.everyone.if.no.acl.found", "false") == "true"
        return AclVerdict(everyone, "no rule applies to it", None, notes)
    because = "a rule" if decision.rule else "no rule allows it"
    return AclVerdict(decision.allowed, because, decision.rule, notes)


def _settings(session: ClusterSession) -> tuple[dict[str, str], list[str]]:
    """Return the broker settings that matter for authorization, and notes on missing ones."""
    keys = ("super.users", "allow.everyone.if.no.acl.found")
    try:
        entries = describe_configs(session, [("broker", str(session.some_broker))])
    except ApiError:
        entries = []
    values = {
        entry.key: entry.value for entry in entries if entry.key in keys and entry.value is not None
    }
    notes = [f"the broker does not return {key}" for key in keys if key not in values]
    return values, notes


def _rule(resource: Any, acl: Any) -> Acl:
    return Acl(
        ResourceType(resource.resource_type),
        PatternType(resource.pattern_type),
        resource.resource_name,
        acl.principal,
        acl.host,
        Operation(acl.operation),
        Permission(acl.permission_type),
    )


def _order(rule: Acl) -> tuple[object, ...]:
    return (
        rule.resource_type,
        rule.resource_name,
        rule.pattern_type,
        rule.principal,
        rule.permission,
        rule.operation,
        rule.host,
    )
