"""Writes the generated parts of README.md (``make readme``).

The API table comes from the registry that also answers ApiVersions, so the two can't drift apart;
a test compares the page with what this module would write.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fencepost.coordinator.handlers import Registry


def api_table() -> str:
    """Every served API with its versions and what a client would need to call it, in Markdown."""
    registry = Registry()
    lines = ["| key | API | versions | permission |", "|---|---|---|---|"]
    for handler in registry.handlers():
        api = handler.api
        low, high = registry.versions[api.key]
        note = "" if api.advertised_min == low else f" (advertised from {api.advertised_min})"
        versions = f"{low}–{high}{note}"
        lines.append(f"| {int(api.key)} | {api.name} | {versions} | {handler.permission} |")
    return "\n".join(lines)


def between(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the markers of the part ``name``; ValueError without them."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"the page has no {begin} … {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main(path: Path) -> None:
    """Bring the generated parts of the page at ``path`` up to date."""
    page = path.read_text(encoding="utf-8")
    path.write_text(between(page, "apis", api_table()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
