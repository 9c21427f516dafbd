"""The disk in memory, on which simulated machines lose power."""

from __future__ import annotations

import random

from tests.support.memory_disk import MemoryDisk


def test_empty_files_keep_distinct_inodes_across_power_losses() -> None:
    disk = MemoryDisk()
    for name in ("a", "b", "c"):
        loss = disk.base()
        disk.close(disk.open(f"/{name}", create=True))
        disk.sync_directory("")
        for _ in loss.walk(disk.steps):
            pass
        disk = loss.state(random.Random(0), "everything")
    inodes = disk.names[""].values()
    assert len(set(inodes)) == len(inodes) == 3
