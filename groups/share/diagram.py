"""Draws the README's table of states: ``python -m fencepost.groups.share.diagram``."""

from __future__ import annotations

import sys

from fencepost.groups.share.states import TRANSITIONS


def states() -> str:
    """Return the transitions of a record as a Markdown table."""
    lines = ["| from | to | causes |", "|---|---|---|"]
    for (old, new), causes in TRANSITIONS.items():
        name = "not read" if old is None else old.name
        lines.append(f"| {name} | {new.name} | {', '.join(cause.value for cause in causes)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{states()}\n")
