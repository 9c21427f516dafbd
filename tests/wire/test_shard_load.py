"""A daemon that already serves while it loads a large offsets log."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fencepost import Broker
from fencepost.groups.records import OffsetCommitValue, offset_commit
from fencepost.protocol.steps import finish
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.unit.coordinator.services.coordinators import Services

BATCHES, BATCH = 40, 4_000
LOADED_S = 60.0


async def fill(directory: Path) -> int:
    """Write the offsets of one group many times; return the last offset."""
    async with Broker(directory):
        pass  # creates the broker's directory
    services = await Services(directory).start()
    services.topic("t", 8)
    finish(services.groups.open_in_steps())
    partition = services.groups.partition_of("big")
    now_ms = int(time.time() * 1000)
    offset = 0
    for _ in range(BATCHES):
        records = []
        for _ in range(BATCH):
            offset += 1
            value = OffsetCommitValue(offset, -1, "", now_ms)
            records.append(offset_commit("big", "t", offset % 8, value))
        partition.append_records(records, now_ms=now_ms)
    await services.stop()
    return offset


@pytest.mark.slow
async def test_small_shard_is_served_while_a_large_one_loads(tmp_path: Path) -> None:
    last = await fill(tmp_path)
    daemon = Daemon(tmp_path).start()
    try:
        with Cluster(daemon.bootstrap) as cluster:
            said = []
            end = time.monotonic() + LOADED_S
            while time.monotonic() < end:
                code = fetch(cluster, "big")
                said.append((code, fetch(cluster, "small"), listed(cluster)))
                if code == "none":
                    break
            loading = [row for row in said if row[0] == "coordinator_load_in_progress"]
            # If loading took a single turn of the loop, there would be no second response.
            assert len(loading) > 1, said
            # Loading may end between the last two requests.
            assert {row[2] for row in loading[:-1]} == {"coordinator_load_in_progress"}
            assert {row[1] for row in said} == {"none"}, "a small shard need not wait"
            assert said[-1] == ("none", "none", "none")
            assert [cluster.committed("big", "t", index) for index in range(8)] == [
                last - (last - index) % 8 for index in range(8)
            ]
    finally:
        daemon.stop()


def fetch(cluster: Cluster, group: str) -> str:
    answer = cluster.call("offset_fetch", 7, group_id=group, topics=None, require_stable=False)
    return str(answer["error_code"])


def listed(cluster: Cluster) -> str:
    answer = cluster.call("list_groups", 4, states_filter=[])
    return str(answer["error_code"])
