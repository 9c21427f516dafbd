"""Rules and quotas that the controller of a cluster has changed hold on its brokers."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from structlog.testing import capture_logs

from fencepost.cluster.acl import AclFilter, Operation, ResourceType
from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    ClientQuotaRecord,
    EntityData,
    MetadataRecord,
    RemoveAccessControlEntryRecord,
)
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.metadata.observed import ObservedMetadata
from fencepost.coordinator.security.acls import AclPublisher
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.security.principal import Principal, Session
from fencepost.coordinator.security.quota_table import QuotaTable
from fencepost.coordinator.wire.steps import finish

ALICE = (EntityData("user", "alice"),)
RULE = UUID(int=5)


class Cluster:
    """Images, one after the other."""

    def __init__(self) -> None:
        config = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:root",
        }
        self.config = BrokerConfig(config)
        self.metadata = ObservedMetadata(self.config, node_id=7)

    def change(self, *records: MetadataRecord) -> None:
        image = self.metadata.image
        delta = MetadataDelta(image)
        for record in records:
            delta.replay(record)
        self.metadata.install(delta.apply(image.offset + len(records), 1))


def quota(value: float, *, remove: bool = False) -> ClientQuotaRecord:
    return ClientQuotaRecord(ALICE, "producer_byte_rate", value, remove=remove)


def test_quotas_follow_the_image() -> None:
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


def test_failing_listener_costs_neither_other_listeners_nor_later_quotas() -> None:
    cluster = Cluster()
    table = QuotaTable(cluster.metadata)
    heard: list[float | None] = []
    table.listen(lambda *_: 1 / 0)
    table.listen(lambda _entity, _key, value: heard.append(value))
    bob = (EntityData("user", "bob"),)
    with capture_logs() as lines:
        cluster.change(quota(10.0), ClientQuotaRecord(bob, "producer_byte_rate", 20.0, False))
    assert (table.count, heard) == (2, [10.0, 20.0])
    assert [one["log_level"] for one in lines] == ["error", "error"]


def test_rules_follow_the_image() -> None:
    cluster = Cluster()
    authorizer = Authorizer.configured(cluster.config)
    assert authorizer is not None
    AclPublisher(cluster.metadata, authorizer)
    cluster.change(AccessControlEntryRecord(RULE, 2, "t", 3, "User:alice", "*", 3, 3))
    alice = Session("127.0.0.1", "PLAINTEXT", Principal("User", "alice"))

    def may_read() -> bool:
        return authorizer.allows(
            alice, Operation.READ, ResourceType.TOPIC, "t", audited=False, request="Fetch", count=1
        )

    assert may_read()
    cluster.change(RemoveAccessControlEntryRecord(RULE))
    assert not may_read()


def test_a_rule_that_is_not_understood_is_an_error_in_the_log_and_the_others_hold() -> None:
    cluster = Cluster()
    authorizer = Authorizer.configured(cluster.config)
    assert authorizer is not None
    AclPublisher(cluster.metadata, authorizer)
    good = AccessControlEntryRecord(RULE, 2, "t", 3, "User:alice", "*", 3, 3)
    other = replace(good, id=UUID(int=7), resource_name="u")
    odd = replace(good, id=UUID(int=6), resource_type=99)
    with capture_logs() as lines:
        cluster.change(good, odd, other)
    (line,) = [one for one in lines if one["log_level"] == "error"]
    assert line["acl"] == str(odd.id)
    found = finish(authorizer.rules.find(AclFilter()))
    assert {one.resource_name for one in found} == {"t", "u"}
    cluster.change(replace(odd, resource_type=3))
    found = finish(authorizer.rules.find(AclFilter()))
    assert ResourceType.GROUP in {one.resource_type for one in found}


def test_an_image_without_changes_of_them_is_passed_over() -> None:
    cluster = Cluster()
    cluster.change(quota(10.0))
    table = QuotaTable(cluster.metadata)
    table.listen(lambda *_: 1 / 0)
    table.follow(cluster.metadata.image, cluster.metadata.image)
    assert isinstance(cluster.metadata.image, MetadataImage)
