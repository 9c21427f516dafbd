"""The command line, as a user runs it, which must work on any Kafka broker."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.support.cluster import unique
from tests.support.waits import until
from tests.wire.clients import confluent_consumer, confluent_producer
from tests.wire.command_line import cli


def fencepost(
    *arguments: str, bootstrap: str = "", stdin: str = "", status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process, check the exit status, and return the output."""
    done = subprocess.run(
        [sys.executable, "-m", "fencepost", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "FENCEPOST_BOOTSTRAP": bootstrap} if bootstrap else None,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def rows(done: Result) -> list[dict[str, object]]:
    return json.loads(done.stdout)


@pytest.fixture
def topic(bootstrap):
    name = unique("cli")
    cli(bootstrap, "topics", "create", name, "--partitions", "3")
    return name


def test_topics_are_created_listed_described_and_deleted(bootstrap):
    name = unique("cli")
    made = cli(bootstrap, "topics", "create", name, "-p", "2", "--config", "retention.ms=1000")
    assert made.stdout == f"created {name} (2 partitions)\n"
    listed = rows(cli(bootstrap, "topics", "list", "--format", "json"))
    assert [row["partitions"] for row in listed if row["topic"] == name] == [2]
    table = cli(bootstrap, "topics", "list").stdout.splitlines()
    assert table[0].split() == ["TOPIC", "PARTITIONS", "REPLICAS", "TOPIC_ID"]
    described = rows(cli(bootstrap, "topics", "describe", name, "--format", "json"))
    assert [(row["partition"], row["earliest"], row["latest"]) for row in described] == [
        (0, 0, 0),
        (1, 0, 0),
    ]
    settings = rows(cli(bootstrap, "topics", "describe", name, "--configs", "--format", "json"))
    assert {row["key"]: (row["value"], row["source"]) for row in settings}["retention.ms"] == (
        "1000",
        "topic",
    )
    assert cli(bootstrap, "topics", "delete", name, "--yes").stdout == f"deleted {name}\n"
    gone = cli(bootstrap, "topics", "describe", name, status=1)
    assert f"there is no topic {name!r}" in gone.stderr


def test_validate_only_creates_nothing(bootstrap):
    name = unique("cli")
    done = cli(bootstrap, "topics", "create", name, "-p", "2", "--validate-only")
    assert done.stdout.startswith(f"would create {name}")
    cli(bootstrap, "topics", "describe", name, status=1)


def test_topics_create_error_names_the_reason(bootstrap, topic):
    again = cli(bootstrap, "topics", "create", topic, status=1)
    assert "TOPIC_ALREADY_EXISTS" in again.stderr.upper()
    assert topic in again.stderr
    bad = cli(bootstrap, "topics", "create", "x", "--config", "novalue", status=2)
    assert "KEY=VALUE" in bad.stderr


def test_unreachable_broker_is_exit_status_3():
    gone = fencepost("topics", "list", "--timeout", "1", bootstrap="127.0.0.1:1", status=3)
    assert "127.0.0.1:1" in gone.stderr


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_produced_lines_are_consumed_with_keys_and_headers(bootstrap, topic, codec):
    lines = "".join(f"k{n % 5}\tvalue {n}\n" for n in range(50))
    done = cli(
        bootstrap,
        *("produce", topic, "--key-separator", "\t", "--compression", codec),
        *("--header", "source=test"),
        stdin=lines,
    )
    assert "50 records acknowledged" in done.stderr
    out = cli(bootstrap, "consume", topic, "--format", "json").stdout
    seen = [json.loads(line) for line in out.splitlines()]
    assert sorted(row["value"] for row in seen) == sorted(f"value {n}" for n in range(50))
    assert all(row["headers"] == [["source", "test"]] for row in seen)
    assert len({(row["key"], row["partition"]) for row in seen}) == 5


def test_key_gets_the_same_partition_as_from_murmur2_partitioner(bootstrap, topic):
    keys = [f"key-{n}" for n in range(20)]
    cli(
        bootstrap,
        *("produce", topic, "--key-separator", "="),
        stdin="".join(f"{key}=cli\n" for key in keys),
    )
    with confluent_producer(bootstrap, partitioner="murmur2") as producer:
        for key in keys:
            producer.produce(topic, b"client", key)
    out = cli(bootstrap, "consume", topic, "--format", "json").stdout
    places = {(row["key"], row["partition"]) for row in map(json.loads, out.splitlines())}
    assert len(places) == len(keys)


def test_consume_shows_committed_and_hides_aborted_transactions(bootstrap, topic):
    fencepost("produce", topic, "--transactional-id", topic, bootstrap=bootstrap, stdin="a\nb\n")
    with confluent_producer(bootstrap, transactional_id=unique("aborts")) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, b"hidden")
        producer.flush(60)
        producer.abort_transaction(60)
    committed = fencepost("consume", topic, bootstrap=bootstrap).stdout
    assert sorted(committed.split()) == ["a", "b"]
    everything = fencepost(
        "consume", topic, "--isolation", "read_uncommitted", bootstrap=bootstrap
    ).stdout
    assert sorted(everything.split()) == ["a", "b", "hidden"]


def test_line_without_separator_aborts_the_whole_transaction(bootstrap, topic):
    bad = fencepost(
        *("produce", topic, "--transactional-id", topic, "--key-separator", ":"),
        bootstrap=bootstrap,
        stdin="k:v\n" * 3000 + "no separator\n",
        status=1,
    )
    assert "line 3001" in bad.stderr
    assert fencepost("consume", topic, bootstrap=bootstrap).stdout == ""


def test_consume_starts_at_from_and_stops_at_limit(bootstrap, topic):
    cli(bootstrap, "produce", topic, "--partition", "1", stdin="a\nb\nc\nd\n")

    def read(*arguments: str) -> list[str]:
        return cli(bootstrap, "consume", topic, "-p", "1", *arguments).stdout.split()

    assert read("--from", "2") == ["c", "d"]
    assert read("--limit", "3") == ["a", "b", "c"]
    assert read("--from", "latest") == []
    assert read("--from", "2000-01-01T00:00:00+00:00") == ["a", "b", "c", "d"]
    assert read("--from", "2999-01-01T00:00:00+00:00") == []
    cli(bootstrap, "consume", topic, "--from", "soon", status=2)
    cli(bootstrap, "consume", topic, "-p", "9", status=1)


def test_groups_are_listed_and_described(bootstrap, topic):
    group = unique("group")
    cli(bootstrap, "produce", topic, "--partition", "0", stdin="a\nb\nc\n")
    with confluent_consumer(bootstrap, group_id=group, client_id="reader") as consumer:
        consumer.subscribe([topic])
        message = consumer.poll(60)
        assert message is not None
        consumer.commit(message, asynchronous=False)
        listed = rows(cli(bootstrap, "groups", "list", "--format", "json"))
        assert [row["state"] for row in listed if row["group"] == group] == ["Stable"]
        members = rows(cli(bootstrap, "groups", "describe", group, "--members", "--format", "json"))
        assert [row["client"] for row in members] == ["reader"]
        assert members[0]["assigned"] == [f"{topic}:{n}" for n in range(3)]
        offsets = rows(cli(bootstrap, "groups", "describe", group, "--format", "json"))
        assert [(row["partition"], row["committed"], row["lag"]) for row in offsets] == [
            (0, 1, 2),
            (1, None, 0),
            (2, None, 0),
        ]
    table = cli(bootstrap, "groups", "describe", group).stdout
    assert table.startswith(f"{group}: Empty, 0 members")
    missing = cli(bootstrap, "groups", "describe", unique("none"), status=1)
    assert "no group" in missing.stderr or "GROUP_ID_NOT_FOUND" in missing.stderr.upper()


def test_transactions_are_listed_and_described(bootstrap, topic):
    name = unique("txn")
    with confluent_producer(bootstrap, transactional_id=name) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, b"open", partition=2)
        producer.flush(60)
        listed = rows(cli(bootstrap, "txns", "list", "--state", "Ongoing", "--format", "json"))
        assert name in [row["transactional_id"] for row in listed]
        seen = rows(cli(bootstrap, "txns", "describe", name, "--format", "json"))
        assert (seen[0]["state"], seen[0]["partitions"]) == ("Ongoing", [f"{topic}:2"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", seen[0]["started"])
        assert seen[0]["open_seconds"] >= 0
        producer.commit_transaction(60)

    def described() -> Any:
        told = cli(bootstrap, "txns", "describe", name, "--format", "json")
        return rows(told)[0]

    after = until(lambda: (row := described())["state"] == "CompleteCommit" and row, "the commit")
    assert after["open_seconds"] is None, "it is not open any more"
    told = cli(bootstrap, "txns", "history", name)
    assert "the history leaves out commits that a producer requested" in told.stderr
    assert "there is no transactional id" in (
        cli(bootstrap, "txns", "describe", unique("none"), status=1).stderr
    )
    unknown = cli(bootstrap, "txns", "list", "--state", "Nonsense", status=2)
    assert "Nonsense" in unknown.stderr


def test_help_lists_every_command():
    text = cli("", "--help").stdout
    for name in ("serve", "topics", "produce", "consume", "groups", "txns"):
        assert name in text
        assert "Usage" in cli("", name, "--help").stdout


def test_command_summaries_in_help_are_not_truncated():
    listed = cli("", "topics", "--help").stdout.partition("Commands:")[2]
    assert "..." not in listed
    assert "with --execute, add them." in " ".join(listed.split())


def test_misspelt_command_gets_a_suggestion():
    assert "did you mean topics?" in cli("", "topic", "list", status=2).stderr
    assert "No such command 'zzz'\n" in cli("", "zzz", status=2).stderr


@pytest.mark.parametrize("words", ["--help", "--version", "serve --help", "completion bash"])
def test_texts_of_commands_without_a_broker_on_a_full_disk_are_an_error(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fencepost", *words.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            env={name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"},
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "Error: [Errno 28] No space left on device\n")


def test_output_to_a_full_disk_is_an_error_without_a_traceback(bootstrap, topic):
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    fencepost("produce", topic, bootstrap=bootstrap, stdin="line\n")
    for arguments, env in itertools.product(
        (["topics", "list"], ["consume", topic]),
        (buffered, {**buffered, "PYTHONUNBUFFERED": "1"}),
    ):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "fencepost", *arguments, "--bootstrap", bootstrap],
                stdout=full,
                stderr=subprocess.PIPE,
                env=env,
                text=True,
                timeout=60,
                check=False,
            )
        assert (done.returncode, done.stderr) == (1, "Error: [Errno 28] No space left on device\n")
