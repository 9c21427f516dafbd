"""Clients work while a broker becomes a member of an Apache Kafka cluster, and leaves it.

At first Fencepost serves the clients alone. Then it is promoted, Apache Kafka's brokers join,
replicas are added, and leaders and coordinators move. In the end Fencepost is stopped and
unregistered. No client is restarted. The clients are librdkafka, Java's clients, an exactly-once
application of Kafka Streams, aiokafka, franz-go, a Spark query with Fencepost's source and sink,
and sensors whose MQTT messages Fencepost's bridge writes (``failover/``). Each writes, reads in a
group and copies in transactions.

``GROWTH=long`` has three controllers, and kills a controller and two brokers meanwhile.
``GROWTH=kafka`` and ``GROWTH=kafka,long`` run with Apache Kafka as the first broker, and only
print the errors.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.oracle.failover.judging import (
    GONE,
    PARTITIONS,
    Client,
    Errors,
    franz_go_program,
    java_program,
    lead,
    python_command,
    show,
)
from tests.oracle.growing import Growing, OfFencepost, OfKafka, assert_has_all_of
from tests.spark.conftest import require_spark
from tests.support.daemon import ROOT
from tests.support.mosquitto import Mosquitto
from tests.support.processes import Child

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools"), pytest.mark.timeout(1800)]

MQTT: Final = "mqtt"
VISIBLE: Final = re.compile(r"\w+ (?!log\b|error_cb\b)[\w ']+: ")
"""An error that a program gets as the result of a call."""

NEVER: Final = re.compile(r"writer |copier (state|a thread's end): |any the end of a thread: ")
"""Errors that no fault of a broker excuses: a lost record, or an application that has ended."""

EXPECTED: Final = re.compile(
    r"(reader|copier) .*(NOT_COORDINATOR|COORDINATOR_LOAD_IN_PROGRESS|COORDINATOR_NOT_AVAILABLE|"
    r"_WAIT_COORD|_TIMED_OUT|Timeout)"
)
"""Errors that are expected when a coordinator moves, and timeouts, which also occur on a busy
machine.
"""

IS_AWAY: Final = re.compile(r"becomes a member|kill")
"""Steps in which at times no broker runs. Every error is allowed, except the errors in NEVER."""

NAMES: Final = "librdkafka", "java", "streams", "aiokafka", "franz-go", "spark", MQTT


@contextmanager
def clients_of(brokers: Growing, directory: Path, stop: Path) -> Iterator[list[Client]]:
    """Yield all clients. Clients that create connections often get the addresses of all brokers."""
    go = franz_go_program()  # the first build may take a while
    many = ",".join([brokers.first.bootstrap, *(broker.address for broker in brokers.joining)])
    mosquitto = Mosquitto(directory / "mosquitto").start()
    mqtt = ["--mqtt", f"127.0.0.1:{mosquitto.port}", "--route", f"#=in-{MQTT}"]
    module = "fencepost.pipelines.mqtt"
    bridge = Child([sys.executable, "-m", module, "--bootstrap", many, *mqtt], cwd=ROOT)
    spark = directory / "spark"
    spark.mkdir()
    began: list[Client] = []

    def begin(name: str, command: list[str], bootstrap: str, *more: str) -> None:
        began.append(Client(name, command, bootstrap, stop, *more))

    address = brokers.first.bootstrap
    try:
        bridge.wait_for_line(r"bridge at work", deadline_s=60)  # messages before this would be lost
        begin("librdkafka", python_command("librdkafka"), address, "consumer")
        begin("java", java_program(), address)
        begin("streams", java_program(), address, "consumer", str(directory / "streams"))
        begin("aiokafka", python_command("by_aiokafka"), address)
        begin("franz-go", go, address)
        begin("spark", python_command("by_spark"), many, str(spark))
        begin(MQTT, python_command("by_mqtt"), many, str(mosquitto.port))
        yield began
        assert bridge.returncode is None, bridge.tail()
    finally:
        for client in began:
            client.end()
        bridge.kill()
        mosquitto.kill()
        (directory / "bridge.txt").write_text("\n".join(bridge.lines), encoding="utf-8")


def story(brokers: Growing, *, is_long: bool) -> dict[str, Errors]:
    """Run all steps; return each client's errors."""
    stop = brokers.directory / "stop"
    steps = {
        "quiet": lambda: None,
        "the first becomes a member": brokers.become_a_member,
        "it is killed alone": brokers.first_is_killed,
        "brokers join": brokers.join,
        "a controller is killed": brokers.controller_is_killed,
        "it is killed as replicas are added": brokers.replicate_while_it_is_killed,
        "replicas are added": brokers.replicate,
        "leaders move, and a controller is killed": brokers.hand_over_without_a_controller,
        "another is killed": brokers.another_is_killed,
        "the first leads again, and is killed": brokers.lead_again_and_be_killed,
        "leaders move": brokers.hand_over,
        "the first is stopped": brokers.leave,
        "the first is struck off": brokers.strike_off,
        "without it": lambda: None,
    }
    if not is_long:
        steps = {step: act for step, act in steps.items() if "kill" not in step}
    try:
        brokers.begin([f"{way}-{name}" for name in NAMES for way in ("in", "out")], PARTITIONS)
        many = ",".join(broker.address for broker in brokers.joining)
        with clients_of(brokers, brokers.directory, stop) as clients:
            return lead(brokers.name, clients, steps, stop, many)
    finally:
        brokers.stop()


Told = tuple[str, str, str]
"""A client, a step, and an error."""


def visible(errors: dict[str, Errors]) -> set[Told]:
    """Return the errors that programs got as results of calls, except lost connections."""
    return {
        (name, step, what)
        for name, by_step in errors.items()
        for step, found in by_step.items()
        for what in found
        if VISIBLE.match(what) and not what.endswith(GONE)
    }


def judged(told: set[Told]) -> tuple[set[Told], set[Told]]:
    """Return the errors that must never occur, and the errors that Kafka must also cause."""
    never = {error for error in told if NEVER.match(error[2])}
    explained = {error for error in told if EXPECTED.match(error[2]) or IS_AWAY.search(error[1])}
    return never, told - never - explained


def test_clients_survive_growth_without_errors_that_kafka_does_not_cause(tmp_path: Path) -> None:
    require_spark()
    words = os.environ.get("GROWTH", "").split(",")
    is_long = "long" in words

    def told_by(make: type[Growing], name: str) -> dict[str, Errors]:
        return story(make(tmp_path / name, 3 if is_long else 1), is_long=is_long)

    if "kafka" in words:
        theirs = told_by(OfKafka, "kafka")
        for name in NAMES:
            show(name, theirs[name], theirs[name])
        return
    ours = told_by(OfFencepost, "fencepost")
    for name in NAMES:
        show(name, ours[name], {})
    never, extra = judged(visible(ours))
    assert not never, never
    if extra:
        whats = {(name, what) for name, _, what in visible(told_by(OfKafka, "kafka"))}
        extra = {error for error in extra if (error[0], error[2]) not in whats}
    assert not extra, extra


def test_fatal_client_errors_are_distinguished_from_retriable_ones() -> None:
    def errors(step: str, *whats: str) -> dict[str, Errors]:
        return {"java": {step: Counter(whats)}}

    lost = ("java", "brokers join", "writer delivery: TimeoutException")
    assert judged(visible(errors(*lost[1:]))) == ({lost}, set())
    fenced = ("java", "leaders move", "copier commitTransaction: ProducerFencedException")
    late = "copier commitTransaction: TimeoutException"
    assert judged(visible(errors(fenced[1], fenced[2], late))) == (set(), {fenced})
    away = "reader log: no connection", "reader log: any", "reader commit: ILLEGAL_GENERATION"
    assert judged(visible(errors("the first becomes a member", *away))) == (set(), set())


def test_log_that_is_no_prefix_of_another_is_found(tmp_path: Path) -> None:
    for room, segments in {"a": ["one", "two", "three"], "b": ["one", "two"], "c": ["on"]}.items():
        log = tmp_path / room / "t-0"
        log.mkdir(parents=True)
        for number, text in enumerate(segments):
            (log / f"{number:020}.log").write_text(text)
    assert_has_all_of(tmp_path / "a", tmp_path / "b")
    assert_has_all_of(tmp_path / "b", tmp_path / "c")
    (tmp_path / "b" / "t-0" / f"{1:020}.log").write_text("owt")
    with pytest.raises(AssertionError, match="t-0"):
        assert_has_all_of(tmp_path / "a", tmp_path / "b")
