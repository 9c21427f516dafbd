"""The options that a seed determines for a simulated run on ZooKeeper."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Final

from tests.sim.daemon_faults import LOSING
from tests.sim.daemons import Options, draw_members, draw_weather

SHARED: Final = (
    "kill",
    "kill_leader",
    "kill_coordinator",
    "stop",
    "pause",
    "flap",
    "break_off",
    "cut",
    "isolate",
    "grow",
    "reassign",
    "call_off",
    "elect_preferred",
    "flip",
    "recreate",
    "delete_records",
    "alter_config",
)
"""Faults that do not concern ZooKeeper."""

OWN: Final = (
    "expire",
    "disconnect",
    "zookeeper_cut",
    "zookeeper_away",
    "late_writes",
    "kill_controller",
    "expire_controller",
    "pause_controller",
    "disconnect_controller",
    "remove_controller",
    "isr_note",
    "mark_for_deletion",
    "bounce",
    "clock_jump",
)
"""Faults of :class:`tests.sim.zk_outages.Outages`."""

TOGETHER: Final[tuple[tuple[str, ...], ...]] = (
    ("expire_controller", "reassign", "recreate"),
    ("kill_controller", "reassign", "recreate", "grow"),
    ("pause_controller", "reassign", "flip", "alter_config"),
    ("disconnect_controller", "reassign", "recreate", "call_off"),
    ("late_writes", "remove_controller", "flip", "recreate"),
    ("bounce", "flip"),
    ("bounce", "pause_controller", "expire_controller"),
    ("expire", "kill"),
    ("zookeeper_cut", "zookeeper_away", "reassign"),
    ("remove_controller", "reassign", "mark_for_deletion", "recreate"),
    ("isr_note", "flap", "expire_controller"),
    ("stop", "expire_controller", "flip"),
    ("disconnect", "expire", "alter_config", "grow"),
)
"""Faults that reach rare states only in combination."""

TOOLS: Final = (
    "admin_reassign",
    "admin_elect",
    "admin_create",
    "admin_delete",
    "tool_settings",
    "tool_access",
    "broker_access",
)
"""Actions of :class:`tests.sim.zk_writers.Writers`."""

WITH_TOOLS: Final = 0.4
"""The share of simulated runs in which tools write."""

WITH_POWER_LOSSES: Final = 0.15
"""The share of simulated runs in which brokers lose power."""

WITH_LOST_DISKS: Final = 0.15
"""The share of simulated runs in which brokers lose their disks."""

AUTHORIZER: Final = "kafka.security.authorizer.AclAuthorizer"


@dataclass(frozen=True)
class ZooKeeperOptions(Options):
    """The options of one simulated run on ZooKeeper."""

    servers: int = 1
    """Members of the ensemble."""
    member_lag_ms: int = 0
    """How far a member may lag behind the leader of the ensemble."""

    @property
    def has_rules(self) -> bool:
        """Whether brokers have an authorizer."""
        return not {"tool_access", "broker_access"}.isdisjoint(self.faults)

    @property
    def _elects(self) -> dict[str, Any]:
        rules = {"authorizer.class.name": AUTHORIZER, "allow.everyone.if.no.acl.found": True}
        return (rules if self.has_rules else {}) | {
            "zookeeper.session.timeout.ms": self.session_ms,
            "leader.imbalance.check.interval.seconds": 1,
            "controlled.shutdown.retry.backoff.ms": 500,
        }


def draw_options(seed: int) -> ZooKeeperOptions:
    """Draw the options of a seed."""
    draw = random.Random(f"zookeeper daemons {seed}")
    brokers = draw.choice((2, 3, 3))
    factor = min(brokers, draw.choice((1, 2, 3, 3)))
    faults: tuple[str, ...]
    if draw.random() < 0.5:
        faults = draw.choice(TOGETHER)
    else:
        faults = tuple(draw.sample(SHARED + OWN, draw.choice((1, 2, 4, 8))))
    if draw.random() < WITH_TOOLS:
        faults += tuple(draw.sample(TOOLS, draw.choice((1, 2, 4))))
    # Separate generators keep the other options of each seed unchanged.
    if random.Random(f"zookeeper power losses {seed}").random() < WITH_POWER_LOSSES:
        faults += ("power_loss",)
    options = ZooKeeperOptions(
        seed=seed,
        brokers=brokers,
        factor=factor,
        min_isr=min(factor, draw.choice((1, 2))),
        partitions=draw.choice((1, 2, 3)),
        weather=draw_weather(draw),
        disk_ms=draw.choice(((0, 0), (0, 3), (1, 30))),
        creep_ns=draw.choice((0, 0, 10_000)),
        faults=faults,
        fault_pause_ms=draw.choice((200, 500, 1_000)),
        chaos_ms=draw.choice((2_000, 4_000)),
        producers=draw.choice((1, 2, 3)),
        transactions=draw.choice((0, 1, 2)),
        readers=draw.choice((1, 2)),
        members=tuple((False, is_static) for _, is_static in draw_members(draw)),
        lag_ms=draw.choice((500, 1_000, 2_000)),
        session_ms=draw.choice((600, 900, 1_500)),
        outage_ms=draw.choice((800, 2_500)),
        transactional_members=draw.choice((0.0, 0.0, 0.5, 1.0)),
        servers=draw.choice((1, 1, 3)),
        member_lag_ms=draw.choice((0, 5, 40)),
    )
    disks = random.Random(f"zookeeper lost disks {seed}")
    if disks.random() < WITH_LOST_DISKS:
        # A lost record may belong to a transaction or be a commit of offsets, so there are neither.
        return replace(
            options,
            faults=(*options.faults, disks.choice(LOSING)),
            unclean=disks.random() < 0.5,
            transactions=0,
            members=(),
        )
    return options
