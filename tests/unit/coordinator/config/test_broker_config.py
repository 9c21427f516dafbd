from __future__ import annotations

import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fencepost.cluster.image import BROKER_RESOURCE
from fencepost.coordinator.config.broker_config import (
    BROKER_KEYS,
    TOPIC_KEYS,
    BrokerConfig,
    ConfigError,
    ConfigSource,
    ConfigType,
    check_topic_configs,
    load,
    log_config,
)
from fencepost.coordinator.config.group_keys import GROUP_OWN_KEYS
from fencepost.coordinator.config.key import MAX_VALUE_CHARACTERS, text_of
from fencepost.coordinator.config.security_keys import OF_LISTENERS
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.metadata.config_checks import check_configs
from fencepost.logcore.config import LogConfig

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("key", [*BROKER_KEYS.values(), *TOPIC_KEYS.values()], ids=lambda k: k.name)
def test_every_config_default_is_valid_for_its_key(key):
    if key.default is not None:
        assert text_of(key.parse(key.default)) is not None


def test_every_broker_config_is_used_or_marked_as_inert():
    sources = "".join(
        path.read_text()
        for path in (ROOT / "coordinator").rglob("*.py")
        if path.name not in {"broker_keys.py", "topic_keys.py", "security_keys.py"}
    )
    behind_topics = {synonym.name for key in TOPIC_KEYS.values() for synonym in key.synonyms}
    # The broker looks up sizes of coordinators' topics and bounds of group settings by prefix.
    by_prefix = {
        f"{prefix}.{name}"
        for prefixes, names in (
            (
                ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"),
                ("num.partitions", "segment.bytes", "replication.factor", "min.isr"),
            ),
            (
                [f"group.{kind}.{end}" for kind in ("consumer", "share") for end in ("min", "max")],
                ("session.timeout.ms", "heartbeat.interval.ms", "assignment.interval.ms"),
            ),
            (
                ("group.share", "group.share.min", "group.share.max"),
                ("delivery.count.limit", "partition.max.record.locks", "record.lock.duration.ms"),
            ),
        )
        for prefix in prefixes
        for name in names
    }
    unused = [
        name
        for name, key in BROKER_KEYS.items()
        if not key.inert and name not in behind_topics | by_prefix and f'"{name}"' not in sources
    ]
    assert unused == []


def test_every_topic_config_is_a_log_config_field_or_marked_as_inert():
    fields = set(LogConfig.__dataclass_fields__)
    for name, key in TOPIC_KEYS.items():
        elsewhere = name in {
            "errors.deadletterqueue.group.enable",
            "internal.segment.bytes",
            "min.insync.replicas",
            "unclean.leader.election.enable",
        }
        elsewhere = elsewhere or name.endswith(".throttled.replicas")
        assert name.replace(".", "_") in fields or key.inert or elsewhere


def test_log_config_of_an_empty_broker_config_has_the_default_values():
    assert log_config(BrokerConfig(), {}) == LogConfig()


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        ({"no.such.key": "1"}, "no.such.key", "unknown"),
        ({"log.dirs": "/x"}, "log.dirs", "--data-dir"),
        ({"num.partitions": "0"}, "num.partitions", "at least 1"),
        ({"num.partitions": "many"}, "num.partitions", "number"),
        ({"num.partitions": "2147483648"}, "num.partitions", "Not a number of type INT"),
        ({"auto.create.topics.enable": "yes"}, "auto.create.topics.enable", "true or false"),
        ({"log.cleanup.policy": "delete,burn"}, "log.cleanup.policy", "delete, compact"),
        ({"log.segment.bytes": "1048575"}, "log.segment.bytes", "at least 1048576"),
        ({"compression.gzip.level": "10"}, "compression.gzip.level", "9"),
        ({"broker.rack": "x" * (MAX_VALUE_CHARACTERS + 1)}, "broker.rack", "longer"),
        (
            {"group.min.session.timeout.ms": "10", "group.max.session.timeout.ms": "9"},
            "group.min.session.timeout.ms",
            "above group.max.session.timeout.ms",
        ),
        (
            {"group.consumer.session.timeout.ms": "44999"},
            "group.consumer.min.session.timeout.ms",
            "above group.consumer.session.timeout.ms",
        ),
        (
            {"group.consumer.session.timeout.ms": "60001"},
            "group.consumer.session.timeout.ms",
            "above group.consumer.max.session.timeout.ms",
        ),
        (
            {
                "group.consumer.min.session.timeout.ms": "60001",
                "group.consumer.session.timeout.ms": "60001",
            },
            "group.consumer.min.session.timeout.ms",
            "above group.consumer.max.session.timeout.ms",
        ),
        (
            {"group.consumer.heartbeat.interval.ms": "4999"},
            "group.consumer.min.heartbeat.interval.ms",
            "above group.consumer.heartbeat.interval.ms",
        ),
        (
            {"group.consumer.heartbeat.interval.ms": "15001"},
            "group.consumer.heartbeat.interval.ms",
            "above group.consumer.max.heartbeat.interval.ms",
        ),
        (
            {
                "group.consumer.min.session.timeout.ms": "5000",
                "group.consumer.session.timeout.ms": "5000",
            },
            "group.consumer.heartbeat.interval.ms",
            "below group.consumer.session.timeout.ms",
        ),
        (
            {
                "group.streams.min.session.timeout.ms": "5000",
                "group.streams.session.timeout.ms": "5000",
            },
            "group.streams.heartbeat.interval.ms",
            "below group.streams.session.timeout.ms",
        ),
        ({"group.share.assignors": "simple,other"}, "group.share.assignors", "one assignor"),
        ({"group.share.assignors": ""}, "group.share.assignors", "one assignor"),
    ],
)
def test_invalid_config_error_names_the_key_and_the_reason(settings, key, reason):
    with pytest.raises(ConfigError) as refused:
        BrokerConfig(settings)
    assert refused.value.key == key
    assert key in str(refused.value)
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "contradiction",
    [
        "share.heartbeat.interval.ms=15001 > share.max.heartbeat.interval.ms=15000",
        "share.min.assignment.interval.ms=1001 > share.assignment.interval.ms=1000",
        "share.min.delivery.count.limit=5 > share.delivery.count.limit=4",
        "share.partition.max.record.locks=4001 > share.max.partition.max.record.locks=4000",
        "share.record.lock.duration.ms=60001 > share.max.record.lock.duration.ms=60000",
        "share.max.size=1000 > share.max.share.sessions=999",
        "streams.session.timeout.ms=60001 > streams.max.session.timeout.ms=60000",
        "streams.num.standby.replicas=3 > streams.max.standby.replicas=2",
        "streams.min.task.offset.interval.ms=2 > streams.task.offset.interval.ms=1",
        "streams.num.warmup.replicas=2 > streams.max.warmup.replicas=1",
    ],
)
def test_contradicting_bounds_of_share_and_streams_groups_are_refused(contradiction):
    settings = dict(f"group.{bound}".split("=") for bound in contradiction.split(" > "))
    low, high = settings
    with pytest.raises(ConfigError, match=re.escape(f"above {high} ({settings[high]})")) as refused:
        BrokerConfig(settings)
    assert refused.value.key == low
    BrokerConfig({**settings, low: settings[high]})


@pytest.mark.parametrize("bytes_", ["1048576", "2147483647"])
def test_config_value_at_its_bound_is_accepted(bytes_):
    assert BrokerConfig({"log.segment.bytes": bytes_}).int("log.segment.bytes") == int(bytes_)


@pytest.mark.parametrize(
    ("session", "beat"), [("45000", "5000"), ("60000", "15000"), ("45000", "15000")]
)
def test_consumer_group_timeouts_at_their_bounds_are_accepted(session, beat):
    config = BrokerConfig(
        {
            "group.consumer.session.timeout.ms": session,
            "group.consumer.heartbeat.interval.ms": beat,
        }
    )
    assert config.int("group.consumer.session.timeout.ms") == int(session)


def test_typed_config_access_returns_the_value_or_raises_a_type_error():
    config = BrokerConfig({"broker.rack": " r1 ", "num.partitions": " 3 "})
    assert config.int("num.partitions") == 3
    assert config.text("broker.rack") == "r1"
    assert config.text("advertised.listeners") is None
    assert config.bool("delete.topic.enable") is True
    assert config.get("log.cleanup.policy") == ("delete",)
    for access, name in (
        (config.int, "delete.topic.enable"),
        (config.int, "log.retention.ms"),
        (config.bool, "num.partitions"),
        (config.text, "num.partitions"),
    ):
        with pytest.raises(TypeError, match=name):
            access(name)
    with pytest.raises(KeyError):
        config.get("no.such.key")


def test_topic_config_key_in_the_broker_config_sets_the_broker_default():
    config = BrokerConfig({"flush.messages": "1"})
    assert log_config(config, {}).flush_messages == 1
    assert config.int("log.flush.interval.messages") == 1


@pytest.mark.parametrize(
    ("settings", "retention_ms"),
    [
        ({}, 168 * 3_600_000),
        ({"log.retention.hours": "2"}, 7_200_000),
        ({"log.retention.hours": "2", "log.retention.minutes": "3"}, 180_000),
        ({"log.retention.minutes": "3", "log.retention.ms": "4"}, 4),
        ({"log.retention.hours": "-1"}, -1),
    ],
)
def test_finest_retention_unit_takes_precedence(settings, retention_ms):
    assert log_config(BrokerConfig(settings), {}).retention_ms == retention_ms


def test_topic_config_overrides_the_broker_config():
    config = BrokerConfig({"log.retention.ms": "5", "log.segment.bytes": "2000000"})
    overrides = {"retention.ms": "6", "internal.segment.bytes": "100"}
    assert log_config(config, overrides).retention_ms == 6
    assert log_config(config, overrides).segment_bytes == 100
    sources = [setting.source for setting in config.topic_settings("retention.ms", overrides)]
    # The last row is the default of log.retention.hours, a synonym of log.retention.ms.
    assert sources == [ConfigSource.TOPIC, ConfigSource.STATIC_BROKER, ConfigSource.DEFAULT]
    hours = BrokerConfig({"log.retention.hours": "2"})
    assert hours.topic_settings("retention.ms", {}) == []


def test_broker_key_is_followed_by_its_synonyms_in_other_units():
    config = BrokerConfig({"log.retention.ms": "5", "log.retention.hours": "2"})
    config.set_dynamic(ConfigSource.DYNAMIC_DEFAULT_BROKER, {"log.retention.minutes": "3"})
    minutes = ("log.retention.minutes", "3", ConfigSource.DYNAMIC_DEFAULT_BROKER)
    ms = ("log.retention.ms", "5", ConfigSource.STATIC_BROKER)
    hours = ("log.retention.hours", "2", ConfigSource.STATIC_BROKER)
    default = ("log.retention.hours", "168", ConfigSource.DEFAULT)
    # Values of other keys with a higher precedence are not shown.
    assert config.synonyms("log.retention.ms") == [ms, hours, default]
    assert config.synonyms("log.retention.minutes") == [minutes, ms, hours, default]
    assert config.synonyms("log.retention.hours") == [hours, default]
    assert BrokerConfig().synonyms("log.retention.ms") == []
    interval, scheduler = "log.flush.interval.ms", "log.flush.scheduler.interval.ms"
    flush = BrokerConfig({interval: "7", scheduler: "8"})
    assert [synonym.name for synonym in flush.synonyms(interval)] == [
        interval,
        scheduler,
        scheduler,
    ]
    assert [synonym.name for synonym in flush.synonyms(scheduler)] == [scheduler, scheduler]


def test_synonyms_of_a_listener_key_end_with_the_key_of_all_listeners():
    name, base = "listener.name.in.ssl.keystore.location", "ssl.keystore.location"
    config = BrokerConfig({name: "/own", base: "/all"})
    assert [(synonym.name, synonym.text) for synonym in config.synonyms(name)] == [
        (name, "/own"),
        (base, "/all"),
    ]
    assert [synonym.name for synonym in config.synonyms(base)] == [base]


def test_repeated_item_of_a_list_config_counts_once():
    key = BROKER_KEYS["log.cleanup.policy"]
    assert key.parse("compact, compact") == ("compact",)
    assert key.parse("delete,compact,delete") == ("delete", "compact")
    found = log_config(BrokerConfig(), {"cleanup.policy": "compact,compact"})
    assert found.cleanup_policy == {"compact"}


def test_invalid_topic_configs_are_refused():
    config = BrokerConfig()
    for overrides in (
        {"no.such": "1"},
        {"retention.ms": "-2"},
        {"min.compaction.lag.ms": "2", "max.compaction.lag.ms": "1"},
        {"log.retention.ms": "1"},
    ):
        with pytest.raises(ConfigError):
            check_topic_configs(config, overrides)
    assert log_config(config, {"cleanup.policy": ""}).cleanup_policy == frozenset()


def test_dynamic_config_overrides_static_config_and_notifies_listeners():
    config = BrokerConfig({"message.max.bytes": "10"})
    heard = []
    config.listen(lambda: heard.append(config.int("message.max.bytes")))
    config.set_dynamic(ConfigSource.DYNAMIC_DEFAULT_BROKER, {"message.max.bytes": "20"})
    config.set_dynamic(ConfigSource.DYNAMIC_BROKER, {"message.max.bytes": "30"})
    config.set_dynamic(ConfigSource.DYNAMIC_BROKER, {})
    config.set_dynamic(ConfigSource.DYNAMIC_DEFAULT_BROKER, {})
    assert heard == [20, 30, 20, 10]


def test_invalid_dynamic_config_value_is_ignored_and_logged():
    config = BrokerConfig({"message.max.bytes": "10"})
    of_listener = "listener.name.plaintext.max.connections"
    kept = {"message.max.bytes": "much", of_listener: "abc", "log.retention.ms": "5"}
    with capture_logs() as told:
        config.set_dynamic(ConfigSource.DYNAMIC_BROKER, kept)
    assert (config.int("message.max.bytes"), config.int("log.retention.ms")) == (10, 5)
    assert not config.is_set_on_listener("PLAINTEXT", "max.connections")
    assert [entry["log_level"] for entry in told] == ["error", "error"]
    assert [entry["key"] for entry in told] == ["message.max.bytes", of_listener]


def test_invalid_dynamic_listener_config_is_ignored_and_logged():
    config, key = BrokerConfig({"max.connections": "10"}), "listener.name.in.max.connections"
    with capture_logs() as told:
        config.set_dynamic(ConfigSource.DYNAMIC_BROKER, {key: "many", "no.such.key": "1"})
    assert config.on_listener("IN", "max.connections") == 10
    assert config.dynamic(ConfigSource.DYNAMIC_BROKER) == {"no.such.key": "1"}
    assert [line["key"] for line in told] == [key]


def test_existing_invalid_config_does_not_prevent_changing_another():
    config, kept = BrokerConfig(), {"no.such.key": "1", "num.partitions": "3"}
    check_configs(config, BROKER_RESOURCE, "", {**kept, "log.retention.ms": "5"}, kept)
    with pytest.raises(ConfigError, match=r"no\.such\.key"):
        check_configs(config, BROKER_RESOURCE, "", {**kept, "no.such.key": "2"}, kept)


def test_only_updatable_keys_can_be_dynamic():
    config = BrokerConfig()
    config.check_dynamic({"log.retention.ms": "1"})
    with pytest.raises(InvalidRequestError, match=r"num\.partitions"):
        config.check_dynamic({"num.partitions": "2"})
    with pytest.raises(ConfigError):
        config.check_dynamic({"no.such.key": "2"})
    with pytest.raises(InvalidRequestError, match=r"Invalid value x for .* log\.retention\.ms"):
        config.check_dynamic({"log.retention.ms": "x"})


CODE_AND_FILES = re.compile(
    r"class|jaas|url|handler|provider|module|reporter|plugin|assignor|listeners|path|\bdirs?\b"
    r"|location"
)
"""A pattern of the names of settings whose values are code, addresses or files."""

CERTIFICATES = {"ssl.keystore.location", "ssl.truststore.location"}


def test_updatable_configs_name_no_code_address_or_file_except_certificates():
    """CVE-2023-25194, CVE-2025-27818 and CVE-2025-27819 exploit such settings."""
    keys = {**BROKER_KEYS, **OF_LISTENERS, **TOPIC_KEYS, **GROUP_OWN_KEYS}
    found = {
        name
        for name, key in keys.items()
        if key.updatable and not key.inert and CODE_AND_FILES.search(name)
    }
    assert found <= CERTIFICATES


@pytest.mark.parametrize(
    "name",
    [
        "sasl.jaas.config",
        "listener.name.in.sasl.jaas.config",
        "listener.name.in.plain.sasl.jaas.config",
        "listener.name.in.scram-sha-256.sasl.jaas.config",
        "listener.name.in.oauthbearer.sasl.oauthbearer.jwks.endpoint.url",
        "listener.name.in.oauthbearer.sasl.server.callback.handler.class",
        "listener.name.in.sasl.enabled.mechanisms",
        "listener.name.in.ssl.client.auth",
        "listener.name.in.ssl.principal.mapping.rules",
        "listener.name.in.ssl.engine.factory.class",
        "ssl.keystore.location",
        "listeners",
        "listener.security.protocol.map",
        "authorizer.class.name",
        "super.users",
        "allow.everyone.if.no.acl.found",
        "metric.reporters",
        "log.dirs",
        "config.providers",
        "principal.builder.class",
    ],
)
def test_security_config_cannot_be_changed_dynamically(name):
    config = BrokerConfig()
    with pytest.raises((ConfigError, InvalidRequestError)) as refused:
        config.check_dynamic({name: "com.sun.security.auth.module.JndiLoginModule required;"})
    if "jaas" in name:  # may hold passwords
        assert "Jndi" not in str(refused.value)


def test_configs_without_effect_are_listed():
    config = BrokerConfig({"num.io.threads": "16", "num.partitions": "2"})
    assert [name for name, _ in config.without_effect()] == ["num.io.threads"]


def test_config_file_and_command_line_pairs_are_merged(tmp_path):
    path = tmp_path / "broker.toml"
    path.write_text(
        "num.partitions = 3\n"
        "auto.create.topics.enable = false\n"
        '"max.connections" = 7\n'
        '"max.connections.per.ip" = 5\n'
        '"log.cleanup.policy" = ["delete", "compact"]\n'
        "[group]\n"
        "max.size = 9\n"
    )
    assert load(["num.partitions=4", "broker.rack=a=b"], path) == {
        "num.partitions": "4",
        "auto.create.topics.enable": "false",
        "max.connections": "7",
        "max.connections.per.ip": "5",
        "log.cleanup.policy": "delete,compact",
        "group.max.size": "9",
        "broker.rack": "a=b",
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('x = "', "cannot be read: .*; it is read as TOML because of its quotes"),
        ('a = "1"\na.b = "2"', "must be in quotes"),
        ("[group]\nmax.size = ", "it is read as TOML"),
        ("a.b = 2020-01-01", "expected text"),
        ("a.b = [1, 2]", "expected text"),
        ("# " + "x" * (1 << 20), "longer"),
    ],
)
def test_invalid_config_file_is_refused(tmp_path, text, reason):
    path = tmp_path / "broker.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load([], path)


@pytest.mark.parametrize("name", ["server.properties", "broker.conf", "broker", "broker.toml"])
@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("log.dirs=/a\nnum.partitions=3\n", {"log.dirs": "/a", "num.partitions": "3"}),
        ("max.connections=1\nmax.connections.per.ip=2", {"max.connections": "1"}),
        ("a=1\na=2", {"a": "2"}),
        ("broker.rack=\xfc", {"broker.rack": "ü"}),
        ("! comment\nlisteners = A://h:1,\\\n  B://h:2", {"listeners": "A://h:1,B://h:2"}),
        ("x = ", {"x": ""}),
        ('broker.rack = "a"\n[log]\nroll.hours = 2', {"broker.rack": "a", "log.roll.hours": "2"}),
        ("auto.create.topics.enable = false", {"auto.create.topics.enable": "false"}),
    ],
)
def test_config_file_format_is_detected_from_its_content(tmp_path, name, text, settings):
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    assert settings.items() <= load([], path).items()


def test_invalid_pair_or_missing_config_file_is_refused(tmp_path):
    for pair in ("num.partitions", "=3", ""):
        with pytest.raises(ConfigError, match="KEY=VALUE"):
            load([pair])
    with pytest.raises(ConfigError, match="cannot be read"):
        load([], tmp_path / "none.toml")


def test_config_types_have_kafkas_numbers():
    assert [kind.value for kind in ConfigType] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
