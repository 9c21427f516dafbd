"""No group request within the limits blocks the broker's event loop for long."""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fencepost import Broker
from tests.support.cluster import GROUP, Cluster
from tests.support.stalls import watched_loop
from tests.support.waits import until

pytestmark = pytest.mark.slow

CONFIG = {
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "3000",
    "group.consumer.min.heartbeat.interval.ms": "1000",
    "group.consumer.heartbeat.interval.ms": "1000",
    "group.consumer.assignment.interval.ms": "1000",
}
TIMEOUT = 60_000


class Client(Cluster):
    """A raw connection for one or more members of the group ``g``."""

    def beat(self, member: str, epoch: int, **more: Any) -> Any:
        body = {
            "group_id": "g",
            "member_id": member,
            "member_epoch": epoch,
            "rebalance_timeout": TIMEOUT if epoch == 0 else -1,
            "instance_id": None,
            "rack_id": None,
            "subscribed_topic_names": None,
            "subscribed_topic_regex": None,
            "server_assignor": None,
            "topic_partitions": [] if epoch == 0 else None,
            **more,
        }
        return self.call("consumer_group_heartbeat", 1, **body)

    def enter(self, member: str, *names: str, **more: Any) -> int:
        answer = self.beat(member, 0, **{"subscribed_topic_names": list(names), **more})
        assert answer["error_code"] == "none", answer
        return int(answer["member_epoch"])

    def describe(self) -> Any:
        asked = {"group_ids": ["g"], "include_authorized_operations": False}
        return self.call("consumer_group_describe", 1, **asked)["groups"][0]

    def classic(self, name: str, metadata: bytes) -> str:
        """Join as a new member of the classic protocol."""
        joined = self.call(
            "join_group",
            3,
            group_id="g",
            member_id="",
            session_timeout=TIMEOUT,
            rebalance_timeout=TIMEOUT,
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": metadata}],
        )
        assert joined["error_code"] == "none", joined
        return str(joined["member_id"])


async def stalls(home: Path, topics: dict[str, int], scenario: Callable[[Client], None]) -> None:
    """Run ``scenario`` in a thread, and check the turns of the broker, which is in this process."""
    async with Broker(data_dir=home, config=CONFIG) as broker:
        with Client(broker.bootstrap) as client:

            def prepare() -> None:
                for name, partitions in topics.items():
                    client.create_topic(name, partitions)
                client.coordinator("g", GROUP)

            await asyncio.to_thread(prepare)
            with watched_loop() as watch:
                await asyncio.to_thread(scenario, client)
    watch.check()


@pytest.mark.parametrize("pattern", ["(.?){600}", "(((a?){10}){10}){9}|.*7"])
async def test_costly_subscription_regex_does_not_block_the_event_loop(
    tmp_path: Path, pattern: str
) -> None:
    def scenario(client: Client) -> None:
        epoch = client.enter("m", subscribed_topic_names=None, subscribed_topic_regex=pattern)

        def resolved() -> bool:
            nonlocal epoch
            epoch = client.beat("m", epoch)["member_epoch"]
            (member,) = client.describe()["members"]
            return bool(member["assignment"]["topic_partitions"])

        until(resolved, "the expression is resolved")

    await stalls(tmp_path, {f"{number:060}": 1 for number in range(100)}, scenario)


async def test_expiration_of_many_members_does_not_block_the_event_loop(tmp_path: Path) -> None:
    def scenario(client: Client) -> None:
        for number in range(300):
            client.enter(f"m{number}", "t")
        epoch = client.enter("alive", "t")

        def is_alone() -> bool:
            nonlocal epoch
            answer = client.beat("alive", epoch)
            assert answer["error_code"] == "none", answer
            epoch = answer["member_epoch"]
            return len(client.describe()["members"]) == 1

        until(is_alone, "all others have expired")

    await stalls(tmp_path, {"t": 1_000}, scenario)


async def test_conversion_of_a_large_group_does_not_block_the_event_loop(tmp_path: Path) -> None:
    def scenario(client: Client) -> None:
        metadata = struct.pack(">hih", 0, 1, 1) + b"t" + struct.pack(">i", -1)
        client.enter("m", "t")
        members = [client.classic(f"c{number}", metadata) for number in range(300)]
        assert client.beat("m", -1)["error_code"] == "none"
        asked = {"groups": ["g"], "include_authorized_operations": False}
        (found,) = client.call("describe_groups", 6, **asked)["groups"]
        assert len(found["members"]) == len(members)
        client.enter(str(uuid.uuid4()), "t")
        assert len(client.describe()["members"]) == len(members) + 1

    await stalls(tmp_path, {"t": 1_000}, scenario)
