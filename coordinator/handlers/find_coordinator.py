"""FindCoordinator (10): where a group or a transactional id is looked after.

The internal topic is created by the first request, and its shards serve when the answer goes out,
where Kafka says COORDINATOR_NOT_AVAILABLE and lets the client come again.

Versions: 1 asks by type, 4 for many keys at once, 6 knows share coordinators, which there are none
of (INVALID_REQUEST, as from a Kafka without them).
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.security.acl import Operation, ResourceType
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.machine import DomainError

GROUP = 0
TRANSACTION = 1
FIRST_WITH_MANY_KEYS = 4
FIRST_WITH_SHARE_COORDINATORS = 6


_AUTHORIZED: Final = {
    GROUP: (ResourceType.GROUP, ErrorCode.group_authorization_failed),
    TRANSACTION: (
        ResourceType.TRANSACTIONAL_ID,
        ErrorCode.transactional_id_authorization_failed,
    ),
}
"""What a key of a type names, and the error for who may not describe it."""

Verdict = tuple[ErrorCode, str | None]


@handles(ApiKey.FIND_COORDINATOR, versions=(0, 6), permission="DESCRIBE Group or TransactionalId")
def run(ctx: Context) -> Steps[Entity]:
    """Answer with this broker's own address, or an error."""
    respond, body = ctx.respond, ctx.body
    key_type = getattr(body, "key_type", GROUP)
    opened: Verdict | None = None
    found = []
    for key in (body.key,) if ctx.version < FIRST_WITH_MANY_KEYS else body.coordinator_keys:
        verdict = _denied(ctx, key_type, key)
        if verdict is None:
            if opened is None:
                opened = yield from _open(ctx, key_type)
            verdict = opened
        found.append((key, _place(ctx, *verdict)))
        yield
    if ctx.version < FIRST_WITH_MANY_KEYS:
        return respond.FindCoordinatorResponse(**found[0][1])
    coordinators = []
    for key, place in found:
        coordinators.append(respond.Coordinator(key=key, **place))
        yield
    return respond.FindCoordinatorResponse(coordinators=tuple(coordinators))


def _denied(ctx: Context, key_type: int, key: str) -> Verdict | None:
    """Why the client is not told of the coordinator of ``key``, whether there is one or not."""
    if key_type in _AUTHORIZED:
        resource, code = _AUTHORIZED[key_type]
        return None if ctx.may(Operation.DESCRIBE, resource, key) else (code, None)
    if ctx.version >= FIRST_WITH_SHARE_COORDINATORS and not ctx.may_on_cluster(
        Operation.CLUSTER_ACTION
    ):
        return ErrorCode.cluster_authorization_failed, None
    return ErrorCode.invalid_request, f"no coordinators of type {key_type}"


def _place(ctx: Context, code: ErrorCode, message: str | None) -> dict[str, Any]:
    found = code is ErrorCode.none
    host, port = ctx.advertised
    return {
        "error_code": code,
        "error_message": message,
        "node_id": ctx.broker.node_id if found else -1,
        "host": host if found else "",
        "port": port if found else -1,
    }


def _open(ctx: Context, key_type: int) -> Steps[Verdict]:
    coordinator = ctx.broker.groups if key_type == GROUP else ctx.broker.txns
    try:
        yield from coordinator.open_in_steps()
    except DomainError as error:
        return error_code(error), str(error)
    return ErrorCode.none, None
