"""``fencepost crash-sweep``: kills the broker at every step of the user's own pipeline."""

from __future__ import annotations

import shlex
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fencepost.cli.options import duration
from fencepost.cli.output import emit
from fencepost.cli.printing import print_json, print_lines

if TYPE_CHECKING:
    from fencepost.tools.sweep.run import RunResult, SweepResult

DEFAULT_POINTS = "50"
MAX_POINTS = 100_000
MAX_JOBS = 32

F = TypeVar("F", bound=Callable[..., Any])


def _count(_ctx: click.Context, _param: click.Parameter, text: str) -> int | None:
    """Parse ``--points``; None means all."""
    if text == "all":
        return None
    if text.isdecimal() and 1 <= int(text) <= MAX_POINTS:
        return int(text)
    raise click.BadParameter(f"{text!r} is neither a number from 1 to {MAX_POINTS} nor 'all'")


def _seconds(name: str, field: str, default: float, text: str) -> Callable[[F], F]:
    return click.option(
        name,
        field,
        callback=duration("s", 0.1),
        default=default,
        show_default=True,
        metavar="SECONDS",
        help=text,
    )


def _number(name: str, low: int, high: int, default: int, text: str) -> Callable[[F], F]:
    return click.option(
        name, type=click.IntRange(low, high), default=default, show_default=True, help=text
    )


@click.command("crash-sweep")
@click.argument("line", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--points",
    callback=_count,
    default=DEFAULT_POINTS,
    show_default=True,
    metavar="N|all",
    help="The number of kills, spread evenly over the run.",
)
@click.option(
    "--config",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the broker; may be repeated.",
)
@click.option(
    "--setup", metavar="CMD", help="Run this once; every run begins with the data it leaves."
)
@click.option(
    "--verify", metavar="CMD", help=("Run this after each run; if it fails, the run has failed.")
)
@_number("--restarts", 0, 100, 5, "The number of times that a failed COMMAND is restarted.")
@_number("--jobs", 1, MAX_JOBS, 1, "The number of runs at the same time.")
@click.option("--every-answer", is_flag=True, help="Also kill before answers to reads.")
@click.option("--kill-command", is_flag=True, help="Kill COMMAND together with the broker.")
@_seconds(
    "--command-timeout", "command_timeout_s", 60.0, "The time limit of one run of one command."
)
@_seconds("--settle", "settle_s", 10.0, "How long transactions may stay open after COMMAND.")
@_seconds("--time-limit", "time_limit_s", 600.0, "Begin no run after this time.")
@click.option(
    "--label-header",
    default="fencepost-txn",
    show_default=True,
    metavar="NAME",
    help="Records with one value of this header are seen whole and once, or not at all.",
)
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory to work in, where failed runs are kept; else a temporary one.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="A verdict table, or one JSON object.",
)
def command(
    line: tuple[str, ...],
    pairs: tuple[str, ...],
    setup: str | None,
    verify: str | None,
    label_header: str,
    directory: Path | None,
    form: str,
    **bounds: Any,
) -> None:
    """Run COMMAND repeatedly, and kill the broker at a different point each time.

    A first run counts the broker's durable operations. Then, for each chosen point, the broker is
    killed (SIGKILL) exactly before, in the middle of or after one of these operations, or before
    the answer that follows it (--every-answer: before any answer), and started again on the same
    port; COMMAND continues, or is started again if it fails. Afterwards no transaction may be open,
    read_committed readers must see exactly the committed records, each unit of work (see below)
    must be committed completely and once, or not at all, and --verify must succeed.

    \b
    COMMAND finds in its environment:
      FENCEPOST_BOOTSTRAP      the broker, HOST:PORT
      FENCEPOST_SWEEP_DIR      a directory of this run alone, the same after a restart
      FENCEPOST_SWEEP_POINT    the point, e.g. "before 17"; "none" in the counting run
      FENCEPOST_SWEEP_RUN      the number of the run, from 0 on
      FENCEPOST_SWEEP_ATTEMPT  how often COMMAND was started in this run, from 1 on

    A record may carry the header named by --label-header (which unit of work it belongs to) and
    one more with "-size" at the end of its name (how many records the unit has).

    Exit status 0 if every run was right, 1 if one failed.
    """  # noqa: D301 - click wants the control character
    from fencepost.coordinator.config.broker_config import BrokerConfig, ConfigError, load
    from fencepost.tools.sweep.judge import Labels
    from fencepost.tools.sweep.run import Sweep, SweepPlan

    try:
        config = load(pairs)
        BrokerConfig(config)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--config") from error
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="sweep-", dir=directory))
    plan = SweepPlan(
        command=line,
        directory=home,
        setup=shlex.split(setup or ""),
        verify=shlex.split(verify or ""),
        config=config,
        labels=Labels(label_header, f"{label_header}-size"),
        **bounds,
    )
    began = time.monotonic()
    try:
        outcome = Sweep(plan, _SweepProgress()).run()
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    if not outcome.failed:
        shutil.rmtree(home, ignore_errors=True)
    _report(outcome, form, time.monotonic() - began)
    if outcome.failed:
        raise SystemExit(1)


class _SweepProgress:
    """Reports failures and, from time to time, the progress of the sweep on standard error."""

    EVERY_S = 2.0

    def __init__(self) -> None:
        self._done = self._kills = self._failures = 0
        self._said = time.monotonic()

    def __call__(self, result: RunResult, total: int) -> None:
        self._done += 1
        self._kills += result.killed is not None
        self._failures += bool(result.failures)
        if result.failures:
            print_lines(f"{result.point}: {'; '.join(result.failures)}", err=True)
        if time.monotonic() - self._said > self.EVERY_S or self._done == total:
            self._said = time.monotonic()
            print_lines(
                f"{self._done}/{total} points, {self._kills} kills, {self._failures} failures",
                err=True,
            )


def _report(outcome: SweepResult, form: str, seconds: float) -> None:
    runs = [result for result in outcome.results if result.point is not None]
    totals = {
        "operations": sum(not event.is_answer for event in outcome.events),
        "answers": sum(event.is_answer for event in outcome.events),
        "candidates": outcome.candidates,
        "points": len(runs),
        "kills": sum(result.killed is not None for result in runs),
        "not_reached": sum(result.killed is None and not result.skipped for result in runs),
        "skipped": sum(result.skipped for result in runs),
        "failures": len(outcome.failed),
        "seconds": round(seconds, 1),
    }
    if form == "json":
        rows = [
            {**asdict(result), "point": str(result.point) if result.point else "none"}
            for result in outcome.results
        ]
        print_json({**totals, "results": rows})
        return
    emit(_table(runs), ["where", "operation", "points", "kills", "failures"], "table")
    for result in outcome.failed:
        print_lines(f"FAILED {result.point or 'without any kill'}: {'; '.join(result.failures)}")
    print_lines(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in totals.items()))


def _table(runs: list[RunResult]) -> list[dict[str, object]]:
    """Return points, kills and failures by kind of operation."""
    kinds: dict[tuple[str, str], list[RunResult]] = defaultdict(list)
    for result in runs:
        if result.point is not None:
            kinds[str(result.point.where), result.point.kind].append(result)
    return [
        {
            "where": where,
            "operation": kind,
            "points": len(results),
            "kills": sum(result.killed is not None for result in results),
            "failures": sum(bool(result.failures) for result in results),
        }
        for (where, kind), results in sorted(kinds.items())
    ]
