"""The authorizer's rules follow the ACLs of the metadata image.

Source: ``AclPublisher``, ``StandardAuthorizerData``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from uuid import UUID

from fencepost.cluster.acl import Acl, Operation, PatternType, Permission, ResourceType
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import AccessControlEntryRecord
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.security.rules import RuleTable
from fencepost.coordinator.wire.steps import finish

Acls = Mapping[UUID, AccessControlEntryRecord]


class AclPublisher:
    """Hears of every image. Raises MetadataError for an ACL that it does not understand."""

    def __init__(self, metadata: Metadata, authorizer: Authorizer) -> None:
        self._authorizer = authorizer
        added = {_acl(record): id_ for id_, record in metadata.image.acls.items()}
        authorizer.rules = finish(RuleTable().changed(added=added))
        metadata.subscribe(Subscriber.ACLS, self.follow)

    def follow(self, old: MetadataImage, new: MetadataImage) -> None:
        """Let the ACLs of the ``new`` image be the rules. Raises MetadataError."""
        before, after = old.acls, new.acls
        if before is after:
            return
        rules = self._authorizer.rules
        gone = ((_acl(record), record.id) for record in _missing(before, after))
        removed = [acl for acl, id_ in gone if rules.id_of(acl) == id_]
        added = {_acl(record): record.id for record in _missing(after, before)}
        self._authorizer.rules = finish(rules.changed(removed=removed, added=added))


def _missing(one: Acls, other: Acls) -> Iterator[AccessControlEntryRecord]:
    """The records of one image that the other does not have."""
    # Two images share the records that did not change, and the hash of a UUID is slow.
    shared = set(map(id, other.values()))
    for record in one.values():
        if id(record) not in shared and other.get(record.id) != record:
            yield record


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
