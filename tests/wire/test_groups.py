"""Consumer groups from the view of clients: members join, share partitions, leave and rejoin."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import aiokafka
import confluent_kafka
import kafka
import pytest
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from tests.support.cluster import GROUP, Cluster, unique
from tests.support.waits import until, until_async
from tests.wire.clients import (
    aio_consumer,
    confluent_consumer,
    confluent_producer,
    drain,
    kp_admin,
    kp_consumer,
    poll_until,
)


def fill(bootstrap: str, topic: str, partitions: int, each: int) -> None:
    with confluent_producer(bootstrap, linger_ms=5) as producer:
        for partition in range(partitions):
            for i in range(each):
                producer.produce(topic, b"%d:%d" % (partition, i), partition=partition)


def describe(cluster: Cluster, group: str) -> dict[str, object]:
    answer = cluster.call("describe_groups", 5, groups=[group])
    described: dict[str, object] = answer["groups"][0]
    assert described["error_code"] == "none"
    return described


def shares(consumers: Sequence[aiokafka.AIOKafkaConsumer], partitions: int) -> bool:
    """Return whether every partition has exactly one owner and every consumer has partitions."""
    owned = [tp.partition for consumer in consumers for tp in consumer.assignment()]
    return sorted(owned) == list(range(partitions)) and all(c.assignment() for c in consumers)


@pytest.mark.parametrize(
    "assignor", [RangePartitionAssignor, RoundRobinPartitionAssignor, StickyPartitionAssignor]
)
async def test_three_consumers_share_partitions_and_return_them_on_leaving(
    bootstrap: str, cluster: Cluster, assignor: type
) -> None:
    topic, group = cluster.create_topic(unique("share"), 6), unique("g")
    cluster.coordinator(group, GROUP)
    conf = {"group_id": group, "partition_assignment_strategy": (assignor,)}
    async with aio_consumer(bootstrap, topic, **conf) as first:

        async def alone() -> bool:
            return shares([first], 6)

        await until_async(alone, "the only member owns everything")
        async with (
            aio_consumer(bootstrap, topic, **conf) as second,
            aio_consumer(bootstrap, topic, **conf) as third,
        ):

            async def shared() -> bool:
                return shares([first, second, third], 6) and all(
                    len(c.assignment()) == 2 for c in (first, second, third)
                )

            await until_async(shared, "two partitions each")
            described = describe(cluster, group)
            assert described["group_state"] == "Stable"
            assert described["protocol_type"] == "consumer"
            assert described["protocol_data"] == assignor.name
            assert len(described["members"]) == 3
        await until_async(alone, "the leavers' partitions come back")
    assert describe(cluster, group)["group_state"] == "Empty"


async def test_records_are_processed_once_across_a_rebalance(
    bootstrap: str, cluster: Cluster
) -> None:
    """Consumers commit when partitions are revoked, and resume there: each record is read once."""
    topic, group = cluster.create_topic(unique("once"), 4), unique("g")
    fill(bootstrap, topic, 4, 50)
    seen: list[tuple[int, bytes]] = []

    class CommitOnRevoke(aiokafka.ConsumerRebalanceListener):
        def __init__(self, consumer: aiokafka.AIOKafkaConsumer) -> None:
            self.consumer = consumer

        async def on_partitions_revoked(self, revoked: set[aiokafka.TopicPartition]) -> None:
            if revoked:
                await self.consumer.commit()

        async def on_partitions_assigned(self, assigned: set[aiokafka.TopicPartition]) -> None:
            pass

    async def work(consumer: aiokafka.AIOKafkaConsumer, stop: asyncio.Event) -> None:
        consumer.subscribe([topic], listener=CommitOnRevoke(consumer))
        while not stop.is_set():
            for records in (await consumer.getmany(timeout_ms=50, max_records=3)).values():
                seen.extend((r.partition, r.value) for r in records)
        if consumer.assignment():
            await consumer.commit()

    async def read(count: int) -> None:
        async def enough() -> bool:
            [task.result() for task in tasks if task.done()]  # a task's exception fails the test
            return len(seen) >= count

        await until_async(enough, f"{count} records")

    async def settled(members: int) -> None:
        """Wait until the group is stable, because commits may be refused in a rebalance."""

        async def stable() -> bool:
            group_now = describe(cluster, group)
            return group_now["group_state"] == "Stable" and len(group_now["members"]) == members

        await until_async(stable, f"{members} members")

    tasks: list[asyncio.Task[None]] = []
    stops = [asyncio.Event() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        consumers = [
            await stack.enter_async_context(aio_consumer(bootstrap, group_id=group))
            for _ in range(3)
        ]
        for consumer, stop in zip(consumers, stops, strict=True):
            tasks.append(asyncio.create_task(work(consumer, stop)))
            await read(20 * len(tasks))
        await settled(3)
        stops[1].set()
        await tasks[1]
        await consumers[1].stop()
        await read(200)
        await settled(2)
        for stop in stops:
            stop.set()
        await asyncio.gather(*tasks)

    assert len(seen) == len(set(seen)) == 200
    assert sum(cluster.committed(group, topic, p) for p in range(4)) == 200


def test_restarted_consumer_resumes_at_its_committed_offset(
    bootstrap: str, cluster: Cluster
) -> None:
    topic, group = cluster.create_topic(unique("resume")), unique("g")
    fill(bootstrap, topic, 1, 30)
    with confluent_consumer(bootstrap, group_id=group) as consumer:
        consumer.subscribe([topic])
        got = drain(consumer, 10)
        consumer.commit(message=got[-1], asynchronous=False)
        drain(consumer, 5)
    with confluent_consumer(bootstrap, group_id=group) as consumer:
        consumer.subscribe([topic])
        assert drain(consumer, 1)[0].offset() == 10
        (committed,) = consumer.committed([confluent_kafka.TopicPartition(topic, 0)], timeout=10)
        assert committed.offset == 10


def test_offsets_carry_metadata_and_are_read_by_another_client(
    bootstrap: str, cluster: Cluster
) -> None:
    topic, group = cluster.create_topic(unique("meta"), 2), unique("g")
    with kp_consumer(bootstrap, group_id=group) as writer:
        writer.commit(
            {
                kafka.TopicPartition(topic, 0): kafka.OffsetAndMetadata(7, "état 🦔", -1),
                kafka.TopicPartition(topic, 1): kafka.OffsetAndMetadata(9, "", -1),
            }
        )
    with confluent_consumer(bootstrap, group_id=group) as reader:
        asked = [confluent_kafka.TopicPartition(topic, p) for p in (0, 1)]
        # Do not compare the metadata. librdkafka copies it without a terminating NUL, so other
        # bytes may follow it. Once in some thousand runs these bytes are not UTF-8.
        assert [position.offset for position in reader.committed(asked, timeout=60)] == [7, 9]
    topics = [{"name": topic, "partition_indexes": [0, 1]}]
    told = cluster.call("offset_fetch", 5, group_id=group, topics=topics)["topics"][0]["partitions"]
    assert [partition["metadata"] for partition in told] == ["état 🦔", ""]
    with kp_admin(bootstrap) as admin:
        listed = admin.list_group_offsets({group: None})[group]
    assert {(tp.partition, meta.offset) for tp, meta in listed.items()} == {(0, 7), (1, 9)}


def test_auto_commit_commits_the_consumed_offset(bootstrap: str, cluster: Cluster) -> None:
    topic, group = cluster.create_topic(unique("auto")), unique("g")
    fill(bootstrap, topic, 1, 20)
    with confluent_consumer(
        bootstrap, group_id=group, enable_auto_commit=True, auto_commit_interval_ms=50
    ) as consumer:
        consumer.subscribe([topic])
        drain(consumer, 20)
        poll_until([consumer], lambda: cluster.committed(group, topic) == 20, "the commit")


def test_cooperative_rebalance_moves_only_reassigned_partitions(
    bootstrap: str, cluster: Cluster
) -> None:
    topic, group = cluster.create_topic(unique("coop"), 4), unique("g")
    cluster.coordinator(group, GROUP)
    revoked: dict[str, list[int]] = {"first": [], "second": []}
    owned: dict[str, set[int]] = {"first": set(), "second": set()}

    def join(name: str, consumer: confluent_kafka.Consumer) -> None:
        def gained(c: confluent_kafka.Consumer, got: list[confluent_kafka.TopicPartition]) -> None:
            c.incremental_assign(got)
            owned[name] |= {tp.partition for tp in got}

        def lost(c: confluent_kafka.Consumer, gone: list[confluent_kafka.TopicPartition]) -> None:
            c.incremental_unassign(gone)
            revoked[name] += [tp.partition for tp in gone]
            owned[name] -= {tp.partition for tp in gone}

        consumer.subscribe([topic], on_assign=gained, on_revoke=lost)

    conf = {"group_id": group, "partition_assignment_strategy": "cooperative-sticky"}
    with confluent_consumer(bootstrap, **conf) as first:
        join("first", first)
        poll_until([first], lambda: owned["first"] == {0, 1, 2, 3}, "all four")
        with confluent_consumer(bootstrap, **conf) as second:
            join("second", second)
            poll_until(
                [first, second],
                lambda: len(owned["first"]) == len(owned["second"]) == 2,
                "two each",
            )
            assert owned["first"] | owned["second"] == {0, 1, 2, 3}
            assert len(revoked["first"]) == 2
            moved = set(revoked["first"])
            assert moved == owned["second"]
            described = describe(cluster, group)
            assert described["protocol_data"] == "cooperative-sticky"
        poll_until([first], lambda: owned["first"] == {0, 1, 2, 3}, "all four again")
        assert set(revoked["first"]) == moved


def test_static_member_rejoins_without_a_rebalance(bootstrap: str, cluster: Cluster) -> None:
    topic, group = cluster.create_topic(unique("static"), 4), unique("g")
    cluster.coordinator(group, GROUP)
    assigned: list[str] = []

    @contextlib.contextmanager
    def member(instance: str):  # type: ignore[no-untyped-def]
        with confluent_consumer(bootstrap, group_id=group, group_instance_id=instance) as consumer:
            consumer.subscribe([topic], on_assign=lambda *_: assigned.append(instance))
            yield consumer

    def ids() -> dict[str, str]:
        described = describe(cluster, group)
        if described["group_state"] != "Stable":
            return {}
        return {m["group_instance_id"]: m["member_id"] for m in described["members"]}

    with member("one") as one:
        with member("two") as two:
            poll_until(
                [one, two],
                lambda: len(one.assignment()) == len(two.assignment()) == 2 and len(ids()) == 2,
                "both members",
            )
            before = ids()
        # A static member does not send LeaveGroup.
        assert ids() == before
        assigned.clear()
        with member("two") as two:
            poll_until([one, two], lambda: "two" in assigned, "the return")
            after = ids()
            assert after["one"] == before["one"]
            assert after["two"] != before["two"]
            assert "one" not in assigned


def test_duplicate_group_instance_id_fences_the_older_member(
    bootstrap: str, cluster: Cluster
) -> None:
    topic, group = cluster.create_topic(unique("twice")), unique("g")
    fenced: list[confluent_kafka.KafkaError] = []
    older = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.instance.id": "i",
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 100,
            "error_cb": fenced.append,
        }
    )
    older.subscribe([topic])
    poll_until([older], older.assignment, "assignment")
    with confluent_consumer(bootstrap, group_id=group, group_instance_id="i") as newer:
        newer.subscribe([topic])
        poll_until([newer], newer.assignment, "the newer's assignment")

        def hears_of_it() -> bool:
            message = older.poll(0.05)
            if message is not None and message.error():
                fenced.append(message.error())
            return any(
                e.code()
                in (
                    confluent_kafka.KafkaError._FATAL,
                    confluent_kafka.KafkaError.FENCED_INSTANCE_ID,
                )
                for e in fenced
            )

        until(hears_of_it, "the older is fenced")
        assert newer.assignment()
    older.close()


async def test_member_without_heartbeats_is_removed(bootstrap: str, cluster: Cluster) -> None:
    topic, group = cluster.create_topic(unique("silent"), 2), unique("g")
    cluster.coordinator(group, GROUP)
    # This member joins by raw requests, and then goes silent.
    with Cluster(bootstrap) as ghost:
        join = {
            "group_id": group,
            "session_timeout": 1000,
            "rebalance_timeout": 1000,
            "protocol_type": "consumer",
            "protocols": [
                {"name": "roundrobin", "metadata": _subscription(topic)},
            ],
        }
        known = ghost.call("join_group", 5, **join)
        joined = ghost.call("join_group", 5, member_id=known["member_id"], **join)
        assert joined["error_code"] == "none"
        ghost.call(
            "sync_group",
            3,
            group_id=group,
            generation_id=joined["generation_id"],
            member_id=joined["member_id"],
        )
    async with aio_consumer(bootstrap, topic, group_id=group) as consumer:

        async def all_mine() -> bool:
            return len(consumer.assignment()) == 2

        await until_async(all_mine, "the ghost is gone")
    assert describe(cluster, group)["members"] == []


def _subscription(topic: str) -> bytes:
    name = topic.encode()
    return b"\0\0\0\0\0\1" + len(name).to_bytes(2, "big") + name + b"\xff\xff\xff\xff"


def test_pattern_subscription_consumes_only_matching_topics(
    bootstrap: str, cluster: Cluster
) -> None:
    stem = unique("pattern")
    first, second = cluster.create_topic(f"{stem}-a"), cluster.create_topic(f"{stem}-b")
    cluster.create_topic(f"other-{stem}")
    fill(bootstrap, first, 1, 3)
    fill(bootstrap, second, 1, 3)
    with confluent_consumer(bootstrap, group_id=unique("g")) as consumer:
        consumer.subscribe([f"^{stem}-.*"])
        assert {m.topic() for m in drain(consumer, 6)} == {first, second}


def test_kafka_python_members_share_partitions(bootstrap: str, cluster: Cluster) -> None:
    topic, group = cluster.create_topic(unique("kp"), 2), unique("g")
    cluster.coordinator(group, GROUP)
    fill(bootstrap, topic, 2, 10)
    with (
        kp_consumer(bootstrap, topic, group_id=group) as first,
        kp_consumer(bootstrap, topic, group_id=group) as second,
    ):

        def both() -> bool:
            first.poll(50)
            second.poll(50)
            return len(first.assignment()) == len(second.assignment()) == 1

        until(both, "one partition each")


def test_groups_are_listed_described_and_deleted(bootstrap: str, cluster: Cluster) -> None:
    topic, group = cluster.create_topic(unique("admin")), unique("g")
    with kp_admin(bootstrap) as admin:
        with confluent_consumer(bootstrap, group_id=group) as consumer:
            consumer.subscribe([topic])
            poll_until([consumer], consumer.assignment, "assignment")
            mark = confluent_kafka.TopicPartition(topic, 0, 0)
            consumer.commit(offsets=[mark], asynchronous=False)
            listed = {g["group_id"]: g for g in admin.list_groups()}[group]
            assert listed["protocol_type"] == "consumer"
            assert listed["group_state"] == "Stable"
            refused = cluster.call("delete_groups", 2, groups_names=[group])
            assert refused["results"][0]["error_code"] == "non_empty_group"
            still = cluster.call(
                "offset_delete",
                0,
                group_id=group,
                topics=[{"name": topic, "partitions": [{"partition_index": 0}]}],
            )
            part = still["topics"][0]["partitions"][0]
            assert part["error_code"] == "group_subscribed_to_topic"
        assert describe(cluster, group)["group_state"] == "Empty"
        assert cluster.committed(group, topic) == 0
        assert cluster.call("delete_groups", 2, groups_names=[group])["results"] == [
            {"group_id": group, "error_code": "none"}
        ]
        assert group not in {g["group_id"] for g in admin.list_groups()}
    assert cluster.committed(group, topic) == -1
    gone = cluster.call("delete_groups", 2, groups_names=[group])
    assert gone["results"][0]["error_code"] == "group_id_not_found"


def test_offsets_of_an_empty_group_can_be_deleted_one_by_one(
    bootstrap: str, cluster: Cluster
) -> None:
    topic, group = cluster.create_topic(unique("offdel"), 2), unique("g")
    with confluent_consumer(bootstrap, group_id=group) as consumer:
        consumer.commit(
            offsets=[confluent_kafka.TopicPartition(topic, p, 3) for p in (0, 1)],
            asynchronous=False,
        )
    answer = cluster.call(
        "offset_delete",
        0,
        group_id=group,
        topics=[{"name": topic, "partitions": [{"partition_index": 0}]}],
    )
    assert answer["error_code"] == "none"
    assert cluster.committed(group, topic, 0) == -1
    assert cluster.committed(group, topic, 1) == 3


def test_deleted_topic_loses_its_committed_offsets(bootstrap: str, cluster: Cluster) -> None:
    topic, group = cluster.create_topic(unique("forgotten")), unique("g")
    with confluent_consumer(bootstrap, group_id=group) as consumer:
        consumer.commit(offsets=[confluent_kafka.TopicPartition(topic, 0, 3)], asynchronous=False)
    cluster.call("delete_topics", 5, topic_names=[topic], timeout=10_000)

    def gone() -> bool:
        answer = cluster.call("offset_fetch", 7, group_id=group, topics=None)
        return answer["topics"] == []

    until(gone, "no offsets left")
