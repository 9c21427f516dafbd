"""Garbage collections traverse only new objects, and frozen objects are not in garbage cycles."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost import Broker
from fencepost.coordinator.daemon.collector import COLLECTED_BYTES, GROWTH_BLOCKS, Collector
from fencepost.logcore.byte_count import INPUT_BYTES
from tests.support.cluster import GROUP, Cluster, unique
from tests.support.raw import RawClient

OURS = "fencepost."
CONFIG = {"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "1"}

pytestmark = pytest.mark.usefixtures("refrozen")


@pytest.fixture
def thawed() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    assert gc.get_threshold() == before


class Node:
    def __init__(self) -> None:
        self.other: Node | None = None


async def grow(nodes: int) -> list[Node]:
    """Create this number of objects, in several turns of the loop."""
    made = []
    for number in range(nodes):
        made.append(Node())
        if number % 1_000 == 0:
            await asyncio.sleep(0)
    return made


async def test_collection_in_a_growing_process_traverses_only_new_objects(thawed: None) -> None:
    collector = Collector(asyncio.get_running_loop())
    collector.start()
    try:
        frozen, seen = gc.get_freeze_count(), []

        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start" and info["generation"] == 2:
                seen.append(len(gc.get_objects()))

        gc.callbacks.append(note)
        # Before Python 3.13 a node takes two blocks, and since then one.
        alive = await grow(7 * GROWTH_BLOCKS)
        gc.callbacks.remove(note)
    finally:
        collector.stop()
    # A node consists of an object and its dictionary.
    assert len(seen) >= 5
    assert max(seen) <= 2 * GROWTH_BLOCKS
    assert gc.get_freeze_count() - frozen > len(alive) / 2


async def test_garbage_cycles_are_collected_before_freezing(thawed: None) -> None:
    collector = Collector(asyncio.get_running_loop())
    collector.start()
    try:
        await grow(GROWTH_BLOCKS)
        collector.settle()
        frozen = gc.get_freeze_count()
        for _ in range(GROWTH_BLOCKS):
            one, two = Node(), Node()
            one.other, two.other = two, one
        collector.settle()
        assert gc.get_freeze_count() - frozen < GROWTH_BLOCKS / 100
    finally:
        collector.stop()


async def test_process_that_does_not_grow_freezes_no_objects(thawed: None) -> None:
    collector = Collector(asyncio.get_running_loop())
    collector.start()
    try:
        frozen = gc.get_freeze_count()
        for _ in range(20):
            await grow(GROWTH_BLOCKS // 10)
        assert gc.get_freeze_count() <= frozen
    finally:
        collector.stop()


async def test_small_cycle_is_collected_after_the_input_byte_limit(thawed: None) -> None:
    collector = Collector(asyncio.get_running_loop())
    collector.start()
    try:
        frozen, cycle, alive = gc.get_freeze_count(), Node(), Node()
        cycle.other, left = cycle, weakref.ref(cycle)
        del cycle
        INPUT_BYTES.add(COLLECTED_BYTES - 1)
        await asyncio.sleep(0)
        assert left() is not None
        INPUT_BYTES.add(1)
        await asyncio.sleep(0)
        assert left() is None
        assert alive.other is None
        assert gc.get_freeze_count() <= frozen, "what is alive may be garbage soon"
    finally:
        collector.stop()


def use(bootstrap: str) -> None:
    """Use topics, group members, transactional ids, long polls and connections, then close them."""
    with Cluster(bootstrap) as client:
        for _ in range(3):
            topic, group = client.create_topic(unique("t"), 5), unique("g")
            producer = client.init_producer(unique("x"))
            assert producer[0] >= 0
            for partition in range(5):
                client.produce(topic, [b"v"], partition=partition)
            client.coordinator(group, GROUP)
            joined = client.call(
                "join_group",
                3,
                group_id=group,
                session_timeout=6_000,
                rebalance_timeout=6_000,
                protocol_type="consumer",
                protocols=[{"name": "range", "metadata": b""}],
            )
            member = {"group_id": group, "member_id": joined["member_id"]}
            client.call("sync_group", 3, generation_id=joined["generation_id"], **member)
            with RawClient(bootstrap) as waiting:
                waiting.send("fetch", 11, max_wait=60_000, min_bytes=1, session_epoch=-1)
            client.call("leave_group", 2, **member)
            client.call("delete_groups", 1, groups_names=[group])
            client.call("delete_topics", 5, timeout=1_000, topic_names=[topic])


def test_requests_and_connections_leave_no_reference_cycles(tmp_path: Path) -> None:
    with Broker.in_thread(tmp_path, config=CONFIG) as broker:
        use(broker.bootstrap)
        gc.collect()
        gc.disable()
        try:
            client = threading.Thread(target=use, args=(broker.bootstrap,))
            client.start()
            client.join()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            kinds = {
                f"{type(leftover).__module__}.{type(leftover).__qualname__}"
                for leftover in gc.garbage
            }
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert [kind for kind in kinds if kind.startswith(OURS)] == []
