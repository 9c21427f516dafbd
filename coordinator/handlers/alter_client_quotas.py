"""AlterClientQuotas (49): limit users, clients or addresses, or let them go.

To take away what is not there is no error, as in Apache Kafka, also by a key that is no quota's.
What is wrong with one entity keeps no other from its quotas; one that is named twice keeps what it
had, where Apache Kafka makes the first change and answers that it made none.

Source: ``ClientQuotaControlManager.alterClientQuotas``; KIP-546.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.quota_entities import (
    ENTITY_TYPES,
    reason_against,
    reason_against_value,
)
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import (
    ClusterAuthorizationError,
    InvalidRequestError,
    PolicyViolationError,
)
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import forced, result_of
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback

MAX_CHANGES: Final = 10_000
"""Quotas that one request changes: what Kafka's controllers write at once."""


class _Alteration:
    """What becomes of one entity."""

    __slots__ = ("error", "named", "wanted")

    def __init__(self, named: dict[str, str | None]) -> None:
        self.named = named
        self.wanted: dict[str, float | None] = {}
        self.error: DomainError | None = None


@handles(ApiKey.ALTER_CLIENT_QUOTAS, versions=(0, 1), permission="ALTER_CONFIGS Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Change, or only check, the quotas of each entity; each is answered once."""
    make, table = ctx.respond, ctx.broker.quotas.table
    may = ctx.may_on_cluster(Operation.ALTER_CONFIGS)
    answers: dict[object, _Alteration] = {}
    for entry in ctx.body.entries:
        one = yield from _read(entry)
        # One of more types has an unknown one among them, and is refused whatever others say.
        is_short = len(one.named) <= len(ENTITY_TYPES)
        entity = frozenset(one.named.items()) if is_short else len(answers)
        if not may:
            one.error = ClusterAuthorizationError("Cluster authorization failed.")
        elif entity in answers:
            one.error = InvalidRequestError("Ignoring duplicate entity")
        answers[entity] = one
    changes = 0
    for known, one in answers.items():
        if one.error is None and isinstance(known, frozenset):
            changes += len(table.changes(known, one.wanted))
        yield None
    if changes > MAX_CHANGES:
        for one in answers.values():
            one.error = PolicyViolationError("Unable to perform excessively large batch operation.")
    elif changes and not ctx.body.validate_only:
        yield from forced(ctx, _changed(ctx, answers))
    entries = []
    for one in answers.values():
        shown = []
        for kind, name in one.named.items():
            shown.append(make.EntityData(entity_type=kind, entity_name=name))
            yield None
        error = one.error
        code = ErrorCode.none if error is None else error_code(error)
        message = None if error is None else str(error)
        entries.append(make.EntryData(error_code=code, error_message=message, entity=tuple(shown)))
        yield None
    return make.AlterClientQuotasResponse(entries=tuple(entries))


def _read(entry: Any) -> Steps[_Alteration]:
    """The changes of one entity, or what is wrong with them."""
    one = _Alteration({})
    for part in entry.entity:
        one.named[part.entity_type] = part.entity_name
        yield
    reason = None
    for op in entry.ops:
        if op.key in one.wanted:
            reason = f"Duplicate quota key {op.key}"
        one.wanted[op.key] = None if op.remove else op.value
        yield
    if reason is None:
        reason = reason_against(one.named)
    if reason is None:
        for key, value in one.wanted.items():
            if value is not None and reason is None:
                reason = reason_against_value(one.named, key, value)
            yield
    if reason is not None:
        one.error = InvalidRequestError(reason)
    return one


def _changed(ctx: Context, answers: dict[object, _Alteration]) -> Work[None]:
    table, later = ctx.broker.quotas.table, []
    for entity, one in answers.items():
        if one.error is None and isinstance(entity, frozenset):
            try:
                with ctx.broker.metadata.unforced():
                    holds = table.change(entity, one.wanted)
            except DomainError as error:
                one.error = without_traceback(error)
            else:
                if holds is not None:
                    later.append((one, holds))
        yield None
    for one, holds in later:
        one.error = yield from result_of(holds)
