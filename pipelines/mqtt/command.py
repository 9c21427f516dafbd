"""The command line of the bridge."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import aiomqtt
import click
import structlog
from aiokafka.errors import KafkaError
from structlog.typing import EventDict

from fencepost.cli.profiles import Profile, ProfileError, read_settings
from fencepost.client.client import ApiError, AuthenticationError
from fencepost.client.security import PLAINTEXT, Security, SecurityError
from fencepost.logcore.printable import printable
from fencepost.pipelines.failures import PipelineError
from fencepost.pipelines.mqtt.bridge import (
    MAX_RECORD_BYTES,
    MIN_RECORD_BYTES,
    Bridge,
    BridgeOptions,
)
from fencepost.pipelines.mqtt.ledger import LedgerError
from fencepost.pipelines.mqtt.routes import Mapped, MessageId, Route, RouteError, load
from fencepost.pipelines.mqtt.session import Address
from fencepost.pipelines.topics import illegal

MAX_PORT = 65_535

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"

ENDS = (
    RouteError,
    LedgerError,
    PipelineError,
    AuthenticationError,
    SecurityError,
    aiomqtt.MqttError,
    ApiError,
    KafkaError,
    OSError,
)
"""Errors that end a bridge with a one-line message: a retry would not help."""

_log = structlog.get_logger()


def _mapped(config: Path | None, routes: tuple[str, ...], qos: int, message_id: str) -> Mapped:
    if (config is None) == (not routes):
        raise click.UsageError("give either --config or at least one --route FILTER=TOPIC")
    try:
        if config is not None:
            return load(config)
        parsed = []
        for text in routes:
            pattern, _, topic = text.rpartition("=")
            parsed.append(Route(pattern, topic, qos=qos))
        return Mapped(tuple(parsed), MessageId.parse(message_id))
    except RouteError as error:
        raise click.UsageError(str(error)) from error


def _settings(path: Path | None) -> Profile:
    return Profile() if path is None else read_settings(path)


def _warn(files: Iterable[Path], securities: Iterable[Security]) -> None:
    for path in files:
        if _settings(path).is_open:
            _log.warning("others can read a file that holds a secret: chmod 600", path=str(path))
    for security in securities:
        for warning in security.warnings():
            _log.warning(warning)


_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command()
@click.option("--bootstrap", "--bootstrap-server", show_default=DEFAULT_BOOTSTRAP, help="of Kafka")
@click.option(
    "--command-config",
    type=_FILE,
    help="how to connect to Kafka, by its own names (security.protocol, sasl.*, ssl.*), as"
    " properties or TOML; read again before each connection",
)
@click.option("--mqtt", "mqtt", default="127.0.0.1:1883", show_default=True, help="HOST:PORT")
@click.option(
    "--client-id",
    default="fencepost-bridge",
    show_default=True,
    help="names the MQTT session, the transactional id and the ledger; one bridge for each",
)
@click.option("--mqtt-version", type=click.Choice(["3.1.1", "5"]), default="5", show_default=True)
@click.option(
    "--mqtt-config",
    type=_FILE,
    help="how to connect to the MQTT broker, by the same names: SSL, or SASL_SSL with PLAIN for a"
    " user name and a password",
)
@click.option("--username", help="of MQTT")
@click.option(
    "--password",
    envvar="MQTT_PASSWORD",
    help="of MQTT; better in MQTT_PASSWORD or --mqtt-config: all users of the machine see what"
    " stands on command lines",
)
@click.option(
    "--config",
    type=_FILE,
    help="TOML: [[route]] …, instead of the next three",
)
@click.option("--route", "routes", multiple=True, metavar="FILTER=TOPIC", help="may be repeated")
@click.option("--qos", type=click.IntRange(0, 2), default=2, show_default=True, help="of --route")
@click.option(
    "--message-id",
    default="property:message-id",
    show_default=True,
    help="the place of a message's own id: property:NAME, json:FIELD or level:N",
)
@click.option(
    "--dead-letter",
    help="Kafka topic of messages without a route or a topic in Kafka, or too large",
)
@click.option(
    "--max-record-bytes",
    type=click.IntRange(min=MIN_RECORD_BYTES),
    default=MAX_RECORD_BYTES,
    show_default=True,
    help="a message whose record would be larger is too large",
)
@click.option(
    "--report-s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="seconds between two lines of counters in the log; 0 for none",
)
def main(
    bootstrap: str | None,
    command_config: Path | None,
    mqtt: str,
    client_id: str,
    mqtt_version: str,
    mqtt_config: Path | None,
    username: str | None,
    password: str | None,
    config: Path | None,
    routes: tuple[str, ...],
    qos: int,
    message_id: str,
    dead_letter: str | None,
    max_record_bytes: int,
    report_s: float,
) -> None:
    """Write MQTT messages to Kafka topics, exactly once where MQTT allows it.

    SIGTERM and Ctrl-C end it properly, with status 0; an error that no retry can fix ends it with
    status 1.
    """
    host, _, port = mqtt.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise click.UsageError(f"--mqtt wants HOST:PORT, not {mqtt!r}")
    if dead_letter is not None and (reason := illegal(dead_letter)):
        raise click.UsageError(f"--dead-letter: {reason}")
    if not client_id:
        raise click.UsageError("--client-id must not be empty: it names the session")

    def renewed() -> tuple[Address, Security]:
        try:
            mqtt_settings, kafka_settings = _settings(mqtt_config), _settings(command_config)
        except ProfileError as error:
            raise SecurityError(str(error)) from None
        version = 5 if mqtt_version == "5" else 4
        secured = mqtt_settings.security or PLAINTEXT
        address = Address(host, int(port), client_id, version, username, password, security=secured)
        return address, kafka_settings.security or PLAINTEXT

    try:
        address, security = renewed()
    except SecurityError as error:
        raise click.UsageError(str(error)) from error
    files = [path for path in (mqtt_config, command_config) if path is not None]
    _warn(files, (address.security, security))
    bootstrap = bootstrap or _settings(command_config).bootstrap or DEFAULT_BOOTSTRAP
    options = BridgeOptions(
        dead_letter=dead_letter,
        max_record_bytes=max_record_bytes,
        security=security,
        renewed=renewed if files else None,
    )
    mapped = _mapped(config, routes, qos, message_id)
    bridge = Bridge(bootstrap, address, mapped, options)
    if not structlog.is_configured():
        structlog.configure(processors=[_escaped, *structlog.get_config()["processors"]])
    try:
        asyncio.run(_run(bridge, report_s))
    except ENDS as error:
        raise click.ClickException(
            printable(f"the bridge ends: {str(error) or type(error).__name__}")
        ) from error


def _escaped(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Escape names from MQTT clients, which the log's default format prints unchanged."""
    return {
        key: printable(value) if isinstance(value, str) else value for key, value in event.items()
    }


async def _run(bridge: Bridge, report_s: float) -> None:
    reporting = asyncio.create_task(_report(bridge, report_s))
    try:
        await bridge.run()
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        _log.info("bridge stopped", **asdict(bridge.counters))


async def _report(bridge: Bridge, report_s: float) -> None:
    """Log the counters in each interval in which some of them have changed."""
    reported = asdict(bridge.counters)
    while report_s:
        await bridge.is_stopping.pause(report_s)
        if bridge.is_stopping.is_set():
            return
        counters = asdict(bridge.counters)
        if counters != reported:
            _log.info("bridge counters", **counters)
            reported = counters
