"""Draws the state diagrams of this package: ``python -m fencepost.groups.diagram``.

``groups/README.md`` contains the output; a test compares the two.
"""

from __future__ import annotations

import sys

from fencepost.groups.classic_state import TRANSITIONS, ClassicState
from fencepost.groups.reconcile import TRANSITIONS as MEMBER_TRANSITIONS
from fencepost.groups.reconcile import MemberState


def classic_diagram() -> str:
    """Return the states of a classic group as a Mermaid diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {ClassicState.EMPTY}: created, or loaded empty"]
    lines.append(f"    [*] --> {ClassicState.STABLE}: loaded with members, was a consumer group")
    lines += [
        f"    {source} --> {target}: {cause}" for (source, target), cause in TRANSITIONS.items()
    ]
    lines.append(f"    {ClassicState.DEAD} --> [*]")
    return "\n".join(lines)


def consumer_member_diagram() -> str:
    """Return the states of a consumer group's member as a Mermaid diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {MemberState.STABLE.name}: joins, owns nothing"]
    lines += [
        f"    {source.name} --> {target.name}: {cause}"
        for (source, target), cause in MEMBER_TRANSITIONS.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(classic_diagram() + "\n\n" + consumer_member_diagram() + "\n")
