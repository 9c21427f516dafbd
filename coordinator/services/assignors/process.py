"""Custom server-side assignors, each in a separate process.

User code never runs in the daemon: an assignor that raises, hangs, prints, exits, exhausts its
memory or returns an invalid result affects only its process, which is killed and started again. The
failure delays no other group's heartbeat. The worker process validates the result, and the state
machine of the groups validates it again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.runtime.background import call_later, spawn, swallow
from fencepost.coordinator.services.assignors.frames import (
    ENTRY_POINTS,
    HEADER_BYTES,
    frame,
    request_of,
    result_of,
    unpack,
)
from fencepost.groups.assignors.remote import ComputeTarget, TargetComputed

ANSWER_TIMEOUT_MS = 5_000
"""The maximum time for a computation; a slower rebalance is useless."""

START_TIMEOUT_MS = 15_000
"""The maximum time until the first response of a process, which first has to import modules."""

MAX_ANSWER_BYTES = 64 << 20
"""The maximum size of a response: a million partitions take about 25 MiB."""

MAX_WAITING_GROUPS = 10_000
"""The maximum number of groups that wait for one assignor. Above it, the oldest request fails, and
its group repeats the request after ``ASK_AGAIN_MS``."""

Result = tuple[dict[str, frozenset[tuple[bytes, int]]] | None, str]
"""Member id → partitions, or None and the problem."""

Report = Callable[[TargetComputed], None]

_log = structlog.get_logger(__name__)


class AssignorProcesses:
    """The custom assignors of a broker. Raises ConfigError for a name without an entry point."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_name = {name: _AssignorProcess(name) for name in names}
        if self._by_name:
            # Imported late: it takes milliseconds, and few daemons have a custom assignor.
            from importlib.metadata import entry_points  # noqa: PLC0415

            installed = {point.name for point in entry_points(group=ENTRY_POINTS)}
            for name in self._by_name.keys() - installed:
                reason = f"neither built in nor an entry point of {ENTRY_POINTS}"
                raise ConfigError("group.consumer.assignors", name, reason)

    def compute(self, effect: ComputeTarget, report: Report) -> None:
        """Queue a computation; ``report`` is called later, but never after :meth:`close`."""
        self._by_name[effect.assignor].ask(effect, report)

    async def close(self) -> None:
        """End the processes."""
        for process in self._by_name.values():
            await process.close()


class _AssignorProcess:
    """One assignor: its queue and its process, which starts with the first request."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: dict[str, tuple[ComputeTarget, Report]] = {}
        """The newest request of each waiting group, by group id, oldest first."""
        self._child: asyncio.subprocess.Process | None = None
        self._work: asyncio.Task[None] | None = None
        self._is_closed = False

    def ask(self, effect: ComputeTarget, report: Report) -> None:
        """Queue a request."""
        # A newer request of a group replaces its older one.
        self._waiting.pop(effect.group_id, None)
        if len(self._waiting) >= MAX_WAITING_GROUPS:
            self._drop_oldest()
        self._waiting[effect.group_id] = (effect, report)
        if self._work is None or self._work.done():
            self._work = spawn(self._serve(), f"assignor {self._name}")

    def _drop_oldest(self) -> None:
        effect, report = self._waiting.pop(next(iter(self._waiting)))
        problem = f"more than {MAX_WAITING_GROUPS} groups wait for it"
        # Reported in a later turn: the shard that makes this request is still executing a command.
        loop = asyncio.get_running_loop()
        call_later(loop, 0, "assignor", partial(self._fail, effect, report, problem))

    async def close(self) -> None:
        """End the process; waiting and dropped requests are not reported."""
        self._is_closed = True
        self._waiting.clear()
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        await self._kill()

    async def _serve(self) -> None:
        while self._waiting:
            effect, report = self._waiting.pop(next(iter(self._waiting)))
            result, problem = None, ""
            try:
                result, problem = await self._compute(effect)
            except TimeoutError:
                problem = f"it did not answer within {ANSWER_TIMEOUT_MS} ms"
            except Exception as error:  # noqa: BLE001 - user code may cause any error
                problem = f"its process ended or answered nonsense: {error!r}"
            with swallow("assignor", assignor=self._name, group=effect.group_id):
                if result is None:
                    self._fail(effect, report, problem)
                else:
                    report(TargetComputed(effect.group_id, effect.assignor, effect.group, result))

    def _fail(self, effect: ComputeTarget, report: Report, problem: str) -> None:
        if self._is_closed:
            return
        _log.warning("assignor failed", assignor=self._name, group=effect.group_id, cause=problem)
        report(TargetComputed(effect.group_id, effect.assignor, effect.group, None, problem))

    async def _compute(self, effect: ComputeTarget) -> Result:
        timeout_ms = ANSWER_TIMEOUT_MS if self._child is not None else START_TIMEOUT_MS
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                reader, writer = await self._pipes()
                writer.write(frame(request_of(effect.group)))
                await writer.drain()
                return result_of(unpack(await _body(reader)))
        except BaseException:
            await self._kill()
            raise

    async def _pipes(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        child = self._child or await self._start()
        if child.stdin is None or child.stdout is None:
            raise EOFError("it has no pipes")
        return child.stdout, child.stdin

    async def _start(self) -> asyncio.subprocess.Process:
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fencepost.coordinator.services.assignors.worker",
            self._name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self._child

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if child.returncode is None:
                child.kill()
            await child.wait()


async def _body(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(HEADER_BYTES))
    if length > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {length} bytes (most: {MAX_ANSWER_BYTES})")
    return await reader.readexactly(length)
