"""The authorizer's rules follow the ACLs of the metadata image.

Source: ``AclPublisher``, ``StandardAuthorizerData``.
"""

from __future__ import annotations

from fencepost.cluster.acl import Acl, Operation, PatternType, Permission, ResourceType
from fencepost.cluster.image import MetadataImage, changed_acls
from fencepost.cluster.records import AccessControlEntryRecord
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.runtime.background import tell
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.security.rules import RuleTable
from fencepost.coordinator.wire.steps import finish


class AclPublisher:
    """Hears of every image. Raises MetadataError for an ACL of the first that is not understood."""

    def __init__(self, metadata: Metadata, authorizer: Authorizer) -> None:
        self._authorizer = authorizer
        added = {_acl(record): id_ for id_, record in metadata.image.acls.items()}
        authorizer.rules = finish(RuleTable().changed(added=added))
        metadata.subscribe(Subscriber.ACLS, self.follow)

    def follow(self, old: MetadataImage, new: MetadataImage) -> None:
        """Let the ACLs of the ``new`` image be the rules.

        An ACL that is not understood is logged as an error, and all others of the image hold.
        """
        rules, removed, added = self._authorizer.rules, [], {}
        for id_ in changed_acls(old, new):
            gone, came = old.acls.get(id_), new.acls.get(id_)
            acl = None if gone is None else _understood(gone)
            if acl is not None and rules.id_of(acl) == id_:
                removed.append(acl)
            acl = None if came is None else _told(came)
            if acl is not None:
                added[acl] = id_
        if removed or added:
            self._authorizer.rules = finish(rules.changed(removed=removed, added=added))


def _told(record: AccessControlEntryRecord) -> Acl | None:
    """The ACL of a new record; None, and an error in the log, if it is not understood."""
    try:
        return _acl(record)
    except MetadataError as error:
        tell("apply an ACL", error, acl=str(record.id))
        return None


def _understood(record: AccessControlEntryRecord) -> Acl | None:
    """The ACL of a former record; None if it was not understood, which the log has said."""
    try:
        return _acl(record)
    except MetadataError:
        return None


def _acl(record: AccessControlEntryRecord) -> Acl:
    """The ACL of a record. Raises MetadataError: to leave out a denial would be to allow."""
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
