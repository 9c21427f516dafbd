"""A ZooKeeper with TLS and authentication, whose znodes only the brokers may change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from kazoo.exceptions import NoAuthError, NoNodeError

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.zookeeper.connection import ZooKeeperConfig
from fencepost.coordinator.zookeeper.kazoo_client import client_of
from tests.support.certificates import Authority
from tests.support.cluster import unique
from tests.support.kafka import served
from tests.support.kafka39 import Kafka39
from tests.support.member import Member
from tests.support.raw import RawClient
from tests.support.waits import until, until_true
from tests.support.zookeeper import SecuredZooKeeper

pytestmark = pytest.mark.oracle

USER, PASSWORD = "kafka", "kafka's"
MODULE: Final = "org.apache.zookeeper.server.auth.DigestLoginModule"
NETTY: Final = "org.apache.zookeeper.ClientCnxnSocketNetty"
AUTHORIZER: Final = {
    "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
    "super.users": "User:ANONYMOUS",
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secured(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecuredZooKeeper]:
    home = tmp_path_factory.mktemp("secured")
    server = SecuredZooKeeper(home, authority, {USER: PASSWORD}, wants="want")
    yield from served(server, "ZooKeeper")


def settings(secured: SecuredZooKeeper, authority: Authority, chroot: str) -> dict[str, str]:
    """Return the settings of brokers of both kinds."""
    return {
        "zookeeper.connect": f"{secured.secure}/{chroot}",
        "zookeeper.ssl.client.enable": "true",
        "zookeeper.clientCnxnSocket": NETTY,
        "zookeeper.ssl.truststore.location": str(authority.truststore),
        "zookeeper.ssl.truststore.type": "PEM",
        "zookeeper.set.acl": "true",
        **AUTHORIZER,
    }


def login(password: str = PASSWORD) -> dict[str, str]:
    """Return the setting for the login, which Kafka does not have."""
    jaas = f'{MODULE} required username="{USER}" password="{password}";'
    return {"fencepost.zookeeper.jaas.config": jaas}


def write_some(bootstrap: str) -> None:
    """Create a topic, a user, quotas, a rule and a broker setting."""
    with RawClient(bootstrap) as client:
        topic = {"name": "topic", "num_partitions": 1, "replication_factor": 1}

        def is_made() -> bool:
            # A newly elected controller may not know the brokers yet.
            answer = client.call("create_topics", 5, timeout=30_000, topics=[topic])
            return answer["topics"][0]["error_code"] in {"none", "topic_already_exists"}

        until(is_made, "the topic is made")
        user = {
            "name": "alice",
            "mechanism": 2,
            "iterations": 4096,
            "salt": b"salt",
            "salted_password": b"x" * 64,
        }
        answer = client.call("alter_user_scram_credentials", 0, deletions=[], upsertions=[user])
        assert answer["results"][0]["error_code"] == "none", answer
        entity = [{"entity_type": kind, "entity_name": "alice"} for kind in ("user", "client-id")]
        ops = [{"key": "producer_byte_rate", "value": 1e6, "remove": False}]
        for named in (entity, entity[1:]):
            answer = client.call(
                "alter_client_quotas",
                1,
                entries=[{"entity": named, "ops": ops}],
                validate_only=False,
            )
            assert answer["entries"][0]["error_code"] == "none", answer
        rule = {
            "resource_type": 2,
            "resource_name": "topic",
            "resource_pattern_type": 3,
            "principal": "User:alice",
            "host": "*",
            "operation": 3,
            "permission_type": 3,
        }
        for pattern in (3, 4):
            answer = client.call(
                "create_acls", 3, creations=[rule | {"resource_pattern_type": pattern}]
            )
            assert answer["results"][0]["error_code"] == "none", answer
        configs = [{"name": "message.max.bytes", "config_operation": 0, "value": "999999"}]
        resource = {"resource_type": 4, "resource_name": "", "configs": configs}
        answer = client.call(
            "incremental_alter_configs", 0, resources=[resource], validate_only=False
        )
        assert answer["responses"][0]["error_code"] == "none", answer


WRITTEN: Final = (
    *("/", "/admin", "/admin/delete_topics", "/brokers", "/brokers/ids", "/brokers/ids/1"),
    *("/brokers/seqid", "/brokers/topics", "/brokers/topics/topic", "/cluster", "/cluster/id"),
    *("/brokers/topics/topic/partitions", "/brokers/topics/topic/partitions/0"),
    *("/brokers/topics/topic/partitions/0/state", "/config", "/config/brokers", "/config/changes"),
    *("/config/brokers/<default>", "/config/clients", "/config/clients/alice", "/config/ips"),
    *("/config/topics", "/config/topics/topic", "/config/users", "/config/users/alice"),
    *("/config/users/alice/clients", "/config/users/alice/clients/alice", "/consumers"),
    *("/controller", "/controller_epoch", "/isr_change_notification", "/kafka-acl"),
    *("/kafka-acl/Topic", "/kafka-acl/Topic/topic", "/kafka-acl/Group", "/kafka-acl-changes"),
    *("/kafka-acl-extended", "/kafka-acl-extended/prefixed", "/kafka-acl-extended-changes"),
    *("/kafka-acl-extended/prefixed/Topic", "/kafka-acl-extended/prefixed/Topic/topic"),
    *("/latest_producer_id_block", "/log_dir_event_notification"),
)


def who_may(znodes: Any, chroot: str) -> dict[str, Any]:
    """Return the ACLs of all znodes by path, including change notifications."""
    found = {}
    znodes.chroot = f"/{chroot}"
    for path in WRITTEN:
        try:
            found[path] = _rights(znodes, path)
        except NoNodeError:
            found[path] = None
    for folder in ("/config/changes", "/kafka-acl-changes", "/kafka-acl-extended-changes"):
        for name in znodes.get_children(folder):
            found[f"{folder}/*"] = _rights(znodes, f"{folder}/{name}")
    return found


def _rights(znodes: Any, path: str) -> set[tuple[str, str, int]]:
    return {(acl.id.scheme, acl.id.id, acl.perms) for acl in znodes.get_acls(path)[0]}


def test_znodes_have_the_acls_that_kafka_sets(
    secured: SecuredZooKeeper,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    jaas = tmp_path / "jaas.conf"
    jaas.write_text(f'Client {{ {MODULE} required username="{USER}" password="{PASSWORD}"; }};\n')
    java, ours = unique("java"), unique("ours")
    told = settings(secured, authority, java)
    known = {**told, **login(), "zookeeper.connect": secured.secure}
    kafka = Kafka39(tmp_path / "java", told.pop("zookeeper.connect"), settings=told)
    member = Member(
        tmp_path / "ours",
        None,
        node_id=1,
        settings={**settings(secured, authority, ours), **login()},
    )
    try:
        with monkeypatch.context() as patch:
            patch.setenv("JAVA_TOOL_OPTIONS", f"-Djava.security.auth.login.config={jaas}")
            kafka.launch()
        member.start()
        kafka.wait_until_listening()
        for broker in (kafka, member):
            write_some(broker.bootstrap)
        insider, outsider = client_of(ZooKeeperConfig.of(BrokerConfig(known))), secured.client()
        insider.start(60)
        try:
            assert who_may(insider, ours) == who_may(insider, java)
            outsider.chroot = f"/{java}"
            for path in ("/config/users/alice", "/config/brokers/<default>"):
                with pytest.raises(NoAuthError):
                    outsider.get(path)
            assert outsider.get("/brokers/topics/topic")[0]
            with pytest.raises(NoAuthError):
                outsider.set("/brokers/topics/topic", b"{}")
            with pytest.raises(NoAuthError):
                outsider.create("/kafka-acl/Topic/another", b"{}")
        finally:
            for client in (insider, outsider):
                client.stop()
                client.close()
    finally:
        for broker in (kafka, member):
            if broker.child is not None:
                broker.child.kill()


def begin(tmp_path: Path, told: Mapping[str, object]) -> Broker:
    alone = {"node.id": 1, "controlled.shutdown.enable": False}
    return Broker(tmp_path / unique("broker"), "127.0.0.1:0", {**alone, **told})


def test_client_certificate_owns_the_znodes(
    secured: SecuredZooKeeper, authority: Authority, tmp_path: Path
):
    chroot = unique("certified")
    keystore = {
        "zookeeper.ssl.keystore.location": str(authority.client("broker", password="its key").file),
        "zookeeper.ssl.keystore.password": "its key",
    }

    async def scenario() -> None:
        async with begin(tmp_path, {**settings(secured, authority, chroot), **keystore}) as broker:
            acls, _ = await asyncio.to_thread(
                broker.services.on_zookeeper.session._client.get_acls, "/config/users"
            )
            assert [(acl.id.scheme, acl.perms) for acl in acls] == [("x509", 31)]
            assert "CN=broker" in acls[0].id.id

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (login("another"), "the login has failed"),
        ({}, "NoAuth|InvalidACL"),
        ({"zookeeper.connect": "127.0.0.1:{port}/x", **login()}, None),
        ({"authority": "other", **login()}, "certificate verify failed"),
    ],
)
def test_start_with_wrong_zookeeper_security_fails_with_a_reason(
    secured: SecuredZooKeeper,
    authority: Authority,
    tmp_path: Path,
    more: dict[str, str],
    message: str | None,
):
    told: dict[str, str] = {**settings(secured, authority, unique("wrong")), **more}
    told["zookeeper.connection.timeout.ms"] = "2000"
    if told.pop("authority", None):
        other = Authority(tmp_path / "other", "other")
        told["zookeeper.ssl.truststore.location"] = str(other.truststore)
    told["zookeeper.connect"] = told["zookeeper.connect"].replace(
        "{port}", secured.secure.partition(":")[2]
    )
    if "fencepost.zookeeper.jaas.config" not in told:
        told["zookeeper.set.acl"] = "true"
        message = "zookeeper.set.acl"

    async def scenario() -> None:
        broker = begin(tmp_path, told)
        if message is None:  # the certificate also contains the address
            async with broker:
                return
        with pytest.raises(BrokerError, match=message):
            await broker.start()

    asyncio.run(scenario())


def test_session_survives_a_server_restart_and_failed_logins(
    secured: SecuredZooKeeper, authority: Authority, tmp_path: Path
):
    """Each connection begins with a login; a failed login is retried."""

    async def scenario() -> None:
        told = {**settings(secured, authority, unique("again")), **login()}
        told["zookeeper.session.timeout.ms"] = "60000"
        async with begin(tmp_path, told) as broker:
            node = broker.services.on_zookeeper
            epoch = node.broker_epoch
            await asyncio.to_thread(secured.stop)
            await until_true(lambda: not node.session.is_connected, "the connection is lost")
            secured.set_password(USER, "another")
            await asyncio.to_thread(secured.start)
            handler = node.session._client.handler
            await until_true(lambda: "login" in handler.problem, "the login fails")
            await asyncio.to_thread(secured.stop)
            secured.set_password(USER, PASSWORD)
            await asyncio.to_thread(secured.start)
            await until_true(lambda: handler.problem == "", "the login is taken")
            await asyncio.to_thread(until, lambda: _created(broker), "it is controller again")
            assert node.broker_epoch == epoch, "the session is the same"

    asyncio.run(scenario())


def _created(broker: Broker) -> bool:
    with RawClient(broker.bootstrap) as client:
        topic = {"name": unique("t"), "num_partitions": 1, "replication_factor": 1}
        answer = client.call("create_topics", 5, timeout=30_000, topics=[topic])
    return bool(answer["topics"][0]["error_code"] == "none")
