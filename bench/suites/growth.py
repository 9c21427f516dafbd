"""Growth of cost: the broker's processor time and memory over a growing number of items.

A figure's name gives its place on a curve: ``WHAT, with NUMBER THINGS (UNIT)``, from which
:mod:`bench.plot` draws the plots.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from bench.brokers import Broker, pid_of, resident_mib
from bench.clients import Burst, framed, joined_group
from bench.suite import ALONE, DEFAULTS, Figures, Local, Suite, Workload
from bench.suites.log import lookup
from fencepost.logcore.batch import LogRecord, encode_batch
from tests.support.cluster import GROUP, Cluster, unique
from tests.support.raw import Answer
from tests.support.waits import until

MEMBERS = (10, 100, 1_000, 10_000)
CLASSIC_MEMBERS = (10, 100, 1_000)
"""Fewer than :data:`MEMBERS`: each member of the classic protocol needs a connection of its own, on
which JoinGroup waits for the other members."""

FETCHED = (1, 10, 100, 1_000, 10_000)
OPEN_IDS = (10, 100, 1_000, 10_000)
PARTITIONS = (10, 100, 1_000, 5_000)
SEGMENTS = (10, 100, 1_000, 10_000)
CONNECTIONS = (10, 100, 1_000, 5_000)

REPEATS = 2_000
"""The minimum number of requests whose processor time is measured together."""

LONG_MS, SETTLE_S = 900_000, 300.0


def at(what: str, count: int, things: str, unit: str) -> str:
    """Return the name of a figure on a curve."""
    return f"{what}, with {count:,} {things if count > 1 else things[:-1]} ({unit})"


class Meter:
    """The broker's processor time per item, in µs, for ``count`` items during the context."""

    def __init__(self, broker: Broker, count: int) -> None:
        self._broker, self._count, self.each_us = broker, count, 0.0

    def __enter__(self) -> Self:
        self._begin = _cpu_us(self._broker)
        return self

    def __exit__(self, *_: object) -> None:
        self.each_us = (_cpu_us(self._broker) - self._begin) / self._count


def _cpu_us(broker: Broker) -> float:
    """Return the processor time of the broker's threads so far, with nanosecond resolution."""
    tasks = Path(f"/proc/{pid_of(broker)}/task").iterdir()
    return sum(int((task / "schedstat").read_text("ascii").split()[0]) for task in tasks) / 1e3


def consumer_members(broker: Broker) -> Figures:
    """Measure the cost of joining and of existing members in a consumer protocol group."""
    figures: Figures = {}
    with Cluster(broker.bootstrap) as cluster:
        topic = cluster.create_topic(unique("grown"), 100)
        cluster.coordinator("any", GROUP)
        for count in (MEMBERS[0], *MEMBERS):  # the first warms up
            group = unique("crowd")
            names = [f"member-{number}" for number in range(count)]
            before = resident_mib(broker)
            with Meter(broker, count) as joins:
                _come(broker, group, names, topic)
            figures[at("CPU time of a join, consumer protocol", count, "members", "µs")] = (
                joins.each_us
            )
            grown = resident_mib(broker) - before
            figures[at("memory", count, "members", "MiB")] = grown
            epochs = _settled(broker, cluster, group)
            frames = [
                framed("consumer_group_heartbeat", 1, **_beat(group, *member_epoch))
                for member_epoch in epochs
            ]
            rounds = max(1, REPEATS // count)
            with Meter(broker, rounds * count) as beats:
                _burst(broker, frames * rounds)
            figures[at("CPU time of a heartbeat, consumer protocol", count, "members", "µs")] = (
                beats.each_us
            )
            _burst(broker, [_leave(group, name) for name in names])
    return figures


def _come(broker: Broker, group: str, names: list[str], topic: str) -> None:
    _burst(
        broker,
        [
            framed(
                "consumer_group_heartbeat",
                1,
                group_id=group,
                member_id=name,
                member_epoch=0,
                rebalance_timeout=LONG_MS,
                subscribed_topic_names=[topic],
                topic_partitions=[],
            )
            for name in names
        ],
    )


def _beat(group: str, member: str, epoch: int) -> dict[str, object]:
    return {
        "group_id": group,
        "member_id": member,
        "member_epoch": epoch,
        "rebalance_timeout": -1,
        "subscribed_topic_names": None,
        "topic_partitions": None,
    }


def _leave(group: str, member: str) -> bytes:
    return framed("consumer_group_heartbeat", 1, **_beat(group, member, -1))


def _settled(broker: Broker, cluster: Cluster, group: str) -> list[tuple[str, int]]:
    """Return members and epochs once no member has partitions to assign or revoke."""

    def probe() -> list[tuple[str, int]] | None:
        described = cluster.call("consumer_group_describe", 0, group_ids=[group])["groups"][0]
        behind = [
            member
            for member in described["members"]
            if member["member_epoch"] != described["group_epoch"]
            or member["assignment"] != member["target_assignment"]
        ]
        if described["group_state"] == "Stable" and not behind:
            return [
                (member["member_id"], member["member_epoch"]) for member in described["members"]
            ]
        _burst(
            broker,
            [
                framed(
                    "consumer_group_heartbeat",
                    1,
                    **_beat(group, member["member_id"], member["member_epoch"])
                    | {
                        "topic_partitions": _as_owned(
                            member["assignment"], member["target_assignment"]
                        )
                    },
                )
                for member in behind or described["members"][:1]
            ],
        )
        return None

    return until(probe, f"the members of {group} settle", deadline_s=SETTLE_S)


def _as_owned(assignment: Answer, target: Answer) -> list[dict[str, object]]:
    """Return the partitions that a member reports, without the ones it must revoke."""
    kept = {topic["topic_id"]: set(topic["partitions"]) for topic in target["topic_partitions"]}
    return [
        {
            "topic_id": uuid.UUID(topic["topic_id"]),
            "partitions": sorted(set(topic["partitions"]) & kept.get(topic["topic_id"], set())),
        }
        for topic in assignment["topic_partitions"]
    ]


def classic_members(broker: Broker) -> Figures:
    """Measure one rebalance of a classic group: join, assignment, sync and heartbeats."""
    figures: Figures = {}
    with Cluster(broker.bootstrap) as cluster:
        cluster.coordinator("any", GROUP)
    for count in (CLASSIC_MEMBERS[0], *CLASSIC_MEMBERS):  # the first warms up
        group = unique("crowd")
        with ExitStack() as stack:
            members = [stack.enter_context(Cluster(broker.bootstrap)) for _ in range(count)]
            with Meter(broker, count) as joins:
                joined = joined_group(members, group)
            figures[at("CPU time of a join and sync, classic protocol", count, "members", "µs")] = (
                joins.each_us
            )
            frames = [
                framed(
                    "heartbeat",
                    4,
                    group_id=group,
                    member_id=member["member_id"],
                    generation_id=member["generation_id"],
                )
                for member in joined
            ]
            rounds = max(1, REPEATS // count)
            with Meter(broker, rounds * count) as beats:
                _burst(broker, frames * rounds)
            figures[at("CPU time of a heartbeat, classic protocol", count, "members", "µs")] = (
                beats.each_us
            )
    return figures


def fetches(broker: Broker) -> Figures:
    """Measure fetches over growing numbers of partitions: with a record in each, and empty ones."""
    figures: Figures = {}
    most = FETCHED[-1]
    with Cluster(broker.bootstrap) as cluster:
        topic = cluster.create_topic(unique("grown"), most)
        records = bytes(encode_batch([LogRecord(0, int(time.time() * 1000), None, b"x" * 100)]))
        for first in range(0, most, 1_000):
            data = [{"index": index, "records": records} for index in range(first, first + 1_000)]
            _burst(
                broker,
                [
                    framed(
                        "produce",
                        8,
                        acks=-1,
                        timeout=LONG_MS,
                        topic_data=[{"name": topic, "partition_data": data}],
                    )
                ],
            )
        for count in FETCHED:
            rounds = max(4, REPEATS // count)
            for what, offset in (("one new record in each", 0), ("no new records", 1)):
                frame = _fetch(topic, count, offset)
                _burst(broker, [frame] * 2)
                with Meter(broker, rounds * count) as meter:
                    _burst(broker, [frame] * rounds, 1)
                figures[at(f"CPU time per partition, {what}", count, "partitions", "µs")] = (
                    meter.each_us
                )
    return figures


def _fetch(topic: str, count: int, offset: int) -> bytes:
    return framed(
        "fetch",
        11,
        replica_id=-1,
        max_wait=0,
        min_bytes=0,
        max_bytes=50 << 20,
        session_id=0,
        session_epoch=-1,
        topics=[
            {
                "topic": topic,
                "partitions": [
                    {"partition": index, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
                    for index in range(count)
                ],
            }
        ],
    )


def transactions(broker: Broker) -> Figures:
    """Measure a transaction beside growing numbers of open ones, and the open ones' memory."""
    figures: Figures = {}
    with Cluster(broker.bootstrap) as cluster:
        topic = cluster.create_topic(unique("grown"), 1)
        ours = unique("ours")
        mine = cluster.init_producer(ours)
        held, before = 0, resident_mib(broker)
        for count in OPEN_IDS:
            for number in range(held, count):
                name = f"open-{number}"
                _add(cluster, name, _producer(cluster, name), topic)
            held = count
            rounds = REPEATS // 4

            figures[at("memory", count, "open transactions", "MiB")] = resident_mib(broker) - before
            with Meter(broker, rounds) as meter:
                for _ in range(rounds):
                    _add(cluster, ours, mine, topic)
                    _end(cluster, ours, mine)
            figures[at("CPU time of another transaction", count, "open transactions", "µs")] = (
                meter.each_us
            )
            with Meter(broker, count) as meter:
                cluster.call("list_transactions", 0)
            figures[at("CPU time per listed transaction", count, "open transactions", "µs")] = (
                meter.each_us
            )
    return figures


def _producer(cluster: Cluster, name: str) -> tuple[int, int]:
    """Get a producer id with one request; :meth:`Cluster.init_producer` takes several."""
    answer = cluster.call(
        "init_producer_id",
        4,
        transactional_id=name,
        transaction_timeout=LONG_MS,
        producer_id=-1,
        producer_epoch=-1,
    )
    if answer["error_code"] != "none":
        return cluster.init_producer(name, timeout_ms=LONG_MS)
    return answer["producer_id"], answer["producer_epoch"]


def _add(cluster: Cluster, name: str, producer: tuple[int, int], topic: str) -> None:
    _until_done(
        cluster,
        "add_partitions_to_txn",
        3,
        v3_and_below_transactional_id=name,
        v3_and_below_producer_id=producer[0],
        v3_and_below_producer_epoch=producer[1],
        v3_and_below_topics=[{"name": topic, "partitions": [0]}],
    )


def _end(cluster: Cluster, name: str, producer: tuple[int, int]) -> None:
    _until_done(
        cluster,
        "end_txn",
        3,
        transactional_id=name,
        producer_id=producer[0],
        producer_epoch=producer[1],
        committed=True,
    )


def _until_done(cluster: Cluster, api: str, version: int, **body: object) -> None:
    def done() -> bool:
        answer = cluster.call(api, version, **body)
        return "concurrent_transactions" not in str(answer)

    until(done, api)


def memory_of_partitions(broker: Broker) -> Figures:
    """Measure the memory of partitions with a record each."""
    figures: Figures = {}
    rest = resident_mib(broker)
    held = 0
    records = bytes(encode_batch([LogRecord(0, int(time.time() * 1000), None, b"x" * 1000)]))
    with Cluster(broker.bootstrap) as cluster:
        for count in PARTITIONS:
            topic = cluster.create_topic(unique("grown"), count - held)
            data = [{"index": index, "records": records} for index in range(count - held)]
            body = [{"name": topic, "partition_data": data}]
            _burst(broker, [framed("produce", 8, acks=-1, timeout=LONG_MS, topic_data=body)])
            held = count
            figures[at("memory", count, "partitions", "MiB")] = resident_mib(broker) - rest
    return figures


def memory_of_connections(broker: Broker) -> Figures:
    """Measure the memory of idle connections, after one request each."""
    figures: Figures = {}
    rest = resident_mib(broker)
    with ExitStack() as stack:
        held = 0
        for count in CONNECTIONS:
            for _ in range(count - held):
                client = stack.enter_context(Cluster(broker.bootstrap))
                client.call("api_versions", 0)
            held = count
            figures[at("memory", count, "connections", "MiB")] = resident_mib(broker) - rest
    return figures


def look_ups(home: Path) -> Figures:
    """Measure finding the batch of an offset, in a log of a growing number of segments."""
    what = "median time to find an offset"
    return {
        at(what, count, "segments", "µs"): lookup(count)(home / str(count))["median time (µs)"]
        for count in SEGMENTS
    }


def _burst(broker: Broker, frames: Iterable[bytes], connections: int = 4) -> None:
    burst, chosen = Burst(broker.bootstrap, connections), list(frames)
    try:
        burst.run([chosen[place::connections] for place in range(connections)], deadline_s=300)
    finally:
        burst.close()


_CROWDED = {
    **DEFAULTS,
    "group.consumer.max.size": "20000",
    "group.consumer.max.session.timeout.ms": str(LONG_MS),
    "group.consumer.session.timeout.ms": str(LONG_MS),
}
"""No member times out while the others join."""
_ONE_PHASE = {"group.max.size": "20000", "group.initial.rebalance.delay.ms": "3000"}
"""All members join within the first join phase."""


def _workload(
    name: str, run: Callable[[Broker], Figures], settings: Mapping[str, str] = DEFAULTS
) -> Workload:
    return Workload(name, run, settings, sides=ALONE, is_pinged=False, fresh=True)


GROWTH = Suite(
    "growth",
    "CPU time and memory of the broker while the number of items grows; the memory is the "
    "increase since before the first item.",
    (
        _workload("group", consumer_members, _CROWDED),
        _workload("classic group", classic_members, _ONE_PHASE),
        _workload("Fetch", fetches),
        _workload("transactions", transactions),
        _workload("partitions with a record", memory_of_partitions),
        _workload("idle connections", memory_of_connections),
        Local("log", look_ups),
    ),
)
