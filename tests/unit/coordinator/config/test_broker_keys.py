"""Every broker key of Apache Kafka 3.9, 4.3 and 4.4 is accepted, with and without a listener."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fencepost.coordinator.config.broker_config import BrokerConfig, ConfigError, load
from fencepost.coordinator.config.broker_keys import REPLACED
from fencepost.coordinator.daemon.serving import Listeners
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.handlers import Registry
from fencepost.coordinator.metadata.controller_settings import controller_settings
from tests.support.broker_keys import VERSIONS, KafkaKey, file_of_defaults, keys_of
from tests.support.daemon import Daemon
from tests.support.processes import Child
from tests.unit.coordinator.services.coordinators import Services

SAMPLES = {
    "BOOLEAN": "true",
    "CLASS": "x",
    "DOUBLE": "1",
    "INT": "1",
    "LIST": "x",
    "LONG": "1",
    "PASSWORD": "x",
    "SHORT": "1",
    "STRING": "x",
}
"""Type → a value for keys without a default."""

CHOSEN = {
    "password.encoder.keyfactory.algorithm": "PBKDF2WithHmacSHA512",
    "process.roles": "broker",
    "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
    "zookeeper.connection.timeout.ms": "18000",
    "zookeeper.ssl.enabled.protocols": "TLSv1.3",
}

NUMBERS = {"broker.id": "1", "node.id": "1"}
"""In Kafka 3.9 the default -1 requests a generated id; this broker requires node.id."""


def value_of(key: KafkaKey) -> str:
    if key.default is None:
        return CHOSEN.get(key.name, SAMPLES[key.type])
    return key.default


@pytest.mark.parametrize("version", VERSIONS)
def test_every_key_is_accepted_at_its_default(version: str) -> None:
    keys = keys_of(version)
    assert len(keys) > 300
    settings = {key.name: value_of(key) for key in keys.values()}
    for name in settings.keys() & (REPLACED.keys() | NUMBERS.keys()):
        if settings[name] not in NUMBERS.values():
            with pytest.raises(ConfigError) as refused:
                BrokerConfig({name: settings[name]})
            assert "unknown" not in str(refused.value)
            del settings[name]
    BrokerConfig(settings)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("prefix", ["listener.name.inside.", "listener.name.inside.scram-sha-256."])
def test_every_key_is_accepted_for_a_listener(version: str, prefix: str) -> None:
    keys = [key for key in keys_of(version).values() if key.name not in REPLACED]
    config = BrokerConfig({prefix + key.name: value_of(key) for key in keys})
    reasons, effective = dict(config.without_effect()), config.other_keys()
    for key in keys:
        assert prefix + key.name in effective or reasons[prefix + key.name]


def test_plugin_configs_are_ignored_with_a_reason() -> None:
    given = {
        "config.providers.file.class": "org.apache.kafka.common.config.provider.FileConfigProvider",
        "rsm.config.bucket": "b",
        "rlmm.config.remote.log.metadata.topic.replication.factor": "1",
    }
    config = BrokerConfig(given)
    assert dict(config.without_effect()).keys() == given.keys()


def test_zookeeper_configs_without_zookeeper_connect_have_no_effect() -> None:
    settings = {
        "leader.imbalance.per.broker.percentage": "20",
        "zookeeper.session.timeout.ms": "9000",
    }
    reasons = dict(BrokerConfig(settings).without_effect())
    assert reasons.keys() == settings.keys()
    assert all("zookeeper.connect is not set" in reason for reason in reasons.values())
    assert not BrokerConfig({**settings, "zookeeper.connect": "z:2181"}).without_effect()


@pytest.mark.parametrize(
    ("version", "name"), [("3.9", "broker.conf"), ("4.3", "settings"), ("4.4", "broker.toml")]
)
def test_broker_starts_with_all_kafka_configs_at_their_defaults(
    tmp_path: Path, version: str, name: str
) -> None:
    path = tmp_path / name
    path.write_text(file_of_defaults(version, tmp_path))
    daemon = Daemon(tmp_path, {})
    child = daemon.child = Child([*daemon._command, "--config-file", str(path)])
    daemon.wait_until_listening()
    told = re.findall(r'"key": "(\S+)", .*"event": "setting has no effect"', child.tail(100_000))
    daemon.stop()
    assert {"num.io.threads", "log.local.retention.ms"} <= set(told)
    assert ("inter.broker.protocol.version" in told) is (version == "3.9")


def test_misspelled_listener_config_error_suggests_the_nearest_key() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^listener\.name\.x\.ssl\.keystore\.locaton: unknown configuration; "
        r"did you mean listener\.name\.x\.ssl\.keystore\.location\?$",
    ):
        BrokerConfig({"listener.name.x.ssl.keystore.locaton": "secret"})


@pytest.mark.parametrize(("text", "limit_ms"), [("-1", sys.maxsize), ("0", 1), ("5", 5)])
async def test_connections_max_idle_ms_sets_the_idle_limit_and_minus_1_disables_it(
    tmp_path: Path, text: str, limit_ms: int
) -> None:
    services = await Services(tmp_path, {"connections.max.idle.ms": text}).start()
    server = Listeners({}, {}).prepare(services, Registry())
    assert server.limits.max_idle_ms == limit_ms
    await services.stop()


@pytest.mark.parametrize(
    ("settings", "percentage"),
    [({}, None), ({"zookeeper.connect": "z:2181"}, 10), (
        {"zookeeper.connect": "z:2181", "leader.imbalance.per.broker.percentage": "25"}, 25
    )],
)  # fmt: skip
def test_leader_imbalance_percentage_applies_only_with_zookeeper(
    settings: dict[str, str], percentage: int | None
) -> None:
    found = controller_settings(BrokerConfig(settings), node_id=1)
    assert found.leader_imbalance_percentage == percentage


def test_configs_without_effect_can_be_dynamic_as_in_kafka() -> None:
    config = BrokerConfig()
    config.check_dynamic({"num.io.threads": "4", "log.cleaner.backoff.ms": "0"})
    with pytest.raises(InvalidRequestError, match=r"num\.io\.threads: Value must be at least 1"):
        config.check_dynamic({"num.io.threads": "0"})
    with pytest.raises(ConfigError, match=r"^metric\.reporters: it has no effect: there is"):
        config.check_dynamic({"metric.reporters": "x"})
    with pytest.raises(ConfigError, match=r"^num\.io\.thread: unknown .* num\.io\.threads\?$"):
        config.check_dynamic({"num.io.thread": "4"})


def test_duration_units_are_accepted_only_on_the_command_line(tmp_path: Path) -> None:
    pairs = ["log.retention.ms=7d", "log.roll.hours=2d", "offsets.retention.minutes=1h30m"]
    assert list(load(pairs).values()) == ["604800000", "48", "90"]
    assert load(["broker.rack=1h"]) == {"broker.rack": "1h"}
    with pytest.raises(ConfigError, match="not a whole number of hours"):
        load(["log.roll.hours=90m"])
    path = tmp_path / "server.properties"
    path.write_text("log.retention.ms=7d")
    with pytest.raises(ConfigError, match="Not a number of type"):
        BrokerConfig(load([], path))
