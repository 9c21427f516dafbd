"""Transactions of real clients: committed records are visible, aborted records are not.

Zombies are fenced.
"""

from __future__ import annotations

import aiokafka
import confluent_kafka
import pytest

from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.waits import until, until_async
from tests.wire.clients import aio_consumer, confluent_consumer, confluent_producer, drain, kp_admin
from tests.wire.transactional import CLIENTS, AbortableError, Fenced, transactional

every_client = pytest.mark.parametrize("client", CLIENTS)


def settled(cluster: Cluster, topic: str, end: int, partition: int = 0) -> None:
    """Wait until ``topic`` ends at offset ``end`` and no transaction holds the LSO back."""
    until(
        lambda: cluster.lso(topic, partition) == cluster.offset(topic, partition) == end,
        f"LSO = LEO = {end} in {topic}-{partition}",
    )


@every_client
async def test_committed_records_are_visible_and_aborted_ones_are_not(
    bootstrap: str, cluster: Cluster, client: str
) -> None:
    topic = cluster.create_topic(unique("txn"), 2)
    async with transactional(client, bootstrap, unique("id")) as producer:
        for number in range(6):
            await producer.begin()
            await producer.send(topic, b"%d-a" % number, 0)
            await producer.send(topic, b"%d-b" % number, 1)
            await (producer.commit() if number % 3 else producer.abort())
    for partition, name in ((0, b"a"), (1, b"b")):
        settled(cluster, topic, 12, partition)
        committed = [b"%d-%s" % (n, name) for n in (1, 2, 4, 5)]
        everything = [b"%d-%s" % (n, name) for n in range(6)]
        read = cluster.values(topic, partition=partition, isolation=READ_COMMITTED)
        assert read == committed
        assert cluster.values(topic, partition=partition) == everything

    async with aio_consumer(bootstrap, isolation_level="read_committed") as consumer:
        consumer.assign([aiokafka.TopicPartition(topic, 0)])
        got = [(await consumer.getone()).value for _ in range(4)]
        assert got == [b"%d-a" % n for n in (1, 2, 4, 5)]
        assert await consumer.position(aiokafka.TopicPartition(topic, 0)) <= 12
    with confluent_consumer(bootstrap, isolation_level="read_committed") as consumer:
        consumer.assign([confluent_kafka.TopicPartition(topic, 1, 0)])
        assert [m.value() for m in drain(consumer, 4)] == [b"%d-b" % n for n in (1, 2, 4, 5)]
    with confluent_consumer(bootstrap, isolation_level="read_uncommitted") as consumer:
        consumer.assign([confluent_kafka.TopicPartition(topic, 1, 0)])
        assert [m.value() for m in drain(consumer, 6)] == [b"%d-b" % n for n in range(6)]


@every_client
async def test_open_transaction_holds_back_the_last_stable_offset(
    bootstrap: str, cluster: Cluster, client: str
) -> None:
    topic = cluster.create_topic(unique("lso"))
    cluster.produce(topic, [b"before"])
    async with transactional(client, bootstrap, unique("id")) as producer:
        await producer.begin()
        await producer.send(topic, b"open")
        cluster.produce(topic, [b"behind"])
        assert cluster.lso(topic) == 1
        assert cluster.offset(topic) == 3
        assert cluster.values(topic, isolation=READ_COMMITTED) == [b"before"]
        assert cluster.values(topic) == [b"before", b"open", b"behind"]
        await producer.commit()
    settled(cluster, topic, 4)
    assert cluster.values(topic, isolation=READ_COMMITTED) == [b"before", b"open", b"behind"]


@every_client
async def test_lso_waits_for_the_first_of_two_overlapping_transactions(
    bootstrap: str, cluster: Cluster, client: str
) -> None:
    topic = cluster.create_topic(unique("overlap"))
    async with (
        transactional(client, bootstrap, unique("id")) as first,
        transactional(client, bootstrap, unique("id")) as second,
    ):
        await first.begin()
        await second.begin()
        await first.send(topic, b"first")
        await second.send(topic, b"second")
        await first.send(topic, b"first again")
        await second.commit()
        until(lambda: cluster.offset(topic) == 4, "the second's marker")
        assert cluster.lso(topic) == 0
        await first.abort()
    settled(cluster, topic, 5)
    assert cluster.values(topic, isolation=READ_COMMITTED) == [b"second"]


@every_client
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
async def test_transactional_offsets_take_effect_only_with_a_commit(
    bootstrap: str, cluster: Cluster, client: str, commit: bool
) -> None:
    topic, group = cluster.create_topic(unique("offsets")), unique("g")
    with confluent_consumer(bootstrap, group_id=group) as consumer:
        start = confluent_kafka.TopicPartition(topic, 0, 1)
        consumer.commit(offsets=[start], asynchronous=False)
    async with transactional(client, bootstrap, unique("id")) as producer:
        await producer.begin()
        await producer.send(topic, b"result")
        await producer.send_offsets({(topic, 0): 5}, group)
        assert cluster.committed(group, topic) == 1
        unstable = cluster.call(
            "offset_fetch",
            7,
            group_id=group,
            require_stable=True,
            topics=[{"name": topic, "partition_indexes": [0]}],
        )["topics"][0]["partitions"][0]
        assert (unstable["error_code"], unstable["committed_offset"]) == (
            "unstable_offset_commit",
            -1,
        )
        await (producer.commit() if commit else producer.abort())
    settled(cluster, topic, 2)
    assert cluster.committed(group, topic, stable=True) == (5 if commit else 1)


@every_client
async def test_transaction_with_offsets_alone_commits_them(
    bootstrap: str, cluster: Cluster, client: str
) -> None:
    topic, group = cluster.create_topic(unique("only-offsets")), unique("g")
    async with transactional(client, bootstrap, unique("id")) as producer:
        for mark in (3, 8):
            await producer.begin()
            await producer.send_offsets({(topic, 0): mark}, group)
            await producer.commit()
    assert cluster.committed(group, topic, stable=True) == 8


@every_client
async def test_newer_producer_fences_the_zombie(
    bootstrap: str, cluster: Cluster, client: str
) -> None:
    topic, name = cluster.create_topic(unique("zombie")), unique("id")
    async with transactional(client, bootstrap, name) as zombie:
        await zombie.begin()
        await zombie.send(topic, b"lost")
        async with transactional(client, bootstrap, name) as newer:
            # The successor's InitProducerId has aborted the zombie's transaction.
            settled(cluster, topic, 2)
            with pytest.raises((Fenced, AbortableError)):
                await zombie.send(topic, b"too late")
            with pytest.raises((Fenced, AbortableError)):
                await zombie.commit()
            await newer.begin()
            await newer.send(topic, b"kept")
            await newer.commit()
    settled(cluster, topic, 4)
    assert cluster.values(topic, isolation=READ_COMMITTED) == [b"kept"]
    assert b"too late" not in cluster.values(topic)


@every_client
async def test_fenced_producer_cannot_begin_another_transaction(
    bootstrap: str, cluster: Cluster, client: str
) -> None:
    topic, name = cluster.create_topic(unique("fenced")), unique("id")
    async with transactional(client, bootstrap, name) as zombie:
        await zombie.begin()
        await zombie.send(topic, b"mine")
        await zombie.commit()
        settled(cluster, topic, 2)
        async with transactional(client, bootstrap, name):
            await zombie.begin()
            with pytest.raises((Fenced, AbortableError)):
                await zombie.send(topic, b"zombie's")
            with pytest.raises((Fenced, AbortableError)):
                await zombie.commit()
    settled(cluster, topic, 2)


@every_client
async def test_abandoned_transaction_is_aborted_at_its_timeout(
    bootstrap: str, cluster: Cluster, client: str
) -> None:
    topic = cluster.create_topic(unique("timeout"))
    async with transactional(client, bootstrap, unique("id"), timeout_ms=2_500) as producer:
        await producer.begin()
        await producer.send(topic, b"forgotten")
        settled(cluster, topic, 2)
        with pytest.raises((Fenced, AbortableError)):
            await producer.commit()
    assert cluster.values(topic, isolation=READ_COMMITTED) == []


async def test_restarted_copier_resumes_at_its_transactional_offsets(
    bootstrap: str, cluster: Cluster
) -> None:
    """Run consume-transform-produce, and abandon every third transaction half-way."""
    source, target = cluster.create_topic(unique("in")), cluster.create_topic(unique("out"))
    group, name, count = unique("g"), unique("id"), 120
    with confluent_producer(bootstrap, linger_ms=5) as producer:
        for i in range(count):
            producer.produce(source, b"%d" % i)
    life = 0
    while cluster.committed(group, source) < count:
        life += 1
        assert life < 20, "no progress"
        await copy_for_a_while(bootstrap, source, target, group, name, transactions=2)
    until(lambda: cluster.lso(target) == cluster.offset(target), "every transaction has ended")
    copied = cluster.values(target, isolation=READ_COMMITTED)
    assert copied == [b"copy of %d" % i for i in range(count)]
    # The log contains the records of the abandoned attempts.
    assert len(cluster.values(target)) > count


async def copy_for_a_while(
    bootstrap: str, source: str, target: str, group: str, name: str, *, transactions: int
) -> None:
    """Run a copier for several transactions of ten records; it never ends the last one."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": name, "linger.ms": 0}
    )
    producer.init_transactions(60)
    with confluent_consumer(
        bootstrap, group_id=group, isolation_level="read_committed"
    ) as consumer:
        consumer.subscribe([source])
        for number in range(transactions + 1):
            messages = consumer.consume(10, timeout=2 if number else 10)
            if not messages:
                return
            producer.begin_transaction()
            for message in messages:
                producer.produce(target, b"copy of " + message.value())
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), 60
            )
            producer.flush(60)
            if number < transactions:
                producer.commit_transaction(60)


async def test_concurrent_reader_sees_only_complete_transactions(
    bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("live"))
    seen: list[bytes] = []
    async with (
        aio_consumer(bootstrap, isolation_level="read_committed") as reader,
        transactional("aiokafka", bootstrap, unique("id")) as producer,
    ):
        reader.assign([aiokafka.TopicPartition(topic, 0)])
        wanted: list[bytes] = []
        for number in range(20):
            await producer.begin()
            values = [b"%d/%d" % (number, i) for i in range(3)]
            for value in values:
                await producer.send(topic, value)
            if number % 2:
                await producer.commit()
                wanted += values
            else:
                await producer.abort()

            async def all_seen(wanted: list[bytes] = wanted) -> bool:
                for records in (await reader.getmany(timeout_ms=20)).values():
                    seen.extend(r.value for r in records)
                return len(seen) >= len(wanted)

            if number % 4 == 3:
                await until_async(all_seen, "the committed ones")
                assert seen == wanted
    assert seen == wanted


async def test_transactions_are_listed_and_described_in_each_state(
    bootstrap: str, cluster: Cluster
) -> None:
    topic, name = cluster.create_topic(unique("show"), 2), unique("id")

    def described() -> dict[str, object]:
        # Read the raw response, because some decoders refuse its valid timestamp of -1.
        listed = cluster.call("list_transactions", 1, duration_filter=-1)
        return {t["transactional_id"]: t["transaction_state"] for t in listed["transaction_states"]}

    async with transactional("confluent", bootstrap, name) as producer:
        assert described()[name] == "Empty"
        await producer.begin()
        await producer.send(topic, b"v", 1)
        assert described()[name] == "Ongoing"
        with kp_admin(bootstrap) as admin:
            shown = admin.describe_transactions([name])[name]
        assert shown.state == "Ongoing"
        assert {(tp.topic, tp.partition) for tp in shown.topic_partitions} == {(topic, 1)}
        await producer.commit()
        until(lambda: described()[name] == "CompleteCommit", "completion")
        await producer.begin()
        await producer.send(topic, b"v", 1)
        await producer.abort()
        until(lambda: described()[name] == "CompleteAbort", "completion")


async def test_describe_producers_shows_sequence_and_transaction_start(
    bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("producers"))

    def active() -> list[dict[str, int]]:
        answer = cluster.call(
            "describe_producers", 0, topics=[{"name": topic, "partition_indexes": [0]}]
        )
        part = answer["topics"][0]["partitions"][0]
        assert part["error_code"] == "none"
        found: list[dict[str, int]] = part["active_producers"]
        return found

    async with transactional("confluent", bootstrap, unique("id")) as producer:
        await producer.begin()
        await producer.send(topic, b"a")
        await producer.send(topic, b"b")
        (state,) = active()
        assert state["producer_epoch"] == 0
        assert state["last_sequence"] == 1
        assert state["current_txn_start_offset"] == 0
        await producer.commit()
        until(lambda: active()[0]["current_txn_start_offset"] == -1, "the end")
        assert active()[0]["coordinator_epoch"] >= 0


def test_list_transactions_accepts_only_re2j_patterns(cluster: Cluster) -> None:
    stem = unique("ids")
    ids = (f"{stem}-orders", f"{stem}-Orders.EU", f"{stem}-αβγ", f"{stem}-é")
    for name in ids:
        cluster.init_producer(name)

    def listed(pattern: str) -> str | list[int]:
        answer = cluster.call("list_transactions", 2, transactional_id_pattern=pattern)
        found = [row["transactional_id"] for row in answer["transaction_states"]]
        if answer["error_code"] != "none":
            assert not found
            return str(answer["error_code"])
        return [at for at, name in enumerate(ids) if name in found]

    patterns = {
        "": [0, 1, 2, 3],
        ".*": [0, 1, 2, 3],
        stem: [],
        f"{stem}-orders": [0],
        "orders": [],
        f"{stem}-(?i:orders.*)": [0, 1],
        f"(?i){stem.upper()}-É": [3],
        rf"{stem}-\p{{Greek}}+": [2],
        rf"{stem}-\P{{Greek}}+": [0, 1, 3],
        rf"{stem}-[\p{{Greek}}é]*": [2, 3],
        rf"{stem}-.*\b": [0, 1],
        rf"{stem}\b.*\B": [2, 3],
        rf"{stem}-\w+": [0],
        f"{stem}-.": [3],
        f"{stem}-[^a-z]*": [2, 3],
        rf"\Q{stem}-\E(orders|é){{1,3}}": [0, 3],
        f"{stem}-(.*.*)*": [0, 1, 2, 3],
    }
    assert {pattern: listed(pattern) for pattern in patterns} == patterns
    for pattern in ("(", "[a", "a**", r"(a)\1", "(?=a)", r"\p{Klingon}", "a{1001}", "(?x)a", "\\"):
        assert listed(pattern) == "invalid_regular_expression", pattern
