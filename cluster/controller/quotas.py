"""Client quotas: which changes are valid, and their records.

As in Apache Kafka, deleting a quota that does not exist is not an error, even with an unknown key.

Source: ``ClientQuotaControlManager``; KIP-546.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from fencepost.cluster.controller.acls import ReasonAgainst
from fencepost.cluster.controller.errors import InvalidRequestError, PolicyViolationError
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.image import Entity, MetadataImage
from fencepost.cluster.quota_entities import (
    ENTITY_TYPES,
    reason_against,
    reason_against_value,
)
from fencepost.cluster.records import ClientQuotaRecord, EntityData, MetadataRecord
from fencepost.logcore.machine import DomainError
from fencepost.logcore.steps import Steps
from fencepost.logcore.tracebacks import without_traceback

MAX_QUOTAS: Final = 20_000
"""The maximum number of quotas in the cluster. Each takes about a kilobyte of memory, and stays
when its clients have disconnected."""

MAX_CHANGES: Final = 10_000
"""The maximum number of quotas that one request changes: Kafka's ``MAX_RECORDS_PER_USER_OP``."""


class ClientQuotaAlteration(NamedTuple):
    """Changes of the quotas of one entity."""

    named: Mapping[str, str | None]
    """The types of the entity with their names; None is the default of a type."""
    ops: Sequence[tuple[str, float | None]]
    """Keys with their new values; None deletes a quota."""


class CheckedAlteration(NamedTuple):
    """The change of an entity's quotas, and the error of this change."""

    alteration: ClientQuotaAlteration
    error: DomainError | None


def check_quotas(
    view: ControllerView, alterations: Iterable[ClientQuotaAlteration]
) -> Steps[list[CheckedAlteration]]:
    """Check the changes, and return each entity once, with an error if it is named twice."""
    checked: dict[object, CheckedAlteration] = {}
    for alteration in alterations:
        reason = yield from _reason_against(alteration)
        # An entity with more types is refused in any case, because one of the types is unknown.
        is_short = len(alteration.named) <= len(ENTITY_TYPES)
        key = _entity_of(alteration.named) if is_short else len(checked)
        if key in checked:
            # Kafka makes the entity's first change, although it answers with an error.
            reason = "Ignoring duplicate entity"
        checked[key] = CheckedAlteration(alteration, None if reason is None else _error(reason))
        yield
    changes = 0
    for alteration, error in checked.values():
        changes += 0 if error is not None else len(_changes(view, alteration))
        yield
    if changes <= MAX_CHANGES:
        return [*checked.values()]
    error = PolicyViolationError("Unable to perform excessively large batch operation.")
    return [CheckedAlteration(alteration, error) for alteration, _ in checked.values()]


def alter_client_quotas(
    view: ControllerView,
    alterations: Iterable[ClientQuotaAlteration],
    quota_count: int,
    reason_against_record: ReasonAgainst,
) -> ControllerResult[list[DomainError | None]]:
    """Make the checked changes, and refuse changes that exceed MAX_QUOTAS.

    ``quota_count`` is the number of quotas in the image.
    """
    errors: list[DomainError | None] = []
    records: list[MetadataRecord] = []
    for alteration in alterations:
        parts = tuple(EntityData(*part) for part in _entity_of(alteration.named))
        changed = [
            ClientQuotaRecord(parts, key, value or 0.0, remove=value is None)
            for key, value in _changes(view, alteration).items()
        ]
        more = added_quotas(view.image, changed)
        error: DomainError | None = None
        if more > 0 and quota_count + more > MAX_QUOTAS:
            error = PolicyViolationError(
                f"the limit of {MAX_QUOTAS} quotas (MAX_QUOTAS) is reached"
            )
        elif changed and (reason := reason_against_record(changed[0])):
            error = _error(reason)
        else:
            records += changed
            quota_count += more
        errors.append(error)
    return ControllerResult(errors, tuple(records))


def added_quotas(image: MetadataImage, records: Iterable[MetadataRecord]) -> int:
    """Return the number of quotas that the records add to the image."""
    added = 0
    for record in records:
        if isinstance(record, ClientQuotaRecord):
            entity = tuple((part.entity_type, part.entity_name) for part in record.entity)
            added += (record.key not in image.quotas.get(entity, {})) - record.remove
    return added


def _entity_of(named: Mapping[str, str | None]) -> Entity:
    """Return an entity as the image's key."""
    return tuple(sorted(named.items(), key=lambda component: component[0]))


def _changes(view: ControllerView, alteration: ClientQuotaAlteration) -> dict[str, float | None]:
    now = view.image.quotas.get(_entity_of(alteration.named), {})
    return {key: value for key, value in alteration.ops if now.get(key) != value}


def _reason_against(alteration: ClientQuotaAlteration) -> Steps[str | None]:
    keys: set[str] = set()
    reason = None
    for key, _ in alteration.ops:
        if key in keys:
            reason = f"Duplicate quota key {key}"
        keys.add(key)
        yield
    if reason is None:
        reason = reason_against(alteration.named)
    if reason is not None:
        return reason
    for key, value in alteration.ops:
        if value is not None and (reason := reason_against_value(alteration.named, key, value)):
            return reason
        yield
    return None


def _error(reason: str) -> DomainError:
    return without_traceback(InvalidRequestError(reason))
