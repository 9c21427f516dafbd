"""Kills the process after every file-system operation of a round of compaction."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fencepost.logcore.compression import Codec
from fencepost.logcore.config import LogConfig
from fencepost.logcore.partition import Partition
from tests.support.faults import Killed, MortalDisk
from tests.unit.logcore.compaction_driver import (
    COMPACTED,
    commit_offsets,
    compact,
    end,
    essence,
    fill_active,
    names,
    put,
    small,
)
from tests.unit.logcore.partition_driver import T0, open_partition

pytestmark = pytest.mark.slow

LATER = T0 + 10_000


def keyed_log(partition: Partition) -> None:
    """Write plain, idempotent and compressed batches and tombstones, in several groups."""
    for turn in range(4):
        put(partition, [(b"a", b"%d" % turn), (b"b%d" % turn, b"once" * 10)], producer_id=7)
        put(partition, [(b"c", None if turn % 2 else b"value"), (b"d", b"%d" % turn)])
        put(partition, [(b"e", b"x" * 80), (b"f%d" % turn, b"y")], codec=Codec.GZIP)
    put(partition, [(b"silent", b"1")], producer_id=8)
    put(partition, [(b"silent", b"2")])
    fill_active(partition)


def offsets_log(partition: Partition) -> None:
    """Write ``__consumer_offsets`` in transactions that commit and abort alternately."""
    for turn in range(6):
        commit_offsets(partition, 1, [(b"g/t/0", b"%d" % turn), (b"g/t/1", b"%d" % turn)])
        commit_offsets(partition, 2, [(b"g/t/0", b"lost %d" % turn)])
        end(partition, 1, commit=True)
        commit_offsets(partition, 2, [(b"h/t/%d" % turn, b"lost")])
        end(partition, 2, commit=turn == 5)
        put(partition, [(b"meta", b"%d" % turn * 30)])
        if turn == 4:
            newcomer = 3 + len(list(partition.producers.view()))
            commit_offsets(partition, newcomer, [(b"g/t/1", None)])
            end(partition, newcomer, commit=True, epoch=1)
    fill_active(partition)


LOGS = {"keyed": (keyed_log, COMPACTED), "offsets": (offsets_log, small(file_delete_delay_ms=10))}


def prepare(root: Path, kind: str) -> tuple[Path, LogConfig]:
    """Return the directory of a killed partition that was compacted once and is dirty again."""
    history, settings = LOGS[kind]
    partition = open_partition(root, config=settings, fs=MortalDisk())
    history(partition)
    assert compact(partition, now_ms=T0) is not None
    history(partition)
    # With larger segments the next round merges the remaining segments of the first round.
    return Path(partition.log.directory), replace(settings, segment_bytes=1_200)


def copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target / source.name)
    return target


def reopen(root: Path, settings: LogConfig, *, recovery_point: int = 0) -> Partition:
    fs = MortalDisk()
    return open_partition(root, config=settings, fs=fs, clean=False, recovery_point=recovery_point)


def run_until_killed(root: Path, settings: LogConfig, fs: MortalDisk, after: int) -> bool:
    """Compact on ``fs``, killed after ``after`` operations; return whether it was killed."""
    partition = open_partition(root, config=settings, fs=fs)
    fs.dies_after(after)
    try:
        compact(partition, now_ms=LATER)
    except Killed:
        fs.bury()
        return True
    fs.lifetime = 1 << 60
    partition.close()
    return False


@pytest.fixture
def root_path(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory for thousands of small files, in memory if the machine has /dev/shm."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("kind", LOGS)
def test_kill_at_any_operation_of_a_compaction_loses_no_record(
    root_path: Path, kind: str, torn: bool
) -> None:
    source, settings = prepare(root_path / "source", kind)
    whole = reopen(copy(source, root_path / "whole"), settings)
    expected = essence(whole)
    end_offset = whole.log_end_offset
    whole.close()
    after, killed = 0, True
    while killed:
        root = copy(source, root_path / "copy")
        killed = run_until_killed(root, settings, MortalDisk(torn=torn), after)
        # Recover once from the recovery point, and once from the whole log without snapshots.
        twin = copy(root / source.name, root_path / "twin")
        again = reopen(root, settings, recovery_point=end_offset)
        assert essence(again) == expected, after
        left = names(again.log.directory)
        assert not [name for name in left if name.endswith((".cleaned", ".swap"))], after
        assert again.recovery is None or not again.recovery.reason, after
        compact(again, now_ms=LATER)
        assert essence(again) == expected, after
        again.close()
        for snapshot in (twin / source.name).glob("*.snapshot"):
            snapshot.unlink()
        scanned = reopen(twin, settings)
        assert essence(scanned) == expected, after
        assert scanned.recovery is not None
        assert not scanned.recovery.reason, after
        scanned.close()
        after += 1
    assert after > 60


@pytest.mark.parametrize("kind", LOGS)
def test_second_kill_during_recovery_loses_no_record(root_path: Path, kind: str) -> None:
    source, settings = prepare(root_path / "source", kind)
    fs = MortalDisk()
    root = copy(source, root_path / "copy")
    partition = open_partition(root, config=settings, fs=fs)
    expected, begin = essence(partition), len(fs.steps)
    compact(partition, now_ms=LATER)
    steps = fs.steps[begin:]
    partition.close()
    swaps = [at for at, (kind, name) in enumerate(steps) if name.endswith(".log.swap")]
    gone = {name for kind, name in steps if name.endswith((".log", ".log.deleted"))}
    assert len(gone) > len(swaps) > 1, "a round of several groups, some of several segments"
    # Between the renames the directory passes through each state that recovery must resolve.
    for first in range(swaps[0], swaps[0] + 24):
        root = copy(source, root_path / "copy")
        assert run_until_killed(root, settings, MortalDisk(), first)
        image = copy(root / source.name, root_path / "image") / source.name
        second, died = 0, True
        while died:
            root = copy(image, root_path / "copy")
            mortal = MortalDisk(second)
            try:
                open_partition(
                    root, config=settings, fs=mortal, clean=False, recovery_point=1 << 40
                )
                died = False
            except Killed:
                pass
            mortal.bury()
            again = reopen(root, settings, recovery_point=1 << 40)
            assert essence(again) == expected, (first, second)
            again.close()
            second += 3


def test_replaced_segments_are_removed_only_after_the_new_ones_are_durable(root_path: Path) -> None:
    _, settings = prepare(root_path / "source", "offsets")
    fs = MortalDisk()
    partition = open_partition(root_path / "source", config=settings, fs=fs, clean=False)
    begin = len(fs.steps)
    compact(partition, now_ms=LATER)
    steps = fs.steps[begin:]
    unsynced: set[str] = set()
    swaps = names_synced = 0
    for kind, name in steps:
        stem = name.removesuffix(".swap")
        if kind in {"create", "write", "truncate", "map"}:
            unsynced.add(name)
        elif kind == "sync":
            unsynced.discard(name)
        elif kind == "sync_directory":
            names_synced = swaps
        elif kind == "rename" and name.endswith(".swap"):
            assert stem + ".cleaned" not in unsynced
            swaps += 1
        elif kind == "rename" and name.endswith(".deleted"):
            assert names_synced == swaps > 0
    assert steps[-1][0] == "sync_directory" or swaps
    partition.close()
