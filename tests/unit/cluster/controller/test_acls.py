"""ACLs as the controller creates and deletes them.

``tests/unit/coordinator/security/test_acl_publisher.py`` has the contents of ACLs and filters, the
limits of a request, and the authorizer that replays the records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from uuid import UUID

import pytest

from fencepost.cluster.acl import (
    Acl,
    AclFilter,
    AclLimits,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.cluster.controller import acls
from fencepost.cluster.controller.errors import InvalidRequestError, PolicyViolationError
from fencepost.cluster.records import AccessControlEntryRecord, RemoveAccessControlEntryRecord
from fencepost.logcore.steps import Steps, finish
from tests.unit.cluster.controller import cluster_driver
from tests.unit.cluster.controller.cluster_driver import SETTINGS


def acl(name: str, permission: Permission = Permission.ALLOW) -> Acl:
    return Acl(
        ResourceType.TOPIC,
        PatternType.LITERAL,
        name,
        "User:alice",
        "*",
        Operation.READ,
        permission,
    )


class Index(dict[Acl, UUID]):
    """ACLs with their ids."""

    def id_of(self, entry: Acl) -> UUID | None:
        return self.get(entry)

    def find(self, wanted: AclFilter) -> Steps[list[Acl]]:
        yield
        return [rule for rule in self if wanted.resource_name in {None, rule.resource_name}]


class Cluster(cluster_driver.Cluster):
    """A controller that gives ACLs consecutive ids; ``index`` maps its ACLs to their ids."""

    def __init__(self, **limits: int) -> None:
        super().__init__((), settings=replace(SETTINGS, acl_limits=AclLimits(**limits)))
        self._ids = count(1)

    def draw(self) -> UUID:
        return UUID(int=next(self._ids))

    @property
    def index(self) -> Index:
        return Index(
            (acl(record.resource_name, Permission(record.permission_type)), id_)
            for id_, record in self.image.acls.items()
        )

    def create_acls(self, *acls: Acl, draw: Callable[[], UUID] | None = None) -> None:
        self.do(self.controller.create_acls(acls, self.index, draw or self.draw))

    def check(self, *acls: Acl, refuse: str | None = None) -> tuple[list[str | None], list[Acl]]:
        errors, created = finish(
            self.controller.check_acl_creation(acls, self.index, lambda _: refuse)
        )
        return [None if error is None else str(error) for error in errors], created


def test_creation_writes_one_record_per_new_acl() -> None:
    cluster = Cluster()
    cluster.create_acls(acl("a"))
    outcome = cluster.controller.create_acls([acl("a"), acl("b")], cluster.index, cluster.draw)
    assert outcome.records == (
        AccessControlEntryRecord(UUID(int=2), 2, "b", 3, "User:alice", "*", 3, 3),
    )


def test_creation_draws_another_id_while_the_id_is_taken() -> None:
    cluster = Cluster()
    cluster.create_acls(acl("a"))
    ids = iter([UUID(int=1), UUID(int=1), UUID(int=9)])
    cluster.create_acls(acl("b"), draw=lambda: next(ids))
    assert cluster.index == {acl("a"): UUID(int=1), acl("b"): UUID(int=9)}


def test_creation_check_returns_each_new_acl_once_and_no_existing_acl() -> None:
    cluster = Cluster()
    cluster.create_acls(acl("a"))
    assert cluster.check(acl("a"), acl("b"), acl(""), acl("b")) == (
        [None, None, "Invalid empty resource name", None],
        [acl("b")],
    )


def test_deny_acls_are_created_first_and_deleted_last() -> None:
    """A broker that has replayed only some of the records must not allow a denied operation."""
    cluster = Cluster()
    a, b, c, d = acl("a"), acl("b", Permission.DENY), acl("c"), acl("d", Permission.DENY)
    assert cluster.check(a, b, c, d) == ([None] * 4, [b, d, a, c])
    cluster.create_acls(a, b, c, d)
    ((found,), deleted) = finish(
        cluster.controller.check_acl_deletion([AclFilter()], cluster.index)
    )
    assert (found, deleted) == ([a, b, c, d], [a, c, b, d])


def test_acl_that_the_store_cannot_keep_is_refused() -> None:
    assert Cluster().check(acl("a"), refuse="too long for a znode") == (
        ["too long for a znode"],
        [],
    )


def test_creation_skips_acls_created_by_another_request_after_the_check() -> None:
    cluster = Cluster()
    _, created = cluster.check(acl("a"), acl("b"))
    cluster.create_acls(acl("a"))
    cluster.create_acls(*created)
    assert cluster.index == {acl("a"): UUID(int=1), acl("b"): UUID(int=2)}


def test_creation_is_refused_if_acl_limit_was_reached_after_the_check() -> None:
    cluster = Cluster(max_acls=2)
    _, created = cluster.check(acl("a"), acl("b"))
    cluster.create_acls(acl("c"))
    with pytest.raises(PolicyViolationError, match="max_acls"):
        cluster.create_acls(*created)
    assert cluster.index == {acl("c"): UUID(int=1)}


def test_creation_of_existing_acls_at_the_acl_limit_is_accepted() -> None:
    cluster = Cluster(max_acls=1)
    cluster.create_acls(acl("a"))
    cluster.create_acls(acl("a"))
    assert cluster.check(acl("a")) == ([None], [])
    with pytest.raises(PolicyViolationError, match="max_acls"):
        cluster.check(acl("b"))


def test_deletion_writes_one_record_per_existing_acl() -> None:
    cluster = Cluster()
    cluster.create_acls(acl("a"), acl("b"))
    outcome = cluster.controller.delete_acls([acl("b"), acl("gone")], cluster.index)
    assert outcome.records == (RemoveAccessControlEntryRecord(UUID(int=2)),)


def test_acl_that_several_filters_match_is_deleted_once() -> None:
    cluster = Cluster()
    cluster.create_acls(acl("a"), acl("b"))
    filters = [AclFilter(), AclFilter(ResourceType.UNKNOWN), AclFilter(resource_name="b")]
    answers, deleted = finish(cluster.controller.check_acl_deletion(filters, cluster.index))
    everything, refused, second = answers
    assert (everything, second) == ([acl("a"), acl("b")], [acl("b")])
    assert isinstance(refused, InvalidRequestError)
    assert deleted == [acl("a"), acl("b")]


def test_deletion_of_more_acls_than_a_request_may_change_is_refused() -> None:
    cluster = Cluster(max_changes_per_request=1)
    cluster.create_acls(acl("a"), acl("b"))
    with pytest.raises(InvalidRequestError, match="Cannot remove more than 1 acls"):
        finish(cluster.controller.check_acl_deletion([AclFilter()], cluster.index))


def test_deletion_with_too_many_filter_matches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ACL counts once for each filter that matches it, because the response repeats the ACL."""
    monkeypatch.setattr(acls, "MAX_MATCHES_TOLD", 6)
    cluster = Cluster()
    cluster.create_acls(acl("a"), acl("b"))
    check = cluster.controller.check_acl_deletion
    answers, deleted = finish(check([AclFilter()] * 3, cluster.index))
    assert (answers, deleted) == ([[acl("a"), acl("b")]] * 3, [acl("a"), acl("b")])
    with pytest.raises(InvalidRequestError, match="MAX_MATCHES_TOLD"):
        finish(check([*[AclFilter()] * 3, AclFilter(resource_name="a")], cluster.index))


def test_match_limit_is_at_least_the_deletion_limit_of_a_request() -> None:
    assert AclLimits().max_changes_per_request <= acls.MAX_MATCHES_TOLD
