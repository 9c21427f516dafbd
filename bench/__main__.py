"""Measure suites of workloads, on Fencepost and on Apache Kafka in turn, and report the ratios.

``python -m bench`` runs every suite, ``python -m bench log txn`` only these two. Each workload runs
on both brokers, in changing order, before the next one begins, so that a drift of the machine's
speed affects both. Both brokers are warm, and up during the whole run, except for workloads that
need a new broker. ``--write PAGE`` puts the tables between the page's
markers: its ``bench`` block gets the medians of all suites measured, a ``bench-SUITE`` block one
suite in full.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from compileall import compile_dir, compile_file
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fencepost
from bench import report
from bench.brokers import FENCEPOST, Broker
from bench.clients import delete_topics
from bench.ping import pinged
from bench.report import Samples
from bench.suite import Figures, Local, Pair, Suite, Workload
from bench.suites import SUITES
from bench.warm import WarmBrokers
from docs.generate import between


def measure(
    workload: Workload | Local | Pair, side: str, warm: WarmBrokers
) -> Iterator[tuple[str, Figures]]:
    """Run one workload, on a new or a warm broker if it needs one; yield figures as they come."""
    if isinstance(workload, Workload) and not workload.fresh:
        broker = warm.broker(side, workload.sides[side])
        try:
            yield side, _figures(workload, broker)
        finally:
            delete_topics(broker.bootstrap)
        return
    with tempfile.TemporaryDirectory(prefix="fencepost-bench-") as home:
        if isinstance(workload, Pair):
            yield from workload.run(Path(home))
            return
        if isinstance(workload, Local):
            yield side, workload.run(Path(home))
            return
        broker = workload.sides[side](Path(home), workload.settings)
        broker.start()
        try:
            yield side, _figures(workload, broker)
        finally:
            broker.kill()  # its data is no longer needed


def _figures(workload: Workload, broker: Broker) -> Figures:
    """Run the workload, and ping the broker meanwhile."""
    first = broker.bootstrap.partition(",")[0]
    with pinged(first) if workload.is_pinged else nullcontext([]) as longest:
        figures = workload.run(broker)
    # A workload that only starts brokers leaves no time for a ping.
    return {**figures, report.STALL: max(longest)} if any(longest) else figures


def sides_of(workload: Workload | Local | Pair, number: int, *, without_kafka: bool) -> list[str]:
    if without_kafka or not isinstance(workload, Workload):
        return [FENCEPOST]
    return list(workload.sides)[:: -1 if number % 2 else 1]


def run(suites: list[Suite], arguments: argparse.Namespace) -> tuple[dict[str, Samples], list[str]]:
    """Run all rounds, each with every workload once on each side; return samples and failures."""
    failed: list[str] = []
    measured = {suite.name: report.no_samples() for suite in suites}
    chosen = [
        (number, suite, workload)
        for number in range(arguments.rounds)
        for suite in suites
        for workload in suite.workloads
        if not arguments.only or any(part in workload.name for part in arguments.only)
    ]
    with WarmBrokers() as warm:
        for number, suite, workload in chosen:
            for side in sides_of(workload, number, without_kafka=arguments.without_kafka):
                what = f"round {number + 1}: {suite.name}: {workload.name} on {side}"
                print(what, file=sys.stderr, flush=True)
                try:
                    for of, figures in measure(workload, side, warm):
                        print(f"  {of}: {report.plain(figures)}", file=sys.stderr, flush=True)
                        report.take(measured[suite.name], number, workload.name, of, figures)
                except Exception:  # noqa: BLE001 - the other figures must be kept
                    traceback.print_exc()
                    failed.append(what)
            if arguments.json:  # save after each workload: a long run may be interrupted
                save(arguments.json, report.as_json(arguments.rounds, measured))
    return measured, failed


def save(path: Path, result: dict[str, Any]) -> None:
    """Write every sample in ``result``."""
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write(page: Path, result: dict[str, Any]) -> None:
    """Replace the tables between the markers in ``page``."""
    text = page.read_text(encoding="utf-8")
    if "<!-- bench:begin -->" in text:
        text = between(text, "bench", report.summary(result))
    for name, measured in result.items():
        if f"<!-- bench-{name}:begin -->" in text:
            told = report.detailed(measured, SUITES[name].sides)
            text = between(text, f"bench-{name}", told)
    page.write_text(text, encoding="utf-8")


def compile_package() -> None:
    """Compile the package to bytecode, as an installation does, before starts are timed."""
    for path in Path(fencepost.__file__).parent.iterdir():
        if path.is_dir():  # in a checkout these are links, which compileall does not follow
            compile_dir(path.resolve(), quiet=2)
        elif path.suffix == ".py":
            compile_file(path, quiet=2)


def main() -> None:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only",
        action="append",
        help="run only the workloads whose name contains this; may be repeated",
    )
    parser.add_argument("--without-kafka", action="store_true", help="measure Fencepost alone")
    parser.add_argument("--write", type=Path, action="append", default=[], metavar="PAGE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument(
        "--read", type=Path, action="append", default=[], metavar="FILE", help="of --json; no run"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - SUITES.keys():
        parser.error(f"no suite is called {', '.join(sorted(unknown))}")
    suites = [suite for name, suite in SUITES.items() if name in (arguments.suites or SUITES)]
    failed: list[str] = []
    if arguments.read:
        result = merged(arguments.read, suites)
    else:
        compile_package()
        measured, failed = run(suites, arguments)
        result = report.as_json(arguments.rounds, measured)
    for name, measured in result.items():
        print(f"\n{SUITES[name].about}\n\n{report.detailed(measured, SUITES[name].sides)}")
    if arguments.json:
        save(arguments.json, result)
    for page in arguments.write:
        write(page, result)
    if failed:
        sys.exit("failed: " + "; ".join(failed))


def merged(files: list[Path], suites: list[Suite]) -> dict[str, Any]:
    """Merge earlier results, in the order of the suites; of two results the later one counts."""
    found: dict[str, Any] = {}
    for path in files:
        found |= json.loads(path.read_text(encoding="utf-8"))
    return {suite.name: found[suite.name] for suite in suites if suite.name in found}


if __name__ == "__main__":
    main()
