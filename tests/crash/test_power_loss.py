"""Power loss at every step of a workload on one log, and the recovery when the log is next opened.

    make crash N=100000 ARGS=tests/crash/test_power_loss.py

checks that many states; POWER_SEED sets another seed. A state that breaks a promise is printed with
the command that reproduces it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.crash.power_judge import BrokenPromiseError, judge
from tests.crash.power_workloads import WORKLOADS, Recorder, recorded
from tests.support.memory_disk import MemoryDisk, Skip

STATES = int(os.environ.get("POWER_STATES", "10500"))
"""Number of states to check over all workloads."""

SEED = int(os.environ.get("POWER_SEED", "1"))

ONLY = os.environ.get("POWER_ONLY", "")
"""``<step>:<number>`` of a single state to check, as a failure prints it."""

pytestmark = [pytest.mark.crash, pytest.mark.timeout(3600)]


def states(
    run: Recorder, name: str, seed: int, count: int
) -> Iterator[tuple[int, int, MemoryDisk, random.Random]]:
    """Yield ``count`` states spread evenly over all steps: step, number, disk, further choices."""
    steps = run.disk.steps
    loss = MemoryDisk().base()
    for step in loss.walk(steps):
        first, behind = count * step // (len(steps) + 1), count * (step + 1) // (len(steps) + 1)
        for number in range(first, behind):
            choice = random.Random(f"{name} {seed} {number}")
            if not ONLY or f"{step}:{number}" == ONLY:
                yield step, number, loss.state(choice), choice


def first_broken(
    name: str, seed: int, count: int, disk: MemoryDisk | None = None
) -> tuple[int, int, str] | None:
    """Check the states of one workload; return step, number and error of the first broken state."""
    run = recorded(name, seed, disk)
    for step, number, state, choice in states(run, name, seed, count):
        try:
            judge(run, step, state, choice)
        except Exception as error:  # noqa: BLE001 - an exception in recovery is a failure
            return step, number, f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", WORKLOADS)
def test_power_loss_at_any_step_breaks_no_durability_promise(name: str) -> None:
    count = -(-STATES // len(WORKLOADS))
    begin = time.monotonic()
    broken = first_broken(name, SEED, count)
    print(f"{name}: {count} states in {time.monotonic() - begin:.1f} s")
    if broken is not None:
        step, number, why = broken
        pytest.fail(
            f"{why}\nagain: POWER_STATES={STATES} POWER_SEED={SEED} POWER_ONLY={step}:{number}"
            f" pytest tests/crash/test_power_loss.py -k '{name}'",
            pytrace=False,
        )


def log_files(kind: str, path: str) -> bool:
    return kind == "sync" and path.endswith(".log")


def names(kind: str, path: str) -> bool:
    return kind == "sync_directory" and path.endswith("/t-0")


def names_of_checkpoints(kind: str, path: str) -> bool:
    return kind == "sync_directory" and path.endswith("/data")


def checkpoints(kind: str, path: str) -> bool:
    return kind == "sync" and "offset-checkpoint" in path


def transaction_indexes(kind: str, path: str) -> bool:
    return kind == "sync" and ".txnindex" in path


def cleaned_segments(kind: str, path: str) -> bool:
    return kind == "sync" and path.endswith(".log.cleaned")


def snapshots(kind: str, path: str) -> bool:
    return kind == "sync" and path.endswith(".snapshot")


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (log_files, "producers"),
        pytest.param(log_files, "compaction", marks=pytest.mark.slow),
        pytest.param(names, "producers", marks=pytest.mark.slow),
        (names, "compaction"),
        (names_of_checkpoints, "deletion"),
        (checkpoints, "deletion"),
        pytest.param(transaction_indexes, "producers", marks=pytest.mark.slow),
        (cleaned_segments, "compaction"),
        pytest.param(snapshots, "deletion", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_missing_sync_is_found(fault: Skip, name: str) -> None:
    broken = first_broken(name, 1, 2_500, MemoryDisk(skip=fault))
    assert broken is not None


def test_power_loss_states_are_reproducible() -> None:
    def some() -> list[object]:
        run = recorded("deletion", 5)
        return [
            (step, number, state.contents, state.names)
            for step, number, state, _ in states(run, "deletion", 5, 20)
        ]

    assert some() == some()
    assert isinstance(BrokenPromiseError(), AssertionError)
