"""AlterClientQuotas (49): set or remove the quotas of users, clients or addresses.

An error of one entity does not prevent changes to the others.

Source: ``ClientQuotaControlManager.alterClientQuotas``; KIP-546.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.acls import ReasonAgainst
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.quotas import ClientQuotaAlteration, added_quotas
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import MetadataRecord
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import code_and_message, each_row
from fencepost.coordinator.handlers.controller_decisions import decided_by_item
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps


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
    """Change, or only validate, the quotas of each entity; respond with one result for each."""
    ctx.require_on_cluster(Operation.ALTER_CONFIGS)
    alterations: list[ClientQuotaAlteration] = []
    for entry in ctx.body.entries:
        quota_alteration = yield from _read(entry)
        alterations.append(quota_alteration)
    checked = yield from ctx.controller.current_machine().check_quotas(alterations)
    if not ctx.body.validate_only:
        good = [at for at, (_, error) in enumerate(checked) if error is None]
        alter = partial(_alter, _QuotaCount(ctx), ctx.metadata.reason_against)
        errors = yield from decided_by_item(
            ctx, [checked[at].alteration for at in good], alter, _characters
        )
        for at, error in zip(good, errors, strict=True):
            checked[at] = checked[at]._replace(error=error)
            yield None
    entries = []
    for alteration, error in checked:
        row = yield from _row(ctx, alteration.named.items(), *code_and_message(error))
        entries.append(row)
        yield None
    return ctx.respond.AlterClientQuotasResponse(entries=tuple(entries))


def _read(entry: Any) -> Steps[ClientQuotaAlteration]:
    """Return one entry of the request as an alteration of one entity's quotas."""
    named: dict[str, str | None] = {}
    for part in entry.entity:
        named[part.entity_type] = part.entity_name
        yield
    ops: list[tuple[str, float | None]] = []
    for op in entry.ops:
        ops.append((op.key, None if op.remove else op.value))
        yield
    return ClientQuotaAlteration(named, ops)


def _characters(alteration: ClientQuotaAlteration) -> int:
    """Return the total length of the entity's names in its quota records, in characters."""
    return len(alteration.ops) * sum(len(name or "") for name in alteration.named.values())


class _QuotaCount:
    """Counts the quotas that exist before each decision on a request.

    In a ZooKeeper cluster the broker's quota table is updated only after the changes are written.
    So this class adds up the quotas in the request's image and the quotas that the request's
    decisions add.
    """

    def __init__(self, ctx: Context) -> None:
        self._table = ctx.broker.quotas.table
        self._stored_count: int | None = None
        if ctx.zookeeper_controller is not None:
            self._stored_count = sum(map(len, ctx.metadata.image.quotas.values()))

    @property
    def now(self) -> int:
        return self._table.count if self._stored_count is None else self._stored_count

    def decided(self, image: MetadataImage, records: Sequence[MetadataRecord]) -> None:
        """Count the quotas that a decision's records add to ``image``."""
        if self._stored_count is not None:
            self._stored_count += added_quotas(image, records)


def _alter(
    count: _QuotaCount,
    reason_against: ReasonAgainst,
    batch: Sequence[ClientQuotaAlteration],
    controller: Controller,
) -> ControllerResult[list[DomainError | None]]:
    result = controller.alter_client_quotas(batch, count.now, reason_against)
    count.decided(controller.image, result.records)
    return result
