"""Authorization of clients' operations by ACLs.

Source: ``StandardAuthorizer``, ``StandardAuthorizerData``.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.config.broker_config import BrokerConfig, ConfigError
from fencepost.coordinator.security.audit import Audit, AuditedAccess
from fencepost.coordinator.security.principal import ClientSession, Principal
from fencepost.coordinator.security.rules import RuleTable

STANDARD = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
ON_ZOOKEEPER = "kafka.security.authorizer.AclAuthorizer"
"""The authorizer's class names in Apache Kafka, for ACLs in the metadata log and in ZooKeeper."""

MAX_KEPT_ANSWERS = 10_000
"""The maximum number of cached results of :meth:`Authorizer.allows_some`; a full cache is emptied.
"""


class Authorizer:
    """The current ACLs, and the super users, which need none.

    A change of :attr:`rules` takes effect at once, also for open connections.
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
        self._verdicts: dict[tuple[Principal, str, Operation, ResourceType], bool] = {}
        self.version = 0
        """How often the ACLs were replaced; callers that cache results compare this number."""
        self.allowed = 0
        """The number of authorized operations."""
        self.denied = 0
        """The number of denied operations."""

    @classmethod
    def configured(cls, config: BrokerConfig) -> Authorizer | None:
        """Return the authorizer of ``authorizer.class.name``; None if unset. Raises ConfigError."""
        key = "authorizer.class.name"
        name = config.text(key)
        super_users = parse_super_users(config.text("super.users") or "")
        if not name:
            return None
        default = ON_ZOOKEEPER if config.text("zookeeper.connect") else STANDARD
        if name != default:
            raise ConfigError(key, name, f"Java classes are not loaded; built in is {default}")
        return cls(
            super_users=super_users,
            allows_without_rules=config.bool("allow.everyone.if.no.acl.found"),
        )

    @property
    def rules(self) -> RuleTable:
        """All ACLs. Assigning another table replaces them."""
        return self._rules

    @rules.setter
    def rules(self, rules: RuleTable) -> None:
        self._rules = rules
        self._verdicts.clear()
        self.version += 1

    def allows(
        self,
        session: ClientSession,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        *,
        audited: bool = True,
        request: str = "",
        count: int = 1,
    ) -> bool:
        """Return whether a client may do an operation on the resource ``name``.

        Unless ``audited`` is false, the audit log shows ``request``, the name of the API, and
        ``count``, the number of times that the request names the resource.
        """
        allowed = bool(self.operations(session, resource_type, name) >> operation & 1)
        if allowed:
            self.allowed += 1
        else:
            self.denied += 1
        if audited and (not allowed or self._audit.tells_allowed):
            access = AuditedAccess(session, operation, resource_type, name, request, count)
            tell = self._audit.allowed if allowed else self._audit.denied
            tell(access, partial(self.reason, session, operation, resource_type, name))
        return allowed

    def operations(self, session: ClientSession, resource_type: ResourceType, name: str) -> int:
        """Return the operations that a client may do on a resource, as a bit mask; -1 is all."""
        if session.principal in self._super_users:
            return -1
        rules = self._rules
        denied, allowed = rules.rights(str(session.principal), session.host, resource_type, name)
        if not denied | allowed and self._allows_without_rules:
            return 0 if rules.is_ruled(resource_type, name) else -1
        return allowed & ~denied

    def allows_some(
        self, session: ClientSession, operation: Operation, resource_type: ResourceType
    ) -> bool:
        """Return whether a client may do an operation on any resource of this type."""
        # Like Kafka, look up this fixed name first. A client that may use any name, such as a super
        # user, is allowed even if ACLs deny it other names.
        if self.operations(session, resource_type, "hardcode") >> operation & 1:
            return True
        key = session.principal, session.host, operation, resource_type
        verdict = self._verdicts.get(key)
        if verdict is None:
            if len(self._verdicts) >= MAX_KEPT_ANSWERS:
                self._verdicts.clear()
            verdict = self._verdicts[key] = self._rules.allows_some(
                str(session.principal), session.host, operation, resource_type
            )
        return verdict

    def reason(
        self, session: ClientSession, operation: Operation, resource_type: ResourceType, name: str
    ) -> str:
        """Return the reason for the result of :meth:`allows`, in words."""
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
    """Return the principals in ``super.users``. Raises ConfigError."""
    try:
        return frozenset(
            Principal.parse(principal.strip()) for principal in text.split(";") if principal.strip()
        )
    except ValueError as error:
        raise ConfigError("super.users", text, str(error)) from error
