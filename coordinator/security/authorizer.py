"""Who may do what, decided from rules.

Source: ``StandardAuthorizer``, ``StandardAuthorizerData``.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.config.broker_config import BrokerConfig, ConfigError
from fencepost.coordinator.security.audit import Access, Audit
from fencepost.coordinator.security.principal import Principal, Session
from fencepost.coordinator.security.rules import RuleTable

STANDARD = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
ON_ZOOKEEPER = "kafka.security.authorizer.AclAuthorizer"
"""The authorizer that there is, by its names in Apache Kafka: as rules are kept in its metadata log
or in ZooKeeper."""

MAX_KEPT_ANSWERS = 10_000
"""Answers of :meth:`Authorizer.allows_some` that are kept: one for a principal at an address."""


class Authorizer:
    """The rules that hold now, and who stands above them.

    Its answers change with :attr:`rules` at once, for connections that are open as well.
    """

    def __init__(
        self,
        *,
        super_users: Collection[Principal] = (),
        allows_without_rules: bool = False,
        audit: Audit | None = None,
    ) -> None:
        self._super_users = frozenset(super_users)
        self._allows_without_rules = allows_without_rules
        self._audit = Audit() if audit is None else audit
        self._rules = RuleTable()
        self._some: dict[tuple[Principal, str, Operation, ResourceType], bool] = {}
        self.version = 0
        """How often the rules were replaced: for whoever keeps answers."""
        self.allowed = 0
        """Questions that were answered with yes."""
        self.denied = 0
        """Questions that were answered with no."""

    @classmethod
    def configured(cls, config: BrokerConfig) -> Authorizer | None:
        """What ``authorizer.class.name`` says; None for no authorizer. Raises ConfigError."""
        key = "authorizer.class.name"
        name = config.text(key)
        super_users = parse_super_users(config.text("super.users") or "")
        if not name:
            return None
        known = ON_ZOOKEEPER if config.text("zookeeper.connect") else STANDARD
        if name != known:
            raise ConfigError(key, name, f"classes of Java are not loaded; there is {known}")
        return cls(
            super_users=super_users,
            allows_without_rules=config.bool("allow.everyone.if.no.acl.found"),
        )

    @property
    def rules(self) -> RuleTable:
        """All rules. Setting them replaces them."""
        return self._rules

    @rules.setter
    def rules(self, rules: RuleTable) -> None:
        self._rules = rules
        self._some.clear()
        self.version += 1

    def allows(
        self,
        session: Session,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        *,
        audited: bool = True,
        request: str = "",
        count: int = 1,
    ) -> bool:
        """Whether a client may do that with the resource ``name``.

        For the log, unless ``audited`` is false: the API that asks, and how often it names that.
        """
        allowed = bool(self.operations(session, resource_type, name) >> operation & 1)
        if allowed:
            self.allowed += 1
        else:
            self.denied += 1
        if audited and (not allowed or self._audit.tells_allowed):
            access = Access(session, operation, resource_type, name, request, count)
            tell = self._audit.allowed if allowed else self._audit.denied
            tell(access, partial(self.reason, session, operation, resource_type, name))
        return allowed

    def operations(self, session: Session, resource_type: ResourceType, name: str) -> int:
        """All that a client may do with a resource: bits at the operations' numbers."""
        if session.principal in self._super_users:
            return -1
        rules = self._rules
        denied, allowed = rules.rights(str(session.principal), session.host, resource_type, name)
        if not denied | allowed and self._allows_without_rules:
            return 0 if rules.is_ruled(resource_type, name) else -1
        return allowed & ~denied

    def allows_some(
        self, session: Session, operation: Operation, resource_type: ResourceType
    ) -> bool:
        """Whether a client may do that with at least one resource of this type."""
        # The name is Kafka's: what is allowed by no rule is found with it, and so are super users.
        if self.operations(session, resource_type, "hardcode") >> operation & 1:
            return True
        key = session.principal, session.host, operation, resource_type
        known = self._some.get(key)
        if known is None:
            if len(self._some) >= MAX_KEPT_ANSWERS:
                self._some.clear()
            known = self._some[key] = self._rules.allows_some(
                str(session.principal), session.host, operation, resource_type
            )
        return known

    def reason(
        self, session: Session, operation: Operation, resource_type: ResourceType, name: str
    ) -> str:
        """Why :meth:`allows` says what it says, in words."""
        if session.principal in self._super_users:
            return "super user"
        rule = self._rules.decide(
            str(session.principal), session.host, operation, resource_type, name
        )
        if rule.rule is not None:
            return str(rule.rule)
        if rule.allowed is None and self._allows_without_rules:
            return "allow.everyone.if.no.acl.found"
        return "no rule allows it"


def parse_super_users(text: str) -> frozenset[Principal]:
    """The principals of ``super.users``. Raises ConfigError."""
    try:
        return frozenset(Principal.parse(one.strip()) for one in text.split(";") if one.strip())
    except ValueError as error:
        raise ConfigError("super.users", text, str(error)) from error
