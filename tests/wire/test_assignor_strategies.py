"""aiokafka with Fencepost's assignors, alone and in groups with librdkafka's and Java's members."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiokafka import AIOKafkaConsumer

from fencepost.pipelines.assignors import BUILT_IN, Strategy
from tests.support.cluster import Cluster, unique
from tests.support.kafka import java_command
from tests.support.processes import Child
from tests.support.waits import until_async
from tests.wire.clients import confluent_consumer
from tests.wire.test_cli import fencepost, rows
from tests.wire.test_consumer_protocol import member

PARTITIONS = 6


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return cluster.create_topic(unique("strategy"), PARTITIONS)


def consumer(bootstrap: str, topic: str, group: str, strategy: str) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        group_id=group,
        partition_assignment_strategy=[Strategy(strategy)],
        heartbeat_interval_ms=200,
        session_timeout_ms=6_000,
        metadata_max_age_ms=1_000,
    )


def indexes(reader: AIOKafkaConsumer) -> set[int]:
    return {partition.partition for partition in reader.assignment()}


@pytest.mark.parametrize("strategy", BUILT_IN)
async def test_second_member_gets_half_and_leaves_the_rest_to_the_first(bootstrap, topic, strategy):
    group = unique("strategy")
    async with consumer(bootstrap, topic, group, strategy) as first:

        async def alone() -> bool:
            return indexes(first) == set(range(PARTITIONS))

        await until_async(alone, "everything at the first member")
        before = indexes(first)
        async with consumer(bootstrap, topic, group, strategy) as second:

            async def shared() -> bool:
                mine, theirs = indexes(first), indexes(second)
                return len(mine) == len(theirs) == 3 and not mine & theirs

            await until_async(shared, "three each", deadline_s=60)
            assert indexes(first) <= before
        await until_async(alone, "everything at the first member again", deadline_s=60)


def java_member(bootstrap: str, topic: str, group: str) -> Child:
    return Child(
        java_command(
            "org.apache.kafka.tools.VerifiableConsumer",
            *("--bootstrap-server", bootstrap, "--topic", topic, "--group-id", group),
            "--assignment-strategy",
            "org.apache.kafka.clients.consumer.CooperativeStickyAssignor",
        )
    )


def owned_by_java(child: Child) -> set[int]:
    mine: set[int] = set()
    for line in list(child.lines):
        if not line.startswith("{"):
            continue
        event = json.loads(line)
        named = {row["partition"] for row in event.get("partitions", ()) if "partition" in row}
        if event["name"] == "partitions_assigned":
            mine |= named
        elif event["name"] == "partitions_revoked":
            mine -= named
    return mine


@pytest.mark.slow
@pytest.mark.usefixtures("java_tools")
async def test_cooperative_sticky_members_of_three_clients_share_partitions(bootstrap, topic):
    """aiokafka's member joins first and leads; after it has left, another client's member leads."""
    group = unique("mixed")
    conf = {"group_id": group, "partition_assignment_strategy": "cooperative-sticky"}
    with confluent_consumer(bootstrap, **conf) as rd:
        java = None
        try:
            async with consumer(bootstrap, topic, group, "cooperative-sticky") as ours:

                def parts() -> list[set[int]]:
                    rd.poll(0.05)
                    theirs = {partition.partition for partition in rd.assignment()}
                    javas = set() if java is None else owned_by_java(java)
                    return [indexes(ours), theirs, javas]

                async def are(*sizes: int) -> bool:
                    found = parts()
                    everything = [index for part in found for index in part]
                    return sorted(map(len, found)) == sorted(sizes) and sorted(everything) == list(
                        range(PARTITIONS)
                    )

                await until_async(lambda: are(6, 0, 0), "ours alone", deadline_s=60)
                rd.subscribe([topic])
                await until_async(lambda: are(3, 3, 0), "librdkafka's share", deadline_s=60)
                java = java_member(bootstrap, topic, group)
                await until_async(lambda: are(2, 2, 2), "Java's share", deadline_s=60)
            kept = parts()[1:]

            async def without_ours() -> bool:
                _, theirs, javas = parts()
                return len(theirs) == len(javas) == 3 and not theirs & javas

            await until_async(without_ours, "the rest shared by the others", deadline_s=60)
            assert all(old <= new for old, new in zip(kept, parts()[1:], strict=True))
        finally:
            if java is not None:
                java.kill()


async def test_cooperative_sticky_member_shares_with_consumer_protocol_member(bootstrap, topic):
    """The group changes its protocol when librdkafka joins, and again when it leaves."""
    group = unique("mixed848")
    async with consumer(bootstrap, topic, group, "cooperative-sticky") as ours:

        async def alone() -> bool:
            return indexes(ours) == set(range(PARTITIONS))

        await until_async(alone, "everything at aiokafka's member")
        with member(bootstrap, group, topic) as theirs:

            async def shared() -> bool:
                theirs.poll(0.05)
                mine = indexes(ours)
                other = {partition.partition for partition in theirs.assignment()}
                return len(mine) == len(other) == 3 and not mine & other

            await until_async(shared, "three each, one in each protocol", deadline_s=60)
        await until_async(alone, "everything at aiokafka's member again", deadline_s=60)


async def test_plan_of_a_sticky_group_matches_its_next_assignment(bootstrap, topic):
    group = unique("plan")
    async with consumer(bootstrap, topic, group, "sticky") as first:

        async def alone() -> bool:
            return len(indexes(first)) == PARTITIONS

        await until_async(alone, "everything at the first member")
        asked = ("groups", "plan", group, "--add", "1", "--format", "json")
        planned = rows(await asyncio.to_thread(fencepost, *asked, bootstrap=bootstrap))
        assert sorted((row["now"], row["then"]) for row in planned) == [(0, 3), (6, 3)]
        async with consumer(bootstrap, topic, group, "sticky") as second:

            async def shared() -> bool:
                return len(indexes(first)) == len(indexes(second)) == 3

            await until_async(shared, "the plan", deadline_s=60)
