"""Keeps the authorizer's ACLs equal to the ACLs of the metadata image.

Source: ``AclPublisher``, ``StandardAuthorizerData``.
"""

from __future__ import annotations

import asyncio
from typing import Final

from fencepost.cluster.acl import Acl, Operation, PatternType, Permission, ResourceType
from fencepost.cluster.image import MetadataImage, changed_acls
from fencepost.cluster.records import AccessControlEntryRecord
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.runtime.background import Pace, log_failure, spawn
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.security.rules import RuleTable
from fencepost.protocol.steps import Steps, finish

MAX_AT_ONCE: Final = 500
"""The maximum number of changed ACLs that are applied in one turn of the event loop. A controller
of Fencepost never changes more at a time. A snapshot, or one CreateAcls at a controller of Apache
Kafka, may change 10,000 ACLs, which would block the loop for some 200 ms."""


class AclPublisher:
    """Applies the ACLs of every image. Raises MetadataError for an invalid ACL in the first image.

    The whole table of ACLs is replaced at once, so that a decision never mixes two images. With
    ACLs replaced one by one, an ALLOW could take effect before its DENY, and a resource could be
    without ACLs for a moment, which ``allow.everyone.if.no.acl.found`` would open to all clients.
    """

    def __init__(self, metadata: Metadata, authorizer: Authorizer) -> None:
        self._authorizer = authorizer
        self._applied = self._newest = metadata.image
        self._applying: asyncio.Task[None] | None = None
        # A broker does not start without all of its ACLs: a skipped ACL may be a DENY.
        added = {_acl(record): id_ for id_, record in metadata.image.acls.items()}
        authorizer.rules = finish(RuleTable().changed(added=added))
        metadata.subscribe(Subscriber.ACLS, self.follow)

    def follow(self, _old: MetadataImage, new: MetadataImage) -> None:
        """Apply the ACLs of the ``new`` image, at once if few have changed.

        An invalid ACL is logged as an error, and all other ACLs of the image are applied.
        """
        self._newest = new
        if self._applying is not None:
            return
        if len(changed_acls(self._applied, new)) > MAX_AT_ONCE:
            self._applying = spawn(self._apply_in_slices(), "apply many ACLs")
        else:
            finish(self._apply(new))

    def applied(self) -> asyncio.Future[None] | None:
        """Return a future that is done once the newest image is applied; None if it is applied."""
        return None if self._applying is None else asyncio.shield(self._applying)

    def stop(self) -> None:
        """Drop changes that are not applied yet."""
        if self._applying is not None:
            self._applying.cancel()

    async def _apply_in_slices(self) -> None:
        pace = Pace()
        try:
            while self._applied is not self._newest:
                for _ in self._apply(self._newest):
                    await pace()
        finally:
            self._applying = None

    def _apply(self, new: MetadataImage) -> Steps[None]:
        rules, removed, added = self._authorizer.rules, [], {}
        for id_ in changed_acls(self._applied, new):
            gone, came = self._applied.acls.get(id_), new.acls.get(id_)
            acl = None if gone is None else _understood(gone)
            if acl is not None and rules.id_of(acl) == id_:
                removed.append(acl)
            acl = None if came is None else _acl_or_log(came)
            if acl is not None:
                added[acl] = id_
            yield
        if removed or added:
            self._authorizer.rules = yield from rules.changed(removed=removed, added=added)
        self._applied = new


def _acl_or_log(record: AccessControlEntryRecord) -> Acl | None:
    """Return the ACL of a new record; log an invalid one, and return None."""
    try:
        return _acl(record)
    except MetadataError as error:
        log_failure("apply an ACL", error, acl=str(record.id))
        return None


def _understood(record: AccessControlEntryRecord) -> Acl | None:
    """Return the ACL of an old record; None for an invalid ACL, which was logged before."""
    try:
        return _acl(record)
    except MetadataError:
        return None


def _acl(record: AccessControlEntryRecord) -> Acl:
    """Return a record's ACL. Raises MetadataError if it is invalid."""
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
        reason = acl.reason_against
    except ValueError as error:
        reason = str(error)
    if reason is not None:
        raise MetadataError(f"{METADATA_TOPIC}: the rule {record.id} is not understood: {reason}")
    return acl
