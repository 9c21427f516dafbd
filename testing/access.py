"""Users, certificates and ACLs of a broker for tests, and the settings of its clients.

Certificates are issued by an authority that exists only in the test process. Generating them needs
trustme, which ``pip install '.[tls-testing]'`` in a clone of Fencepost installs.
"""

from __future__ import annotations

import base64
import re
import secrets
import ssl
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from fencepost.client.queries.session import ClusterSession, check
from fencepost.client.security import Security
from fencepost.cluster.acl import (
    ANYTHING,
    CLUSTER_NAME,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.coordinator.config.key import nearest
from fencepost.protocol.scram import MIN_ITERATIONS, SCRAM_MECHANISMS, salted_password
from fencepost.testing.arguments import one_of

OWN_USER: Final = "fencepost-testing"
"""The name of the super user with which the methods of a broker under test log in."""

MECHANISMS: Final = ("PLAIN", *SCRAM_MECHANISMS)
USUAL_MECHANISM: Final = "SCRAM-SHA-512"
_BETWEEN_BROKERS: Final = "SCRAM-SHA-256"

STYLES: Final = ("confluent", "aiokafka", "kafka-python", "java")
"""The clients for which :meth:`BrokerAccess.client_config` has settings."""

_RULE = re.compile(
    r"(?:(?P<permission>allow|deny) )?(?P<user>\S+) (?P<operations>[A-Za-z_,]+)"
    r" (?P<type>[a-z-]+)(?::(?P<name>\S+))?",
    re.IGNORECASE,
)
_OPERATIONS = [operation.name for operation in Operation if operation > Operation.ANY]
_JAAS = "org.apache.kafka.common.security"


class BrokerCertificates(NamedTuple):
    """PEM texts: the CA certificate, and the chain and key of a broker on this machine."""

    authority: str
    chain: str
    key: str


@cache
def certificates() -> BrokerCertificates:
    """Return the certificates of this process. Raises ImportError without trustme."""
    try:
        import trustme  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - of trustme
    except ModuleNotFoundError as error:
        raise ImportError(
            "tls=True needs: pip install '.[tls-testing]' in a clone of Fencepost"
        ) from error
    authority = trustme.CA(organization_name="fencepost tests")
    issued = authority.issue_cert("localhost", "127.0.0.1", "::1")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    return BrokerCertificates(
        authority.cert_pem.bytes().decode(),
        "".join(certificate.bytes().decode() for certificate in issued.cert_chain_pems),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode(),
    )


class BrokerAccess:
    """A broker's authentication and authorization.

    ``users`` maps names to passwords. ``tls`` encrypts connections. ``acls`` are ACLs as texts (see
    :func:`parse_rule`). If the argument is given, even as an empty list, every operation that no
    ACL allows is denied. Raises TypeError, ValueError, ImportError.
    """

    def __init__(
        self,
        users: Mapping[str, str] | None = None,
        *,
        tls: bool = False,
        acls: Sequence[str] | None = None,
    ) -> None:
        if users is not None and not isinstance(users, Mapping):
            raise TypeError(f"users are passwords by name, {{'alice': 'secret'}}, not {users!r}")
        self.users = dict(users or {})
        self.tls = tls
        if not all(isinstance(text, str) and text for pair in self.users.items() for text in pair):
            raise TypeError("users are passwords by name, {'alice': 'secret'}")
        if acls is not None and not isinstance(acls, (list, tuple)):
            raise TypeError(f"acls are a list of rules, not {acls!r}")
        if acls is not None and not self.users:
            raise ValueError(
                "acls= needs users=: a client that does not log in has no principal to authorize"
            )
        self.rules = None if acls is None else [self.rule(acl) for acl in acls]
        self._passwords = {**self.users, OWN_USER: secrets.token_urlsafe(16)} if self.users else {}
        self._certificates = certificates() if tls else None
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self.added = [
            _added(name, password, mechanism)
            for name, password in self._passwords.items()
            for mechanism in SCRAM_MECHANISMS
        ]
        """The argument of ``Broker(add_scram=…)``."""

    def _no_user(self, user: str | None) -> str:
        users = sorted(self.users)
        hint = nearest(user, users) if user is not None else ""
        return f"user={user!r} is not one of the broker's: {', '.join(users)}{hint}"

    def rule(self, text: str) -> Rule:
        """Parse an ACL, which must be for one of the users or for ``*``. Raises ValueError."""
        rule = parse_rule(text)
        user = rule.principal.removeprefix("User:")
        if self.users and user not in {*self.users, ANYTHING}:
            raise ValueError(f"{text!r}: {self._no_user(user)}")
        return rule

    @property
    def protocol(self) -> str:
        """Kafka's ``security.protocol``."""
        return ("SASL_" if self.users else "") + ("SSL" if self.tls else "PLAINTEXT")

    @property
    def settings(self) -> dict[str, str]:
        """The broker's settings."""
        if self.protocol == "PLAINTEXT":
            return {}
        settings = {"listeners": f"{self.protocol}://127.0.0.1:0"}
        if self._certificates is not None:
            settings["ssl.keystore.type"] = "PEM"
            settings["ssl.keystore.certificate.chain"] = self._certificates.chain
            settings["ssl.keystore.key"] = self._certificates.key
        if self.users:
            settings["sasl.enabled.mechanisms"] = ",".join(MECHANISMS)
            settings["super.users"] = f"User:{OWN_USER}"
        if self.rules is not None:
            settings["authorizer.class.name"] = (
                "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
            )
        return settings

    @property
    def between_brokers(self) -> dict[str, str]:
        """The settings for connections between brokers, which use the clients' listener."""
        settings = {"inter.broker.listener.name": self.protocol}
        if self._certificates is not None:
            settings["ssl.truststore.type"] = "PEM"
            settings["ssl.truststore.certificates"] = self._certificates.authority
        if self.users:
            login = _jaas(_BETWEEN_BROKERS, OWN_USER, self._passwords[OWN_USER])
            listener = f"listener.name.{self.protocol.lower()}"
            settings["sasl.mechanism.inter.broker.protocol"] = _BETWEEN_BROKERS
            settings[f"{listener}.{_BETWEEN_BROKERS.lower()}.sasl.jaas.config"] = login
        return settings

    @property
    def of_controller(self) -> dict[str, str]:
        """The settings of a separate controller, whose listener has no authentication."""
        names = ("authorizer.class.name", "super.users")
        settings = {name: self.settings[name] for name in names if name in self.settings}
        if "super.users" in settings:
            settings["super.users"] += ";User:ANONYMOUS"
        return settings

    @property
    def ca_file(self) -> Path:
        """A PEM file with the broker's CA certificate. Raises RuntimeError without TLS."""
        if self._certificates is None:
            raise RuntimeError("the broker has no certificate: tls=True gives it one")
        if self._home is None:
            self._home = tempfile.TemporaryDirectory(prefix="fencepost-ca-")
        path = Path(self._home.name) / "ca.pem"
        if not path.exists():
            path.write_text(self._certificates.authority)
        return path

    def close(self) -> None:
        """Remove the PEM file."""
        if self._home is not None:
            self._home.cleanup()
            self._home = None

    def own(self) -> Security:
        """Return the client settings with which the methods of a broker under test log in."""
        settings = {"security.protocol": self.protocol}
        if self._certificates is not None:
            settings["ssl.truststore.certificates"] = self._certificates.authority
        if self.users:
            settings["sasl.mechanism"] = _BETWEEN_BROKERS
            settings["sasl.username"] = OWN_USER
            settings["sasl.password"] = self._passwords[OWN_USER]
        return Security.of(settings)

    def client_config(
        self, bootstrap: str, user: str | None, style: str, mechanism: str
    ) -> dict[str, Any]:
        """Return a client's settings, in the format of ``style``. Raises ValueError."""
        one_of("style", style, STYLES)
        one_of("mechanism", mechanism, MECHANISMS)
        if user is None and len(self.users) == 1:
            (user,) = self.users
        if self.users and user not in self.users:
            raise ValueError(self._no_user(user))
        if user is not None and not self.users:
            raise ValueError("the broker has no users: users={'alice': 'secret'} gives it some")
        login = None if user is None else (mechanism, user, self.users[user])
        if style in {"aiokafka", "kafka-python"}:
            return self._of_python(bootstrap, login, style)
        config: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "security.protocol": self.protocol,
        }
        if self.tls and style == "java":
            config |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(self.ca_file)}
        elif self.tls:
            config["ssl.ca.location"] = str(self.ca_file)
        if login is not None and style == "java":
            config |= {"sasl.mechanism": mechanism, "sasl.jaas.config": _jaas(*login)}
        elif login is not None:
            config |= dict(
                zip(("sasl.mechanism", "sasl.username", "sasl.password"), login, strict=True)
            )
        return config

    def _of_python(
        self, bootstrap: str, login: tuple[str, str, str] | None, style: str
    ) -> dict[str, Any]:
        config: dict[str, Any] = {
            "bootstrap_servers": bootstrap,
            "security_protocol": self.protocol,
        }
        if self.tls and style == "aiokafka":
            config["ssl_context"] = ssl.create_default_context(cafile=str(self.ca_file))
        elif self.tls:
            config["ssl_cafile"] = str(self.ca_file)
        if login is not None:
            names = ("sasl_mechanism", "sasl_plain_username", "sasl_plain_password")
            config |= dict(zip(names, login, strict=True))
        return config

    def make_rules(self, session: ClusterSession) -> None:
        """Create the ACLs. Raises ApiError."""
        add_rules(session, self.rules or ())


class Rule(NamedTuple):
    """One ACL, or several that differ only in their operation."""

    permission: Permission
    principal: str
    operations: tuple[Operation, ...]
    resource_type: ResourceType
    pattern_type: PatternType
    resource_name: str


def parse_rule(text: str) -> Rule:
    """Parse ``alice READ topic:orders``, ``deny bob ALL topic:secret-*``. Raises ValueError.

    Operations have Kafka's names. A name that ends in an asterisk is a prefix, the asterisk alone
    is any name; ``cluster`` needs none. The principal is of the type User; ``*`` is every user.
    """
    match = _RULE.fullmatch(" ".join(text.split())) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not an ACL like 'alice READ,WRITE topic:orders'")
    kind = match["type"].upper().replace("-", "_")
    types = [
        resource_type.name for resource_type in ResourceType if resource_type > ResourceType.ANY
    ]
    if kind not in types:
        there = [resource_type.lower().replace("_", "-") for resource_type in types]
        hint = nearest(match["type"].lower(), there)
        syntax = (
            f"{text!r}: there is no resource type {match['type']!r}; known are {', '.join(there)}"
        )
        raise ValueError(f"{syntax}{hint}")
    operations = [operation.upper() for operation in match["operations"].split(",")]
    for operation in operations:
        if operation not in _OPERATIONS:
            hint = (
                nearest(operation, _OPERATIONS) or f"; the operations are {', '.join(_OPERATIONS)}"
            )
            raise ValueError(f"{text!r}: unknown operation {operation!r}{hint}")
    name = match["name"] or (CLUSTER_NAME if kind == "CLUSTER" else "")
    if not name:
        raise ValueError(f"{text!r}: the {match['type']} needs a name; {match['type']}:* means any")
    is_prefix = name.endswith("*") and name != ANYTHING
    return Rule(
        Permission.DENY if (match["permission"] or "").lower() == "deny" else Permission.ALLOW,
        f"User:{match['user'].removeprefix('User:')}",
        tuple(Operation[operation] for operation in operations),
        ResourceType[kind],
        PatternType.PREFIXED if is_prefix else PatternType.LITERAL,
        name[:-1] if is_prefix else name,
    )


def add_rules(session: ClusterSession, rules: Iterable[Rule]) -> None:
    """Create ACLs. Raises ApiError."""
    all_rules = list(rules)
    if not all_rules:
        return
    answer = session.client.call(
        "CreateAcls",
        check=False,
        entity=lambda f: f.message(
            creations=[
                f.AclCreation(
                    resource_type=rule.resource_type,
                    resource_name=rule.resource_name,
                    resource_pattern_type=rule.pattern_type,
                    principal=rule.principal,
                    host=ANYTHING,
                    operation=operation,
                    permission_type=rule.permission,
                )
                for rule in all_rules
                for operation in rule.operations
            ]
        ),
    )
    for result in answer.results:
        check(result.error_code, "CreateAcls", None, result.error_message)


def _added(name: str, password: str, mechanism: str) -> str:
    """Return an ``--add-scram`` argument with a salted password.

    The argument's syntax cannot express every plain password.
    """
    salt = secrets.token_bytes(16)
    salted = salted_password(SCRAM_MECHANISMS[mechanism], password, salt, MIN_ITERATIONS)
    texts = (base64.b64encode(value).decode() for value in (salt, salted))
    return '{}=[name="{}",salt="{}",saltedpassword="{}"]'.format(mechanism, name, *texts)


def _jaas(mechanism: str, user: str, password: str) -> str:
    module = "plain.Plain" if mechanism == "PLAIN" else "scram.Scram"
    texts = (text.replace("\\", "\\\\").replace('"', '\\"') for text in (user, password))
    return '{}.{}LoginModule required username="{}" password="{}";'.format(_JAAS, module, *texts)
