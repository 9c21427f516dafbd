"""Changes by ``fencepost topics``, ``configs`` and ``cluster``, on any Kafka broker.

Each command first shows its change, and makes the change only with ``--execute``.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from fencepost.cli import main
from tests.support.cluster import EARLIEST, Cluster, unique
from tests.support.waits import until

SHOWN = "nothing was changed; --execute makes the change"


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return cluster.create_topic(unique("changes"), 2)


def run(bootstrap: str, *arguments: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, [*arguments, "--bootstrap", bootstrap])
    assert done.exit_code == status, (arguments, done.output, done.exception)
    return done


def rows(bootstrap: str, *arguments: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(
        run(bootstrap, *arguments, "--format", "json").stdout
    )
    return found


def test_topic_is_deleted_only_with_execute(cluster, bootstrap, topic):
    cluster.produce(topic, [b"a", b"b"])
    asked = run(bootstrap, "topics", "delete", topic)
    assert asked.stdout == f"would delete {topic} (2 partitions, 2 offsets)\n"
    assert SHOWN in asked.stderr
    assert cluster.offset(topic) == 2
    assert "--dry-run" in run(bootstrap, "topics", "delete", topic, "--dry-run").stderr
    run(bootstrap, "topics", "delete", topic, "--dry-run", "--execute", status=2)
    assert "there is no topic 'no'" in run(bootstrap, "topics", "delete", "no", status=1).stderr
    assert run(bootstrap, "topics", "delete", topic, "--execute").stdout == f"deleted {topic}\n"
    run(bootstrap, "topics", "describe", topic, status=1)
    again = cluster.create_topic(unique("changes"))
    old = run(bootstrap, "topics", "delete", again, "--yes")
    assert (old.stdout, "--execute" in old.stderr) == (f"deleted {again}\n", True)


def test_add_partitions_grows_topic_only_with_execute(cluster, bootstrap, topic):
    grow = ("topics", "add-partitions", topic, "--to")
    assert f"would grow {topic} from 2 to 3" in run(bootstrap, *grow, "3").stdout
    assert "INVALID_PARTITIONS" in run(bootstrap, *grow, "2", status=1).stderr
    assert cluster.leaders(topic) == 2
    assert (
        run(bootstrap, *grow, "3", "--execute").stdout == f"grew {topic} from 2 to 3 partitions\n"
    )
    until(lambda: cluster.leaders(topic) == 3, "the third partition")


def test_topics_trim_deletes_records_up_to_an_offset_or_time(cluster, bootstrap, topic):
    for index, count in ((0, 5), (1, 3)):
        cluster.produce(topic, [b""] * count, partition=index)

    def first() -> list[int]:
        return [cluster.offset(topic, index, EARLIEST) for index in (0, 1)]

    plan = rows(bootstrap, "topics", "trim", topic, "--to-offset", "4")
    assert [(row["first"], row["new_first"], row["going"]) for row in plan] == [
        (0, 4, 4),
        (0, 3, 3),
    ]
    assert "1 has 0 to 3, so 3 is taken for 4" in (
        run(bootstrap, "topics", "trim", topic, "--to-offset", "4").stderr
    )
    assert first() == [0, 0]
    rows(bootstrap, "topics", "trim", f"{topic}:0", "--to-offset", "2", "--execute")
    assert first() == [2, 0]
    rows(bootstrap, "topics", "trim", topic, "--to-datetime", "1970-01-01", "--execute")
    assert first() == [2, 0]
    rows(bootstrap, "topics", "trim", topic, "--to-latest", "--execute")
    assert first() == [5, 3]
    run(bootstrap, "topics", "trim", topic, "--to-latest", "--to-offset", "1", status=2)
    assert "partition 7" in (
        run(bootstrap, "topics", "trim", f"{topic}:7", "--to-latest", status=1).stderr
    )


def setting(bootstrap: str, kind: str, name: str, key: str) -> tuple[object, object]:
    (row,) = rows(bootstrap, "configs", "get", kind, name, key)
    return row["value"], row["source"]


def test_topic_configs_are_set_and_unset_only_with_execute(bootstrap, topic):
    key = "retention.ms"
    default, _ = setting(bootstrap, "topic", topic, key)
    (row,) = rows(bootstrap, "configs", "set", "topic", topic, f"{key}=12345")
    assert (row["value"], row["new"]) == (default, "12345")
    assert setting(bootstrap, "topic", topic, key)[0] == default
    run(bootstrap, "configs", "set", "topic", topic, f"{key}=12345", "--execute")
    assert setting(bootstrap, "topic", topic, key) == ("12345", "topic")
    changed = rows(bootstrap, "configs", "list", "topic", topic, "--changed")
    assert key in {row["key"] for row in changed}
    assert "default" not in {row["source"] for row in changed}
    (row,) = rows(bootstrap, "topics", "alter", topic, "--unset", key, "--execute")
    assert (row["value"], row["new"]) == ("12345", default)
    run(bootstrap, "topics", "alter", topic, "--config", "retention.ms=7", "--execute")
    run(bootstrap, "configs", "unset", "topic", topic, key, "--execute")
    assert setting(bootstrap, "topic", topic, key)[0] == default


def test_topics_describe_header_shows_the_topics_own_configs(cluster, bootstrap, topic):
    run(bootstrap, "configs", "set", "topic", topic, "retention.ms=7", "--execute")
    head, columns, *lines = run(bootstrap, "topics", "describe", topic, topic).stdout.splitlines()
    assert head == f"{topic}: 2 partitions, id {cluster.topic_id(topic)}, retention.ms=7"
    assert columns.split()[:3] == ["TOPIC", "PARTITION", "LEADER"]
    assert len(lines) == 2


def test_invalid_configs_command_fails_with_a_reason(bootstrap, topic):
    for asked, status, says in (
        (("set", "topic", topic, "retention.mss=1"), 1, "did you mean retention.ms?"),
        (("get", "topic", topic, "cleanup.polcy"), 1, "did you mean cleanup.policy?"),
        (("unset", "topic", topic, "qqq"), 1, "has no setting 'qqq'\n"),
        (("set", "topic", topic, "retention.ms=soon"), 1, "INVALID_CONFIG"),
        (("set", "topic", topic, "retention.ms"), 2, "KEY=VALUE"),
        (("set", "topic", unique("none"), "retention.ms=1"), 1, "there is no topic"),
        (("list", "broker", "77"), 1, "there is no broker '77'"),
        (("list", "client", "77"), 2, "topic"),
    ):
        assert says in run(bootstrap, "configs", *asked, status=status).stderr, asked
    run(bootstrap, "topics", "alter", topic, status=2)


def test_broker_and_group_configs_are_set_and_unset(bootstrap, cluster):
    node = str(
        rows(bootstrap, "topics", "describe", cluster.create_topic(unique("n")))[0]["leader"]
    )
    key = "log.cleaner.backoff.ms"
    assert setting(bootstrap, "broker", node, key)[1] in {"default", "file"}
    key, before = "message.max.bytes", setting(bootstrap, "broker", node, "message.max.bytes")
    for name, source in (("all", "cluster"), (node, "broker")):
        run(bootstrap, "configs", "set", "broker", name, f"{key}=1000000", "--execute")
        until(lambda s=source: setting(bootstrap, "broker", node, key) == ("1000000", s), source)
    for name in (node, "all"):
        run(bootstrap, "configs", "unset", "broker", name, key, "--execute")
    until(lambda: setting(bootstrap, "broker", node, key) == before, "what it was")
    group, key = unique("group"), "consumer.session.timeout.ms"
    default, _ = setting(bootstrap, "group", group, key)
    assert default == "45000"
    run(bootstrap, "configs", "set", "group", group, f"{key}=46000", "--execute")
    until(lambda: setting(bootstrap, "group", group, key) == ("46000", "group"), "46000")
    run(bootstrap, "configs", "unset", "group", group, key, "--execute")
    until(lambda: setting(bootstrap, "group", group, key)[0] == "45000", "45000")


def test_cluster_info_lists_broker_features_and_apis(bootstrap, request):
    told = json.loads(run(bootstrap, "cluster", "info", "--apis", "--format", "json").stdout)
    (broker,) = told["brokers"]
    assert (f"{broker['host']}:{broker['port']}", broker["controller"]) == (bootstrap, True)
    assert {"transaction.version", "group.version"} <= {
        feature["feature"] for feature in told["features"]
    }
    produce = next(api for api in told["apis"] if api["api"] == "Produce")
    assert (produce["key"], produce["lowest"]) == (0, 0)
    assert broker["apis"] == len(told["apis"])
    if request.config.getoption("--target") == "kafka":
        assert told["version"] == "4.4"
    table = run(bootstrap, "cluster", "info").stdout
    assert table.startswith(f"cluster {told['cluster_id']}, 1 broker")
    assert "BROKER  HOST" in table
