"""AlterClientQuotas (49): limit users, clients or addresses, or let them go.

To take away what is not there is no error, as in Apache Kafka, also by a key that is no quota's.
What is wrong with one entity keeps no other from its quotas; one that is named twice keeps what it
had, where Apache Kafka makes the first change and answers that it made none.

Source: ``ClientQuotaControlManager.alterClientQuotas``; KIP-546.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from fencepost.cluster.acl import Operation
from fencepost.cluster.quota_entities import (
    ENTITY_TYPES,
    reason_against,
    reason_against_value,
)
from fencepost.coordinator.errors import InvalidRequestError, PolicyViolationError
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import code_of, each_row, forced, result_of
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


def refused(ctx: Context, code: int, message: str | None) -> Steps[Entity]:
    """Refuse each entry for the same reason."""
    entries = []
    for entry in ctx.body.entries:
        named = ((part.entity_type, part.entity_name) for part in entry.entity)
        entries.append((yield from _row(ctx, named, code, message)))
    return ctx.respond.AlterClientQuotasResponse(entries=tuple(entries))


def _row(
    ctx: Context, named: Iterable[tuple[str, str | None]], code: int, message: str | None
) -> Steps[Entity]:
    make = ctx.respond
    entity = yield from each_row(
        named, lambda part: make.EntityData(entity_type=part[0], entity_name=part[1])
    )
    return make.EntryData(error_code=code, error_message=message, entity=entity)


@handles(
    ApiKey.ALTER_CLIENT_QUOTAS,
    versions=(0, 1),
    permission="ALTER_CONFIGS Cluster",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Change, or only check, the quotas of each entity; each is answered once."""
    ctx.require_on_cluster(Operation.ALTER_CONFIGS)
    table = ctx.broker.quotas.table
    answers: dict[object, _Alteration] = {}
    for entry in ctx.body.entries:
        one = yield from _read(entry)
        # One of more types has an unknown one among them, and is refused whatever others say.
        is_short = len(one.named) <= len(ENTITY_TYPES)
        entity = frozenset(one.named.items()) if is_short else len(answers)
        if entity in answers:
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
        message = None if one.error is None else str(one.error)
        row = yield from _row(ctx, one.named.items(), code_of(one.error), message)
        entries.append(row)
        yield None
    return ctx.respond.AlterClientQuotasResponse(entries=tuple(entries))


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
