"""AlterClientQuotas (49): limit users, clients or addresses. That is not done here, so it fails.

To take away what is not there is no error, as in Apache Kafka.

Source: ``ClientQuotaControlManager.alterClientQuotas``; KIP-546.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.describe_client_quotas import ENTITY_TYPES
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps


@handles(ApiKey.ALTER_CLIENT_QUOTAS, versions=(0, 1), permission="ALTER_CONFIGS Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Refuse each entity that would get a quota."""
    make = ctx.respond
    entries = []
    for entry in ctx.body.entries:
        reason = _reason_against(entry)
        entity = []
        for one in entry.entity:
            entity.append(make.EntityData(entity_type=one.entity_type, entity_name=one.entity_name))
            yield
        entries.append(
            make.EntryData(
                error_code=ErrorCode.none if reason is None else ErrorCode.invalid_request,
                error_message=reason,
                entity=tuple(entity),
            )
        )
        yield
    return make.AlterClientQuotasResponse(entries=tuple(entries))


def _reason_against(entry: Any) -> str | None:
    if not entry.entity:
        return "Invalid empty client quota entity"
    unknown = {one.entity_type for one in entry.entity} - ENTITY_TYPES
    if unknown:
        return f"Unhandled client quota entity type: {min(unknown)}"
    if all(op.remove for op in entry.ops):
        return None
    return "this broker does not limit clients, so a quota would have no effect"
