"""Users, quotas and ACLs in ZooKeeper, with brokers of Fencepost and Apache Kafka 3.9 together.

Every broker logs in to the other brokers with a credential that Kafka's tool wrote to ZooKeeper
before the first broker started.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from kazoo.exceptions import NoNodeError

from fencepost.cluster.acl import Operation, PatternType, Permission, ResourceType
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.zookeeper import access_znodes as formats
from fencepost.coordinator.zookeeper.access_znodes import SecurityChange
from fencepost.protocol.scram import SCRAM_MECHANISMS, salted_password, stored_key
from tests.support.cluster import Cluster, unique
from tests.support.kafka39 import ACLS, CONFIGS, run_tool
from tests.support.raw import ConnectionLostError, RawClient
from tests.support.waits import until
from tests.support.zookeeper import ZooKeeper
from tests.support.zookeeper_listeners import ListeningBrokers
from tests.unit.coordinator.logging_in import ScramClient

pytestmark = pytest.mark.oracle

OURS, OTHER, JAVA = 1, 2, 3
EVERY = (OURS, OTHER, JAVA)
ADMIN, SECRET = "admin", "admin's secret"
MODULE: Final = "org.apache.kafka.common.security.scram.ScramLoginModule"
SETTINGS: Final = {
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,LOGIN:SASL_PLAINTEXT",
    "inter.broker.listener.name": "LOGIN",
    "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
    "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
    "listener.name.login.scram-sha-512.sasl.jaas.config": (
        f'{MODULE} required username="{ADMIN}" password="{SECRET}";'
    ),
    "listener.name.login.scram-sha-256.sasl.jaas.config": f"{MODULE} required;",
    "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
    "super.users": f"User:ANONYMOUS;User:{ADMIN}",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
}
"""Clients of the PLAINTEXT listener on loopback act as the operator."""

Rule = dict[str, Any]


class Place(ListeningBrokers):
    """Two brokers of Fencepost, the first of which is the controller, and one of Apache Kafka."""

    def __init__(self, home: Path, zookeeper: ZooKeeper) -> None:
        layout = {OURS: "P", OTHER: "P", JAVA: "J"}
        super().__init__(home, zookeeper, layout, SETTINGS, ["LOGIN"])
        self.znodes.ensure_path("/")
        run_tool(
            CONFIGS,
            *("--zookeeper", self.connect, "--alter"),
            *("--entity-type", "users", "--entity-name", ADMIN),
            *("--add-config", f"SCRAM-SHA-512=[iterations=4096,password={SECRET}]"),
        )

    # --- users ---

    def put_user(self, via: int, name: str, password: str, mechanism: str) -> str:
        scram_mechanism, salt = SCRAM_MECHANISMS[mechanism], b"a salt of sixteen"
        row = {
            "name": name,
            "mechanism": scram_mechanism.number,
            "iterations": 4096,
            "salt": salt,
            "salted_password": salted_password(scram_mechanism, password, salt, 4096),
        }
        return self._alter_users(via, [], [row])

    def drop_user(self, via: int, name: str, mechanism: str) -> str:
        number = SCRAM_MECHANISMS[mechanism].number
        return self._alter_users(via, [{"name": name, "mechanism": number}], [])

    def _alter_users(self, via: int, deletions: list[Any], upsertions: list[Any]) -> str:
        with self.client(via) as client:
            answer = client.call(
                "alter_user_scram_credentials", 0, deletions=deletions, upsertions=upsertions
            )
        return str(answer["results"][0]["error_code"])

    def described(self, via: int, user: str) -> Any:
        with self.client(via) as client:
            answer = client.call("describe_user_scram_credentials", 0, users=[{"name": user}])
        return answer["results"]

    def login(
        self, at: int, user: str, password: str, mechanism: str = "SCRAM-SHA-512"
    ) -> RawClient | None:
        """Return a connection on which ``user`` is logged in, None if the login fails."""
        client = RawClient(self.listeners[at]["LOGIN"])
        try:
            client.call("sasl_handshake", 1, mechanism=mechanism)
            scram = ScramClient(user, password, SCRAM_MECHANISMS[mechanism])
            told = client.call("sasl_authenticate", 2, auth_bytes=scram.first.encode())
            if told["error_code"] == "none":
                final = scram.final(told["auth_bytes"])
                told = client.call("sasl_authenticate", 2, auth_bytes=final)
        except (ConnectionLostError, OSError):
            told = {"error_code": "closed"}
        if told["error_code"] == "none":
            return client
        client.close()
        return None

    def may_log_in(self, at: int, user: str, password: str, mechanism: str) -> bool:
        client = self.login(at, user, password, mechanism)
        if client is None:
            return False
        client.close()
        return True

    # --- quotas ---

    def quota(self, via: int, entity: Mapping[str, str | None], **values: float | None) -> str:
        ops = [
            {"key": key, "value": value or 0.0, "remove": value is None}
            for key, value in values.items()
        ]
        named = [{"entity_type": kind, "entity_name": name} for kind, name in entity.items()]
        with self.client(via) as client:
            answer = client.call(
                "alter_client_quotas",
                1,
                entries=[{"entity": named, "ops": ops}],
                validate_only=False,
            )
        return str(answer["entries"][0]["error_code"])

    def quotas(self, via: int) -> dict[frozenset[tuple[str, str | None]], dict[str, float]]:
        with self.client(via) as client:
            answer = client.call("describe_client_quotas", 1, components=[], strict=False)
        assert answer["error_code"] == "none", answer
        return {
            frozenset((part["entity_type"], part["entity_name"]) for part in row["entity"]): {
                value["key"]: value["value"] for value in row["values"]
            }
            for row in answer["entries"]
        }

    # --- rules ---

    def allow(self, via: int, *rules: Rule) -> list[str]:
        with self.client(via) as client:
            answer = client.call("create_acls", 3, creations=[*rules])
        return [row["error_code"] for row in answer["results"]]

    def drop(self, via: int, **wanted: Any) -> int:
        """Delete the matching rules; return their number."""
        with self.client(via) as client:
            answer = client.call("delete_acls", 3, filters=[_filter(**wanted)])
        row = answer["filter_results"][0]
        assert row["error_code"] == "none", answer
        return len(row["matching_acls"])

    def rules(self, via: int, **wanted: Any) -> set[tuple[Any, ...]]:
        named = _filter(**wanted)
        with self.client(via) as client:
            answer = client.call("describe_acls", 3, **named)
        assert answer["error_code"] == "none", answer
        return {
            (row["resource_type"], row["pattern_type"], row["resource_name"], *acl.values())
            for row in answer["resources"]
            for acl in row["acls"]
        }

    def sees(self, at: int, user: str, password: str, topic: str) -> str:
        """Return the error that ``user`` gets for a topic. Most operations imply Describe."""
        client = self.login(at, user, password)
        assert client is not None
        with client:
            answer = client.call("metadata", 9, topics=[{"name": topic}])
        return str(answer["topics"][0]["error_code"])

    def data(self, path: str) -> bytes | None:
        try:
            return bytes(self.znodes.get(path)[0])
        except NoNodeError:
            return None


def rule(
    name: str,
    user: str,
    *,
    kind: ResourceType = ResourceType.TOPIC,
    pattern: PatternType = PatternType.LITERAL,
    operation: Operation = Operation.READ,
    permission: Permission = Permission.ALLOW,
    host: str = "*",
) -> Rule:
    return {
        "resource_type": int(kind),
        "resource_name": name,
        "resource_pattern_type": int(pattern),
        "principal": f"User:{user}",
        "host": host,
        "operation": int(operation),
        "permission_type": int(permission),
    }


def _filter(
    name: str | None = None, user: str | None = None, pattern: PatternType = PatternType.ANY
) -> dict[str, Any]:
    return {
        "resource_type_filter": int(ResourceType.ANY),
        "resource_name_filter": name,
        "pattern_type_filter": int(pattern),
        "principal_filter": None if user is None else f"User:{user}",
        "host_filter": None,
        "operation": int(Operation.ANY),
        "permission_type": int(Permission.ANY),
    }


def rewritten(path: str, data: bytes) -> bytes | None:
    """Return the data of a znode after Fencepost has parsed it and written it again."""
    return formats.changed(
        path, None, [SecurityChange(record) for record in formats.records_of(path, data)]
    )


@pytest.fixture(scope="module")
def place(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    found = Place(tmp_path_factory.mktemp("users"), zookeeper)
    try:
        found.start()
        yield found
    finally:
        found.close()


def test_brokers_log_in_with_credentials_written_by_kafkas_tool(place: Place):
    for node_id in EVERY:
        until(lambda at=node_id: place.live_brokers(at) == {*EVERY}, "all know all")  # type: ignore[misc]
    name = place.create([OURS, JAVA, OTHER], [JAVA, OTHER, OURS])
    place.all_in_sync(name)
    path = f"/config/users/{ADMIN}"
    data = place.data(path)
    assert data is not None
    assert rewritten(path, data) == data, "to the letter"


def test_user_is_stored_as_by_kafka_and_logs_in_at_every_broker(place: Place):
    user, password = f"{unique('u')} ö*~+", "alice's"
    for mechanism in SCRAM_MECHANISMS:
        assert place.put_user(OTHER, user, password, mechanism) == "none"
    path = f"/config/users/{formats.sanitized(user)}"
    assert place.node(path)["config"].keys() == {*SCRAM_MECHANISMS}
    for node_id in EVERY:
        for mechanism in SCRAM_MECHANISMS.values():
            wanted = {"mechanism": mechanism.number, "iterations": 4096}

            def is_known(at: int = node_id, wanted: Any = wanted) -> bool:
                (row,) = place.described(at, user)
                return wanted in row["credential_infos"]

            until(is_known, f"broker {node_id} knows him")
    plain = unique("plain")
    assert place.put_user(OURS, plain, password, "SCRAM-SHA-512") == "none"
    assert place.put_user(OTHER, plain, password, "SCRAM-SHA-256") == "none"
    for node_id in EVERY:
        for mechanism in SCRAM_MECHANISMS:
            until(
                lambda at=node_id, by=mechanism: place.may_log_in(at, plain, password, by),  # type: ignore[misc]
                f"he may log in at {node_id} by {mechanism}",
            )
        assert not place.may_log_in(node_id, plain, "another", "SCRAM-SHA-512")
    assert place.drop_user(OURS, plain, "SCRAM-SHA-256") == "none"
    for node_id in EVERY:
        until(
            lambda at=node_id: not place.may_log_in(at, plain, password, "SCRAM-SHA-256"),  # type: ignore[misc]
            "he may no longer",
        )
        assert place.may_log_in(node_id, plain, password, "SCRAM-SHA-512"), "by this he may"
    assert place.drop_user(OTHER, plain, "SCRAM-SHA-512") == "none"
    assert place.data(f"/config/users/{plain}") is None, "nothing is left of him"
    assert place.drop_user(OTHER, plain, "SCRAM-SHA-512") == "resource_not_found"
    # Kafka's own tool writes to ZooKeeper without a broker.
    by_tool = ("--entity-type", "users", "--entity-name", plain)
    config = ("--add-config", "SCRAM-SHA-256=[password=from a tool]")
    run_tool(CONFIGS, "--zookeeper", place.connect, "--alter", *by_tool, *config)
    for node_id in EVERY:
        until(
            lambda at=node_id: place.may_log_in(at, plain, "from a tool", "SCRAM-SHA-256"),  # type: ignore[misc]
            "the brokers were told",
        )


ENTITIES: Final[tuple[Mapping[str, str | None], ...]] = (
    {"user": "q u"},
    {"user": None},
    {"client-id": "q/c"},
    {"client-id": None},
    {"user": "q u", "client-id": "q/c"},
    {"user": "q u", "client-id": None},
    {"user": None, "client-id": "q/c"},
    {"user": None, "client-id": None},
)
RATES: Final = {
    "producer_byte_rate": 123456789012.0,
    "consumer_byte_rate": 1.0,
    "request_percentage": 200.0,
    "controller_mutation_rate": 12345678.9,
}


def test_quotas_are_stored_as_by_kafka_and_known_to_every_broker(place: Place):
    rows = [*((entity, RATES) for entity in ENTITIES)]
    rows += [({"ip": name}, {"connection_creation_rate": 1e6}) for name in ("10.1.2.3", None)]
    written: dict[int, dict[str, Any]] = {}
    before = place.quotas(OURS)
    for via in (JAVA, OTHER):
        for entity, values in rows:
            assert place.quota(via, entity, **values) == "none", (via, entity)
        wanted = {**before, **{frozenset(entity.items()): values for entity, values in rows}}
        for at in EVERY:
            until(lambda at=at, wanted=wanted: place.quotas(at) == wanted, f"{at} knows them")  # type: ignore[misc]
        written[via] = _tree(place)
        for entity, values in rows:
            assert place.quota(via, entity, **dict.fromkeys(values)) == "none"
        for at in EVERY:
            until(lambda at=at: place.quotas(at) == before, f"{at} has forgotten them")  # type: ignore[misc]
        written[via]["left"] = _tree(place)
    assert written[OTHER] == written[JAVA]
    assert place.quota(OURS, {"ip": "::1"}, connection_creation_rate=5.0) == "invalid_request", (
        "it would keep a broker of Kafka 3.9 from starting"
    )


def _tree(place: Place, folder: str = "/config") -> dict[str, Any]:
    """Return the data of all znodes below ``folder``, except for change notifications."""
    found: dict[str, Any] = {}
    for name in place.znodes.get_children(folder):
        path = f"{folder}/{name}"
        if name not in {"changes", "topics", "brokers"}:
            found[path] = place.node(path)
            found |= _tree(place, path)
    return found


def test_quota_applies_at_every_broker_whichever_broker_set_it(place: Place):
    name = place.create([OURS], [OTHER], [JAVA])
    for via in (JAVA, OURS):
        client_id = unique("slow")
        assert place.quota(via, {"client-id": client_id}, producer_byte_rate=10.0) == "none"
        for index, at in enumerate(EVERY):

            def waits(at: int = at, index: int = index, client_id: str = client_id) -> bool:
                with Cluster(place.nodes[at].bootstrap, client_id=client_id) as client:
                    client.begin_produce(name, [b"x" * 1000], partition=index)
                    return bool(client.receive()["throttle_time"] > 0)

            until(waits, f"broker {at} has it wait")


def test_acls_are_stored_as_by_kafka(place: Place):
    ours, theirs = unique("ours"), unique("java")
    for via, name in ((JAVA, theirs), (OTHER, ours)):
        made = [
            rule(name, "a"),
            rule(name, "b", operation=Operation.ALL, permission=Permission.DENY, host="10.0.0.1"),
            rule(name, "ä", operation=Operation.DESCRIBE_CONFIGS),
            rule(name, "p", pattern=PatternType.PREFIXED),
            rule(name, "t", kind=ResourceType.TRANSACTIONAL_ID, operation=Operation.WRITE),
            rule(name, "g", kind=ResourceType.GROUP, pattern=PatternType.PREFIXED),
        ]
        assert place.allow(via, *made) == ["none"] * len(made)
    for folder in (
        *("/kafka-acl/Topic", "/kafka-acl/TransactionalId"),
        *("/kafka-acl-extended/prefixed/Topic", "/kafka-acl-extended/prefixed/Group"),
    ):
        by_java = place.data(f"{folder}/{theirs}")
        by_us = place.data(f"{folder}/{ours}")
        assert by_java is not None
        assert by_us is not None
        # The order is arbitrary, because the rules come from a set.
        assert _in_order(by_us) == _in_order(by_java)
        assert rewritten(f"{folder}/{theirs}", by_java) == by_java, "to the letter"
    for folder in ("/kafka-acl-changes", "/kafka-acl-extended-changes"):
        notes = {place.data(f"{folder}/{child}") for child in place.znodes.get_children(folder)}
        for note in notes:
            assert note is not None
            other = note.replace(ours.encode(), theirs.encode())
            assert other in notes, "a note for each, to the letter"
    for name in (ours, theirs):
        for at in EVERY:
            until(lambda at=at, name=name: len(place.rules(at, name=name)) == 6, "all know them")  # type: ignore[misc]
        assert place.rules(OURS, name=name) == place.rules(JAVA, name=name)
    told = run_tool(ACLS, "--bootstrap-server", place.nodes[JAVA].bootstrap, "--list")
    for text in ("DENY", "operation=DESCRIBE_CONFIGS", f"name={ours}, patternType=PREFIXED"):
        assert text in told
    assert place.allow(OURS, rule("with/slash", "a")) == ["invalid_request"]
    # Each broker deletes the rules that the other broker has created, and no znode is left.
    assert place.drop(OTHER, name=theirs) == 6
    assert place.drop(JAVA, name=ours) == 6
    for name in (ours, theirs):
        for folder in ("/kafka-acl/Topic", "/kafka-acl-extended/prefixed/Topic"):
            assert place.data(f"{folder}/{name}") is None
        for at in EVERY:
            until(lambda at=at, name=name: not place.rules(at, name=name), "all have forgotten")  # type: ignore[misc]


def _in_order(data: bytes) -> Any:
    value = json.loads(data)
    value["acls"].sort(key=str)
    return value


def test_acls_apply_at_every_broker_whichever_broker_added_them(place: Place):
    topic, user, password = place.create([OURS, JAVA]), unique("user"), "password"
    assert place.put_user(OURS, user, password, "SCRAM-SHA-512") == "none"
    for at in EVERY:
        until(lambda at=at: place.may_log_in(at, user, password, "SCRAM-SHA-512"), "he is known")  # type: ignore[misc]
        assert place.sees(at, user, password, topic) == "topic_authorization_failed"
    for via in (OTHER, JAVA):
        prefixed = rule(topic[:-2], user, pattern=PatternType.PREFIXED)
        denied = rule(topic, user, operation=Operation.DESCRIBE, permission=Permission.DENY)
        for change, told in (
            (lambda: place.allow(via, prefixed), "none"),  # noqa: B023 - called at once
            (lambda: place.allow(via, denied), "topic_authorization_failed"),  # noqa: B023 - too
            (lambda: place.drop(via, name=topic), "none"),  # noqa: B023 - too
            (lambda: place.drop(via, user=user), "topic_authorization_failed"),  # noqa: B023 - too
        ):
            change()
            for at in EVERY:
                until(
                    lambda at=at, told=told: place.sees(at, user, password, topic) == told,  # type: ignore[misc]
                    f"broker {at} says {told}",
                )


def test_concurrent_acl_additions_lose_no_rule(place: Place):
    name = unique("many")

    def write(via: int) -> list[str]:
        found = []
        for number in range(15):
            found += place.allow(via, rule(name, f"{via}-{number}"))
        return found

    with ThreadPoolExecutor(3) as threads:
        answers = [error for some in threads.map(write, EVERY) for error in some]
    assert answers == ["none"] * 45
    assert len(place.node(f"/kafka-acl/Topic/{name}")["acls"]) == 45
    for at in EVERY:
        until(lambda at=at: len(place.rules(at, name=name)) == 45, f"{at} knows all")  # type: ignore[misc]
    # Before a change, a broker reads the current rules from ZooKeeper, even without a notification.
    assert place.allow(JAVA, rule(name, "last")) == ["none"]
    assert place.drop(OTHER, name=name, pattern=PatternType.LITERAL) == 46


def test_first_start_adds_the_configured_user(zookeeper: ZooKeeper, tmp_path: Path):
    """The first start adds the user; a later start with another password does not change it."""

    async def scenario() -> None:
        chroot = f"{zookeeper.connect}/{unique('first')}/of/all"
        for password in ("first", "second"):
            broker = Broker(
                tmp_path / "data",
                config={
                    **SETTINGS,
                    "listeners": "PLAINTEXT://127.0.0.1:0,LOGIN://127.0.0.1:0",
                    "zookeeper.connect": chroot,
                    "node.id": 1,
                    "inter.broker.listener.name": "PLAINTEXT",
                    "controlled.shutdown.enable": "false",
                },
                add_scram=[f"SCRAM-SHA-512=[name=one,password={password}]"],
            )
            async with broker:
                credential = broker.services.users.credential(
                    "one", SCRAM_MECHANISMS["SCRAM-SHA-512"]
                )
                assert credential is not None
                salted = salted_password(
                    credential.mechanism, "first", credential.salt, credential.iterations
                )
                assert credential.stored_key == stored_key(credential.mechanism, salted)

    asyncio.run(scenario())


def test_unreadable_security_znodes_grant_nothing_and_stop_no_broker(place: Place):
    """Fencepost ignores unreadable znodes; Kafka's broker logs the error and continues."""
    topic, user, password = place.create([OURS, OTHER]), unique("user"), "password"
    assert place.put_user(OURS, user, password, "SCRAM-SHA-512") == "none"
    assert place.allow(OURS, rule("*", user)) == ["none"]
    ours = (OURS, OTHER)

    def told(text: str) -> None:
        for at in ours:
            until(
                lambda at=at: (
                    place.may_log_in(at, user, password, "SCRAM-SHA-512")  # type: ignore[misc]
                    and place.sees(at, user, password, topic) == text
                ),
                f"broker {at} says {text}",
            )

    told("none")
    path = f"/kafka-acl/Topic/{topic}"
    znodes = place.znodes
    znodes.create(path, b"no JSON")
    for folder in ("/kafka-acl-changes", "/config/changes"):
        for number, note in enumerate((b"\xff", b"{}", b"[1]", b"Nothing:x")):
            prefix = "acl_changes_" if "acl" in folder else "config_change_"
            znodes.create(f"{folder}/{prefix}{number}", note, sequence=True)
    znodes.create("/kafka-acl-changes/acl_changes_", f"TOPIC:{topic}".encode(), sequence=True)
    told("topic_authorization_failed")
    (created,) = place.allow(OTHER, rule(topic, user))
    assert created == "unknown_server_error", "nobody knows what stands there"
    # One DENY rule cannot be parsed; the other rules can.
    entries = [
        {"principal": f"User:{user}", "permissionType": "Deny", "operation": "New", "host": "*"},
        {"principal": f"User:{user}", "permissionType": "Allow", "operation": "Read", "host": "*"},
    ]
    znodes.set(path, json.dumps({"version": 1, "acls": entries}).encode())
    znodes.create("/kafka-acl-changes/acl_changes_", f"Topic:{topic}".encode(), sequence=True)
    for at in ours:
        until(lambda at=at: len(place.rules(at, name=topic)) == 2, "the rest is known")  # type: ignore[misc]
    told("topic_authorization_failed")
    # A filter with the values of the listing deletes the denial, and the other rules stay.
    denial = {**_filter(name=topic), "permission_type": int(Permission.DENY)}
    with place.client(OTHER) as client:
        answer = client.call("delete_acls", 3, filters=[denial])
    assert len(answer["filter_results"][0]["matching_acls"]) == 1, answer
    assert place.node(path)["acls"] == entries[1:]
    told("none")
    # A user's credential and quota.
    values = {"SCRAM-SHA-512": "salt=x", "producer_byte_rate": "much", "request_percentage": "5"}
    at_user = f"/config/users/{user}"
    znodes.set(at_user, json.dumps({"version": 1, "config": values}).encode())
    note = {"version": 2, "entity_path": f"users/{user}"}
    znodes.create("/config/changes/config_change_", json.dumps(note).encode(), sequence=True)
    for at in ours:
        until(
            lambda at=at: not place.may_log_in(at, user, password, "SCRAM-SHA-512"),  # type: ignore[misc]
            "nobody can log in with that",
        )
        quotas = place.quotas(at)[frozenset({("user", user)})]
        assert quotas == {"request_percentage": 5.0}
    # A starting broker reads all of these znodes, too.
    place.stop(OTHER)
    znodes.set(path, b"{")
    znodes.set(f"/config/topics/{topic}", b"no JSON")
    place.nodes[OTHER].start()
    assert place.put_user(OURS, user, password, "SCRAM-SHA-512") == "none"
    told_by_other = place.rules(OTHER, name=topic)
    assert [row[-1] for row in told_by_other] == ["deny"] or len(told_by_other) == 1
    until(lambda: place.may_log_in(OTHER, user, password, "SCRAM-SHA-512"), "he is known")
    assert place.sees(OTHER, user, password, topic) == "topic_authorization_failed"
