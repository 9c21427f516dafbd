"""A broker changes ACLs, quotas and settings in ZooKeeper, as do other brokers meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from kio.schema.errors import ErrorCode

from fencepost.cluster.controller import quotas
from fencepost.cluster.image import BROKER_RESOURCE
from fencepost.cluster.records import ConfigRecord
from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.errors import RequestTimedOutError
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.handlers.zookeeper_registry import zookeeper_registry
from fencepost.coordinator.security.principal import ClientSession as Client
from fencepost.coordinator.storage.storage import Storage
from fencepost.coordinator.zookeeper import broker_store
from fencepost.coordinator.zookeeper import node as node_module
from fencepost.coordinator.zookeeper.broker_store import ZooKeeperMetadata
from fencepost.coordinator.zookeeper.node import ZooKeeperNode
from fencepost.coordinator.zookeeper.passwords import Passwords
from fencepost.logcore.fs import OsFileSystem
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.messages import request_factory, response_factory
from tests.support.clock import ManualClock
from tests.unit.coordinator.zookeeper.kept_znodes import SETTINGS, TOPICS, Znodes

VERSION = 3


class Connection:
    """The connection of a client."""

    client_software = None
    session = Client("127.0.0.1", "PLAINTEXT")


@pytest.fixture
async def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Services]:
    """Yield the services of broker 1, with znodes in memory."""
    monkeypatch.setattr(node_module, "ZkSession", Znodes)
    clock = ManualClock(1_700_000_000_000)
    observed = ZooKeeperMetadata(SETTINGS, Passwords(SETTINGS, node_id=1), node_id=1)
    storage = Storage(OsFileSystem(), str(tmp_path), SETTINGS, clock, node_id=1, observed=observed)
    with closing(storage.logs):
        services = Services(storage, cluster_id="c", advertised=lambda _listener: ("h", 1))
        services.zookeeper = node = ZooKeeperNode(
            SETTINGS, clock, node_id=1, listener="PLAINTEXT", on_lost=lambda _error: None
        )
        await node.access.load()
        node.follow(services.metadata.install, services.metadata.image)
        yield services
        await node.stop()


def request(services: Services, api: ApiKey, version: int, **body: Any) -> Context:
    """Return a request to this broker."""
    return Context(
        services,
        zookeeper_registry(services),
        api,
        version,
        0,
        "client",
        request_factory(api, version).message(**body),
        response_factory(api, version),
        "127.0.0.1",
        Connection(),
    )


def deletion(services: Services) -> Context:
    """Return a request to delete all ACLs of topics."""
    wanted = request_factory(ApiKey.DELETE_ACLS, VERSION).DeleteAclsFilter(
        resource_type_filter=2,
        resource_name_filter=None,
        pattern_type_filter=1,
        principal_filter=None,
        host_filter=None,
        operation=1,
        permission_type=1,
    )
    return request(services, ApiKey.DELETE_ACLS, VERSION, filters=(wanted,))


def creation(services: Services, topic: str, *users: str) -> Context:
    """Return a request to create the ACLs that :meth:`Znodes.deny` writes."""
    make = request_factory(ApiKey.CREATE_ACLS, VERSION)
    acls = tuple(
        make.AclCreation(
            resource_type=2,
            resource_name=topic,
            resource_pattern_type=3,
            principal=f"User:{user}",
            host="*",
            operation=2,
            permission_type=2,
        )
        for user in users
    )
    return request(services, ApiKey.CREATE_ACLS, VERSION, creations=acls)


def begin(ctx: Context) -> Iterator[Any]:
    """Return the steps that execute a request."""
    return cast("Iterator[Any]", ctx.registry.handler(ctx.api_key).run(ctx))


async def answered(work: Iterator[Any]) -> Entity:
    """Run the steps of a request to their end and return the response."""
    while True:
        try:
            wait = next(work)
        except StopIteration as end:
            return cast("Entity", end.value)
        if wait is not None:
            await asyncio.wait({wait}, timeout=10)


async def test_acl_created_by_another_broker_during_a_deletion_stays(services: Services) -> None:
    node = services.on_zookeeper
    znodes = cast("Znodes", node.session)
    znodes.deny("first", ["a"])
    await node.access.reload()
    work = begin(deletion(services))
    await asyncio.wait({next(work)}, timeout=10)  # the broker has read the newest znodes
    next(work)  # and the steps use the resulting image
    znodes.deny("second", ["b"])
    await node.access.reload()

    (result,) = (await answered(work)).filter_results
    assert (result.error_code, result.error_message) == (ErrorCode.none, None)
    assert [acl.resource_name for acl in result.matching_acls] == ["first"]
    assert [path for path in znodes.data if path.startswith(TOPICS)] == [f"{TOPICS}/second"]
    assert [acl.resource_name for acl in services.metadata.image.acls.values()] == ["second"]


async def test_acl_deleted_by_another_broker_during_a_deletion_is_no_error(
    services: Services,
) -> None:
    node = services.on_zookeeper
    znodes = cast("Znodes", node.session)
    znodes.deny("first", ["a"])
    await node.access.reload()
    work = begin(deletion(services))
    await asyncio.wait({next(work)}, timeout=10)  # the broker has read the newest znodes
    next(work)  # and the steps use the resulting image
    del znodes.data[f"{TOPICS}/first"]
    await node.access.reload()

    (result,) = (await answered(work)).filter_results
    assert result.error_code is ErrorCode.none
    assert not services.metadata.image.acls


async def test_acl_requests_of_one_broker_are_executed_in_order(services: Services) -> None:
    """A creation must not rely on an ACL that an earlier request is about to delete."""
    node = services.on_zookeeper
    cast("Znodes", node.session).deny("t", ["a"])
    await node.access.reload()
    deleting = asyncio.create_task(answered(begin(deletion(services))))
    creating = asyncio.create_task(answered(begin(creation(services, "t", "a", "b"))))
    (deleted,) = (await deleting).filter_results
    assert [acl.principal for acl in deleted.matching_acls] == ["User:a"]
    assert {result.error_code for result in (await creating).results} == {ErrorCode.none}
    acls = services.metadata.image.acls.values()
    assert {acl.principal for acl in acls} == {"User:a", "User:b"}


async def test_quotas_above_the_limit_are_a_policy_violation(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MAX_QUOTAS", 3)

    async def alter(*users: str, value: float | None = 1e6) -> list[ErrorCode]:
        make = request_factory(ApiKey.ALTER_CLIENT_QUOTAS, 1)
        op = make.OpData(key="producer_byte_rate", value=value or 0.0, remove=value is None)
        entries = tuple(
            make.EntryData(
                entity=(make.EntityData(entity_type="user", entity_name=user),), ops=(op,)
            )
            for user in users
        )
        ctx = request(services, ApiKey.ALTER_CLIENT_QUOTAS, 1, entries=entries, validate_only=False)
        return [entry.error_code for entry in (await answered(begin(ctx))).entries]

    none, over = ErrorCode.none, ErrorCode.policy_violation
    assert await alter("a") == [none]
    assert await alter("a", "b", "c", "d", value=2e6) == [none, none, none, over]
    assert await alter("a", value=None) == [none]
    assert await alter("b", "d", "e") == [none, none, over]
    assert len(services.metadata.image.quotas) == 3


async def test_config_request_to_silent_zookeeper_times_out(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, own = services.on_zookeeper, (BROKER_RESOURCE, "1")
    store = (await node.own_decisions([own])).active.store
    monkeypatch.setattr(broker_store, "GIVE_UP_MS", 1)
    cast("Znodes", node.session).is_silent = True
    with pytest.raises(RequestTimedOutError, match="has not returned the settings in time"):
        await node.own_decisions([own])
    store.append([ConfigRecord(*own, "log.retention.ms", "1")])
    written = store.durable()
    assert written is not None
    with pytest.raises(RequestTimedOutError, match="has not taken the settings in time"):
        await written
