"""Write the generated parts of the documentation (``make readme``).

The reference of settings, commands, APIs and classes comes from their definitions, so the two
can't drift apart: a test compares each page with the output of this module. Such a part stands
between ``<!-- name:begin -->`` and ``<!-- name:end -->``; the text around it is written by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.catalogue import catalogue_table
from docs.classes import class_reference
from docs.commands import command_reference
from docs.matrix import matrix, run_table
from docs.series import other_series, own_series
from docs.settings import broker_table, cell, group_table, inert_table, table, topic_table
from fencepost.cli.history_schema import KINDS, SUBJECTS, schema
from fencepost.coordinator.handlers import Registry

ROOT = Path(__file__).resolve().parents[1]


def api_table() -> str:
    """Return the table of served APIs with their versions and the permission that each needs."""
    registry = Registry()
    lines = ["| key | API | versions | permission |", "|---|---|---|---|"]
    for handler in registry.handlers():
        api = handler.api
        low, high = registry.versions[api.key]
        note = "" if api.advertised_min == low else f" (advertised from {api.advertised_min})"
        versions = f"{low}–{high}{note}"
        lines.append(f"| {int(api.key)} | {api.name} | {versions} | {handler.permission} |")
    return "\n".join(lines)


FIRST_FIGURES = (
    "broker without topics: time to start, with an empty directory",
    "broker without topics: time to start, after kill -9",
    "broker without topics: memory when idle",
    "librdkafka, 16 partitions: produce throughput",
    "pipelined requests: rate of commits of one offset",
    "transactions of one record: rate",
    "transactions of one record: p99 duration",
)
"""The rows of docs/figures.md on the first page; readers take in seven rows, but not forty."""


def first_figures() -> str:
    """Return the first page's table: the rows of docs/figures.md that ``FIRST_FIGURES`` names."""
    lines = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    (told,) = (line for line in lines if "a ratio above 1" in line)
    table = [
        "| measurement | unit | Fencepost | Apache Kafka | ratio |",
        "|---|---|---|---|---|",
        *(rows[name] for name in FIRST_FIGURES),
    ]
    told = told.partition(" All figures:")[0]
    return "\n".join([f"{told} [All figures](docs/figures.md).", "", *table])


def kinds_table() -> str:
    """Return the table of the kinds of history entries, by scope."""
    rows = (
        (f"`{scope}`: {SUBJECTS[scope]}", f"`{kind}`", cell(text))
        for scope, kinds in KINDS.items()
        for kind, text in kinds.items()
    )
    return table(("scope and subject", "kind", "meaning"), rows)


PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"figures": first_figures},
    "docs/protocol.md": {"apis": api_table},
    "docs/configuration.md": {
        "broker": broker_table,
        "topics": topic_table,
        "groups": group_table,
        "no-effect": inert_table,
    },
    "docs/cli.md": {"commands": command_reference},
    "docs/compatibility.md": {"matrix": matrix, "runs": run_table},
    "docs/python.md": {"classes": class_reference},
    "docs/metrics.md": {"metrics": own_series, "other-metrics": other_series},
    "docs/causes.md": {"kinds": kinds_table, "catalogue": catalogue_table},
}
"""Page → name of a part → function that returns its text."""


def history_schema() -> str:
    """Return the JSON schema of history entries, as a file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


FILES: Mapping[str, Callable[[], str]] = {"docs/history-entry.schema.json": history_schema}
"""File → function that returns its text."""


def between(page: str, name: str, text: str) -> str:
    """Return ``page`` with ``text`` between the markers of ``name``; ValueError without them."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"the page has no {begin} … {end}")
    # Blank lines: Markdown takes a line directly after a comment as a part of the comment.
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def written(name: str) -> str:
    """Return the text of the page or file ``name``, with its generated parts up to date."""
    if name in FILES:
        return FILES[name]()
    page = (ROOT / name).read_text(encoding="utf-8")
    for part, write in PARTS[name].items():
        page = between(page, part, write())
    return page


def main() -> None:
    """Bring the generated parts of all pages up to date, and name the pages that changed."""
    for name in (*PARTS, *FILES):
        path, page = ROOT / name, written(name)
        if not path.exists() or path.read_text(encoding="utf-8") != page:
            path.write_text(page, encoding="utf-8")
            sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
