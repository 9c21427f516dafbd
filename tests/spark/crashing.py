"""The data source under test, with a step at which something fails, once.

Spark imports this in the processes where the steps happen: the planner, the tasks, the committer.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipelines.spark import sink
from pipelines.spark import transaction as txn
from pipelines.spark.datasource import FencepostDataSource
from tests.support.waits import until

STEPS = (
    "before init",
    "after init",
    "mid write",
    "task finished",
    "commit begins",
    "offsets committed",
    "transaction ended",
    "commit returned",
)


class InjectedError(Exception):
    """What a step raises that is told to fail."""


class Fault:
    """What happens at which step; ``once`` is a file that says that it has happened."""

    def __init__(self, options: dict[str, str]) -> None:
        self.at = options["crash.at"]
        self.how = options["crash.how"]
        self.once = Path(options["crash.once"])
        self.pids = [int(pid) for pid in options.get("crash.pids", "").split(",") if pid]

    def reach(self, step: str) -> None:
        """Fail, if this is the step and it has not happened yet."""
        if step != self.at:
            return
        try:
            self.once.touch(exist_ok=False)
        except FileExistsError:
            return
        if self.how == "kill":
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "wait":
            # The test does what it has to, and then lets us go on.
            gate = self.once.with_suffix(".open")
            until(gate.exists, f"{gate} opens", deadline_s=300)
            return
        raise InjectedError(step)

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Steps are noticed in this process while the context lasts; workers are used again."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                _around(txn, "begin", before="before init", after="after init", of=self)
            )
            stack.enter_context(_around(txn, "end", after="transaction ended", of=self))
            stack.enter_context(_around(txn, "commit_offsets", after="offsets committed", of=self))
            stack.enter_context(_around(txn.Sender, "_attempt", after="mid write", of=self))
            yield


@contextlib.contextmanager
def _around(
    owner: Any, name: str, *, before: str = "", after: str = "", of: Fault
) -> Iterator[None]:
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        of.reach(before)
        result = original(*arguments, **named)
        of.reach(after)
        return result

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, original)


class CrashingWriter(sink.StreamWriter):
    """The real writer with a fault in it."""

    fault: Fault

    def write(self, iterator: Any) -> sink.Written:
        with self.fault.armed():
            written = super().write(iterator)
        self.fault.reach("task finished")
        return written

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803 - Spark's name
        self.fault.reach("commit begins")
        with self.fault.armed():
            super().commit(messages, batchId)
        self.fault.reach("commit returned")


class CrashingDataSource(FencepostDataSource):
    """``format("crashing")``."""

    @classmethod
    def name(cls) -> str:
        return "crashing"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = dict(self.options)
        fault = Fault({key: options.pop(key) for key in list(options) if key.startswith("crash.")})
        with fault.armed():
            writer = sink.stream_writer(
                options, schema, overwrite=overwrite, planning=self._planning
            )
        writer.__class__ = CrashingWriter
        writer.fault = fault  # type: ignore[attr-defined]
        return writer
