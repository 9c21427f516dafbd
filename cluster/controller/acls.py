"""ACLs: which of them are valid, and the records that create and delete them.

The controller checks a request for thousands of ACLs in steps, and splits it into several
decisions, between which it handles no other request for ACLs. Brokers apply the decisions one by
one. Between two decisions they must not allow an operation that neither the old nor the new ACLs
allow, so denials are created first and deleted last. On ZooKeeper, another broker may change ACLs
between the decisions, so a decision skips new ACLs that exist already, and ACLs to delete that no
longer exist.

Source: ``AclControlManager``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol
from uuid import UUID

from fencepost.cluster.acl import CLUSTER_NAME, Acl, AclFilter, AclLimits, Permission, ResourceType
from fencepost.cluster.controller.errors import InvalidRequestError, PolicyViolationError
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    MetadataRecord,
    RemoveAccessControlEntryRecord,
)
from fencepost.logcore.machine import DomainError
from fencepost.logcore.steps import Steps
from fencepost.logcore.tracebacks import without_traceback

MAX_MATCHES_TOLD: Final = 20_000
"""The maximum number of ACLs in one DeleteAcls response. A response repeats an ACL, of up to three
kilobytes, for each filter that matches it, so the limit on deleted ACLs does not bound the size of
the response. The limit on matches is twice as high, to allow filters that overlap."""

_NO_ID = UUID(int=0)


class AclIndex(Protocol):
    """The ACLs of one image by their values; it is immutable."""

    def id_of(self, acl: Acl) -> UUID | None:
        """Return the id of an ACL; None if the ACL does not exist."""

    def find(self, filtered: AclFilter) -> Steps[list[Acl]]:
        """Return the ACLs that a filter matches."""


ReasonAgainst = Callable[[MetadataRecord], str | None]
"""Returns why the metadata store cannot keep a record; None if it can."""


class AclCreation(NamedTuple):
    """The outcome for the ACLs of one request."""

    errors: list[DomainError | None]
    """The error of each ACL of the request, in order; None also for an ACL that exists."""
    created: list[Acl]
    """The new ACLs, each once, denials first."""


def check_creation(
    view: ControllerView, acls: Iterable[Acl], existing: AclIndex, reason_against: ReasonAgainst
) -> Steps[AclCreation]:
    """Return the ``acls`` that must be created. Raises PolicyViolationError for too many."""
    limits = view.settings.acl_limits
    errors: list[DomainError | None] = []
    created: dict[Acl, None] = {}
    size = 0
    for acl in acls:
        reason = _reason_against(acl, limits) or reason_against(_record(_NO_ID, acl))
        errors.append(None if reason is None else without_traceback(InvalidRequestError(reason)))
        if reason is None and acl not in created and existing.id_of(acl) is None:
            created[acl] = None
            size += _bytes(acl.resource_name) + _bytes(acl.principal) + _bytes(acl.host)
        yield
    _check_limit(len(created), limits.max_changes_per_request, "max_changes_per_request")
    _check_limit(size, limits.max_change_bytes, "max_change_bytes")
    _check_room(view, len(created))
    return AclCreation(errors, sorted(created, key=_allows))


def create_acls(
    view: ControllerView, acls: Iterable[Acl], existing: AclIndex, draw_id: Callable[[], UUID]
) -> ControllerResult[None]:
    """Create the checked ``acls`` that do not exist. Raises PolicyViolationError for too many."""
    new = [acl for acl in acls if existing.id_of(acl) is None]
    _check_room(view, len(new))
    records = []
    for acl in new:
        id_ = draw_id()
        while id_ in view.image.acls:
            id_ = draw_id()
        records.append(_record(id_, acl))
    return ControllerResult(None, tuple(records))


def check_filter(filtered: AclFilter) -> None:
    """Raise InvalidRequestError for a filter that no ACL can match."""
    if filtered.is_unknown:
        raise InvalidRequestError(
            "the filter has an unknown type, pattern, operation or permission"
        )


class AclDeletion(NamedTuple):
    """The outcome for the filters of one request."""

    answers: list[list[Acl] | DomainError]
    """The ACLs that each filter matches, or its error."""
    deleted: list[Acl]
    """The matched ACLs, each once, denials last."""


def check_deletion(
    view: ControllerView, filters: Iterable[AclFilter], existing: AclIndex
) -> Steps[AclDeletion]:
    """Return the ACLs that must be deleted. Raises InvalidRequestError for too many.

    Deleted ACLs are limited as in Kafka. The ACLs in the response are limited as well, unlike in
    Kafka.
    """
    limit = view.settings.acl_limits.max_changes_per_request
    answers: list[list[Acl] | DomainError] = []
    deleted: dict[Acl, None] = {}
    count = 0
    for filtered in filters:
        try:
            check_filter(filtered)
        except InvalidRequestError as error:
            answers.append(without_traceback(error))
            continue
        matches = yield from existing.find(filtered)
        answers.append(matches)
        for acl in matches:
            deleted[acl] = None
            if len(deleted) > limit:
                raise InvalidRequestError(
                    f"Cannot remove more than {limit} acls in a single delete operation."
                )
            yield
        count += len(matches)
        if count > MAX_MATCHES_TOLD:
            raise InvalidRequestError(
                f"The filters match more than {MAX_MATCHES_TOLD} ACLs (MAX_MATCHES_TOLD), each"
                " counted once per filter."
            )
    return AclDeletion(answers, sorted(deleted, key=_allows, reverse=True))


def delete_acls(acls: Iterable[Acl], existing: AclIndex) -> ControllerResult[None]:
    """Delete the ``acls`` that exist."""
    ids = (existing.id_of(acl) for acl in acls)
    return ControllerResult(
        None, tuple(RemoveAccessControlEntryRecord(id_) for id_ in ids if id_ is not None)
    )


def _allows(acl: Acl) -> bool:
    return acl.permission is Permission.ALLOW


def _check_room(view: ControllerView, more: int) -> None:
    if more:
        _check_limit(len(view.image.acls) + more, view.settings.acl_limits.max_acls, "max_acls")


def _check_limit(count: int, limit: int, name: str) -> None:
    if count > limit:
        raise PolicyViolationError(f"{count} rules exceed the limit {name}")


def _reason_against(acl: Acl, limits: AclLimits) -> str | None:
    """Return why an ACL is not valid; None if it is."""
    if acl.reason_against is not None:
        return acl.reason_against
    if acl.resource_type is ResourceType.CLUSTER and acl.resource_name != CLUSTER_NAME:
        return f"The only valid name for the CLUSTER resource is {CLUSTER_NAME}"
    if not acl.resource_name:
        return "Invalid empty resource name"
    if ":" not in acl.principal:
        return (
            f"Could not parse principal from `{acl.principal}` (no colon is present separating"
            " the principal type from the principal name)"
        )
    if not acl.host:
        return "Host pattern cannot be null or empty"
    limit = limits.max_text_bytes
    for field in ("resource_name", "principal", "host"):
        if _bytes(getattr(acl, field)) > limit:
            return f"the {field} has more than {limit} bytes"
    return None


def _bytes(text: str) -> int:
    return len(text.encode())


def _record(id_: UUID, acl: Acl) -> AccessControlEntryRecord:
    return AccessControlEntryRecord(
        id_,
        int(acl.resource_type),
        acl.resource_name,
        int(acl.pattern_type),
        acl.principal,
        acl.host,
        int(acl.operation),
        int(acl.permission),
    )
