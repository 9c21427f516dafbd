"""Tasks on one machine use a partition in turn: real processes, locks, killed processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed; `make spark` brings it")

from fencepost.pipelines.spark import spool
from fencepost.pipelines.spark.errors import AccessError, SharedTransactionError
from fencepost.pipelines.spark.progress import Progress
from fencepost.pipelines.spark.sink import added_up
from fencepost.pipelines.spark.spool import Spool
from fencepost.pipelines.spark.supervise import is_fatal
from fencepost.pipelines.spark.task import attempts_of, takes_turns
from fencepost.pipelines.spark.transaction import Sent, TransactionHandle
from fencepost.pipelines.spark.turns import BegunTransaction, TaskTurns, left_behind
from tests.support.processes import Child
from tests.support.waits import until

ROOT = Path(__file__).resolve().parents[4]
PART, OTHER = ("t" * 249, 0), ("t" * 249, 1)
BEGUN = BegunTransaction(
    TransactionHandle("id", 7, 1, implicit=True), Progress(3, "query", "digest")
)

COUNT = """
import os, sys
from pathlib import Path
from fencepost.pipelines.spark.spool import Spool
from fencepost.pipelines.spark.turns import TaskTurns
from tests.support.waits import until
turns = TaskTurns(Spool(sys.argv[1], ""))
parts = [("t" * 249, int(index)) for index in sys.argv[2].split(",")]
print("ready", flush=True)
until(Path(sys.argv[3]).exists, "the others", deadline_s=120)
for _ in range(40):
    with turns.turn(parts) as numbers:
        os.sched_yield()
        for part in parts:
            numbers[part] += 1
"""
HOLD = """
import sys, time
from fencepost.pipelines.spark.spool import Spool
from fencepost.pipelines.spark.turns import TaskTurns
with TaskTurns(Spool(sys.argv[1], "")).turn([("t" * 249, 0)]) as numbers:
    print("sealed", flush=True)
    time.sleep(600)
"""
PATIENCE_S = 120.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spool:
    monkeypatch.setattr(spool.tempfile, "tempdir", str(tmp_path))
    made = Spool.new("query")
    assert made is not None
    return made


@pytest.fixture
def children(folder: Spool) -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.kill()


def process(children: list[Child], program: str, *arguments: str) -> Child:
    command = [sys.executable, "-c", program, *arguments]
    children.append(Child(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT))
    return children[-1]


@pytest.mark.slow
def test_concurrent_tasks_never_get_the_same_sequence_number(
    folder: Spool, children: list[Child], tmp_path: Path
) -> None:
    # Some tasks request both partitions, in either order, which must not deadlock.
    gate = tmp_path / "gate"
    for parts in ("0,1", "1,0", "0", "1"):
        process(children, COUNT, folder.folder, parts, str(gate))
    for child in children:
        child.wait_for_line("^ready$", deadline_s=PATIENCE_S)
    gate.touch()
    for child in children:
        assert child.wait(PATIENCE_S) == 0, child.tail()
    with TaskTurns(folder).turn([OTHER, PART]) as numbers:
        assert numbers == {PART: 120, OTHER: 120}


@pytest.mark.slow
def test_task_killed_during_its_write_ends_the_attempt(
    folder: Spool, children: list[Child]
) -> None:
    child = process(children, HOLD, folder.folder)
    child.wait_for_line("^sealed$", deadline_s=PATIENCE_S)
    waiting = process(children, COUNT, folder.folder, "0", folder.folder)
    os.kill(child.pid, signal.SIGKILL)
    # The waiting task gets the lock, but the killed task has left no sequence numbers.
    assert waiting.wait(PATIENCE_S) == 1
    assert "can't be told" in waiting.tail()
    with pytest.raises(SharedTransactionError, match="amid its write"):
        turn(folder, PART)
    with TaskTurns(folder).turn([OTHER]) as numbers:
        assert numbers == {OTHER: 0}


def turn(folder: Spool, part: tuple[str, int]) -> None:
    with TaskTurns(folder).turn([part]) as numbers:
        numbers[part] += 1


def test_partition_with_a_failed_write_is_refused_to_later_tasks(folder: Spool) -> None:
    turn(folder, PART)
    with contextlib.suppress(AccessError), TaskTurns(folder).turn([PART]) as numbers:
        assert numbers == {PART: 1}
        raise AccessError("it lacks the right WRITE")
    with pytest.raises(SharedTransactionError, match=r"amid its write.*lacks the right") as told:
        turn(folder, PART)
    assert is_fatal(told.value), "no restart cures what lies behind it"


def test_torn_sequence_number_file_is_refused(folder: Spool) -> None:
    turn(folder, PART)
    (file,) = Path(folder.folder).glob("*-0")
    file.write_bytes(b"1nder way")
    with pytest.raises(SharedTransactionError, match="amid its write"):
        turn(folder, PART)


def test_first_task_begins_the_transaction_and_others_join_it(folder: Spool) -> None:
    def fails() -> BegunTransaction:
        raise ConnectionError

    # If a task fails to begin the transaction, the next task may begin it.
    with pytest.raises(ConnectionError):
        TaskTurns(folder).joined(fails)
    assert left_behind("query") == []
    assert TaskTurns(folder).joined(lambda: BEGUN) == BEGUN
    assert TaskTurns(folder).joined(fails) == BEGUN
    assert left_behind("query") == [BEGUN.ticket]
    assert left_behind("another") == left_behind(None) == []
    spool.sweep("query")
    assert left_behind("query") == []


def test_second_attempt_of_a_task_is_refused(folder: Spool) -> None:
    TaskTurns(folder).claim(0)
    TaskTurns(folder).claim(1)
    with pytest.raises(SharedTransactionError, match="write a second time"):
        TaskTurns(folder).claim(0)


def test_task_of_an_abandoned_attempt_is_refused(folder: Spool) -> None:
    turns = TaskTurns(folder)
    turns.claim(0)
    turn(folder, PART)
    # A new attempt to write the batch begins, or the current attempt is aborted.
    assert Spool.new("query") is not None
    for step in (lambda: turn(folder, PART), lambda: turns.joined(lambda: BEGUN)):
        with pytest.raises(SharedTransactionError, match="was given up"):
            step()
    until(lambda: not Path(folder.folder).exists(), "the folder is gone")


def test_record_counts_that_do_not_add_up_are_refused() -> None:
    first, second = Sent(10, 30), Sent(20, 25)
    assert added_up([[(PART, first)], [(PART, second), (OTHER, Sent(5, 5))]]) == {
        PART: 30,
        OTHER: 5,
    }
    assert added_up([]) == {}
    for sent in ([[(PART, first)]], [[(PART, first)], [(PART, Sent(21, 25))]]):
        with pytest.raises(SharedTransactionError, match="the transaction holds 30 records"):
            added_up(sent)


@pytest.mark.parametrize(
    ("master", "attempts"),
    [
        ("local", 1),
        ("local[4]", 1),
        ("local[*]", 1),
        ("local[2,1]", 1),
        ("local[*, 4]", 4),
        ("local-cluster[2,1,1024]", 0),
        ("spark://host:7077", 0),
        ("yarn", 0),
        ("k8s://https://host", 0),
        ("", 0),
    ],
)
def test_tasks_take_turns_only_on_one_machine_without_retries(master: str, attempts: int) -> None:
    assert attempts_of(master) == attempts
    assert takes_turns("auto", attempts) == (attempts == 1)
    assert takes_turns("direct", attempts) == (attempts > 0)
    assert not takes_turns("staged", attempts)
