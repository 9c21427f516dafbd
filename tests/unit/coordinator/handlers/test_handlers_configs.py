"""Describing and altering configurations, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from tests.support.cluster import GROUP as GROUP_KIND
from tests.support.cluster import Cluster, unique
from tests.support.metadata_changes import set_broker_configs
from tests.support.stalls import watched_loop

TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32


def _describe(client: Cluster, kind: int, name: str, keys=None, version: int = 4, **fields):
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
    answer = client.call("describe_configs", version, resources=[resource], **fields)
    (result,) = answer["results"]
    return result["error_code"], {entry["name"]: entry for entry in result["configs"]}


def _alter(client: Cluster, kind: int, name: str, *changes, validate_only: bool = False):
    entries = [
        {"name": key, "config_operation": operation, "value": value}
        for key, operation, value in changes
    ]
    resource = {"resource_type": kind, "resource_name": name, "configs": entries}
    answer = client.call(
        "incremental_alter_configs", 1, resources=[resource], validate_only=validate_only
    )
    return answer["responses"][0]["error_code"]


SET, DELETE, APPEND, SUBTRACT = range(4)


@pytest.mark.parametrize("version", range(1, 5))
def test_describe_configs_of_a_topic_returns_values_sources_and_synonyms(client, version):
    name = client.create_topic(unique("conf"), 1, {"retention.ms": "77"})
    fields = {"include_documentation": True} if version >= 3 else {}
    code, found = _describe(client, TOPIC, name, None, version, include_synonyms=True, **fields)
    assert code == "none"
    entry = found["retention.ms"]
    assert (entry["value"], entry["config_source"], entry["read_only"]) == ("77", 1, False)
    assert [(synonym["name"], synonym["source"]) for synonym in entry["synonyms"]] == [
        ("retention.ms", 1)
    ]
    assert found["segment.ms"]["value"] == "604800000"
    assert found["max.message.bytes"]["config_source"] == 4
    if version >= 3:
        assert entry["config_type"] == 5
        assert entry["documentation"]
    code, found = _describe(client, TOPIC, name, ["cleanup.policy"], version)
    assert list(found) == ["cleanup.policy"]
    assert found["cleanup.policy"]["synonyms"] == []
    assert _describe(client, TOPIC, unique("none"))[0] == "unknown_topic_or_partition"
    assert _describe(client, TOPIC, "bad name")[0] == "invalid_topic_exception"


def test_describe_configs_of_brokers_groups_and_metrics_returns_their_keys(client):
    code, found = _describe(client, BROKER, "3", include_synonyms=True)
    assert code == "none"
    assert (found["num.partitions"]["value"], found["num.partitions"]["config_source"]) == ("2", 4)
    assert found["num.partitions"]["read_only"]
    assert not found["log.retention.ms"]["read_only"]
    assert [synonym["source"] for synonym in found["num.partitions"]["synonyms"]] == [4, 5]
    assert _describe(client, BROKER, "4")[0] == "invalid_request"
    assert _describe(client, BROKER, "")[0] == "none"
    code, found = _describe(client, GROUP, "g")
    assert (code, len(found)) == ("none", 21)
    kinds = {name.split(".")[0] for name in found}
    assert kinds == {"consumer", "errors", "share", "streams"}
    assert {config["config_source"] for config in found.values()} == {5}
    assert _describe(client, GROUP, "")[0] == "invalid_request"
    code, found = _describe(client, METRICS, "m", include_synonyms=True)
    assert code == "none"
    assert {
        (config["name"], config["value"], config["config_source"], *config["synonyms"])
        for config in found.values()
    } == {("metrics", "", 5), ("interval.ms", "300000", 5), ("match", "", 5)}
    assert _describe(client, 3, "m")[0] == "invalid_request"


def test_group_config_is_validated_and_overrides_the_broker_default(client):
    session, beat = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
    for change, code in (
        ((session, SET, "50000"), "none"),
        ((session, SET, "60000"), "none"),
        ((session, SET, "60001"), "invalid_config"),
        ((session, SET, "45000"), "none"),
        ((session, SET, "44999"), "invalid_config"),
        ((session, SET, "x"), "invalid_config"),
        ((beat, SET, "15000"), "none"),
        ((beat, SET, "15001"), "invalid_config"),
        (("consumer.assignment.interval.ms", SET, "0"), "none"),
        (("no.such.key", SET, "1"), "invalid_config"),
    ):
        assert _alter(client, GROUP, "own", change) == code, change
    _, found = _describe(client, GROUP, "own", include_synonyms=True)
    assert found[session]["value"] == "45000"
    assert [synonym["source"] for synonym in found[beat]["synonyms"]] == [8, 5]
    client.coordinator("own", GROUP_KIND)
    joined = client.call(
        "consumer_group_heartbeat",
        1,
        group_id="own",
        member_id="m",
        member_epoch=0,
        rebalance_timeout=60_000,
        subscribed_topic_names=[],
        topic_partitions=[],
    )
    assert joined["heartbeat_interval"] == 15_000
    assert _alter(client, GROUP, "own", (beat, DELETE, None)) == "none"
    assert _describe(client, GROUP, "own")[1][beat]["value"] == "5000"


def test_topic_configs_have_the_keys_and_sources_of_kafka(client, topic):
    _, found = _describe(client, TOPIC, topic, include_synonyms=True)
    assert len(found) == 37, "all 38 but the internal one"
    entry = found["max.decompressed.message.bytes"]
    assert (entry["value"], entry["config_source"], entry["config_type"]) == ("2147483639", 5, 3)
    synonyms = {
        name: [synonym["name"] for synonym in found[name]["synonyms"]]
        for name in ("max.decompressed.message.bytes", "remote.copy.lag.ms", "local.retention.ms")
    }
    assert synonyms == {
        "max.decompressed.message.bytes": ["max.decompressed.message.bytes"],
        "remote.copy.lag.ms": ["log.remote.copy.lag.ms"],
        "local.retention.ms": ["log.local.retention.ms"],
    }
    for name in ("remote.storage.enable", "errors.deadletterqueue.group.enable"):
        entry = found[name]
        assert (entry["value"], entry["config_source"], entry["synonyms"]) == ("false", 5, [])
    assert _alter(client, TOPIC, topic, ("internal.segment.bytes", SET, "9000")) == "none"
    assert len(_describe(client, TOPIC, topic)[1]) == 38
    for change, code in (
        (("max.decompressed.message.bytes", SET, "0"), "invalid_config"),
        (("max.decompressed.message.bytes", SET, "2147483640"), "invalid_config"),
        (("remote.copy.lag.bytes", SET, "-2"), "invalid_config"),
        (("remote.copy.lag.ms", SET, "-1"), "none"),
        (("remote.storage.enable", SET, "false"), "none"),
        (("remote.storage.enable", SET, "true"), "invalid_config"),
        (("message.format.version", SET, "3.0-IV1"), "invalid_config"),
    ):
        assert _alter(client, TOPIC, topic, change) == code, change


def test_internal_keys_of_a_group_are_described_only_when_set(client):
    internal = "streams.num.warmup.replicas"
    assert internal not in _describe(client, GROUP, "warm")[1]
    for change, code in (
        ((internal, SET, "21"), "invalid_config"),
        ((internal, SET, "20"), "none"),
        (("streams.task.offset.interval.ms", SET, "14999"), "invalid_config"),
        (("streams.task.offset.interval.ms", SET, "15000"), "none"),
        (("streams.assignor.name", SET, "other"), "invalid_config"),
        (("streams.assignor.name", SET, "sticky"), "none"),
        (("streams.rack.aware.assignment.tags", SET, "zone,zone"), "invalid_config"),
        (("streams.rack.aware.assignment.tags", SET, "zone,rack"), "none"),
        (("errors.deadletterqueue.topic.name", SET, "__dlq"), "invalid_config"),
        (("errors.deadletterqueue.topic.name", SET, "dlq.orders"), "none"),
    ):
        assert _alter(client, GROUP, "warm", change) == code, change
    _, found = _describe(client, GROUP, "warm", include_synonyms=True)
    assert len(found) == 23
    assert [
        (entry["name"], entry["value"], entry["source"]) for entry in found[internal]["synonyms"]
    ] == [(internal, "20", 8), ("group.streams.num.warmup.replicas", "2", 5)]
    _, other = _describe(client, GROUP, "cold", include_synonyms=True)
    (synonym,) = other["streams.assignor.name"]["synonyms"]
    assert (synonym["name"], synonym["value"]) == ("group.streams.assignors", "sticky")


def test_client_metrics_subscriptions_are_kept_and_listed(client):
    name = unique("metrics")
    for change, code in (
        (("interval.ms", SET, "99"), "invalid_request"),
        (("interval.ms", SET, "3600001"), "invalid_request"),
        (("interval.ms", SET, "x"), "invalid_config"),
        (("interval.ms", SET, "100"), "none"),
        (("match", SET, "client_id"), "invalid_config"),
        (("match", SET, "client=a"), "invalid_config"),
        (("match", SET, "client_id=("), "invalid_config"),
        (("match", SET, "client_id=a.*, client_source_port=9"), "none"),
        (("metrics", APPEND, "org.apache.kafka."), "none"),
        (("no.such.key", SET, "1"), "invalid_request"),
    ):
        assert _alter(client, METRICS, name, change) == code, change
    _, found = _describe(client, METRICS, name, include_synonyms=True)
    entry = found["interval.ms"]
    assert (entry["value"], entry["config_source"]) == ("100", 7)
    assert [(synonym["name"], synonym["source"]) for synonym in entry["synonyms"]] == [
        ("interval.ms", 7)
    ]
    assert found["match"]["value"] == "client_id=a.*,client_source_port=9"
    assert name in {
        resource["resource_name"]
        for resource in client.call("list_config_resources", 0)["config_resources"]
    }
    removed = [(key, DELETE, None) for key in found]
    assert _alter(client, METRICS, name, *removed) == "none"
    assert _alter(client, METRICS, "", ("interval.ms", SET, "100")) == "invalid_request"


@pytest.mark.parametrize(
    "expression",
    ["(?i)" + "[\u0100-\uffff]" * 1_000, "a|" * 16_000, "(?i)" + "a*" * 16_000],
    ids=["ranges", "alternatives", "repetitions"],
)
def test_long_expressions_of_client_metrics_do_not_block_the_loop(client, expression):
    with watched_loop() as watch:
        code = _alter(client, METRICS, unique("metrics"), ("match", SET, f"client_id={expression}"))
    assert code == "none"
    watch.check()


def test_incremental_alter_configs_sets_appends_subtracts_and_deletes(client, topic):
    def values() -> dict[str, str]:
        return {
            name: entry["value"]
            for name, entry in _describe(client, TOPIC, topic)[1].items()
            if entry["config_source"] == 1
        }

    assert _alter(client, TOPIC, topic, ("retention.ms", SET, "5")) == "none"
    assert _alter(client, TOPIC, topic, ("cleanup.policy", APPEND, "compact")) == "none"
    assert values() == {"retention.ms": "5", "cleanup.policy": "delete,compact"}
    assert _alter(client, TOPIC, topic, ("cleanup.policy", APPEND, "delete")) == "none"
    assert _alter(client, TOPIC, topic, ("cleanup.policy", SUBTRACT, "delete,x")) == "none"
    assert values() == {"retention.ms": "5", "cleanup.policy": "compact"}
    assert _alter(client, TOPIC, topic, ("retention.ms", SET, "6"), validate_only=True) == "none"
    assert _alter(client, TOPIC, topic, ("retention.ms", DELETE, None)) == "none"
    assert values() == {"cleanup.policy": "compact"}
    for change, code in (
        (("no.such", SET, "1"), "invalid_config"),
        (("retention.ms", SET, "x"), "invalid_config"),
        (("retention.ms", APPEND, "1"), "invalid_config"),
        (("retention.ms", SET, None), "invalid_request"),
        (("retention.ms", 7, "1"), "invalid_request"),
    ):
        assert _alter(client, TOPIC, topic, change) == code
    twice = ("retention.ms", SET, "1")
    assert _alter(client, TOPIC, topic, twice, twice) == "invalid_request"
    assert _alter(client, TOPIC, unique("none"), twice) == "unknown_topic_or_partition"
    assert values() == {"cleanup.policy": "compact"}


@pytest.mark.parametrize("version", range(3))
def test_alter_configs_resets_configs_that_the_request_omits(client, topic, version):
    def replace(configs: dict[str, str | None], **fields):
        entries = [{"name": name, "value": value} for name, value in configs.items()]
        resource = {"resource_type": TOPIC, "resource_name": topic, "configs": entries}
        answer = client.call("alter_configs", version, resources=[resource], **fields)
        return answer["responses"][0]["error_code"]

    def value(name: str) -> str:
        return _describe(client, TOPIC, topic)[1][name]["value"]

    assert replace({"retention.ms": "5", "segment.ms": "6"}) == "none"
    assert replace({"segment.ms": "7"}, validate_only=True) == "none"
    assert (value("retention.ms"), value("segment.ms")) == ("5", "6")
    assert replace({"segment.ms": "7"}) == "none"
    assert (value("retention.ms"), value("segment.ms")) == ("604800000", "7")
    assert replace({"segment.ms": None}) == "invalid_request"
    assert replace({"no.such": "1"}) == "invalid_config"


def test_dynamic_broker_config_applies_to_topics_and_survives_a_restart(tmp_path):
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        client.create_topic("a")
        assert _alter(client, BROKER, "", ("message.max.bytes", SET, "200")) == "none"
        assert _alter(client, BROKER, "1", ("message.max.bytes", SET, "100")) == "none"
        assert client.produce("a", [b"x" * 100])["error_code"] == "message_too_large"
        _, found = _describe(client, TOPIC, "a", include_synonyms=True)
        synonyms = found["max.message.bytes"]["synonyms"]
        assert [(synonym["value"], synonym["source"]) for synonym in synonyms] == [
            ("100", 2), ("200", 3), ("1048588", 5),
        ]  # fmt: skip
        assert _alter(client, BROKER, "1", ("num.partitions", SET, "4")) == "invalid_request"
        assert _alter(client, BROKER, "2", ("message.max.bytes", SET, "4")) == "invalid_request"
        assert _alter(client, BROKER, "1", ("message.max.bytes", SET, "x")) == "invalid_request"
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        assert client.produce("a", [b"x" * 100])["error_code"] == "message_too_large"
        assert _alter(client, BROKER, "1", ("message.max.bytes", DELETE, None)) == "none"
        assert _alter(client, BROKER, "", ("message.max.bytes", DELETE, None)) == "none"
        assert client.produce("a", [b"x" * 100])["error_code"] == "none"
        assert _describe(client, BROKER, "") == ("none", {})


def test_config_key_unknown_to_the_broker_is_described_without_its_value(tmp_path):
    """Apache Kafka's controllers accept any key in the cluster-wide defaults."""

    broker = Broker(tmp_path)

    async def keep() -> None:
        set_broker_configs(broker.services.metadata, "", {"no.such.key": "7"})

    with BrokerThread(lambda: broker) as thread, Cluster(thread.bootstrap) as client:
        thread.call(keep)
        for name in ("", "1"):
            code, found = _describe(client, BROKER, name, ["no.such.key"], include_synonyms=True)
            assert code == "none"
            assert found == {
                "no.such.key": {
                    "name": "no.such.key",
                    "value": None,
                    "read_only": True,
                    "config_source": 3,
                    "is_sensitive": True,
                    "synonyms": [{"name": "no.such.key", "value": None, "source": 3}],
                    "config_type": 0,
                    "documentation": None,
                }
            }


def test_append_to_an_unset_topic_list_config_uses_the_default_of_the_key(tmp_path):
    """As in Apache Kafka, which appends to the default, not to the broker's setting."""
    config = {"log.cleanup.policy": "compact"}
    with (
        Broker.in_thread(tmp_path, config=config) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        client.create_topic("a")
        assert _describe(client, TOPIC, "a")[1]["cleanup.policy"]["value"] == "compact"
        assert _alter(client, TOPIC, "a", ("cleanup.policy", APPEND, "compact")) == "none"
        found = _describe(client, TOPIC, "a")[1]["cleanup.policy"]["value"]
        assert found == "delete,compact"


def test_logger_level_is_altered_and_invalid_values_are_refused(client):
    _, found = _describe(client, LOGGER, "3")
    before = found["root"]["value"]
    assert found["root"]["config_source"] == 6
    assert _alter(client, LOGGER, "3", ("root", SET, "ERROR")) == "none"
    assert _describe(client, LOGGER, "3")[1]["root"]["value"] == "ERROR"
    assert _alter(client, LOGGER, "3", ("root", SET, before)) == "none"
    assert _alter(client, LOGGER, "3", ("root", SET, "LOUD")) == "invalid_config"
    assert _alter(client, LOGGER, "3", ("kafka", SET, "INFO")) == "invalid_config"
    assert _alter(client, GROUP, "g", ("consumer.session.timeout.ms", SET, "1")) == "invalid_config"


def test_config_resource_named_twice_is_refused(client, topic):
    resource = {"resource_type": TOPIC, "resource_name": topic, "configs": []}
    for api, version in (("alter_configs", 2), ("incremental_alter_configs", 1)):
        answer = client.call(api, version, resources=[resource, resource])
        codes = [response["error_code"] for response in answer["responses"]]
        assert codes == ["invalid_request", "invalid_request"]


def test_deletion_of_an_unknown_topic_config_with_a_value_succeeds(client):
    """Java's tools send an empty value with a deletion."""
    name = client.create_topic(unique("d"), 1, {"retention.ms": "77"})
    changes = [("retention.ms", SET, "1000"), ("no.such.key", DELETE, "")]
    assert _alter(client, TOPIC, name, *changes) == "none"
    assert _describe(client, TOPIC, name)[1]["retention.ms"]["value"] == "1000"


def test_min_insync_replicas_on_a_single_node_is_accepted(client):
    name = client.create_topic(unique("i"), 1, {"min.insync.replicas": "2"})
    assert _describe(client, TOPIC, name)[1]["min.insync.replicas"]["value"] == "2"
