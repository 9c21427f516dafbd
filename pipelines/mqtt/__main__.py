"""``python -m pipelines.mqtt``: run the bridge from the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from pipelines.mqtt.bridge import Bridge, BridgeOptions
from pipelines.mqtt.routes import Mapped, MessageId, Route, RouteError, load
from pipelines.mqtt.session import Address


def _mapped(config: Path | None, routes: tuple[str, ...], qos: int, message_id: str) -> Mapped:
    if (config is None) == (not routes):
        raise click.UsageError("either --config or at least one --route FILTER=TOPIC")
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


@click.command()
@click.option("--bootstrap", default="127.0.0.1:9092", show_default=True)
@click.option("--mqtt", "mqtt", default="127.0.0.1:1883", show_default=True, help="HOST:PORT")
@click.option("--client-id", default="fencepost-bridge", show_default=True)
@click.option("--mqtt-version", type=click.Choice(["3.1.1", "5"]), default="5", show_default=True)
@click.option("--username")
@click.option("--password", envvar="MQTT_PASSWORD", help="or in MQTT_PASSWORD")
@click.option("--config", type=click.Path(path_type=Path, exists=True), help="TOML: [[route]] …")
@click.option("--route", "routes", multiple=True, metavar="FILTER=TOPIC")
@click.option("--qos", type=click.IntRange(0, 2), default=2, show_default=True)
@click.option("--message-id", default="property:message-id", show_default=True)
@click.option("--dead-letter", help="Kafka topic of messages without a route")
def main(
    bootstrap: str,
    mqtt: str,
    client_id: str,
    mqtt_version: str,
    username: str | None,
    password: str | None,
    config: Path | None,
    routes: tuple[str, ...],
    qos: int,
    message_id: str,
    dead_letter: str | None,
) -> None:
    """Write MQTT messages to Kafka topics, exactly once where MQTT allows it."""
    host, _, port = mqtt.rpartition(":")
    if not host or not port.isdecimal():
        raise click.UsageError(f"--mqtt wants HOST:PORT, not {mqtt!r}")
    address = Address(
        host,
        int(port),
        client_id,
        5 if mqtt_version == "5" else 4,
        username,
        password,
    )
    mapped = _mapped(config, routes, qos, message_id)

    async def run() -> None:
        await Bridge(bootstrap, address, mapped, BridgeOptions(dead_letter=dead_letter)).run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
