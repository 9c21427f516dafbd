"""A broker with an authorizer, and the ACLs that a test sets.

The ACLs apply to ``User:ANONYMOUS``, the principal of a connection until :meth:`Guarded.log_in`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self
from uuid import uuid4

from fencepost.cluster.acl import (
    ANYTHING,
    CLUSTER_NAME,
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.security.authorizer import STANDARD
from fencepost.coordinator.security.principal import ANONYMOUS, Principal
from fencepost.protocol.steps import finish
from tests.support.cluster import Cluster
from tests.support.waits import until

ADMIN = Principal("User", "admin")

Right = tuple[Operation, ResourceType, str]
"""Operation, resource type and resource name."""


def topic(operation: Operation, name: str) -> Right:
    return operation, ResourceType.TOPIC, name


def group(operation: Operation, name: str) -> Right:
    return operation, ResourceType.GROUP, name


def transactional_id(operation: Operation, name: str) -> Right:
    return operation, ResourceType.TRANSACTIONAL_ID, name


def cluster(operation: Operation) -> Right:
    return operation, ResourceType.CLUSTER, CLUSTER_NAME


def rule(
    right: Right,
    principal: Principal = ANONYMOUS,
    *,
    host: str = ANYTHING,
    deny: bool = False,
    prefixed: bool = False,
) -> Acl:
    """Return the ACL that allows or denies a right."""
    operation, resource_type, name = right
    pattern = PatternType.PREFIXED if prefixed else PatternType.LITERAL
    permission = Permission.DENY if deny else Permission.ALLOW
    return Acl(resource_type, pattern, name, str(principal), host, operation, permission)


class Guarded:
    """A broker in a thread; before :meth:`allow` only :data:`ADMIN` may do anything."""

    def __init__(self, directory: Path, config: Mapping[str, str]) -> None:
        guard = {"authorizer.class.name": STANDARD, "super.users": str(ADMIN)}
        self._broker = Broker(directory, config={**config, **guard})
        self._thread = BrokerThread(lambda: self._broker)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.stop()

    @property
    def bootstrap(self) -> str:
        return self._thread.bootstrap

    @property
    def services(self) -> Services:
        return self._broker.services

    def allow(self, *rights: Right) -> None:
        """Set all rights of ``User:ANONYMOUS``."""
        self.rule(*map(rule, rights))

    def rule(self, *rules: Acl) -> None:
        """Replace all ACLs."""

        async def applied() -> None:
            acls = self._broker.services.acls
            assert acls is not None
            applying = acls.applied()
            if applying is not None:
                await applying

        async def set_rules() -> None:
            services = self._broker.services
            authorizer, active = services.authorizer, services.active_controller
            assert authorizer is not None
            there = finish(authorizer.rules.find(AclFilter()))
            active.decide(lambda controller: controller.delete_acls(there, authorizer.rules))
            await applied()
            errors, created = finish(
                active.current_machine().check_acl_creation(rules, authorizer.rules, lambda _: None)
            )
            assert errors == [None] * len(rules)
            active.decide(
                lambda controller: controller.create_acls(created, authorizer.rules, uuid4)
            )
            await applied()

        self._thread.call(set_rules)

    def log_in(self, client: Cluster, principal: Principal) -> Cluster:
        """Set the principal of a connection, and return the connection."""
        port = client.local_port

        async def log_in() -> bool:
            for connection in self._broker.server.connections:
                if connection.peer_port == port:
                    connection.session = replace(connection.session, principal=principal)
                    return True
            return False

        until(lambda: self._thread.call(log_in), "the connection is there")
        return client

    def waiting_fetches(self) -> int:
        """Return the number of Fetch requests in purgatory."""

        async def count() -> int:
            return len(self._broker.services.fetches.delayed)

        return self._thread.call(count)

    def admin(self) -> Cluster:
        """Return a connection that may do everything."""
        return self.log_in(Cluster(self.bootstrap, client_id="admin"), ADMIN)
