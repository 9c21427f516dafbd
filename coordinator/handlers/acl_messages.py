"""Conversion of ACLs and ACL filters in requests, and the lookup of existing ACLs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

from fencepost.cluster.acl import (
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.cluster.controller.acls import AclIndex
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.handlers.controller_decisions import (
    ITEMS_PER_TURN,
    batched,
    decided_each,
)
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.authorizer import Authorizer

NO_AUTHORIZER = "No Authorizer is configured"

N = TypeVar("N", bound=IntEnum)
T = TypeVar("T")


def in_turn(ctx: Context, change: Work[T]) -> Work[T]:
    """Run ``change`` after the previous ACL requests, on which its validation depends.

    In a ZooKeeper cluster ``zookeeper_registry`` has already waited for the previous requests.
    """
    if ctx.zookeeper_controller is not None:
        return change
    return ctx.broker.acl_requests.run(_when_applied(ctx, change))


def _when_applied(ctx: Context, change: Work[T]) -> Work[T]:
    """Run ``change`` once the authorizer's ACLs, against which it validates, are up to date."""
    acls = ctx.broker.acls
    while acls is not None and (applied := acls.applied()) is not None:
        yield applied
        applied.result()
    return (yield from change)


def decided_in_batches(
    ctx: Context,
    authorizer: Authorizer,
    acls: Sequence[Acl],
    change: Callable[[Controller, Sequence[Acl], AclIndex], ControllerResult[None]],
) -> Work[object]:
    """Have the controller change validated ACLs, one batch per turn of the event loop."""

    def decision(piece: Sequence[Acl]) -> Callable[[Controller], ControllerResult[None]]:
        return lambda controller: change(controller, piece, existing_acls(ctx, authorizer))

    return decided_each(ctx, map(decision, batched(acls, ITEMS_PER_TURN)))


def existing_acls(ctx: Context, authorizer: Authorizer) -> AclIndex:
    """Return the ACLs against which the request's next decision is validated.

    In a ZooKeeper cluster these are the ACLs that were current when the request began, even if the
    authorizer has applied other brokers' changes since then.
    """
    acls = None if ctx.zookeeper_controller is None else ctx.zookeeper_controller.acls
    return authorizer.rules if acls is None else acls


def rule_of(creation: Any) -> Acl:
    """Return the ACL that a creation describes."""
    return Acl(
        _number(ResourceType, creation.resource_type),
        _number(PatternType, creation.resource_pattern_type),
        creation.resource_name,
        creation.principal,
        creation.host,
        _number(Operation, creation.operation),
        _number(Permission, creation.permission_type),
    )


def filter_of(acl_filter: Any) -> AclFilter:
    """Return the filter of a DescribeAcls request, or one filter of a DeleteAcls request."""
    return AclFilter(
        _number(ResourceType, acl_filter.resource_type_filter),
        _number(PatternType, acl_filter.pattern_type_filter),
        acl_filter.resource_name_filter,
        acl_filter.principal_filter,
        acl_filter.host_filter,
        _number(Operation, acl_filter.operation),
        _number(Permission, acl_filter.permission_type),
    )


def has_unknown_code(acl_filter: Any) -> bool:
    """Return whether a filter contains 0, the code of UNKNOWN, which is invalid in a filter.

    A filter with an undefined code is valid, and matches no ACL.

    Source: ``DescribeAclsRequest.normalizeAndValidate``.
    """
    return 0 in {
        acl_filter.resource_type_filter,
        acl_filter.pattern_type_filter,
        acl_filter.operation,
        acl_filter.permission_type,
    }


def _number(kind: type[N], number: int) -> N:
    """Return the enum member for a code; UNKNOWN for an undefined code."""
    try:
        return kind(number)
    except ValueError:
        return kind(0)
