"""After a power loss at any step, a follower recovers a log that its leader once had.

The follower fetches its log, truncates it after elections, and restarts it at another offset.
Recovery must find a prefix of one former state of the log, never a mixture of several states. It
must also find all batches that were on disk. POWER_STATES and POWER_SEED are as in
``test_power_loss.py``.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from fencepost.logcore.batch import LogRecord, encode_batch, end_marker
from fencepost.logcore.checkpoints import (
    LOG_START_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    write_clean_shutdown,
    write_offsets,
)
from fencepost.logcore.config import LogConfig
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.partition import Partition
from tests.crash.power_workloads import FORCED, KEY, ROOT, T0, UNFORCED, open_log
from tests.support.memory_disk import MemoryDisk

STATES = int(os.environ.get("POWER_STATES", "3000")) // 4
SEED = int(os.environ.get("POWER_SEED", "1"))

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(3600)]

Batches = tuple[tuple[int, bytes], ...]
"""Base offset and bytes of each batch."""


@dataclass(frozen=True)
class View:
    """The contents of the log since a step, and the offset below which they were on disk."""

    step: int
    start: int
    batches: Batches
    on_disk: int
    epoch: int


class Life:
    """One follower on a disk that records all operations."""

    def __init__(self, config: LogConfig, seed: int, *, checkpoints_first: bool = True) -> None:
        self.config, self.choice = config, random.Random(seed)
        self.checkpoints_first = checkpoints_first
        self.disk = MemoryDisk()
        self.disk.make_directory(ROOT)
        self.disk.sync_directory("")
        self.epoch = 1
        self.transactional = 0
        self.views = [View(0, 0, (), 0, self.epoch)]
        self.partition = opened(self.disk, config, self.epoch)

    def note(self, begin: int, *, start: int | None = None, batches: Batches | None = None) -> None:
        """Record the log's contents since step ``begin``, and the part that is now on disk."""
        last = self.views[-1]
        view = replace(
            last,
            step=begin,
            start=last.start if start is None else start,
            batches=last.batches if batches is None else batches,
            epoch=self.epoch,
        )
        self.views.append(view)
        point = self.partition.recovery_point
        on_disk = point if point > view.start else 0
        self.views.append(replace(view, step=len(self.disk.steps), on_disk=on_disk))

    def fetch(self) -> None:
        """Fetch some batches of one size, so that they may exactly replace truncated batches."""
        begin, offset = len(self.disk.steps), self.partition.log_end_offset
        came: list[tuple[int, bytes]] = []
        for _ in range(self.choice.randrange(1, 5)):
            value = self.choice.randbytes(40)
            kind = self.choice.randrange(5)
            if kind == 0 and self.transactional:
                data = bytearray(
                    end_marker(
                        commit=self.choice.random() < 0.5,
                        producer_id=7,
                        producer_epoch=0,
                        coordinator_epoch=1,
                        timestamp_ms=T0,
                    )
                )
                data[:8] = offset.to_bytes(8, "big")
                data[12:16] = self.epoch.to_bytes(4, "big")
                self.transactional = 0
                batch = bytes(data)
            else:
                is_open = kind == 1
                self.transactional += is_open
                batch = encode_batch(
                    [LogRecord(offset, T0 + offset, b"k", value)],
                    leader_epoch=self.epoch,
                    producer_id=7 if is_open else -1,
                    producer_epoch=0 if is_open else -1,
                    base_sequence=0 if is_open else -1,
                    transactional=is_open,
                )
            came.append((offset, batch))
            offset += 1 + 3 * (self.choice.random() < 0.1)  # a compacted leader
        self.partition.append_as_follower(b"".join(data for _, data in came), self.epoch)
        self.partition.replica.move_high_watermark(offset - self.choice.randrange(6))
        self.note(begin, batches=self.views[-1].batches + tuple(came))

    def elect(self) -> None:
        """Elect another leader, whose log has only a prefix of the follower's log."""
        begin, batches = len(self.disk.steps), self.views[-1].batches
        self.epoch += 1
        self.transactional = 0
        keep = max(0, len(batches) - self.choice.randrange(8))
        offset = batches[keep][0] if keep < len(batches) else self.partition.log_end_offset
        lower = min(self.views[-1].on_disk, offset)
        self.views.append(replace(self.views[-1], step=begin, on_disk=lower, epoch=self.epoch))
        self._plan(offset)
        begin = len(self.disk.steps)
        self.partition.truncate_to(offset)
        self.note(begin, batches=batches[:keep])

    def reset(self) -> None:
        """Restart the follower's log, because the leader's log starts after the follower's end."""
        offset = self.partition.log_end_offset + self.choice.randrange(1, 300)
        self.views.append(
            replace(self.views[-1], step=len(self.disk.steps), on_disk=0, start=offset)
        )
        self._plan(offset)
        begin = len(self.disk.steps)
        self.partition.replica.restart_at(offset)
        self.note(begin, start=offset, batches=())

    def _plan(self, offset: int) -> None:
        self.partition.replica.plan_truncation(offset)
        if self.checkpoints_first:
            self.checkpoint()

    def checkpoint(self) -> None:
        partition = self.partition
        known = {
            RECOVERY_POINT_CHECKPOINT: partition.recovery_point,
            LOG_START_CHECKPOINT: partition.log_start_offset,
        }
        for name, offset in known.items():
            write_offsets(self.disk, ROOT, name, {KEY: offset} if offset else {}, copied=True)

    def restart(self) -> None:
        begin = len(self.disk.steps)
        if self.choice.random() < 0.5:
            self.partition.close()
            self.checkpoint()
            write_clean_shutdown(self.disk, ROOT)
        self.partition = opened(self.disk, self.config, self.epoch)
        self.note(begin)

    def live(self) -> None:
        for _ in range(40):
            kind = self.choice.randrange(20)
            if kind == 0:
                self.reset()
            elif kind < 4:
                self.elect()
            elif kind < 6:
                self.checkpoint()
            elif kind < 7:
                self.restart()
            else:
                self.fetch()


def opened(fs: FileSystem, config: LogConfig, epoch: int) -> Partition:
    """Open the replica as a starting broker does."""
    found = open_log(fs, config, epoch, is_replica=True, is_replicated=True, keeps_removed=False)
    found.reader.check_epochs()  # as the broker does before the logs are first used
    return found


def state(partition: Partition) -> tuple[object, ...]:
    """Return the recovered state, which a second recovery must find again."""
    return (
        partition.log_start_offset,
        partition.log_end_offset,
        held(partition),
        sorted(partition.producers.view()),
        partition._epochs.entries,
    )


def held(partition: Partition) -> Batches:
    return tuple((header.base_offset, bytes(data)) for header, data in partition.reader.read_all())


def broken(life: Life, step: int, disk: MemoryDisk) -> str | None:
    """Return the problem of a state after a power loss at ``step``, None if there is none."""
    lived = [view for view in life.views if view.step <= step]
    now = lived[-1]
    partition = opened(disk, life.config, now.epoch)
    found, end = held(partition), partition.log_end_offset
    # If the log was truncated at an offset that the leader's log lacks, it ends before that gap.
    if not {batch for batch in now.batches if batch[0] < now.on_disk} <= set(found):
        return f"the log ends at {end}, {now.on_disk} was on disk"
    if not any(is_part(found, view, now) for view in lived):
        return f"a mixture: {[base for base, _ in found]}"
    epochs = sorted({int.from_bytes(data[12:16], "big") for _, data in found})
    if [epoch for epoch, _ in partition._epochs.entries] != epochs:
        return f"epochs {partition._epochs.entries} of {epochs}"
    again = opened(disk.after_kill(), life.config, now.epoch)
    if state(again) != state(partition):
        return f"a second recovery: {state(again)} / {state(partition)}"
    # The replica must continue: the next leader's batches can be appended and read.
    following = encode_batch([LogRecord(end, T0, None, b"next")], leader_epoch=now.epoch)
    again.append_as_follower(following, now.epoch)
    return None if held(again)[-1:] == ((end, following),) else "it does not go on"


def is_part(found: Batches, view: View, now: View) -> bool:
    """Return whether ``found`` is a prefix of the log in ``view``.

    After the log was restarted at another offset, any part of the old log may be found. That part
    is below the leader's log start offset, and will be deleted.
    """
    if not found or view.batches[: len(found)] == found:
        return True
    if now.start <= view.start or found[0] not in view.batches:
        return False
    at = view.batches.index(found[0])
    return view.batches[at : at + len(found)] == found


def states(life: Life, seed: int, count: int) -> Iterator[tuple[int, MemoryDisk]]:
    """Yield ``count`` states spread over all steps."""
    steps, loss = life.disk.steps, MemoryDisk().base()
    for step in loss.walk(steps):
        first, behind = (count * at // (len(steps) + 1) for at in (step, step + 1))
        for number in range(first, behind):
            yield step, loss.state(random.Random(f"{seed} {number}"))


def first_broken(config: LogConfig, count: int, **options: bool) -> str | None:
    began, seed = time.monotonic(), SEED
    left = count
    while left > 0:
        life = Life(config, seed, **options)
        life.live()
        for step, disk in states(life, seed, min(left, 250)):
            try:
                why = broken(life, step, disk)
            except Exception as error:  # noqa: BLE001 - a log that does not open is a failure
                why = f"{type(error).__name__}: {error}"
            if why is not None:
                return f"POWER_SEED={seed}, step {step}: {why}"
        left -= 250
        seed += 1
    print(f"{count} states in {time.monotonic() - began:.1f} s")
    return None


@pytest.mark.parametrize("config", [FORCED, UNFORCED], ids=["forced", "rarely forced"])
@pytest.mark.parametrize("preallocate", [False, True], ids=["", "preallocated"])
def test_replica_recovers_as_a_prefix_of_one_of_its_histories(
    config: LogConfig, preallocate: bool
) -> None:
    why = first_broken(replace(config, preallocate=preallocate), STATES)
    assert why is None, why


def test_checkpoints_written_after_the_truncation_are_found() -> None:
    """The sweep must find a planted bug: checkpoints are written after the truncation."""
    assert first_broken(UNFORCED, 20_000, checkpoints_first=False) is not None
