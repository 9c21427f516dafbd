"""``fencepost produce``: lines, live input, JSON, and refused records."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.quick import only
from tests.support.waits import until
from tests.wire.command_line import cli, json_lines


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return cluster.create_topic(unique("produce"), 3)


def records(bootstrap: str, topic: str, *options: str) -> list[dict[str, object]]:
    return json_lines(cli(bootstrap, "consume", topic, "--format", "json", *options))


def test_separate_runs_use_more_than_one_partition(bootstrap, topic):
    for number in range(24):
        cli(bootstrap, "produce", topic, stdin=f"{number}\n")
    seen = records(bootstrap, topic)
    assert sorted(int(str(row["value"])) for row in seen) == list(range(24))
    # The probability that all records are in one of the three partitions is 3^-23.
    assert len({row["partition"] for row in seen}) > 1


@pytest.mark.parametrize("separator", [r"\t", "\t", r"\x09"])
def test_key_separator_accepts_escapes(bootstrap, topic, separator):
    cli(bootstrap, "produce", topic, "--key-separator", separator, stdin="k\tv\nk\t\n")
    assert [(row["key"], row["value"]) for row in records(bootstrap, topic)] == [
        ("k", "v"),
        ("k", None),
    ]


def test_key_header_and_null_options_apply_to_each_record(bootstrap, topic):
    options = ("--key", "k", "--header", "a=1", "--header", "a=2", "--null", "NULL")
    cli(bootstrap, "produce", topic, *options, stdin="v\nNULL\n\n")
    seen = records(bootstrap, topic)
    assert [(row["key"], row["value"]) for row in seen] == [("k", "v"), ("k", None), ("k", "")]
    assert all(row["headers"] == [["a", "1"], ["a", "2"]] for row in seen)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--key", "a", "--key-separator", ":"), "either --key or --key-separator"),
        (("--key-separator", ""), "must not be empty"),
        (("--key-separator", r"\q"), r"--key-separator: \q in"),
        (("--format", "json", "--key", "a"), "--key applies to text"),
    ],
)
def test_contradictory_produce_options_are_refused(bootstrap, topic, options, told):
    assert told in cli(bootstrap, "produce", topic, *options, stdin="x\n", status=2).stderr


def test_json_output_of_consume_can_be_produced_again(bootstrap, cluster, topic):
    lines = [
        {"key": "k", "value": "v", "headers": {"a": "1"}, "timestamp": "2026-01-31T12:00Z"},
        {"key_base64": "/w==", "value_base64": "AP8=", "headers_base64": [["b", "/g=="]]},
        {"key": "k", "value": None, "partition": 2},
        {"value": {"nested": [1, None]}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = cli(bootstrap, "produce", topic, "--format", "json", stdin=text)
    assert done.stderr == "4 records acknowledged\n"
    printed = cli(bootstrap, "consume", topic, "--format", "json").stdout
    copy = cluster.create_topic(unique("copy"), 3)
    cli(bootstrap, "produce", copy, "--format", "json", stdin=printed)

    def content(name: str) -> list[dict[str, object]]:
        return [{**row, "topic": ""} for row in records(bootstrap, name)]

    assert content(copy) == content(topic)
    assert {(row["key"], row["value"]) for row in content(copy)} == {
        ("k", "v"),
        ("\\xff", "\0\\xff"),
        ("k", None),
        (None, '{"nested":[1,null]}'),
    }


def test_invalid_lines_are_reported_by_number_and_the_rest_written(bootstrap, topic):
    lines = ['{"value": "a"}', "nonsense", '{"value": "b"}', '{"value": "c", "partition": 9}']
    produce = (bootstrap, "produce", topic, "--format", "json")
    done = cli(*produce, stdin="\n".join(lines), status=4)
    assert done.stderr == (
        "line 2 is not valid JSON: Expecting value at column 1\n"
        f"line 4 names partition 9, which {topic} does not have\n"
        "2 records acknowledged\n"
    )
    assert sorted(str(row["value"]) for row in records(bootstrap, topic)) == ["a", "b"]
    done = cli(*produce, stdin="x\n" * 25, status=1)
    assert done.stderr.endswith("\nand 5 lines more\n0 records acknowledged\n")
    assert done.stderr.count("\n") == 22
    told = cli(*produce, "--transactional-id", topic, stdin="\n".join(lines), status=1).stderr
    assert told.startswith("Error: line 2 is not valid JSON")
    assert len(records(bootstrap, topic)) == 2


def test_records_refused_by_the_broker_are_reported_by_line(bootstrap, topic):
    compacted, small = unique("compacted"), unique("small")
    for name, setting in ((compacted, "cleanup.policy=compact"), (small, "max.message.bytes=300")):
        cli(bootstrap, "topics", "create", name, "-p", "1", "--config", setting)
    lines = ['{"key": "a", "value": 1}', '{"value": 2}', '{"key": "b", "value": 3}']
    done = cli(
        bootstrap, "produce", compacted, "--format", "json", stdin="\n".join(lines), status=4
    )
    assert done.stderr.startswith("line 2 INVALID_RECORD: ")
    assert done.stderr.endswith("\n2 records acknowledged\n")
    assert [row["value"] for row in records(bootstrap, compacted)] == ["1", "3"]
    # The records do not fit into one batch, and the fourth record is too large for any batch.
    values = [f"{number:0100}" for number in range(8)]
    values[3] = "x" * 400
    done = cli(bootstrap, "produce", small, stdin="\n".join(values), status=4)
    assert done.stderr.startswith("line 4 MESSAGE_TOO_LARGE: ")
    assert [row["value"] for row in records(bootstrap, small)] == values[:3] + values[4:]


@pytest.mark.parametrize("number", only((signal.SIGINT, signal.SIGTERM), signal.SIGTERM))
def test_signal_aborts_the_transaction_of_produce(bootstrap, topic, number):
    line = [sys.executable, "-m", "fencepost", "produce", topic, "--transactional-id", topic]
    with subprocess.Popen(
        [*line, "-b", bootstrap], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as live:
        assert live.stdin is not None
        live.stdin.write(b"half\n")
        live.stdin.flush()
        until(lambda: records(bootstrap, topic, "--isolation", "read_uncommitted"), "the record")
        live.send_signal(number)
        assert live.wait(60) == 1
    (told,) = json.loads(cli(bootstrap, "txns", "describe", topic, "--format", "json").stdout)
    assert told["state"] in {"PrepareAbort", "CompleteAbort"}
    assert records(bootstrap, topic) == []


def test_signal_makes_produce_report_acknowledged_records(bootstrap, topic):
    line = [sys.executable, "-m", "fencepost", "produce", topic, "-b", bootstrap]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as live:
        assert live.stdin is not None
        assert live.stderr is not None
        for number in range(2):
            live.stdin.write(b"%d\n" % number)
            live.stdin.flush()
            until(
                lambda number=number: len(records(bootstrap, topic)) == number + 1,
                f"record {number}",
            )
        live.send_signal(signal.SIGINT)
        assert live.wait(60) == 1
        # The second record is in the log, but perhaps not acknowledged yet.
        told = live.stderr.read().decode()
        assert re.fullmatch(r"(1 record|2 records) acknowledged\n\nAborted!\n", told), told


@pytest.mark.slow
def test_live_input_is_written_line_by_line_across_a_restart(tmp_path):
    daemon = Daemon(tmp_path / "data").start()
    try:
        cli(daemon.bootstrap, "topics", "create", "live", "-p", "1")
        with subprocess.Popen(
            [sys.executable, "-m", "fencepost", "produce", "live", "-b", daemon.bootstrap],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "FENCEPOST_PROFILE": ""},
        ) as live:
            assert live.stdin is not None
            for number in range(4):
                live.stdin.write(b"%d\n" % number)
                live.stdin.flush()
                until(
                    lambda number=number: (
                        [row["value"] for row in records(daemon.bootstrap, "live")]
                        == [str(line) for line in range(number + 1)]
                    ),
                    f"line {number}",
                )
                if number == 1:
                    daemon.stop()
                    daemon.start()
                elif number == 2:
                    daemon.kill()
                    daemon.start()
            live.stdin.close()
            live.wait(60)
            assert live.stderr is not None
            assert live.stderr.read() == b"4 records acknowledged\n"
            assert live.returncode == 0
    finally:
        daemon.stop()
