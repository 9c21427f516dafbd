"""``fencepost groups`` on any Kafka broker: changed offsets and their undo, deletion, plans."""

from __future__ import annotations

import datetime as dt
import json
from contextlib import ExitStack

import confluent_kafka
import pytest
from click.testing import CliRunner, Result

from fencepost.cli import main
from tests.support.cluster import Cluster, unique
from tests.support.waits import until
from tests.wire.clients import confluent_consumer, confluent_producer
from tests.wire.command_line import cli
from tests.wire.test_consumer_protocol import member, owned


@pytest.fixture
def topic(cluster: Cluster) -> str:
    name = cluster.create_topic(unique("cli-groups"), 2)
    for index in range(2):
        cluster.produce(name, [b"%d" % number for number in range(10)], partition=index)
    return name


@pytest.fixture
def group(cluster: Cluster, topic: str, bootstrap: str, tmp_path) -> str:
    """Create a group that has committed offset 3 of partition 0, and no offset of partition 1."""
    name = unique("cli-group")
    seed = tmp_path / "seed.csv"
    seed.write_text(f"{topic},0,3\n")
    run(bootstrap, "reset-offsets", name, "--from-file", str(seed), *execute(tmp_path))
    return name


def execute(tmp_path) -> tuple[str, ...]:
    return ("--execute", "--undo", str(tmp_path / unique("undo")))


def run(bootstrap: str, *arguments: str, status: int = 0) -> Result:
    """Run a command in this process, because dozens of new processes would take long."""
    asked = ["groups", *arguments, "--format", "json", "--bootstrap", bootstrap]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == status, (arguments, done.output, done.exception)
    return done


def rows(done: Result) -> list[dict[str, object]]:
    return json.loads(done.stdout)


def new(done) -> dict[int, object]:
    return {int(str(row["partition"])): row["new"] for row in rows(done)}


def committed(bootstrap: str, group: str) -> dict[int, object]:
    found = rows(run(bootstrap, "offsets", group))
    return {int(str(row["partition"])): row["committed"] for row in found}


def test_reset_offsets_without_execute_only_shows_new_offsets(bootstrap, topic, group):
    now = dt.datetime.now(dt.UTC)
    past, future = dt.datetime(1970, 1, 1, tzinfo=dt.UTC), now + dt.timedelta(days=1)
    for arguments, wanted in (
        (("--topic", topic, "--to-earliest"), {0: 0, 1: 0}),
        (("--topic", f"{topic}:1", "--to-latest"), {1: 10}),
        (("--topic", topic, "--to-current"), {0: 3, 1: 10}),
        (("--all-topics", "--to-offset", "5"), {0: 5}),
        (("--topic", topic, "--to-offset", "99"), {0: 10, 1: 10}),
        (("--all-topics", "--shift-by", "2"), {0: 5}),
        (("--all-topics", "--shift-by", "-9"), {0: 0}),
        (("--topic", topic, "--to-datetime", past.isoformat()), {0: 0, 1: 0}),
        (("--topic", topic, "--to-datetime", future.isoformat()), {0: 10, 1: 10}),
        (("--topic", topic, "--by-duration", "P30000DT1H"), {0: 0, 1: 0}),
    ):
        done = run(bootstrap, "reset-offsets", group, *arguments)
        assert new(done) == wanted, arguments
        assert "nothing was changed" in done.stderr
        # If both streams go to a terminal, the last line says that nothing was changed.
        assert done.output.endswith("nothing was changed; --execute makes the change\n")
        assert "no group" not in done.stderr
    assert committed(bootstrap, group) == {0: 3}


def test_invalid_reset_offsets_is_refused_with_a_reason(bootstrap, topic, group, tmp_path):
    bad = tmp_path / "bad.csv"
    bad.write_text(f"{topic},0,3\n{topic},0\n")
    for arguments, status, says in (
        (("--topic", topic), 2, "exactly one"),
        (("--topic", topic, "--to-earliest", "--to-latest"), 2, "exactly one"),
        (("--to-earliest",), 2, "either"),
        (("--topic", f"{topic}:9", "--to-earliest"), 1, "no partition 9"),
        (("--topic", f"{topic}:x", "--to-earliest"), 2, "TOPIC"),
        (("--topic", unique("none"), "--to-earliest"), 1, "there is no topic"),
        (("--topic", topic, "--shift-by", "1"), 1, "no committed offset"),
        (("--topic", topic, "--to-datetime", "soon"), 2, "soon"),
        (("--topic", topic, "--by-duration", "1 day"), 2, "P1DT2H"),
        (("--from-file", str(bad)), 1, "bad.csv:2"),
    ):
        done = run(bootstrap, "reset-offsets", group, *arguments, status=status)
        assert says.lower() in done.stderr.lower(), arguments


def test_reset_offsets_of_a_missing_group_notes_its_creation(bootstrap, topic, tmp_path):
    group = unique("nope")
    change = ("reset-offsets", group, "--topic", topic, "--to-latest")
    note = f"note: there is no group '{group}'; --execute creates it\n"
    assert note in run(bootstrap, *change).stderr
    assert note not in run(bootstrap, *change, *execute(tmp_path)).stderr
    assert note not in run(bootstrap, *change).stderr


def test_undo_file_restores_the_offsets(bootstrap, topic, group, tmp_path):
    undo = tmp_path / "undo.csv"
    change = ("reset-offsets", group, "--topic", topic, "--to-offset", "7")
    run(bootstrap, *change, "--execute", "--undo", str(undo))
    assert committed(bootstrap, group) == {0: 7, 1: 7}
    assert undo.read_text() == f"{topic},0,3\n{topic},1,-1\n"
    again = run(bootstrap, *change, "--execute", "--undo", str(undo), status=1)
    assert "undo file" in again.stderr
    run(bootstrap, "reset-offsets", group, "--from-file", str(undo), *execute(tmp_path))
    assert committed(bootstrap, group) == {0: 3}


def test_undo_file_restores_offset_metadata_and_leader_epoch(
    cluster, bootstrap, topic, group, tmp_path
):
    part = {"partition_index": 1, "committed_offset": 4, "committed_leader_epoch": 0}
    part["committed_metadata"] = 'checkpoint "7",\nü'
    who = {"group_id": group, "generation_id_or_member_epoch": -1, "member_id": ""}
    cluster.call("offset_commit", 8, **who, topics=[{"name": topic, "partitions": [part]}])

    def stored() -> object:
        return cluster.call("offset_fetch", 7, group_id=group, topics=None, require_stable=False)

    before = stored()
    undo = tmp_path / "undo.csv"
    change = ("reset-offsets", group, "--all-topics", "--to-earliest")
    run(bootstrap, *change, "--execute", "--undo", str(undo))
    assert stored() != before
    run(bootstrap, "reset-offsets", group, "--from-file", str(undo), *execute(tmp_path))
    assert stored() == before
    run(bootstrap, "reset-offsets", group, "--all-topics", "--to-current", *execute(tmp_path))
    assert stored() == before


def test_offsets_and_groups_are_deleted(cluster, bootstrap, topic, group, tmp_path):
    assert new(run(bootstrap, "delete-offsets", group, "--all-topics")) == {0: None}
    assert committed(bootstrap, group) == {0: 3}
    undo = tmp_path / "undo.csv"
    run(bootstrap, "delete", group, "--execute", "--undo", str(undo))
    assert "no group" in run(bootstrap, "offsets", group, status=1).stderr
    run(bootstrap, "reset-offsets", group, "--from-file", str(undo), *execute(tmp_path))
    assert committed(bootstrap, group) == {0: 3}
    run(bootstrap, "delete-offsets", group, "--topic", f"{topic}:0", *execute(tmp_path))
    assert cluster.committed(group, topic, 0) == -1


def test_active_group_is_neither_reset_nor_deleted(bootstrap, topic):
    group = unique("active")
    with confluent_consumer(bootstrap, group_id=group) as consumer:
        consumer.subscribe([topic])
        until(lambda: (consumer.poll(0.1), len(consumer.assignment()))[1] == 2, "an assignment")
        for command in (
            ("reset-offsets", group, "--topic", topic, "--to-earliest"),
            ("delete", group),
        ):
            done = run(bootstrap, *command, status=1)
            assert "active" in done.stderr
            assert "1 member)" in done.stderr


def test_group_offsets_show_lag_for_both_isolation_levels(bootstrap, topic, group):
    with confluent_producer(bootstrap, transactional_id=unique("lag")) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, b"open", partition=0)
        producer.flush(60)
        (row,) = rows(run(bootstrap, "offsets", group))
        assert (row["lag"], row["lag_uncommitted"], row["stable"], row["end"]) == (7, 8, 10, 11)
        producer.abort_transaction(60)


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "cooperative-sticky"])
def test_plan_of_a_classic_group_matches_its_next_assignment(bootstrap, topic, assignor):
    group = unique("plan")
    conf = {"group_id": group, "partition_assignment_strategy": assignor}
    with ExitStack() as stack:
        first = stack.enter_context(confluent_consumer(bootstrap, **conf))
        first.subscribe([topic])
        until(lambda: owned(first) == [2], "everything at one member")
        planned = rows(run(bootstrap, "plan", group, "--add", "1"))
        assert sorted((row["now"], row["then"]) for row in planned) == [(0, 1), (2, 1)]
        second = stack.enter_context(confluent_consumer(bootstrap, **conf))
        second.subscribe([topic])
        until(lambda: owned(first, second) == [1, 1], "the plan to come true", deadline_s=60)
        names = [str(row["member"]) for row in rows(run(bootstrap, "members", group))]
        without = rows(run(bootstrap, "plan", group, "--remove", names[0]))
        assert {row["member"]: row["then"] for row in without} == {names[0]: None, names[1]: 2}


def test_plan_of_a_rebalancing_group_names_the_awaited_member(request, bootstrap, topic):
    group = unique("plan")
    conf = {"group_id": group, "client_id": "polls-no-more", "max_poll_interval_ms": 60_000}
    with ExitStack() as stack:
        first = stack.enter_context(confluent_consumer(bootstrap, **conf))
        first.subscribe([topic])
        until(lambda: owned(first) == [2], "everything at one member")
        second = stack.enter_context(confluent_consumer(bootstrap, **{**conf, "client_id": "new"}))
        second.subscribe([topic])

        def rebalances() -> bool:
            second.poll(0.1)
            (row,) = [listed for listed in rows(run(bootstrap, "list")) if listed["group"] == group]
            return row["state"] == "PreparingRebalance"

        until(rebalances, "a rebalance that waits for the first member")
        for more in ((), ("--assignor", "range"), ("--add", "1")):
            told = run(bootstrap, "plan", group, *more, status=1).stderr
            assert f"group '{group}' rebalances (PreparingRebalance)" in told
            assert "only while it is Stable" in told
        if request.config.getoption("--target") == "fencepost":

            def names_it() -> bool:
                told = run(bootstrap, "plan", group, status=1).stderr
                return "waits for polls-no-more@" in told

            until(names_it, "the member in the history")
        until(lambda: owned(first, second) == [1, 1], "the end of the rebalance", deadline_s=60)
        assert rows(run(bootstrap, "plan", group))


def test_plan_of_an_empty_group_is_an_error(bootstrap, topic):
    group = unique("plan")
    with confluent_consumer(bootstrap, group_id=group) as consumer:
        place = confluent_kafka.TopicPartition(topic, 0, 0)
        consumer.commit(offsets=[place], asynchronous=False)
    told = run(bootstrap, "plan", group, status=1).stderr
    assert f"group '{group}' is Empty and has no members" in told


def test_plan_of_a_consumer_group_applies_its_assignor_and_filters(bootstrap, topic):
    group = unique("plan848")
    with member(bootstrap, group, topic) as first:
        until(lambda: owned(first) == [2], "everything at one member")
        planned = rows(run(bootstrap, "plan", group, "--add", "1", "--assignor", "range"))
        assert sorted((row["now"], row["then"]) for row in planned) == [(0, 1), (2, 1)]
        table = cli(bootstrap, "groups", "plan", group, "--add", "1").stdout
        assert table.startswith("uniform: 1 of 2 partitions move")
        for filters, found in (
            (("--type", "consumer"), True),
            (("--type", "classic"), False),
            (("--type", "consumer", "--state", "Stable"), True),
            (("--state", "Empty"), False),
        ):
            listed = [row["group"] for row in rows(run(bootstrap, "list", *filters))]
            assert (group in listed) is found, filters
        unknown = run(bootstrap, "plan", group, "--assignor", "none", status=1)
        assert "range, uniform" in unknown.stderr
        nobody = run(bootstrap, "plan", group, "--remove", "nobody", status=1)
        assert "nobody" in nobody.stderr
        (row,) = rows(run(bootstrap, "members", group))
        assert (row["type"], row["target"]) == ("consumer", [f"{topic}:0", f"{topic}:1"])
