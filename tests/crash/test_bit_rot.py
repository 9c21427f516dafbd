"""One flipped bit in every byte of a whole partition directory, then a start that reads it all.

Whatever the byte belongs to (log, indexes, transaction index, snapshot, leader epochs, identity),
the start refuses, or cuts the log at the damage and says so, or serves exactly what was written.
What recovery does not read, below the recovery point or after a clean stop, is another matter:
there only the CRC of a batch stands between the disk and the reader, as in Apache Kafka.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from logcore.batch import iter_headers, verify_crc
from logcore.checkpoints import (
    CLEAN_SHUTDOWN,
    LOG_START_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    write_clean_shutdown,
)
from logcore.dump import is_problem
from logcore.errors import LogError, StorageError
from logcore.verify import verify_partition
from tests.crash.power_judge import BrokenPromiseError, check_log
from tests.crash.power_workloads import FORCED, ROOT, Recorder, open_log
from tests.support.memory_disk import MemoryDisk

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stopped() -> Recorder:
    """Several segments with all there is to them, after a clean stop."""
    run = Recorder(replace(FORCED, segment_bytes=700), 3, MemoryDisk())
    for turn in range(5):
        run.put(1)
        run.put(2, transactional=True)
        run.end(2, commit=turn % 2 == 0)
    run.put(4, transactional=True)
    run.restart(clean=True)
    run.partition.close()
    run.disk.remove(f"{ROOT}/{RECOVERY_POINT_CHECKPOINT}")
    run.disk.remove(f"{ROOT}/{CLEAN_SHUTDOWN}")
    return run


def test_every_byte_of_a_directory(stopped: Recorder) -> None:
    files = stopped.disk.names[f"{ROOT}/t-0"]
    assert {name.rpartition(".")[2] for name in files} >= {
        "log",
        "index",
        "timeindex",
        "txnindex",
        "snapshot",
        "metadata",
        "leader-epoch-checkpoint",
    }
    assert sum(name.endswith(".log") for name in files) >= 3
    promise = stopped.promises[-1]
    steps = len(stopped.disk.steps)
    whole = stopped.history[-1].last_offset + 1
    refused = cut = 0
    for name, inode in sorted(files.items()):
        for position in range(len(stopped.disk.contents[inode])):
            choice = random.Random(f"{name} {position}")
            rotten = stopped.disk.after_kill()
            rotten.contents[inode][position] ^= 1 << choice.randrange(8)
            try:
                partition = open_log(rotten, stopped.config, promise.epoch)
            except StorageError:
                assert name == "partition.metadata", (name, position)
                refused += 1
                continue
            is_cut = partition.log_end_offset < whole
            assert is_cut == name.endswith(".log"), (name, position)
            if is_cut:
                assert partition.recovery is not None
                assert partition.recovery.reason, (name, position)
                cut += 1
            check_log(stopped, steps, replace(promise, end=0), partition, choice)
    assert refused
    assert cut == sum(
        len(stopped.disk.contents[inode]) for name, inode in files.items() if name.endswith(".log")
    )


UNCOVERED = 16
"""Base offset, length, leader epoch: the bytes of a batch that its CRC leaves out. (The magic, the
seventeenth, is checked.)"""

BLIND = {"log", "index", "timeindex", "txnindex", LOG_START_CHECKPOINT}
"""Files in which damage may show as a wrong answer after a clean stop, as in Apache Kafka."""


def test_every_byte_after_a_clean_stop() -> None:
    """Nothing is scanned then. What a flipped bit can do is written down here, and in the README.

    In a log only the bytes outside of the CRC can mislead: the rest is found by the reader's check.
    What is wrong in an index, ``fencepost log verify`` finds.
    """
    run = Recorder(replace(FORCED, segment_bytes=700), 3, MemoryDisk())
    for turn in range(5):
        run.put(1)
        run.put(2, transactional=True)
        run.end(2, commit=turn % 2 == 0)
    run.put(4, transactional=True)
    run.delete_before(3)
    run.restart(clean=True)
    run.partition.close()
    run.checkpoint()
    write_clean_shutdown(run.disk, ROOT)
    misled, files = set(), 0
    for directory in (f"{ROOT}/t-0", ROOT):
        for name, inode in sorted(run.disk.names[directory].items()):
            files += 1
            for position in range(len(run.disk.contents[inode])):
                rotten = run.disk.after_kill()
                rotten.contents[inode][position] ^= 1 << random.Random(position).randrange(8)
                if not _is_noticed_or_harmless(run, rotten.after_kill(), position):
                    misled.add(name.rpartition(".")[2])
                    if name.endswith("index"):
                        found = verify_partition(rotten, directory)
                        assert any(is_problem(row) for row in found), (name, position)
                    if name.endswith(".log"):
                        raw = bytes(run.disk.contents[inode])
                        assert any(0 <= position - at < UNCOVERED for at, _ in iter_headers(raw))
    assert files > 10
    assert misled == BLIND


def _is_noticed_or_harmless(run: Recorder, rotten: MemoryDisk, seed: int) -> bool:
    promise = replace(run.promises[-1], end=0)
    try:
        partition = open_log(rotten, run.config, promise.epoch)
        for header, batch in partition.read_all():
            verify_crc(batch, 0, header)
        check_log(run, len(run.disk.steps), promise, partition, random.Random(seed))
    except BrokenPromiseError:
        return False
    except LogError:
        return True
    return True
