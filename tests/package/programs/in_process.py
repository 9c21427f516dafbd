"""A user's test with two brokers in this process, which imports only the installed package."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from aiokafka import AIOKafkaProducer

from fencepost import Broker, BrokerThread


async def main(home: Path) -> None:
    async with Broker(data_dir=home / "one") as one, Broker(data_dir=home / "two") as two:
        for broker in (one, two):
            async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap) as producer:
                await producer.send_and_wait("orders", b"first")


with tempfile.TemporaryDirectory() as home:
    asyncio.run(main(Path(home)))
    with BrokerThread(lambda: Broker(data_dir=Path(home) / "three")) as third:
        assert third.address[1] > 0

for name, module in sys.modules.items():
    top = name.partition(".")[0]
    assert top not in {"coordinator", "groups", "logcore", "pipelines", "txn"}, name
    if top == "fencepost":
        print(module.__file__)
