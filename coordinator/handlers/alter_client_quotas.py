"""AlterClientQuotas (49): limit users, clients or addresses. That is not done here, so it fails.

To take away what is not there is no error, as in Apache Kafka, also by a key that is no quota's.
No address is looked up, so what is no address is told only who would give it a quota.

Source: ``ClientQuotaControlManager.alterClientQuotas``; KIP-546.
"""

from __future__ import annotations

from collections.abc import Mapping

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.describe_client_quotas import ENTITY_TYPES, IP
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps


@handles(ApiKey.ALTER_CLIENT_QUOTAS, versions=(0, 1), permission="ALTER_CONFIGS Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Refuse each entity that would get a quota; one that is named twice is answered once."""
    make = ctx.respond
    answers: dict[object, tuple[dict[str, str | None], str | None]] = {}
    for entry in ctx.body.entries:
        entity, keys, sets = dict[str, str | None](), set[str](), False
        for one in entry.entity:
            entity[one.entity_type] = one.entity_name
            yield
        for op in entry.ops:
            keys.add(op.key)
            sets = sets or not op.remove
            yield
        # One of more types has an unknown one among them, and is refused whatever others say.
        is_short = len(entity) <= len(ENTITY_TYPES)
        named = frozenset(entity.items()) if is_short else len(answers)
        if named in answers:
            reason: str | None = "an entity is named twice"
        elif len(keys) < len(entry.ops):
            reason = "a quota is named twice"
        else:
            reason = _reason_against(entity, sets=sets)
        answers[named] = entity, reason
    entries = []
    for entity, reason in answers.values():
        shown = []
        for kind, name in entity.items():
            shown.append(make.EntityData(entity_type=kind, entity_name=name))
            yield
        code = ErrorCode.none if reason is None else ErrorCode.invalid_request
        entries.append(make.EntryData(error_code=code, error_message=reason, entity=tuple(shown)))
        yield
    return make.AlterClientQuotasResponse(entries=tuple(entries))


def _reason_against(entity: Mapping[str, str | None], *, sets: bool) -> str | None:
    if not entity:
        return "Invalid empty client quota entity"
    for kind, name in entity.items():
        if kind not in ENTITY_TYPES:
            return f"Unhandled client quota entity type: {kind}"
        if name == "":
            return f"Empty {kind} not supported"
    if IP in entity and len(entity) > 1:
        return "addresses have no quotas with users or clients"
    return "this broker does not limit clients, so a quota would have no effect" if sets else None
