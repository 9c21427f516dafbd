"""Draws the state diagrams of this package: ``python -m fencepost.cluster.diagram``.

``cluster/README.md`` contains the output; a test compares the two.
"""

from __future__ import annotations

import sys

from fencepost.cluster.lifecycle import TRANSITIONS, BrokerState


def lifecycle_diagram() -> str:
    """Return the states of a broker of a cluster as a Mermaid diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {BrokerState.NOT_RUNNING.name}: its ports are bound"]
    lines += [
        f"    {source.name} --> {target.name}: {cause}"
        for (source, target), cause in TRANSITIONS.items()
    ]
    lines.append(f"    {BrokerState.SHUTTING_DOWN.name} --> [*]")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(lifecycle_diagram() + "\n")
