"""TLS and logins between brokers of Fencepost and of Apache Kafka 3.9 on one ZooKeeper.

There are three clusters. One has a listener for the brokers and another for the controller, both
with certificates. The other two clusters set `security.inter.broker.protocol`, one with PLAIN and
one with certificates. Clients of the PLAINTEXT listener on loopback act as the operator.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.x509.oid import NameOID
from kazoo.exceptions import NoNodeError

from fencepost.cli import main
from fencepost.cluster.acl import Operation, PatternType, Permission, ResourceType
from fencepost.coordinator.zookeeper.passwords import DEFAULT_KEY_FACTORY, Encoder
from tests.support.certificates import HERE, Authority, Certificate, trust_settings
from tests.support.cluster import unique
from tests.support.kafka39 import CONFIGS, run_tool
from tests.support.member import Member
from tests.support.mixed import JAVA, PYTHON
from tests.support.waits import until
from tests.support.zookeeper import ZooKeeper
from tests.support.zookeeper_listeners import ListeningBrokers

pytestmark = pytest.mark.oracle

P, J = 1, 2
"""A broker of Fencepost and one of Apache Kafka."""

SCRAM: Final = "org.apache.kafka.common.security.scram.ScramLoginModule"
PLAIN: Final = "org.apache.kafka.common.security.plain.PlainLoginModule"
SETTINGS: Final = {
    "ssl.client.auth": "required",
    "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
    "super.users": "User:ANONYMOUS;User:CN=broker-1;User:CN=broker-2;User:broker-1;User:broker-2",
    "auto.leader.rebalance.enable": "false",
    "replica.fetch.backoff.ms": "100",
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def _as_text(certificate: Certificate) -> dict[str, str]:
    """Return the settings with ``certificate`` as text, all of type PASSWORD."""
    return {
        "ssl.keystore.key": certificate.key,
        "ssl.keystore.certificate.chain": certificate.chain,
    }


class Secured(ListeningBrokers):
    """One broker of Fencepost and one of Apache Kafka, each with a certificate for its name."""

    def __init__(
        self,
        home: Path,
        zookeeper: ZooKeeper,
        authority: Authority,
        names: Mapping[str, str],
        settings: Mapping[str, str],
        jaas: Mapping[str, str] = {},
    ) -> None:
        """``names`` maps listeners to protocols; ``jaas`` has ``{}`` for a broker's name."""
        names = {"PLAINTEXT": "PLAINTEXT", **names}
        common = {
            **SETTINGS,
            **trust_settings(authority),
            "listener.security.protocol.map": ",".join(f"{a}:{b}" for a, b in names.items()),
            **settings,
        }

        def of_each(node_id: int) -> Mapping[str, str]:
            name = f"broker-{node_id}"
            shown = ((NameOID.COMMON_NAME, name),)
            certificate = authority.sign(name, subject_name=shown, hosts=HERE, is_both=True)
            logins = {key: text.replace("{}", name) for key, text in jaas.items()}
            # A line break is escaped in a properties file.
            shows = {key: text.replace("\n", "\\n") for key, text in _as_text(certificate).items()}
            return {"ssl.keystore.type": "PEM", **shows, **logins}

        layout = {P: PYTHON, J: JAVA}
        super().__init__(home, zookeeper, layout, common, [*names][1:], of_each=of_each)
        self.znodes.ensure_path("/")

    def said(self, node_id: int, pattern: str, since: int = 0) -> re.Match[str]:
        """Wait until a broker has logged a line that matches ``pattern``."""
        child = self.nodes[node_id].child
        assert child is not None
        return child.wait_for_line(pattern, deadline_s=60, since=since)

    def lines(self, node_id: int) -> int:
        """Return the number of lines that a broker has logged so far."""
        child = self.nodes[node_id].child
        assert child is not None
        return len(child.lines)

    def replicate(self) -> str:
        """Create a topic of two partitions; each broker leads one and follows the other."""
        name = self.create([P, J], [J, P], via=self.controller)
        for index, leader in enumerate((P, J)):
            with self.client(leader) as client:

                def is_kept(client: Any = client, index: int = index) -> bool:
                    values = [b"%d" % number for number in range(10)]
                    answer = client.produce(name, values, partition=index, acks=-1)
                    return bool(answer["error_code"] == "none")

                until(is_kept, f"{leader} leads, and the other has a copy")
        self.all_equal(name)
        return name


@pytest.fixture(scope="module")
def two_listeners(
    zookeeper: ZooKeeper, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    found = Secured(
        tmp_path_factory.mktemp("two"),
        zookeeper,
        authority,
        {"REPL": "SASL_SSL", "CONTROL": "SSL"},
        {
            "inter.broker.listener.name": "REPL",
            "control.plane.listener.name": "CONTROL",
            "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "ssl.allow.dn.changes": "true",
            "password.encoder.secret": "the encoder's secret",
        },
        {
            "listener.name.repl.scram-sha-512.sasl.jaas.config": (
                f'{SCRAM} required username="{{}}" password="secret of {{}}";'
            )
        },
    )
    try:
        yield found.start()
    finally:
        found.close()


def _sockets(address: str) -> int:
    """Return the number of established connections to a port of this machine."""
    port = int(address.rpartition(":")[2])
    rows = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    to = [row.split()[2] for row in rows if row.split()[3] == "01"]
    return sum(int(remote.rpartition(":")[2], 16) == port for remote in to)


def test_brokers_log_in_with_users_of_either_tool(two_listeners: Secured):
    """During the test the brokers send requests to the controller through a separate listener."""
    brokers = two_listeners
    name = brokers.create([P, J], [J, P])
    brokers.said(P, "user 'broker-1' cannot log in by SCRAM-SHA-512")
    brokers.said(J, "invalid credentials with SASL mechanism SCRAM-SHA-512")
    assert all(_sockets(brokers.listeners[at]["CONTROL"]) for at in (P, J))
    told = ("users", "add", "broker-2", "--mechanism", "SCRAM-SHA-512", "--password-file", "-")
    told += ("-b", brokers.nodes[P].bootstrap)
    done = CliRunner().invoke(main, told, input="secret of broker-2")
    assert done.exit_code == 0, done.output
    run_tool(
        CONFIGS,
        *("--bootstrap-server", brokers.nodes[J].bootstrap, "--alter"),
        *("--entity-type", "users", "--entity-name", "broker-1"),
        *("--add-config", "SCRAM-SHA-512=[iterations=4096,password=secret of broker-1]"),
    )
    brokers.all_equal(name)
    for controller in (P, J):
        brokers.elect(controller)
        brokers.replicate()


# --- passwords among the settings of brokers ---

OF_THE_KEY: Final = "listener.name.control.ssl.keystore.key"


def _set(brokers: Secured, node_id: int, **values: str) -> tuple[str, str | None]:
    """Change settings of a broker by a request to that broker; return the error and its message."""
    configs = [
        {"name": name, "config_operation": 0, "value": value} for name, value in values.items()
    ]
    resource = {"resource_type": 4, "resource_name": str(node_id), "configs": configs}
    with brokers.client(node_id) as client:
        answer = client.call(
            "incremental_alter_configs", 0, resources=[resource], validate_only=False
        )
    (row,) = answer["responses"]
    return row["error_code"], row["error_message"]


def _shown(brokers: Secured, node_id: int, certificate: Certificate) -> str:
    """Return the serial number of a broker's certificate from the controller's listener."""
    host, _, port = brokers.listeners[node_id]["CONTROL"].partition(":")
    with (
        socket.create_connection((host, int(port))) as plain,
        certificate.context().wrap_socket(plain, server_hostname=host) as encrypted,
    ):
        return str(encrypted.getpeercert()["serialNumber"])  # type: ignore[index]


def _shows(brokers: Secured, node_id: int, certificate: Certificate) -> None:
    parsed = x509.load_pem_x509_certificate(certificate.chain.encode())
    number = f"{parsed.serial_number:X}"
    until(
        lambda: int(_shown(brokers, node_id, certificate), 16) == int(number, 16),
        f"{node_id} shows the certificate, so it has its key",
    )


def _copy(brokers: Secured, source: int, to: int) -> None:
    """Copy a broker's dynamic settings to another broker, without decoding the passwords."""
    data = brokers.znodes.get(f"/config/brokers/{source}")[0]
    brokers.znodes.ensure_path(f"/config/brokers/{to}")
    brokers.znodes.set(f"/config/brokers/{to}", data)
    note = {"version": 2, "entity_path": f"brokers/{to}"}
    brokers.znodes.create(
        "/config/changes/config_change_", json.dumps(note).encode(), sequence=True
    )


def _renewed(authority: Authority, name: str) -> tuple[Certificate, dict[str, str]]:
    """Return a certificate that both brokers may use, and the settings of a broker with it."""
    shown = ((NameOID.COMMON_NAME, f"broker-{J}"),)
    found = authority.sign(name, subject_name=shown, hosts=HERE, is_both=True)
    return found, {f"listener.name.control.{key}": text for key, text in _as_text(found).items()}


def test_passwords_encoded_by_one_broker_are_used_by_the_other(
    two_listeners: Secured, authority: Authority
):
    brokers = two_listeners
    for source, to in ((J, P), (P, J)):
        certificate, told = _renewed(authority, f"by-{source}")
        error, message = _set(brokers, source, **told)
        assert error == "none", message
        _shows(brokers, source, certificate)
        kept = brokers.node(f"/config/brokers/{source}")["config"]
        assert kept.keys() >= told.keys()
        assert not any(
            "PRIVATE" in encoded or encoded.count(":") != 8 for encoded in map(kept.get, told)
        )
        _copy(brokers, source, to)
        _shows(brokers, to, certificate)
        # Settings that do not change keep their encoded values.
        assert _set(brokers, source, **{"message.max.bytes": "900000"})[0] == "none"
        _shows(brokers, source, certificate)
    # A broker with a new secret encodes the stored passwords again when it starts.
    member = brokers.nodes[P]
    assert isinstance(member, Member)
    brokers.stop(P)
    old, new = "the encoder's secret", "another secret"
    member.add_settings({"password.encoder.secret": new, "password.encoder.old.secret": old})
    member.start()
    _shows(brokers, P, certificate)
    kept = brokers.node(f"/config/brokers/{P}")["config"][OF_THE_KEY]
    encoder = Encoder(new, DEFAULT_KEY_FACTORY, 128, 4096)
    assert encoder.decode(kept).strip() == certificate.key.strip()


PLAIN_LOGIN: Final = (
    f'{PLAIN} required username="{{}}" password="of {{}}"'
    ' user_broker-1="of broker-1" user_broker-2="of broker-2";'
)


def test_brokers_log_in_to_each_other_by_plain(
    zookeeper: ZooKeeper, authority: Authority, tmp_path: Path
):
    brokers = Secured(
        tmp_path,
        zookeeper,
        authority,
        {"SASL_SSL": "SASL_SSL"},
        {
            "security.inter.broker.protocol": "SASL_SSL",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "sasl.enabled.mechanisms": "PLAIN",
        },
        {"listener.name.sasl_ssl.plain.sasl.jaas.config": PLAIN_LOGIN},
    )
    try:
        brokers.start()
        for controller in (P, J):
            brokers.elect(controller)
            brokers.replicate()
    finally:
        brokers.close()


# --- certificates alone ---


@pytest.fixture(scope="module")
def by_certificates(
    zookeeper: ZooKeeper, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    """Yield brokers that may send each other requests while the cluster resource has no ACLs."""
    found = Secured(
        tmp_path_factory.mktemp("certificates"),
        zookeeper,
        authority,
        {"SSL": "SSL"},
        {
            "security.inter.broker.protocol": "SSL",
            "super.users": "User:ANONYMOUS",
            "allow.everyone.if.no.acl.found": "true",
        },
    )
    try:
        yield found.start()
    finally:
        found.close()


def test_password_setting_without_encoder_secret_is_refused(by_certificates: Secured):
    name = "listener.name.plaintext.ssl.key.password"
    for node_id in (J, P):
        error, message = _set(by_certificates, node_id, **{name: "in the clear"})
        assert error == "invalid_config", message
        assert "Password encoder secret not configured" in str(message), node_id
        assert by_certificates.node(f"/config/brokers/{node_id}") is None


def _may(node_id: int, permission: Permission) -> dict[str, Any]:
    return {
        "resource_type": int(ResourceType.CLUSTER),
        "resource_name": "kafka-cluster",
        "resource_pattern_type": int(PatternType.LITERAL),
        "principal": f"User:CN=broker-{node_id}",
        "host": "*",
        "operation": int(Operation.CLUSTER_ACTION),
        "permission_type": int(permission),
    }


def _without_right(brokers: Secured, node_id: int) -> None:
    """Allow ClusterAction to both brokers, deny it to ``node_id``; wait for the ACLs."""
    rules = [_may(P, Permission.ALLOW), _may(J, Permission.ALLOW), _may(node_id, Permission.DENY)]
    with brokers.client(P) as client:
        answer = client.call("create_acls", 3, creations=rules)
    assert {row["error_code"] for row in answer["results"]} == {"none"}
    _all_know(brokers, 3)


def _all_know(brokers: Secured, count: int) -> None:
    for at in (P, J):

        def known(at: int = at) -> bool:
            with brokers.client(at) as client:
                answer = client.call("describe_acls", 3, **_OF_THE_CLUSTER)
            return sum(len(resource["acls"]) for resource in answer["resources"]) == count

        until(known, f"{at} knows of {count} rules")


_OF_THE_CLUSTER: Final = {
    "resource_type_filter": int(ResourceType.CLUSTER),
    "resource_name_filter": None,
    "pattern_type_filter": int(PatternType.ANY),
    "principal_filter": None,
    "host_filter": None,
    "operation": int(Operation.ANY),
    "permission_type": int(Permission.ANY),
}


def _take_back(brokers: Secured) -> None:
    """Delete all ACLs of the cluster resource."""
    with brokers.client(P) as client:
        answer = client.call("delete_acls", 3, filters=[_OF_THE_CLUSTER])
    assert answer["filter_results"][0]["error_code"] == "none", answer
    _all_know(brokers, 0)


def _elect_anew(brokers: Secured, wanted: int) -> None:
    """Have ``wanted`` win a new election, even if no broker accepts its requests."""
    before = brokers.controller_epoch
    brokers.znodes.delete("/controller")

    def is_elected() -> bool:
        found = brokers.controller
        if found is not None and found != wanted:
            with suppress(NoNodeError):
                brokers.znodes.delete("/controller")
        return found == wanted and brokers.controller_epoch > before

    until(is_elected, f"{wanted} is the controller")


REFUSALS: Final = {
    P: '"broker": {}, "error": "CLUSTER_AUTHORIZATION_FAILED"',
    J: "[Rr]eceived error .*broker {}",
}
"""Broker → the line that it logs as the controller when another broker refuses its requests."""


@pytest.mark.parametrize("controller", [P, J], ids=["ours", "theirs"])
def test_controller_without_cluster_action_is_refused_and_logs_it(
    by_certificates: Secured, controller: int
):
    brokers, other = by_certificates, P + J - controller
    brokers.elect(controller)
    before = brokers.replicate()
    _without_right(brokers, controller)
    try:
        since = {at: brokers.lines(at) for at in brokers.nodes}
        _elect_anew(brokers, controller)
        refused = REFUSALS[controller].format(other)
        brokers.said(controller, refused, since[controller])
        name = unique("unheard")
        since[controller] = brokers.lines(controller)
        brokers.write(f"/brokers/topics/{name}", {"version": 1, "partitions": {"0": [other]}})
        until(lambda: brokers.node(f"/brokers/topics/{name}/partitions/0/state"), "it is decided")
        brokers.said(controller, refused, since[controller])
        if other == P:
            denied = '"User:CN=broker-2", "operation": "CLUSTER_ACTION".*"LeaderAndIsr"'
            brokers.said(other, denied, since[other])
        assert not brokers.leaders_and_epochs(other, name)
        assert brokers.leaders_and_epochs(other, before), "it goes by what it was told last"
    finally:
        _take_back(brokers)
    brokers.elect(other)
    until(lambda: brokers.leaders_and_epochs(other, name), "the next controller tells it")
    brokers.elect(controller)
    brokers.replicate()
    brokers.all_equal(before)
