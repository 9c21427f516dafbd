"""Consumer groups: the first assignment, heartbeats, commits, a large rebalance, loading."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable

from confluent_kafka import Consumer, TopicPartition

from bench.brokers import Broker, cpu_seconds, resident_mib
from bench.clients import (
    Burst,
    create_topic,
    expect_no_error,
    framed,
    joined_group,
    until,
)
from bench.suite import ALONE, DEFAULTS, Figures, Suite, Workload
from fencepost.coordinator.runtime.key_partition import partition_for
from tests.support.cluster import GROUP, Cluster, unique

JOINS = 10
MEMBERS, PARTITIONS, REBALANCES = 10, 900, 3
BEAT_MS = 100
"""The members' heartbeat interval in the large rebalance: with the defaults of 3 and 5 s, most of
the measured time would be the members' wait for their next heartbeat, not the broker's work."""
GROUPS_COUNT, OFFSETS_EACH = 1_000, 100
OFFSETS_PARTITIONS = 50
"""The default of ``offsets.topic.num.partitions``."""

CLASSIC, CONSUMER = "classic", "consumer"


def _consumer(bootstrap: str, group: str, protocol: str) -> Consumer:
    settings: dict[str, object] = {
        "bootstrap.servers": bootstrap,
        "group.id": group,
        "group.protocol": protocol,
        "enable.auto.commit": False,
    }
    if protocol == CLASSIC:
        settings |= {
            "partition.assignment.strategy": "cooperative-sticky",
            "heartbeat.interval.ms": BEAT_MS,
        }
    return Consumer(settings)


def first_assignment(protocol: str) -> Callable[[Broker], Figures]:
    """Measure from ``subscribe`` of a connected client to its first assignment, in a new group."""

    def run(broker: Broker) -> Figures:
        topic = create_topic(broker.bootstrap, 4)
        with Cluster(broker.bootstrap) as cluster:
            cluster.coordinator("any", GROUP)
        samples = []
        for _ in range(JOINS):
            consumer = _consumer(broker.bootstrap, uuid.uuid4().hex, protocol)
            consumer.list_topics(topic, timeout=10)
            seen: list[int] = []
            begin = time.perf_counter()
            consumer.subscribe([topic], on_assign=lambda _, given, to=seen: to.append(len(given)))
            while sum(seen) < 4:
                consumer.poll(0.01)
                if time.perf_counter() - begin > 30:
                    raise TimeoutError("no assignment after 30 s")
            samples.append(time.perf_counter() - begin)
            consumer.close()
        what = "time to the first assignment"
        return {
            f"{what}, median of {JOINS} groups (ms)": statistics.median(samples) * 1e3,
            f"{what}, slowest of {JOINS} groups (ms)": max(samples) * 1e3,
        }

    return run


def rebalance(protocol: str) -> Callable[[Broker], Figures]:
    """Measure ten consumers joining a topic of 900 partitions, and one of them leaving.

    The median of several groups: librdkafka sends a JoinGroup at most once a second, so a group
    whose members do not all meet in one join phase takes a second more, on any broker.
    """

    def run(broker: Broker) -> Figures:
        topic = create_topic(broker.bootstrap, PARTITIONS)
        with Cluster(broker.bootstrap) as cluster:
            cluster.coordinator("any", GROUP)
        samples = [_come_and_go(broker, topic, protocol) for _ in range(REBALANCES)]
        return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}

    return run


def _come_and_go(broker: Broker, topic: str, protocol: str) -> Figures:
    """Measure one group of :func:`rebalance`."""
    group = uuid.uuid4().hex
    members = [_consumer(broker.bootstrap, group, protocol) for _ in range(MEMBERS)]
    for member in members:
        member.list_topics(topic, timeout=30)

    def even(count: int) -> bool:
        for member in members:
            member.poll(0)
        return all(len(member.assignment()) == count for member in members)

    processor, begin = cpu_seconds(broker), time.perf_counter()
    for member in members:
        member.subscribe([topic])
    until(lambda: even(PARTITIONS // MEMBERS), "all consumers have their share", 120)
    joined = time.perf_counter()
    members.pop().close()
    until(lambda: even(PARTITIONS // (MEMBERS - 1)), "the others have taken over", 120)
    left, processor = time.perf_counter(), cpu_seconds(broker) - processor
    for member in members:
        member.close()
    return {
        "time to assign all partitions after 10 members join (ms)": (joined - begin) * 1e3,
        "time to reassign the partitions after one member leaves (ms)": (left - joined) * 1e3,
        "CPU time of the broker for both rebalances (ms)": processor * 1e3,
    }


def requests(broker: Broker) -> Figures:
    """Measure heartbeats and commits, as fast as the broker answers them on four connections."""
    topic = create_topic(broker.bootstrap, 1)
    with Cluster(broker.bootstrap) as cluster:
        group = _classic_group(cluster)
        beat = framed("heartbeat", 4, group_id=group[0], member_id=group[1], generation_id=group[2])
        answer = cluster.call(
            "heartbeat", 4, group_id=group[0], member_id=group[1], generation_id=group[2]
        )
        expect_no_error(answer)
        name = unique("bench")
        again = _again(name, _new_style_member(cluster, name, topic))
        new_beat = framed("consumer_group_heartbeat", 1, **again)
        expect_no_error(cluster.call("consumer_group_heartbeat", 1, **again))
        commit = _commit_frame("bench-simple", topic, 1)
    burst = Burst(broker.bootstrap, 4)
    figures = {}
    for kind, what, frame, count in (
        ("heartbeat", "of the classic protocol", beat, 10_000),
        ("heartbeat", "of the consumer protocol", new_beat, 10_000),
        ("commit", "of one offset", commit, 5_000),
    ):
        burst.run([[frame] * (count // 20)] * 4)  # warms the JVM and the caches up
        processor = cpu_seconds(broker)
        figures[f"rate of {kind}s {what} (requests/s)"] = (
            4 * count / burst.run([[frame] * count] * 4)
        )
        spent = (cpu_seconds(broker) - processor) / (4 * count)
        figures[f"CPU time of the broker per {kind} {what} (µs)"] = spent * 1e6
    burst.close()
    return figures


def synchronous_commits(broker: Broker) -> Figures:
    """Measure offset commits of one consumer, one after the other."""
    topic = create_topic(broker.bootstrap, 1)
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": topic, "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    with Cluster(broker.bootstrap) as cluster:
        cluster.coordinator(topic, GROUP)
    consumer.commit(offsets=[TopicPartition(topic, 0, 0)], asynchronous=False)
    processor, begin, commits = cpu_seconds(broker), time.perf_counter(), 0
    while time.perf_counter() < begin + 4:
        consumer.commit(offsets=[TopicPartition(topic, 0, commits % 2)], asynchronous=False)
        commits += 1
    seconds, processor = time.perf_counter() - begin, cpu_seconds(broker) - processor
    consumer.close()
    return {
        "rate (commits/s)": commits / seconds,
        "CPU time of the broker per commit (µs)": processor / commits * 1e6,
    }


def _classic_group(cluster: Cluster) -> tuple[str, str, int]:
    """Create a stable group of one member; return (group, member, generation)."""
    group = unique("bench")
    cluster.coordinator(group, GROUP)
    (joined,) = joined_group([cluster], group)
    return group, joined["member_id"], joined["generation_id"]


def _new_style_member(cluster: Cluster, group: str, topic: str) -> tuple[str, int]:
    """Create a member of the consumer protocol; return (member, epoch)."""
    member = str(uuid.uuid4())
    answer = cluster.call(
        "consumer_group_heartbeat",
        1,
        group_id=group,
        member_id=member,
        member_epoch=0,
        rebalance_timeout=300_000,
        subscribed_topic_names=[topic],
        topic_partitions=[],
    )
    expect_no_error(answer)
    return member, answer["member_epoch"]


def _again(group: str, member: tuple[str, int]) -> dict[str, object]:
    """Return a heartbeat of the consumer protocol that changes nothing."""
    return {
        "group_id": group,
        "member_id": member[0],
        "member_epoch": member[1],
        "rebalance_timeout": -1,
        "subscribed_topic_names": None,
        "topic_partitions": None,
    }


def _commit_frame(group: str, topic: str, partitions: int) -> bytes:
    return framed(
        "offset_commit",
        8,
        group_id=group,
        generation_id_or_member_epoch=-1,
        topics=[
            {
                "name": topic,
                "partitions": [
                    {"partition_index": index, "committed_offset": 7, "committed_leader_epoch": -1}
                    for index in range(partitions)
                ],
            }
        ],
    )


def memory(broker: Broker) -> Figures:
    """Measure the memory of a thousand groups of one member, and of a thousand members."""
    topic = create_topic(broker.bootstrap, 4)
    with Cluster(broker.bootstrap) as cluster:
        cluster.coordinator("any", GROUP)
        _classic_group(cluster)
        _new_style_member(cluster, "warm", topic)
        rest = resident_mib(broker)
        for _ in range(GROUPS_COUNT):
            _classic_group(cluster)
        classic = resident_mib(broker)
        for number in range(GROUPS_COUNT):
            _new_style_member(cluster, f"bench-{number}", topic)
        new_style = resident_mib(broker)
        for _ in range(1_000):
            _new_style_member(cluster, "crowd", topic)
        crowd = resident_mib(broker)
    return {
        "group of one member, classic protocol (KiB)": (classic - rest) * 1024 / GROUPS_COUNT,
        "group of one member, consumer protocol (KiB)": (new_style - classic) * 1024 / GROUPS_COUNT,
        "each member of a group of 1,000 (KiB)": (crowd - new_style) * 1024 / 1_000,
    }


def loading(broker: Broker) -> Figures:
    """Kill a broker with 100,000 offsets of 1,000 groups; measure until all can be fetched."""
    topic = create_topic(broker.bootstrap, OFFSETS_EACH)
    names = [f"bench-{number}" for number in range(GROUPS_COUNT)]
    with Cluster(broker.bootstrap) as cluster:
        cluster.coordinator(names[0], GROUP)
        until(lambda: _all_served(cluster, names), "every shard serves")
    burst = Burst(broker.bootstrap, 4)
    frames = [_commit_frame(name, topic, OFFSETS_EACH) for name in names]
    written = burst.run([frames[place::4] for place in range(4)])
    burst.close()
    broker.kill()
    begin = time.perf_counter()
    broker.start()
    listening = time.perf_counter() - begin
    with Cluster(broker.bootstrap) as cluster:
        until(lambda: _all_served(cluster, names), "every shard is loaded")
        loaded = time.perf_counter() - begin
        answer = cluster.call("offset_fetch", 7, group_id=names[-1], topics=None)
        if len(answer["topics"][0]["partitions"]) != OFFSETS_EACH:
            raise RuntimeError("offsets were lost")
    return {
        "rate of writing them, 100 per request (offsets/s)": GROUPS_COUNT * OFFSETS_EACH / written,
        "time from the restart after kill -9 until the broker listens (s)": listening,
        "time from the restart after kill -9 until all can be fetched (s)": loaded,
    }


def _all_served(cluster: Cluster, names: list[str]) -> bool:
    """Return whether a group of every shard can fetch its offsets."""
    one_each = {partition_for(name, OFFSETS_PARTITIONS): name for name in names}
    return all(
        cluster.call("offset_fetch", 7, group_id=name, topics=[])["error_code"] == "none"
        for name in one_each.values()
    )


FAST = {
    **DEFAULTS,
    "group.consumer.heartbeat.interval.ms": str(BEAT_MS),
    "group.consumer.min.heartbeat.interval.ms": str(BEAT_MS),
}

SYNCHRONOUS_COMMITS = Workload("synchronous commits of one consumer", synchronous_commits)

GROUPS = Suite(
    "groups",
    "Rebalances and synchronous commits use confluent-kafka; the other workloads send requests "
    "directly. `group.initial.rebalance.delay.ms=0`; with 900 partitions, members send a "
    "heartbeat every 100 ms.",
    (
        Workload("new group of one member, classic protocol", first_assignment(CLASSIC)),
        Workload("new group of one member, consumer protocol", first_assignment(CONSUMER)),
        Workload("group with 900 partitions, classic protocol", rebalance(CLASSIC)),
        Workload(
            "group with 900 partitions, consumer protocol",
            rebalance(CONSUMER),
            FAST,
            fresh=True,
        ),
        Workload("pipelined requests", requests),
        SYNCHRONOUS_COMMITS,
        Workload("100,000 committed offsets", loading, fresh=True),
        Workload(
            "memory",
            memory,
            {**DEFAULTS, "group.consumer.max.size": "10000"},
            sides=ALONE,
            fresh=True,
        ),
    ),
)
