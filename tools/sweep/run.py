"""The sweep: one run that counts, then one run per crash point, each from the same state."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path

from fencepost.client.queries.session import ClusterSession
from fencepost.logcore.system import kill_group
from fencepost.logcore.values import dataclass
from fencepost.protocol.errors import WireError
from fencepost.tools.sweep.daemon import (
    CountingWrappers,
    Daemon,
    DaemonError,
    DaemonSettings,
    preload,
)
from fencepost.tools.sweep.judge import Labels, judge
from fencepost.tools.sweep.points import CountedEvent, KillPoint, points_of, spread

POLL_S = 0.01
"""The interval for polling the command; the broker's death is reported at once."""
SESSION_TIMEOUT_S = 20.0
TAIL_BYTES = 2_000
"""The maximum number of bytes of a failed command's output that are shown: the last ones."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The commands of a sweep, and its limits. Commands are argument vectors; times are seconds."""

    command: Sequence[str]
    directory: Path
    """The directory of all files of the sweep."""
    setup: Sequence[str] = ()
    verify: Sequence[str] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    points: int | None = None
    """The number of crash points; None is all."""
    jobs: int = 1
    restarts: int = 5
    """The maximum number of restarts of a failed command."""
    every_answer: bool = False
    """Kill before every response, not only before the first one after a durable operation."""
    kill_command: bool = False
    """Kill the command together with the broker, as when the whole machine goes down."""
    command_timeout_s: float = 60.0
    settle_s: float = 10.0
    time_limit_s: float = 600.0
    labels: Labels = field(default_factory=lambda: Labels("fencepost-txn", "fencepost-txn-size"))


@dataclass(slots=True)
class RunResult:
    """One run. ``killed`` is the event at which the broker killed itself, or None."""

    point: KillPoint | None
    killed: str | None = None
    attempts: int = 0
    ended: list[str] = field(default_factory=list)
    """How each failed attempt ended, with the end of the command's output."""
    failures: list[str] = field(default_factory=list)
    skipped: bool = False
    seconds: float = 0.0


@dataclass(slots=True)
class SweepResult:
    """All runs, the counting one first."""

    events: list[CountedEvent]
    candidates: int
    results: list[RunResult]

    @property
    def failed(self) -> list[RunResult]:
        """The runs with failures."""
        return [result for result in self.results if result.failures]


class Sweep:
    """Carries out a plan. ``progress`` gets each result, from any thread, but one at a time."""

    def __init__(self, plan: SweepPlan, progress: Callable[[RunResult, int], None]) -> None:
        self._plan = plan
        self._progress = progress
        self._told = threading.Lock()
        self._stop = threading.Event()
        self._template: Path | None = None
        self._deadline = time.monotonic() + plan.time_limit_s

    def run(self) -> SweepResult:
        """Carry out the whole plan. Failures are in the result."""
        plan = self._plan
        plan.directory.mkdir(parents=True, exist_ok=True)
        try:
            if plan.setup:
                self._prepare()
        except DaemonError as error:
            return SweepResult([], 0, [RunResult(None, failures=[f"setup: {error}"])])
        counted, events = self._run_once(0, None)
        if counted.failures:
            return SweepResult(events, 0, [counted])
        candidates = points_of(events)
        points = candidates if plan.points is None else spread(candidates, plan.points)
        with ThreadPoolExecutor(plan.jobs) as pool:
            try:
                results = list(
                    pool.map(
                        lambda item: self._bounded(item[0], item[1], len(points)),
                        enumerate(points, 1),
                    )
                )
            except BaseException:
                self._stop.set()
                raise
        return SweepResult(events, len(candidates), [counted, *results])

    def _prepare(self) -> None:
        """Run the setup command once; every run starts from the data directory it leaves."""
        home = self._plan.directory / "setup"
        home.mkdir()
        daemon = self._daemon(home, fresh=True)
        try:
            daemon.start()
            env = self._environment(daemon, home, None, 0, 1)
            problem = self._finish(self._spawn(self._plan.setup, home / "setup.log", env), home)
            if problem:
                raise DaemonError(problem)
            daemon.stop()
        finally:
            daemon.close()
        self._template = home / "data"

    def _bounded(self, number: int, point: KillPoint, total: int) -> RunResult:
        if self._stop.is_set() or time.monotonic() > self._deadline:
            return RunResult(point, skipped=True)
        result, _ = self._run_once(number, point)
        with self._told:
            self._progress(result, total)
        return result

    def _run_once(
        self, number: int, point: KillPoint | None
    ) -> tuple[RunResult, list[CountedEvent]]:
        """Carry out one run, and judge it. Its directory is kept if there are failures."""
        began = time.monotonic()
        home = self._plan.directory / f"{number:05d}"
        home.mkdir()
        if self._template is not None:
            shutil.copytree(self._template, home / "data")
        daemon = self._daemon(home, fresh=point is None)
        result = RunResult(point)
        events: list[CountedEvent] = []
        try:
            daemon.start(point)
            if self._work(daemon, home, number, result):
                killed, events = daemon.disarm()
                if killed is not None:
                    self._restart_killed(daemon, result, killed)
                self._verdict(daemon, home, number, result)
                daemon.stop()
                if point is None:
                    preload(daemon.messages)
        except (DaemonError, WireError, OSError) as error:
            result.failures.append(str(error))
        finally:
            daemon.close()
        result.seconds = time.monotonic() - began
        if result.failures:
            result.failures.append(f"kept: {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)
        return result, events

    def _daemon(self, home: Path, *, fresh: bool) -> Daemon:
        plan = self._plan
        counting = CountingWrappers(plan.every_answer)
        settings = DaemonSettings(home / "data", home / "broker.log", plan.config, counting)
        return Daemon(settings, fresh=fresh)

    def _work(self, daemon: Daemon, home: Path, number: int, result: RunResult) -> bool:
        """Run the command to its end across the kill; return False if it never succeeds."""
        plan = self._plan
        while result.attempts <= plan.restarts:
            result.attempts += 1
            env = self._environment(daemon, home, result.point, number, result.attempts)
            log = home / f"command-{result.attempts}.log"
            problem = self._watch(self._spawn(plan.command, log, env), daemon, result)
            if problem is None:
                return True
            result.ended.append(f"{problem}: {_tail(log)}")
        result.failures.append(f"command failed {result.attempts} times, last {result.ended[-1]}")
        return False

    def _watch(
        self, child: subprocess.Popen[bytes], daemon: Daemon, result: RunResult
    ) -> str | None:
        """Wait for the command, and restart a killed broker; return None after success."""
        deadline = time.monotonic() + self._plan.command_timeout_s
        with _kill_on_exit(child):
            while child.poll() is None:
                if self._stop.is_set():
                    raise DaemonError("the sweep was stopped")
                if time.monotonic() > deadline:
                    return "took too long"
                killed = daemon.killed_at(POLL_S)
                if killed is not None:
                    self._restart_killed(daemon, result, killed)
                    if self._plan.kill_command:
                        return "was killed"
        return None if child.returncode == 0 else f"ended with status {child.returncode}"

    @staticmethod
    def _restart_killed(daemon: Daemon, result: RunResult, killed: str) -> None:
        result.killed = killed
        daemon.start()

    def _verdict(self, daemon: Daemon, home: Path, number: int, result: RunResult) -> None:
        """Judge the cluster, then run the user's own verifier."""
        with ClusterSession(daemon.bootstrap, SESSION_TIMEOUT_S) as session:
            result.failures += judge(session, self._plan.labels, self._plan.settle_s)
        if self._plan.verify:
            env = self._environment(daemon, home, result.point, number, result.attempts)
            log = home / "verify.log"
            problem = self._finish(self._spawn(self._plan.verify, log, env), home)
            if problem:
                result.failures.append(f"verify: {problem}: {_tail(log)}")

    def _finish(self, child: subprocess.Popen[bytes], home: Path) -> str | None:
        with _kill_on_exit(child):
            try:
                status = child.wait(self._plan.command_timeout_s)
            except subprocess.TimeoutExpired:
                return "it took too long"
        return None if status == 0 else f"it ended with status {status} (see {home})"

    @staticmethod
    def _environment(
        daemon: Daemon, home: Path, point: KillPoint | None, number: int, attempt: int
    ) -> dict[str, str]:
        return {
            **os.environ,
            "FENCEPOST_BOOTSTRAP": daemon.bootstrap,
            "FENCEPOST_SWEEP_DIR": str(home),
            "FENCEPOST_SWEEP_POINT": str(point) if point is not None else "none",
            "FENCEPOST_SWEEP_RUN": str(number),
            "FENCEPOST_SWEEP_ATTEMPT": str(attempt),
        }

    @staticmethod
    def _spawn(
        command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command in a process group of its own, so that all of it can be killed."""
        with log.open("wb") as output:
            return subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )


@contextmanager
def _kill_on_exit(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a command that still runs, with its whole process group, on leaving."""
    try:
        yield
    finally:
        if child.poll() is None:
            kill_group(child.pid)
            child.wait()


def _tail(log: Path) -> str:
    """Return the last lines of a command's output."""
    try:
        data = log.read_bytes()[-TAIL_BYTES:]
    except OSError:
        return ""
    lines = data.decode("utf-8", "replace").strip().splitlines()
    return " | ".join(lines[-6:])
