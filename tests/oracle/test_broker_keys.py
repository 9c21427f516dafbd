"""All configuration keys of Apache Kafka, with their types, defaults, bounds and scopes.

``BrokerKeys.java`` queries the real definitions for brokers, topics, groups and client metrics,
including the texts that each key accepts. If several versions have a key, the newest version is
compared. The tables list deliberate differences; an entry whose key no longer differs fails the
test as well.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.broker_keys import BROKER_KEYS, REPLACED, SYNONYMS
from fencepost.coordinator.config.client_metrics import CLIENT_METRICS_KEYS
from fencepost.coordinator.config.group_keys import GROUP_OWN_KEYS
from fencepost.coordinator.config.group_settings import broker_key
from fencepost.coordinator.config.ignored_keys import IGNORED_KEYS
from fencepost.coordinator.config.key import ConfigError, ConfigKey, ConfigType
from fencepost.coordinator.config.topic_keys import REFUSED_TOPIC_KEYS, TOPIC_KEYS
from tests.support import kafka, kafka39, kafka43
from tests.support.broker_keys import KafkaKey, path_of
from tests.support.kafka import required

MAIN = Path(__file__).with_name("BrokerKeys.java")
COMMANDS: dict[str, Callable[..., list[str]]] = {
    "3.9": kafka39.java_command,
    "4.3": partial(kafka.java_command, libs=kafka43.jars),
    "4.4": kafka.java_command,
}
OURS: dict[str, Mapping[str, ConfigKey]] = {
    "broker": BROKER_KEYS,
    "topic": TOPIC_KEYS,
    "group": GROUP_OWN_KEYS,
    "client-metrics": CLIENT_METRICS_KEYS,
}
REFUSED = REPLACED.keys() | REFUSED_TOPIC_KEYS.keys()
"""Keys that are refused on purpose, for the reasons in the two tables."""
MAX_REFUSED = 10

DEFAULTS = {
    "broker.id": "numbers are not generated",
    "controller.listener.names": "Kafka requires it; a node that is alone here needs none",
    "group.consumer.max.size": "a table has a limit",
    "group.coordinator.rebalance.protocols": "streams groups are not served",
    "group.initial.rebalance.delay.ms": "tests and small clusters do not wait",
    "group.max.size": "a table has a limit",
    "listeners": "serve listens on 127.0.0.1 where nothing is said",
    "max.connections": "descriptors have a limit",
    "max.connections.per.ip": "descriptors have a limit",
    "node.id": "Kafka requires it; a node that is alone is broker 1",
    "process.roles": "Kafka requires it; a node alone is both",
    "queued.max.request.bytes": "memory has a limit",
    "sasl.server.max.receive.size": "a client that has not logged in gets less memory",
    "ssl.keystore.type": "PEM is the only form that is read",
    "ssl.truststore.type": "PEM is the only form that is read",
    "zookeeper.connect": "empty means the same",
    "zookeeper.ssl.cipher.suites": "empty means the same",
    "zookeeper.ssl.enabled.protocols": "empty means the same",
    "zookeeper.ssl.keystore.type": "PEM is the only form that is read",
    "zookeeper.ssl.truststore.type": "PEM is the only form that is read",
}

NARROWER = {
    "broker.id": "numbers are not generated",
    "connections.max.idle.ms": "below -1 means -1",
    "connections.max.reauth.ms": "no time is negative",
    "default.replication.factor": "a topic has a replica",
    "group.initial.rebalance.delay.ms": "no time is negative",
    "group.max.session.timeout.ms": "no time is negative",
    "group.min.session.timeout.ms": "no time is negative",
    "log.cleaner.dedupe.buffer.size": "no key would fit",
    "log.cleaner.io.max.bytes.per.second": "the cleaner would stand still",
    "log.flush.interval.ms": "no time is negative",
    "log.flush.scheduler.interval.ms": "no time is negative",
    "log.retention.hours": "below -1 means -1",
    "log.retention.minutes": "below -1 means -1",
    "log.retention.ms": "below -1 means -1",
    "log.roll.jitter.ms": "no time is negative",
    "log.roll.ms": "every append would roll",
    "max.connection.creation.rate": "0 lets no client in",
    "max.connections": "0 lets no client in",
    "max.connections.per.ip.overrides": "Kafka refuses these when it starts",
    "offset.metadata.max.bytes": "no length is negative",
    "offsets.topic.segment.bytes": "no topic of 4.3 has smaller segments",
    "password.encoder.cipher.algorithm": "others are not served",
    "password.encoder.iterations": "a start would take hours",
    "password.encoder.key.length": "AES has keys of 128, 192 and 256 bits",
    "password.encoder.keyfactory.algorithm": "others are not served",
    "queued.max.request.bytes": "below -1 means -1",
    "replica.fetch.min.bytes": "no size is negative",
    "replica.high.watermark.checkpoint.interval.ms": "no time is negative",
    "replica.selector.class": "Java classes are not loaded",
    "request.timeout.ms": "no time is negative",
    "sasl.oauthbearer.clock.skew.seconds": "no time is negative",
    "sasl.oauthbearer.jwks.endpoint.refresh.ms": "no time is negative",
    "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms": "no time is negative",
    "sasl.oauthbearer.jwks.endpoint.retry.backoff.ms": "no time is negative",
    "sasl.server.max.receive.size": "no login would fit",
    "ssl.enabled.protocols": "only TLS 1.2 and 1.3 are served",
    "transaction.state.log.segment.bytes": "no topic of 4.3 has smaller segments",
    "zookeeper.connection.timeout.ms": "no time is negative",
    "zookeeper.session.timeout.ms": "no time is negative",
    "zookeeper.ssl.enabled.protocols": "only TLS 1.2 and 1.3 are served",
    "zookeeper.ssl.protocol": "only TLS 1.2 and 1.3 are served",
}
"""Keys whose definition refuses texts that Kafka's definition accepts."""

WIDER = {
    "advertised.listeners": "empty means that it is not set",
    "controller.listener.names": "empty means that it is not set",
    "controller.quorum.bootstrap.servers": "the node's roles are checked with it",
    "controller.quorum.voters": "the node's roles are checked with it",
    "group.consumer.assignors": "the assignors are looked up when the broker starts",
    "group.coordinator.rebalance.protocols": "the classic protocol is always served",
    "group.share.assignors": "the assignors are looked up when the broker starts",
    "group.streams.assignors": "streams groups are not served",
    "listeners": "empty means that it is not set",
    "process.roles": "the start says what is missing",
    "sasl.enabled.mechanisms": "an item of a list that is named twice counts once",
    "sasl.oauthbearer.expected.audience": "an item of a list that is named twice counts once",
    "ssl.cipher.suites": "an item of a list that is named twice counts once",
}
"""Keys whose definition accepts texts that Kafka's definition refuses."""

FIXED = {
    "listener.security.protocol.map": "listeners are bound at the start",
    "listeners": "listeners are bound at the start",
    "sasl.enabled.mechanisms": "logins are set up at the start",
    "sasl.jaas.config": "logins are set up at the start",
    "sasl.mechanism.inter.broker.protocol": "logins are set up at the start",
    "ssl.cipher.suites": "only certificates are exchanged while a listener is open",
    "ssl.client.auth": "only certificates are exchanged while a listener is open",
    "ssl.enabled.protocols": "only certificates are exchanged while a listener is open",
    "ssl.endpoint.identification.algorithm": "only certificates are exchanged while it is open",
    "ssl.protocol": "only certificates are exchanged while a listener is open",
}
"""Keys that are dynamic in Kafka only. Keys that Fencepost does not store are not listed."""

LOOSER = {
    "log.retention.hours": "SIGHUP has the file read again, and this may change with it",
    "log.retention.minutes": "SIGHUP has the file read again, and this may change with it",
    "log.roll.hours": "SIGHUP has the file read again, and this may change with it",
    "log.roll.jitter.hours": "SIGHUP has the file read again, and this may change with it",
}
"""Keys that are dynamic in Fencepost only."""

TABLES = {
    "default": DEFAULTS,
    "narrower": NARROWER,
    "wider": WIDER,
    "fixed": FIXED,
    "looser": LOOSER,
}


def told(version: str, directory: Path) -> list[str]:
    """Return the output lines of ``BrokerKeys.java`` with the jars of a version."""
    with required():
        command = COMMANDS[version](str(MAIN))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=True, cwd=directory
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the output lines of ``BrokerKeys.java``, by version of Apache Kafka."""
    directory = tmp_path_factory.mktemp("keys")
    return {version: told(version, directory) for version in COMMANDS}


RESOURCE_DIFFERENCES: dict[str, dict[str, set[str]]] = {
    # Kafka's definition accepts negative sizes.
    "topic": {"internal.segment.bytes": {"narrower"}},
    # ``group_settings.check`` checks the settings of a group together with the broker's.
    "group": {"share.auto.offset.reset": {"wider"}},
    # A repeated item of a list counts once, as in Kafka's ``ConfigDef.parseValue``.
    "client-metrics": {"metrics": {"wider"}, "match": {"wider"}},
}
"""How keys of other resources differ from Kafka's: kind of resource → key → aspects."""


@pytest.mark.parametrize("version", COMMANDS)
def test_broker_keys_of_unit_tests_equal_those_of_the_jars(
    lines: dict[str, list[str]], version: str
) -> None:
    expected = sorted("\t".join(line.split("\t")[:4]) for line in of_kind("broker", lines[version]))
    assert path_of(version).read_text().splitlines() == expected


def test_every_key_of_kafka_is_known_or_refused(lines: dict[str, list[str]]) -> None:
    for kind, ours in OURS.items():
        names = {KafkaKey.read(line).name for line in of_kind(kind, *lines.values())}
        known = ours.keys() | REFUSED
        if kind == "broker":
            known |= IGNORED_KEYS.keys() | SYNONYMS.keys()
            assert IGNORED_KEYS.keys() - names == set()
        assert names, kind
        assert names - known == set(), kind


def test_refused_keys_are_few_and_explained(lines: dict[str, list[str]]) -> None:
    names = {KafkaKey.read(line).name for kind in OURS for line in of_kind(kind, *lines.values())}
    assert REFUSED - names == {"port"}, "no key of these versions"
    assert len(REFUSED) <= MAX_REFUSED
    assert all({**REPLACED, **REFUSED_TOPIC_KEYS}.values())


def test_types_defaults_bounds_and_scopes_are_kafkas(lines: dict[str, list[str]]) -> None:
    found: dict[str, set[str]] = {what: set() for what in ("type", "internal", *TABLES)}
    for line in decisive("broker", lines):
        theirs = KafkaKey.read(line)
        ours = BROKER_KEYS.get(SYNONYMS.get(theirs.name, theirs.name))
        if ours is not None:
            for what in differences(ours, theirs, line):
                found[what].add(theirs.name)
    assert not found.pop("type")
    assert not found.pop("internal")
    for what, names in found.items():
        assert names == TABLES[what].keys(), what


@pytest.mark.parametrize("kind", ["topic", "group", "client-metrics"])
def test_keys_of_other_resources_are_kafkas(lines: dict[str, list[str]], kind: str) -> None:
    found: dict[str, set[str]] = {}
    for line in decisive(kind, lines):
        theirs = KafkaKey.read(line)
        if theirs.name not in REFUSED:
            ours = OURS[kind][theirs.name]
            # These keys have no scope, and may be changed at any time.
            differ = differences(ours, theirs, line) - {"fixed", "looser"}
            if kind == "group" and ours.default is None and ours.name != "streams.assignor.name":
                key = BROKER_KEYS[broker_key(ours.name)]
                assert key.default == theirs.default, ours.name
                differ -= {"default"}
            if differ:
                found[theirs.name] = differ
    assert found == RESOURCE_DIFFERENCES[kind]


def of_kind(kind: str, *versions: list[str]) -> Iterator[str]:
    """Yield the lines of one kind of resource, each without the columns before the key's name."""
    for version in versions:
        for line in version:
            found, _, rest = line.partition("\t")
            if found == kind:
                yield rest


def decisive(kind: str, lines: dict[str, list[str]]) -> list[str]:
    """Return one line for each key of a kind, from the newest version with that key."""
    newest: dict[str, str] = {}
    for version in COMMANDS:
        newest |= {KafkaKey.read(line).name: line for line in of_kind(kind, lines[version])}
    return list(newest.values())


def differences(ours: ConfigKey, theirs: KafkaKey, line: str) -> set[str]:
    """Return the aspects in which a key differs from Kafka's key."""
    is_internal, *texts = line.split("\t")[4:]
    accepted, refused = (column.split("|")[:-1] for column in texts)
    assert accepted
    found = set()
    if ours.type.name != theirs.type:
        found.add("type")
    if ours.default != theirs.default:
        found.add("default")
    if ours.internal != (is_internal == "true"):
        found.add("internal")
    if not all(accepts(ours, text) for text in accepted):
        found.add("narrower")
    if any(accepts(ours, text) for text in refused):
        found.add("wider")
    if ours.updatable != theirs.is_dynamic:
        found.add("fixed" if theirs.is_dynamic else "looser")
    return found


def accepts(key: ConfigKey, text: str) -> bool:
    """Return whether our definition of the key accepts ``text``."""
    try:
        key.parse(text)
    except ConfigError:
        return False
    return True


CONTRADICTIONS = Path(__file__).with_name("BrokerContradictions.java")


def contradictions() -> Iterator[dict[str, str]]:
    """Yield settings of groups. Many of them contradict each other or a default."""
    for kind in ("consumer", "share", "streams"):
        bounds = [name for name in BROKER_KEYS if name.startswith(f"group.{kind}.")]
        for name in bounds:
            key = BROKER_KEYS[name]
            if key.type not in {ConfigType.INT, ConfigType.LONG} or key.default is None:
                continue
            for other in bounds:
                ending = other.replace(".num.", ".").rpartition(".")[2]
                if other <= name or not name.endswith(ending):
                    continue
                for value in ("0", "1", "100", key.default, "5000", "15000", "45000", "60000"):
                    for another in (value, str(int(value) + 1)):
                        yield {name: value, other: another}
    for text in ("", "simple", "simple,simple"):
        yield {"group.share.assignors": text}


def is_accepted(settings: Mapping[str, str]) -> bool:
    try:
        BrokerConfig(settings)
    except ConfigError:
        return False
    return True


def test_contradictions_are_refused_as_by_kafka(tmp_path: Path) -> None:
    cases = list(contradictions())
    with required():
        command = COMMANDS["4.4"](str(CONTRADICTIONS))
    lines = "".join(" ".join(map("=".join, case.items())) + "\n" for case in cases)
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=240, check=True, cwd=tmp_path
    )
    # The output contains Kafka's warnings as well.
    told = [line for line in done.stdout.splitlines() if line in {"accepted", "refused"}]
    theirs = [line == "accepted" for line in told]
    assert len(theirs) == len(cases)
    different = [
        f"{case}: {'accepted' if ours else 'refused'}"
        for case, ours, their in zip(cases, map(is_accepted, cases), theirs, strict=True)
        if ours != their
    ]
    assert not different, f"{len(different)} of {len(cases)}:\n" + "\n".join(different[:40])
    assert 0 < sum(theirs) < len(theirs)
