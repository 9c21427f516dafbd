"""The options that a seed determines for a history on ZooKeeper."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Final

from tests.sim.swarm import Options
from tests.sim.swarm import draw_options as draw_others

SHARED: Final = (
    "kill",
    "clean_stop",
    "pause",
    "cut",
    "isolate",
    "clock_jump",
    "reassign",
    "cancel",
    "preferred",
    "recreate",
    "add_partitions",
    "flap",
    "flip",
    "delete_records",
    "new_producer",
    "alter_config",
)
"""Faults that do not concern ZooKeeper."""

LOSING: Final = frozenset({"recreate", "delete_records", "mark_for_deletion"})
"""Faults that may remove committed records for good."""

OWN: Final = (
    "expire",
    "disconnect",
    "zookeeper_cut",
    "zookeeper_away",
    "kill_controller",
    "expire_controller",
    "pause_controller",
    "disconnect_controller",
    "remove_controller",
    "isr_note",
    "mark_for_deletion",
    "bounce",
)
"""Faults of :class:`tests.sim.zk_faults.ZooKeeperFaults`."""

TOOLS: Final = (
    "admin_reassign",
    "admin_elect",
    "admin_create",
    "admin_delete",
    "tool_settings",
    "tool_access",
    "broker_access",
)
"""Actions of :class:`tests.sim.zk_tools.Tools`."""

WITH_TOOLS: Final = 0.4
"""The share of histories in which tools write."""

TOGETHER: Final[tuple[tuple[str, ...], ...]] = (
    ("expire_controller", "reassign", "recreate"),
    ("kill_controller", "reassign", "recreate", "add_partitions"),
    ("pause_controller", "reassign", "flip", "alter_config"),
    ("disconnect_controller", "reassign", "recreate", "cancel"),
    ("bounce", "flip"),
    ("bounce", "pause_controller", "expire_controller"),
    ("expire", "kill"),
    ("zookeeper_cut", "zookeeper_away", "reassign"),
    ("remove_controller", "reassign", "mark_for_deletion"),
    ("isr_note", "flap", "expire_controller"),
    ("clean_stop", "expire_controller", "flip"),
    ("disconnect", "expire", "alter_config", "add_partitions"),
)
"""Faults that reach rare states only in combination."""


@dataclass(frozen=True, slots=True)
class ZooKeeperOptions(Options):
    """The options of one history on ZooKeeper."""

    servers: int = 1
    """Members of the ensemble."""
    lag_ms: int = 0
    """How far a member may lag behind the leader."""
    tools: tuple[str, ...] = ()
    """The actions of tools and other brokers, which are also among the faults."""

    def __str__(self) -> str:
        return f"{Options.__str__(self)}, on ZooKeeper ({self.servers} servers)"


def draw_options(seed: int) -> ZooKeeperOptions:
    """Return the options of a seed."""
    draw = random.Random(f"zookeeper {seed}")
    given = draw_others(seed)
    faults: tuple[str, ...]
    if draw.random() < 0.5:
        faults = draw.choice(TOGETHER)
    else:
        faults = tuple(draw.sample(SHARED + OWN, draw.choice((1, 2, 4, 8))))
    if given.has_transactions:
        # The checks of transactions assume that no partition loses committed records.
        faults = tuple(one for one in faults if one not in LOSING)
    kept = {one.name: getattr(given, one.name) for one in fields(Options)}
    # A generator of its own: the choice of tools does not change the other options of a seed.
    draw_tools = random.Random(f"tools {seed}")
    tools: tuple[str, ...] = ()
    if draw_tools.random() < WITH_TOOLS:
        tools = tuple(draw_tools.sample(TOOLS, draw_tools.choice((1, 2, 4))))
        faults += tools
    kept |= {"tools": tools, "faults": faults}
    return ZooKeeperOptions(**kept, servers=draw.choice((1, 1, 3)), lag_ms=draw.choice((0, 5, 40)))
