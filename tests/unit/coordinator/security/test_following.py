"""Brokers apply changes of ACLs and quotas from their cluster's controller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from fencepost.cluster.acl import AclFilter, Operation, Permission, ResourceType
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    ClientQuotaRecord,
    EntityData,
    MetadataRecord,
    RemoveAccessControlEntryRecord,
)
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.metadata.kraft_metadata_cache import KRaftMetadataCache
from fencepost.coordinator.security.acls import MAX_AT_ONCE, AclPublisher
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.security.principal import ClientSession, Principal
from fencepost.coordinator.security.quota_table import QuotaTable
from fencepost.coordinator.security.rules import RuleTable
from fencepost.protocol.steps import finish
from tests.support.images import image_after
from tests.support.stalls import watched_loop
from tests.support.waits import DEADLINE_S

ALICE = (EntityData("user", "alice"),)
RULE = UUID(int=5)


class Cluster:
    """A broker's metadata, to which records are applied as images."""

    def __init__(self) -> None:
        config = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:root",
        }
        self.config = BrokerConfig(config)
        self.metadata = KRaftMetadataCache(self.config, node_id=7)

    def change(self, *records: MetadataRecord) -> None:
        self.metadata.install(image_after(self.metadata.image, *records))


def quota(value: float, *, remove: bool = False) -> ClientQuotaRecord:
    return ClientQuotaRecord(ALICE, "producer_byte_rate", value, remove=remove)


def test_quota_table_follows_metadata_image() -> None:
    cluster = Cluster()
    cluster.change(quota(10.0))
    table = QuotaTable(cluster.metadata)
    heard: list[tuple[object, ...]] = []
    table.listen(lambda *what: heard.append(what))
    alice = frozenset({("user", "alice")})
    cluster.change(quota(20.0))
    assert table.entities == {alice: {"producer_byte_rate": 20.0}}
    cluster.change(quota(0.0, remove=True))
    assert (table.entities, table.count) == ({}, 0)
    assert heard == [(alice, "producer_byte_rate", 20.0), (alice, "producer_byte_rate", None)]


def test_failing_listener_does_not_stop_other_listeners_or_quotas() -> None:
    cluster = Cluster()
    table = QuotaTable(cluster.metadata)
    heard: list[float | None] = []
    table.listen(lambda *_: 1 / 0)
    table.listen(lambda _entity, _key, value: heard.append(value))
    bob = (EntityData("user", "bob"),)
    with capture_logs() as lines:
        cluster.change(quota(10.0), ClientQuotaRecord(bob, "producer_byte_rate", 20.0, False))
    assert (table.count, heard) == (2, [10.0, 20.0])
    assert [line["log_level"] for line in lines] == ["error", "error"]


def test_authorizer_follows_acls_of_metadata_image() -> None:
    following = Following()
    cluster, authorizer = following.cluster, following.authorizer
    cluster.change(AccessControlEntryRecord(RULE, 2, "t", 3, "User:alice", "*", 3, 3))
    alice = ClientSession("127.0.0.1", "PLAINTEXT", Principal("User", "alice"))

    def may_read() -> bool:
        return authorizer.allows(
            alice, Operation.READ, ResourceType.TOPIC, "t", audited=False, request="Fetch", count=1
        )

    assert may_read()
    cluster.change(RemoveAccessControlEntryRecord(RULE))
    assert not may_read()


def test_acl_record_with_unknown_value_is_logged_and_the_others_apply() -> None:
    following = Following()
    cluster, authorizer = following.cluster, following.authorizer
    good = AccessControlEntryRecord(RULE, 2, "t", 3, "User:alice", "*", 3, 3)
    other = replace(good, id=UUID(int=7), resource_name="u")
    odd = replace(good, id=UUID(int=6), resource_type=99)
    with capture_logs() as lines:
        cluster.change(good, odd, other)
    (line,) = [text for text in lines if text["log_level"] == "error"]
    assert line["acl"] == str(odd.id)
    found = finish(authorizer.rules.find(AclFilter()))
    assert {acl.resource_name for acl in found} == {"t", "u"}
    cluster.change(replace(odd, resource_type=3))
    found = finish(authorizer.rules.find(AclFilter()))
    assert ResourceType.GROUP in {acl.resource_type for acl in found}


def rule(number: int, permission: int = 3) -> AccessControlEntryRecord:
    """Return an ACL for the topic ``t<number>``, with an id derived from the number."""
    id_ = UUID(int=number + 1)
    return AccessControlEntryRecord(
        id_, 2, f"t{number}", 3, f"User:{number % 50}", "*", 3, permission
    )


class Following:
    """An authorizer that applies the images of a cluster."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        authorizer = Authorizer.configured(self.cluster.config)
        assert authorizer is not None
        self.authorizer = authorizer
        self.publisher = AclPublisher(self.cluster.metadata, authorizer)

    def rules(self) -> set[tuple[str, Permission]]:
        found = finish(self.authorizer.rules.find(AclFilter()))
        return {(acl.resource_name, acl.permission) for acl in found}

    def image(self) -> set[tuple[str, Permission]]:
        acls = self.cluster.metadata.image.acls.values()
        return {(acl.resource_name, Permission(acl.permission_type)) for acl in acls}

    async def applied(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (applied := self.publisher.applied()) is not None:
                await applied


async def test_few_changed_acls_apply_at_once() -> None:
    following = Following()
    following.cluster.change(*map(rule, range(MAX_AT_ONCE)))
    assert following.publisher.applied() is None
    assert len(following.rules()) == MAX_AT_ONCE


async def test_many_changed_acls_apply_atomically_and_before_later_images() -> None:
    """The authorizer's ACLs are always those of some image."""
    following = Following()
    following.cluster.change(*map(rule, range(400)))
    states = [following.rules()]
    removals = [RemoveAccessControlEntryRecord(rule(at).id) for at in range(200)]
    following.cluster.change(*removals, *(rule(at, 2) for at in range(400, 2_000)))
    states.append(following.image())
    assert following.rules() == states[0], "what takes long is done in slices"
    applying = following.publisher.applied()
    assert applying is not None
    await asyncio.sleep(0)
    following.cluster.change(RemoveAccessControlEntryRecord(rule(1_999).id), rule(0))
    last = following.image()
    assert following.rules() in states
    seen: list[set[tuple[str, Permission]]] = []
    version = following.authorizer.version
    async with asyncio.timeout(DEADLINE_S):
        while following.publisher.applied() is not None:
            await asyncio.sleep(0)
            if following.authorizer.version != version:
                version = following.authorizer.version
                seen.append(following.rules())
    assert seen[-1] == last
    assert all(each in (states[1], last) for each in seen)
    await applying


async def test_acls_that_failed_to_apply_are_applied_with_the_next_image(
    monkeypatch,
) -> None:
    following = Following()

    def fail(*_args: object, **_rules: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken, capture_logs() as lines:
        broken.setattr(RuleTable, "changed", fail)
        following.cluster.change(*map(rule, range(600)))
        with pytest.raises(ZeroDivisionError):
            await following.applied()
    assert [line["what"] for line in lines] == ["apply many ACLs"]
    following.cluster.change(rule(600))
    await following.applied()
    assert following.rules() == following.image()
    assert len(following.rules()) == 601


async def test_pending_acl_changes_are_cancelled_by_stop() -> None:
    following = Following()
    following.cluster.change(*map(rule, range(600)))
    applying = following.publisher.applied()
    assert applying is not None
    following.publisher.stop()
    with pytest.raises(asyncio.CancelledError):
        await applying
    assert following.rules() == set()


@pytest.mark.slow
async def test_event_loop_stays_responsive_while_ten_thousand_acls_change() -> None:
    following = Following()
    following.cluster.change(*map(rule, range(10_000)))
    await following.applied()
    removals = [RemoveAccessControlEntryRecord(rule(at).id) for at in range(10_000)]
    changes: tuple[Sequence[MetadataRecord], ...] = (
        [rule(at) for at in range(10_000, 20_000)],
        removals,
        [rule(at, 2) for at in range(10_000, 20_000)],
    )
    for records in changes:
        image = image_after(following.cluster.metadata.image, *records)
        with watched_loop() as watch:
            await asyncio.sleep(0)
            following.cluster.metadata.install(image)
            await asyncio.sleep(0)
            await following.applied()
            await asyncio.sleep(0)
        assert following.rules() == following.image()
        watch.check()


def test_quota_listeners_are_not_called_for_unchanged_image() -> None:
    cluster = Cluster()
    cluster.change(quota(10.0))
    table = QuotaTable(cluster.metadata)
    table.listen(lambda *_: 1 / 0)
    table.follow(cluster.metadata.image, cluster.metadata.image)
    assert isinstance(cluster.metadata.image, MetadataImage)
