"""``fencepost consume``: its output, where it begins and ends, its messages on standard error."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import re
import sys
from collections.abc import Iterator

import confluent_kafka
import pytest

from fencepost.cli.output import utc
from tests.support.batches import batch
from tests.support.cluster import Cluster, unique
from tests.support.processes import Child
from tests.support.waits import until
from tests.wire.clients import confluent_consumer, confluent_producer
from tests.wire.command_line import cli, json_lines
from tests.wire.test_consumer_protocol import member, owned

NOON = 1_769_860_800_000
"""2026-01-31T12:00Z."""


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return cluster.create_topic(unique("consume"), 2)


@pytest.fixture
def ten(cluster: Cluster, topic: str) -> str:
    """Produce ten records to partition 0, one per minute, and two records to partition 1."""
    for number in range(10):
        record = batch([b"%d" % number], timestamp_ms=NOON + 60_000 * number)
        assert cluster.produce(topic, record, partition=0)["error_code"] == "none"
    cluster.produce(topic, batch([b"a", b"b"], timestamp_ms=NOON), partition=1)
    return topic


def send(bootstrap: str, topic: str, *rows: tuple[bytes | None, bytes | None], **more) -> None:
    with confluent_producer(bootstrap) as producer:
        for key, value in rows:
            producer.produce(topic, value, key, partition=0, **more)
        producer.flush(60)


def read(bootstrap: str, topic: str, *options: str) -> list[str]:
    return cli(bootstrap, "consume", topic, *options).stdout.split()


@contextlib.contextmanager
def consuming(bootstrap: str, topic: str, *options: str) -> Iterator[Child]:
    child = Child([sys.executable, "-m", "fencepost", "consume", topic, *options, "-b", bootstrap])
    try:
        yield child
    finally:
        child.kill()


@contextlib.contextmanager
def open_transaction(
    bootstrap: str, topic: str, *values: bytes
) -> Iterator[tuple[str, confluent_kafka.Producer]]:
    name = unique("open")
    with confluent_producer(bootstrap, transactional_id=name) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, partition=0)
        producer.flush(60)
        yield name, producer
        with contextlib.suppress(confluent_kafka.KafkaException):
            producer.abort_transaction(60)


# --- start and end ---


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--from", "7"), "7 8 9"),
        (("--from", "-3"), "7 8 9 a b"),
        (("--tail", "1"), "9 b"),
        (("--tail", "0"), ""),
        (("--from", "-99", "-p", "1"), "a b"),
        (("--from", "0=8,1=1"), "8 9 b"),
        (("--from", "1=2"), "0 1 2 3 4 5 6 7 8 9"),
        (("--until", "2"), "0 1 a b"),
        (("--until", "0=1,1=0"), "0"),
        (("--from", "3", "--until", "5"), "3 4"),
        (("--tail", "2", "--until", "0=5"), "3 4 a b"),
        (("--from", "2026-01-31T12:07", "-p", "0"), "7 8 9"),
        (("--from", "2026-01-31T12:07", "--until", "2026-01-31T12:08"), "7"),
        (("--until", f"@{NOON + 60_000}"), "0 a b"),
        (("--from", str(NOON + 8 * 60_000)), ""),
        (("--from", f"@{NOON + 8 * 60_000}"), "8 9"),
        (("--from", "latest"), ""),
        (("--from", "yesterday"), ""),
    ],
)
def test_consume_range_accepts_offsets_counts_and_times(bootstrap, ten, options, wanted):
    assert sorted(read(bootstrap, ten, *options)) == wanted.split()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--from", "11", "-p", "0"), "{}:0 ends at 10; there is no record at 11 yet"),
        (("--until", "0=11"), "{}:0 ends at 10, before 11"),
        (("--from", "10", "-p", "0"), ""),
        (("--until", "0=10"), ""),
        (("--from", "2300-01-01"), "{} has no record of 2300-01-01T00:00:00.000Z or later yet"),
        (("--from", f"@{NOON}"), ""),
        (("--from", "latest"), ""),
    ],
)
def test_consume_range_past_the_log_end_is_noted(bootstrap, ten, options, told):
    assert cli(bootstrap, "consume", ten, *options).stderr.strip() == told.format(ten)


def test_consume_from_deleted_offset_notes_the_start_offset(bootstrap, ten):
    group = unique("late")
    cli(bootstrap, "consume", ten, "--group", group, "--until", "0=1")
    cli(bootstrap, "topics", "trim", f"{ten}:0", "--to-offset", "8", "--execute")
    for options in (("--from", "1", "-p", "0"), ("--group", group)):
        done = cli(bootstrap, "consume", ten, *options)
        assert done.stdout.split() == ["8", "9"]
        assert f"{ten}:0 begins at 8; records at 1 have been deleted\n" in done.stderr


@pytest.mark.parametrize(
    ("options", "status", "told"),
    [
        (("--from", "0=1,9=1"), 1, "no partition 9"),
        (("--from", "1", "--tail", "1"), 2, "either --from or --tail"),
        (("--until", "-5"), 2, "--until"),
        (("--follow", "--until", "-1h"), 2, "with --follow, --until takes offsets only"),
        (("--group", "g", "-p", "0"), 2, "a group determines the partitions"),
        (("--format", "yaml"), 2, "neither text, table, json, raw, base64 nor a template"),
        (("--format", "%x"), 2, "--format: %x in '%x' is not a field; the fields are %t topic"),
        (("--format", "%s%"), 2, "is not a field"),
        (("--format", r"%s\q"), 2, r"--format: \q in"),
        (("--key", r"\q"), 2, r"--key: \q in"),
        (("--format", "%s\\"), 2, "ends with an incomplete escape"),
    ],
)
def test_invalid_consume_options_are_refused(bootstrap, ten, options, status, told):
    assert told in cli(bootstrap, "consume", ten, *options, status=status).stderr


def test_tail_counts_only_committed_records(bootstrap, topic):
    """Markers and aborted records have offsets as well, but are not counted."""
    for number in range(4):
        cli(
            *(bootstrap, "produce", topic, "--partition", "0", "--transactional-id", topic),
            stdin=f"{number}\n",
        )
        with open_transaction(bootstrap, topic, b"aborted", b"aborted"):
            pass
    assert read(bootstrap, topic, "--tail", "3") == ["1", "2", "3"]
    assert read(bootstrap, topic, "--tail", "9") == ["0", "1", "2", "3"]


def test_random_consume_range_is_a_slice_of_the_full_output(bootstrap, cluster):
    """Options select records from the full output of a random log with aborted transactions."""
    chance = random.Random(7)
    topic = cluster.create_topic(unique("slices"), 1)
    with confluent_producer(bootstrap, transactional_id=topic) as writer:
        writer.init_transactions(60)
        for number in range(12):
            if chance.random() < 0.3:
                cluster.produce(topic, [b"plain %d" % number] * chance.randrange(1, 5))
                continue
            writer.begin_transaction()
            for _ in range(chance.randrange(1, 5)):
                writer.produce(topic, b"in %d" % number, partition=0)
            writer.flush(60)
            (writer.commit_transaction if chance.random() < 0.6 else writer.abort_transaction)(60)

    def offsets(*options: str) -> list[int]:
        done = cli(bootstrap, "consume", topic, "--format", r"%o\n", *options)
        return [int(line) for line in done.stdout.split()]

    for isolation in ("read_committed", "read_uncommitted"):
        level = ("--isolation", isolation)
        whole = offsets(*level)
        end = whole[-1] + 2
        for count in (0, 1, 2, 5, len(whole) - 1, len(whole), len(whole) + 1):
            assert (
                offsets("--tail", str(count), *level)
                == whole[len(whole) - min(count, len(whole)) :]
            )
        for _ in range(20):
            first, last = chance.randrange(end), chance.randrange(end)
            limit = chance.randrange(1, 9)
            wanted = [offset for offset in whole if first <= offset < last]
            place = ("--from", str(first), "--until", str(last), *level)
            assert offsets(*place) == wanted
            assert offsets(*place, "--limit", str(limit)) == wanted[:limit]


def test_follow_starts_at_from_and_ends_at_until(bootstrap, ten):
    options = ("--follow", "--from", "11", "--until", "13", "-p", "0")
    with consuming(bootstrap, ten, *options) as child:
        send(bootstrap, ten, *((None, b"%d" % n) for n in range(10, 14)))
        assert child.wait(60) == 0
        assert child.tail().split()[-2:] == ["11", "12"]


# --- formats ---


def test_templates_have_the_fields_of_kcat(bootstrap, topic):
    send(bootstrap, topic, (b"k", b"v\xff"), timestamp=NOON, headers=[("a", b"1"), ("b", None)])
    send(bootstrap, topic, (None, None), timestamp=NOON)
    form = r"%t|%p|%o|%k|%s|%h|%T|%D|%K|%S|%%\t\x41\n"
    done = cli(bootstrap, "consume", topic, "--format", form)
    assert done.stdout_bytes.split(b"\n") == [
        topic.encode()
        + b"|0|0|k|v\xff|a=1,b=<null>|1769860800000|2026-01-31T12:00:00.000Z|1|2|%\tA",
        topic.encode() + b"|0|1|<null>|<null>||1769860800000|2026-01-31T12:00:00.000Z|-1|-1|%\tA",
        b"",
    ]
    assert cli(bootstrap, "consume", topic, "--format", "%k;", "--null", "").stdout == "k;;"


def test_record_without_a_timestamp_has_no_time(cluster, bootstrap, topic):
    cluster.produce(topic, batch([b"x"], timestamp_ms=-1))
    told = cli(bootstrap, "consume", topic, "--format", "json").stdout
    assert json.loads(told)["timestamp"] is None
    assert cli(bootstrap, "consume", topic, "--format", "%D|%T\\n").stdout == "-|-1\n"
    again = cli(bootstrap, "produce", topic, "--format", "json", stdin=told)
    assert "1 record" in again.output


def test_tombstone_is_distinct_from_empty_value_in_every_format(bootstrap, topic):
    values = [None, b"", b"null", b"<null>", b"\\<null>"]
    send(bootstrap, topic, *((b"k", value) for value in values))

    def shown(form: str, *options: str) -> list[str]:
        return cli(bootstrap, "consume", topic, "--format", form, *options).stdout.split("\n")[:-1]

    assert shown("text") == ["<null>", "", "null", "\\<null>", "\\\\<null>"]
    assert shown("text", "--null", "~") == ["~", "", "null", "<null>", "\\<null>"]
    rows = [line.partition("  k  ")[2] for line in shown("table")[1:]]
    assert rows == ["<null>", "", "null", "\\<null>", "\\\\<null>"]
    told = [json.loads(line)["value"] for line in shown("json")]
    assert told == [None, "", "null", "<null>", "\\<null>"]
    assert shown("base64") == [
        "-" if value is None else base64.b64encode(value).decode() for value in values
    ]
    assert shown(r"%S\n") == ["-1", "0", "4", "6", "7"]


def test_binary_keys_and_values_are_printed_losslessly(bootstrap, topic):
    value = bytes(range(256))
    send(bootstrap, topic, (b"\xff", value), headers=[("h", b"\xfe")])
    assert cli(bootstrap, "consume", topic, "--format", "raw").stdout_bytes == value + b"\n"
    assert cli(bootstrap, "consume", topic, "--format", "%s").stdout_bytes == value
    (row,) = json_lines(cli(bootstrap, "consume", topic, "--format", "json"))
    assert base64.b64decode(row["value_base64"]) == value
    assert base64.b64decode(row["key_base64"]) == b"\xff"
    assert row["key"] == "\\xff"
    assert row["headers_base64"] == [["h", base64.b64encode(b"\xfe").decode()]]
    table = cli(bootstrap, "consume", topic, "--format", "table").stdout
    assert table.count("\n") == 2
    assert "\x07" not in table


def test_key_option_selects_records_by_key(bootstrap, topic):
    send(bootstrap, topic, (b"a", b"1"), (b"b", b"2"), (None, b"3"), (b"a", b"4"), (b"a\tb", b"5"))
    assert read(bootstrap, topic, "--key", "a") == ["1", "4"]
    assert read(bootstrap, topic, "--key", "a", "--key", r"a\tb", "--limit", "3") == ["1", "4", "5"]
    assert read(bootstrap, topic, "--key", "c") == []


def test_timestamp_beyond_the_calendar_is_printed_as_milliseconds():
    assert utc(NOON * 1000) == f"@{NOON * 1000}"


# --- internal topics ---


def test_internal_topics_are_printed_decoded(bootstrap, topic, target):
    group, name = unique("decoded"), unique("decoded")
    cli(bootstrap, "produce", topic, "--transactional-id", name, stdin="x\n")
    cli(bootstrap, "consume", topic, "--group", group)
    wanted = {"__consumer_offsets": group, "__transaction_state": name}
    if target.name == "fencepost":
        wanted["__fencepost_history"] = group
    for internal, subject in wanted.items():
        told = until(
            lambda internal=internal, subject=subject: [
                row["decoded"]
                for row in json_lines(cli(bootstrap, "consume", internal, "--format", "json"))
                if subject in json.dumps(row.get("decoded"))
            ],
            f"{subject} in {internal}",
        )
        line = cli(bootstrap, "consume", internal).stdout
        assert json.dumps(told[0], ensure_ascii=False) in line
        assert subject in cli(bootstrap, "consume", internal, "--format", r"%s\n").stdout
        plain = json_lines(cli(bootstrap, "consume", internal, "--format", "json", "--no-decode"))
        assert not any("decoded" in row for row in plain)
    offsets = json_lines(cli(bootstrap, "consume", "__consumer_offsets", "--format", "json"))
    mine = [row["decoded"] for row in offsets if row["decoded"].get("group_id") == group]
    assert any(row.get("topic") == topic and "value" in row for row in mine)


# --- open transactions ---


def test_consume_notes_records_held_back_by_an_open_transaction(bootstrap, topic):
    send(bootstrap, topic, (None, b"seen"))
    with open_transaction(bootstrap, topic, b"1", b"2", b"3") as (name, _):
        done = cli(bootstrap, "consume", topic)
        assert done.stdout == "seen\n"
        told = re.escape(f"{topic}:0: the open transaction of {name} (producer ")
        pattern = told + r"\d+\), open since 20\S+Z, holds back 3 records from offset 1 on\n"
        assert re.match(pattern, done.stderr), done.stderr
        assert f"txns blame {topic}" in done.stderr
        for options in (("--isolation", "read_uncommitted"), ("-p", "1"), ("--limit", "1")):
            assert cli(bootstrap, "consume", topic, *options).stderr == ""
    assert cli(bootstrap, "consume", topic).stderr == ""


def test_follow_notes_the_open_transaction_once(bootstrap, topic):
    with (
        open_transaction(bootstrap, topic, b"1") as (name, producer),
        consuming(bootstrap, topic, "-f", "-n", "1") as child,
    ):
        until(lambda: name in child.tail(), "the hint")
        producer.commit_transaction(60)
        assert child.wait(60) == 0
        assert child.tail().count(name) == 1


# --- as a member of a group ---


def committed(bootstrap: str, group: str) -> dict[int, int]:
    done = cli(bootstrap, "groups", "offsets", group, "--format", "json")
    return {
        row["partition"]: row["committed"]
        for row in json.loads(done.stdout)
        if row["committed"] is not None
    }


def test_consume_in_a_group_resumes_at_its_committed_offsets(bootstrap, ten):
    group = unique("readers")
    first = cli(bootstrap, "consume", ten, "--group", group, "--limit", "4")
    assert len(first.stdout.split()) == 4
    assert f"{group}: committed {ten}:" in first.stderr
    assert sum(committed(bootstrap, group).values()) == 4
    rest = cli(bootstrap, "consume", ten, "--group", group)
    assert sorted(first.stdout.split() + rest.stdout.split()) == [*"0123456789", "a", "b"]
    assert committed(bootstrap, group) == {0: 10, 1: 2}
    again = cli(bootstrap, "consume", ten, "--group", group)
    assert (again.stdout, again.stderr) == ("", "")


def test_from_applies_only_to_a_group_without_committed_offsets(bootstrap, ten):
    group = unique("readers")
    done = cli(bootstrap, "consume", ten, "--group", group, "--from", "0=9,1=2")
    assert done.stdout.split() == ["9"]
    # The group has committed offsets now, so --from has no effect.
    assert cli(bootstrap, "consume", ten, "--group", group, "--from", "0=0,1=2").stdout == ""


def test_consume_in_a_group_shares_partitions_with_other_members(bootstrap, ten):
    group = unique("readers")
    with consuming(bootstrap, ten, "-g", group, "-f") as child:
        # The consumer also prints its commits.
        until(lambda: f"{ten}:0 at 10" in child.tail() and f"{ten}:1 at 2" in child.tail(), "all")
        assert committed(bootstrap, group) == {0: 10, 1: 2}
        with confluent_consumer(bootstrap, group_id=group) as consumer:
            consumer.subscribe([ten])
            until(lambda: (consumer.poll(0.1), len(consumer.assignment()) == 1)[1], "a share")
            (mine,) = consumer.assignment()
            with confluent_producer(bootstrap) as producer:
                for index in (0, 1):
                    producer.produce(ten, b"new%d" % index, partition=index)
                producer.flush(60)
            message = until(lambda: consumer.poll(1.0), "a record")
            assert message.value() == b"new%d" % mine.partition
            until(lambda: f"new{1 - mine.partition}" in child.tail(), "the other's record")
            assert f"new{mine.partition}" not in child.tail()


def test_sigterm_makes_consume_leave_the_group(bootstrap, ten):
    group = unique("ended")
    with consuming(bootstrap, ten, "-g", group, "-f") as child:
        until(lambda: f"{ten}:0 at 10" in child.tail(), "its commit")
        assert child.terminate() == 0
    assert cli(bootstrap, "groups", "describe", group).stdout.startswith(f"{group}: Empty")


def test_consume_joins_a_group_of_the_consumer_protocol(bootstrap, ten):
    group = unique("new")
    with member(bootstrap, group, ten) as consumer:
        until(lambda: owned(consumer) == [2], "both partitions")
        with consuming(bootstrap, ten, "-g", group, "-f") as child:
            until(lambda: owned(consumer) == [1], "one of them")
            (mine,) = consumer.assignment()
            told = f"committed {ten}:{1 - mine.partition} at"
            # The consumer gives the partition up when it polls.
            until(lambda: (owned(consumer), told in child.tail())[1], "the other")


def test_consume_in_a_group_with_another_assignor_fails_with_the_reason(bootstrap, topic):
    group = unique("sticky")
    strategy = "cooperative-sticky"
    with confluent_consumer(
        bootstrap, group_id=group, **{"partition.assignment.strategy": strategy}
    ) as consumer:
        consumer.subscribe([topic])
        until(lambda: (consumer.poll(0.1), len(consumer.assignment()) == 2)[1], "the assignment")
        done = cli(bootstrap, "consume", topic, "--group", group, status=1)
        assert "INCONSISTENT_GROUP_PROTOCOL" in done.stderr
