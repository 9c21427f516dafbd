"""The rules as they are kept: made and taken away by request, in the metadata log.

Source: ``AclControlManager``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from fencepost.cluster.acl import (
    CLUSTER_NAME,
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    MetadataRecord,
    RemoveAccessControlEntryRecord,
)
from fencepost.coordinator.errors import InvalidRequestError, PolicyViolationError
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.observed import AnyMetadata
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.wire.steps import Steps, finish
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass

T = TypeVar("T")

_NO_ID = uuid.UUID(int=0)


@dataclass(frozen=True, slots=True)
class AclLimits:
    """How many rules a broker keeps, and how long their texts are."""

    max_acls: int = 20_000
    """Rules. Each takes about a kilobyte of memory and some 20 microseconds of a start, and whether
    a producer may write to any topic at all can take a look at each."""

    max_changes_per_request: int = 10_000
    """Rules that one request makes, or takes away: Kafka's ``MAX_RECORDS_PER_USER_OP``."""

    max_change_bytes: int = 8 << 20
    """Bytes of the texts of rules that one request makes: they are one batch of the log, as large
    as one of Kafka's metadata log may be."""

    max_text_bytes: int = 1_024
    """UTF-8 bytes of a name, a principal or a host. Topics' names end at 249, groups' at this; a
    transactional id that is longer can be named by its beginning."""


class AclControl:
    """The rules of an authorizer. Nobody else may change them in the metadata log.

    Raises MetadataError for a rule that it does not understand.
    """

    def __init__(
        self, metadata: AnyMetadata, authorizer: Authorizer, limits: AclLimits | None = None
    ) -> None:
        self._metadata = metadata
        self._authorizer = authorizer
        self._limits = AclLimits() if limits is None else limits
        self._ids = {_acl(record): id_ for id_, record in metadata.image.acls.items()}
        self._is_changing = False
        self._waiting: list[asyncio.Future[None]] = []
        authorizer.replace(self._ids)

    def follow(self, old: MetadataImage, new: MetadataImage) -> None:
        """Go by the rules of another image: others have changed them. MetadataError."""
        before, after = old.acls, new.acls
        if before is after:
            return
        left = {_acl(one): id_ for id_, one in before.items() if after.get(id_) != one}
        gone = [acl for acl, id_ in left.items() if self._ids.get(acl) == id_]
        came = {_acl(one): id_ for id_, one in after.items() if before.get(id_) != one}
        rules = self._authorizer.rules
        self._authorizer.rules = finish(rules.changed(removed=gone, added=came))
        for acl in gone:
            del self._ids[acl]
        self._ids.update(came)

    def find(self, wanted: AclFilter) -> Steps[list[Acl]]:
        """The rules that a filter means. Raises InvalidRequestError."""
        _check_filter(wanted)
        return self._authorizer.rules.find(wanted)

    def create(self, acls: Sequence[Acl]) -> Work[list[DomainError | None]]:
        """Make rules; returns what is wrong with each of them, None also for one that there is.

        Those with which nothing is wrong are made, all of them, and hold when this returns; they
        may not be on disk yet. Raises PolicyViolationError where they are too many, and LogError.
        """
        return self._in_turn(self._create(acls))

    def delete(self, filters: Sequence[AclFilter]) -> Work[list[list[Acl] | DomainError]]:
        """Take rules away; returns for each filter which it meant, or what is wrong with it.

        A rule that several filters mean is told with each of them. Raises InvalidRequestError
        where they are too many, and LogError; then all stay.
        """
        return self._in_turn(self._delete(filters))

    def _create(self, acls: Sequence[Acl]) -> Work[list[DomainError | None]]:
        answers: list[DomainError | None] = []
        made: dict[Acl, uuid.UUID] = {}
        size = 0
        for acl in acls:
            try:
                self._check(acl)
            except InvalidRequestError as error:
                answers.append(without_traceback(error))
            else:
                answers.append(None)
                if acl not in self._ids and acl not in made:
                    made[acl] = uuid.uuid4()
                    size += _bytes(acl.resource_name) + _bytes(acl.principal) + _bytes(acl.host)
            yield None
        limits = self._limits
        for count, name in (
            (len(made), "max_changes_per_request"),
            (size, "max_change_bytes"),
            (len(self._ids) + len(made), "max_acls"),
        ):
            if made and count > getattr(limits, name):
                raise PolicyViolationError(f"{count} exceed the limit of rules {name}")
        changes: list[MetadataRecord] = []
        for acl, id_ in made.items():
            changes.append(_record(id_, acl))
            yield None
        yield from self._change(changes, added=made)
        return answers

    def _delete(self, filters: Sequence[AclFilter]) -> Work[list[list[Acl] | DomainError]]:
        answers: list[list[Acl] | DomainError] = []
        gone: dict[Acl, uuid.UUID] = {}
        limit = self._limits.max_changes_per_request
        for wanted in filters:
            try:
                found = yield from self.find(wanted)
            except InvalidRequestError as error:
                answers.append(without_traceback(error))
                continue
            answers.append(found)
            for acl in found:
                gone[acl] = self._ids[acl]
                if len(gone) > limit:
                    raise InvalidRequestError(
                        f"Cannot remove more than {limit} acls in a single delete operation."
                    )
                yield None
        records = [RemoveAccessControlEntryRecord(id_) for id_ in gone.values()]
        yield from self._change(records, removed=gone)
        return answers

    def _change(
        self,
        changes: Sequence[MetadataRecord],
        *,
        added: Mapping[Acl, uuid.UUID] | None = None,
        removed: Iterable[Acl] = (),
    ) -> Work[None]:
        """Write changes down and let them hold; nobody has a turn between the two.

        Where they are kept elsewhere, they come back from there; then it may raise a DomainError.
        """
        if not changes:
            return
        rules = yield from self._authorizer.rules.changed(removed=removed, added=added or ())
        holds = yield from self._metadata.append_in_steps(changes)
        if holds is not None:
            yield holds
            holds.result()
            return
        self._authorizer.rules = rules
        for acl in removed:
            del self._ids[acl]
        self._ids.update(added or {})

    def _in_turn(self, change: Work[T]) -> Work[T]:
        """One change after the other: each begins with the rules that the one before has left."""
        while self._is_changing:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            yield turn
        self._is_changing = True
        try:
            return (yield from change)
        finally:
            self._is_changing = False
            waiting, self._waiting = self._waiting, []
            for turn in waiting:  # all, for a client that waits may have gone
                if not turn.done():
                    turn.set_result(None)

    def _check(self, acl: Acl) -> None:
        """Raise InvalidRequestError for a rule that there can not be."""
        if reason := _reason_against(acl):
            raise InvalidRequestError(reason)
        if acl.resource_type is ResourceType.CLUSTER and acl.resource_name != CLUSTER_NAME:
            raise InvalidRequestError(
                f"The only valid name for the CLUSTER resource is {CLUSTER_NAME}"
            )
        if not acl.resource_name:
            raise InvalidRequestError("Invalid empty resource name")
        if ":" not in acl.principal:
            raise InvalidRequestError(
                f"Could not parse principal from `{acl.principal}` (no colon is present separating"
                " the principal type from the principal name)"
            )
        limit = self._limits.max_text_bytes
        for what in ("resource_name", "principal", "host"):
            if _bytes(getattr(acl, what)) > limit:
                raise InvalidRequestError(f"the {what} has more than {limit} bytes")
        if reason := self._metadata.reason_against(_record(_NO_ID, acl)):
            raise InvalidRequestError(reason)


def _reason_against(acl: Acl) -> str | None:
    """What a rule can not be, as far as its words go that only a filter may say."""
    for what, value, least in (
        ("resourceType", acl.resource_type, ResourceType.TOPIC),
        ("operation", acl.operation, Operation.ALL),
        ("permissionType", acl.permission, Permission.DENY),
        ("patternType", acl.pattern_type, PatternType.LITERAL),
    ):
        if value < least:
            return f"Invalid {what} {value.name}"
    return None


def _check_filter(wanted: AclFilter) -> None:
    if wanted.is_unknown:
        raise InvalidRequestError(
            "the filter has an unknown type, pattern, operation or permission"
        )


def _bytes(text: str) -> int:
    return len(text.encode())


def _record(id_: uuid.UUID, acl: Acl) -> AccessControlEntryRecord:
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


def _acl(record: AccessControlEntryRecord) -> Acl:
    """The rule of a record. Raises MetadataError: to leave out a denial would be to allow."""
    try:
        acl = Acl(
            ResourceType(record.resource_type),
            PatternType(record.pattern_type),
            record.resource_name,
            record.principal,
            record.host,
            Operation(record.operation),
            Permission(record.permission_type),
        )
        reason = _reason_against(acl)
    except ValueError as error:
        reason = str(error)
    if reason is not None:
        raise MetadataError(f"{METADATA_TOPIC}: the rule {record.id} is not understood: {reason}")
    return acl
