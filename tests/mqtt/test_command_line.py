"""``python -m fencepost.pipelines.mqtt``: invalid options, an orderly stop, fatal errors."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from fencepost.pipelines.mqtt.command import main
from tests.mqtt.test_sessions import Gateway, broker
from tests.support.cluster import Cluster
from tests.support.daemon import ROOT
from tests.support.mosquitto import Mosquitto
from tests.support.processes import Child

__all__ = ["broker"]

ROUTE = ("--route", "a=b")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "either --config or at least one --route"),
        ((*ROUTE, "--config", __file__), "either --config or at least one --route"),
        (("--config", "/"), "is a directory"),
        (("--config", "/nowhere"), "does not exist"),
        ((*ROUTE, "--mqtt", "localhost"), "HOST:PORT"),
        ((*ROUTE, "--mqtt", "localhost:0"), "HOST:PORT"),
        ((*ROUTE, "--mqtt", "localhost:65536"), "HOST:PORT"),
        ((*ROUTE, "--mqtt-version", "3.1"), "3.1"),
        ((*ROUTE, "--client-id", ""), "must not be empty"),
        ((*ROUTE, "--qos", "3"), "3"),
        ((*ROUTE, "--message-id", "id"), "property:NAME"),
        ((*ROUTE, "--report-s", "-1"), "-1"),
        (("--route", "a"), "not an MQTT topic filter"),
        (("--route", "a="), "needs a Kafka topic"),
        (("--route", "a/#/b=c"), "must be the last level"),
        (("--route", "a/+=x", "--route", "+/b=y"), "overlap"),
        (("--route", "a/+={2}"), "has no level 2"),
        (("--route", "$share/g/a=b"), "shared subscription"),
    ],
)
def test_invalid_options_are_refused_with_a_reason(arguments: tuple[str, ...], told: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert told in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it must contain [[route]] tables"),
        ("routes = 1", "not routes"),
        ("route = ['a']", "a route has filter"),
        ("[[route]]\nfilter = 'a'\ntopic = 5", "topic = 5: it must be of type str"),
        ("[[route]]\nfilter = 'a'\ntopic = 'b'\nqos = '2'", "qos = '2': it must be of type int"),
        ("[[route]]\nfilter = 'a'\ntopic = 'b'\nqos = true", "qos = True: it must be of type int"),
        (
            "message_id = 1\n[[route]]\nfilter = 'a'\ntopic = 'b'",
            "message_id = 1: it must be of type str",
        ),
        ("[[route", "at the end of an array"),
    ],
)
def test_invalid_route_file_is_refused_with_a_reason(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "routes.toml"
    file.write_text(text)
    result = CliRunner().invoke(main, ["--config", str(file)])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


class Process:
    """The command, which has its own client id."""

    def __init__(self, gateway: Gateway, *arguments: str, port: int | None = None) -> None:
        command = [
            *(sys.executable, "-m", "fencepost.pipelines.mqtt", "--bootstrap", gateway.bootstrap),
            *("--mqtt", f"127.0.0.1:{port or gateway.port}", "--client-id", gateway.client_id),
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.child = Child([*command, *arguments], cwd=ROOT, env=env)

    async def says(self, pattern: str) -> str:
        found = await asyncio.to_thread(self.child.wait_for_line, pattern, deadline_s=60)
        return found.string


@pytest.fixture
def gateway(bootstrap: str, cluster: Cluster, broker: Mosquitto) -> Gateway:
    return Gateway(bootstrap, cluster, broker, 5)


@pytest.fixture
def started(gateway: Gateway) -> Iterator[list[Process]]:
    """Yield a list of processes, which are killed after the test."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.child.kill()


async def test_sigterm_stops_the_bridge_with_status_0(
    gateway: Gateway, started: list[Process]
) -> None:
    process = Process(gateway, "--route", f"a/#={gateway.topic}", "--report-s", "0.1")
    started.append(process)
    await process.says("bridge at work")
    await gateway.publish(b"1", b"2")
    await gateway.written(b"1", b"2")
    await process.says("bridge counters .*written=2")
    assert await asyncio.to_thread(process.child.terminate) == 0
    assert "written=2" in await process.says("bridge stopped")
    await gateway.publish(b"3")
    async with gateway.running(gateway.bridge()):
        await gateway.written(b"1", b"2", b"3")


@pytest.mark.slow
async def test_sigterm_stops_a_bridge_without_an_mqtt_broker(
    gateway: Gateway, started: list[Process]
) -> None:
    gateway.broker.kill()
    process = Process(gateway, *ROUTE)
    started.append(process)
    assert "refused" in await process.says("bridge restarts")
    assert await asyncio.to_thread(process.child.terminate) == 0


async def test_message_without_a_kafka_topic_ends_the_bridge_unacknowledged(
    gateway: Gateway, started: list[Process]
) -> None:
    """The message is not acknowledged, so a bridge with a dead-letter topic can take it later."""
    process = Process(gateway, "--route", "a/#=x.{1}")
    started.append(process)
    await process.says("bridge at work")
    await gateway.publish(b"1", topic="a")
    assert "no level 1" in await process.says("Error: the bridge ends")
    assert await asyncio.to_thread(process.child.wait, 30) == 1
    assert not any("Traceback" in line for line in process.child.lines)
    again = Process(gateway, "--route", "a/#=x.{1}", "--dead-letter", gateway.topic)
    started.append(again)
    await gateway.written(b"1")
