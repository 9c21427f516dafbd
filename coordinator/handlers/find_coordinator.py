"""FindCoordinator (10): where a group or a transactional id is looked after.

The internal topic is created by the first request, and its shards serve when the answer goes out,
where Kafka says COORDINATOR_NOT_AVAILABLE and lets the client come again.

Versions: 1 asks by type, 4 for many keys at once, 6 knows share coordinators, which there are none
of (INVALID_REQUEST, as from a Kafka without them).
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.machine import DomainError

GROUP = 0
TRANSACTION = 1


@handles(ApiKey.FIND_COORDINATOR, versions=(0, 6), permission="DESCRIBE Group or TransactionalId")
def run(ctx: Context) -> Steps[Entity]:
    """Answer with this broker's own address, or an error."""
    code, message = yield from _open(ctx)
    found = code is ErrorCode.none
    host, port = ctx.advertised
    place = {
        "error_code": code,
        "error_message": message,
        "node_id": ctx.broker.node_id if found else -1,
        "host": host if found else "",
        "port": port if found else -1,
    }
    respond = ctx.respond
    if ctx.version < 4:
        return respond.FindCoordinatorResponse(**place)
    coordinators = []
    for key in ctx.body.coordinator_keys:
        coordinators.append(respond.Coordinator(key=key, **place))
        yield
    return respond.FindCoordinatorResponse(coordinators=tuple(coordinators))


def _open(ctx: Context) -> Steps[tuple[ErrorCode, str | None]]:
    key_type = getattr(ctx.body, "key_type", GROUP)
    try:
        if key_type == GROUP:
            yield from ctx.broker.groups.open_in_steps()
        elif key_type == TRANSACTION:
            yield from ctx.broker.txns.open_in_steps()
        else:
            return ErrorCode.invalid_request, f"no coordinators of type {key_type}"
    except DomainError as error:
        return error_code(error), str(error)
    return ErrorCode.none, None
