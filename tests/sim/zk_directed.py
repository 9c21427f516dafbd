"""The options of simulated runs on ZooKeeper that reveal planted bugs, by the names of the bugs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from tests.sim import zk_history, zk_scripts
from tests.sim.network import Weather
from tests.sim.zk_options import draw_options
from tests.sim.zk_scripts import (
    ANOTHER_WRITES,
    EXPIRE,
    EXPIRE_ANOTHER,
    KILL,
    LOSE_REQUEST,
    RESIGN,
    Step,
)


class Staged(NamedTuple):
    """A script, and a step with a fault; None stands for a script without a fault."""

    script: str
    step: Step | None = None


Directions = Mapping[str, Any]
"""Options that override the options drawn from the seed of a simulated run."""

_CLUSTER: Final = {
    "brokers": 3,
    "factor": 2,
    "min_isr": 1,
    "fault_pause_ms": 200,
    "session_ms": 600,
    "weather": Weather(latency_ms=(1, 10)),
    "members": (),
    "transactions": 0,
    "servers": 1,
}
_LATE: Final = {
    **_CLUSTER,
    "weather": Weather(latency_ms=(1, 40), slow=0.05, slow_ms=1_500),
    "faults": ("remove_controller", "flip", "break_off", "pause_controller"),
}
_POWER: Final = {
    **_CLUSTER,
    "factor": 3,
    "min_isr": 2,
    "partitions": 1,
    "producers": 2,
    "session_ms": 900,
    "outage_ms": 2_500,
    "chaos_ms": 4_000,
    "faults": ("power_loss", "remove_controller"),
}
_RULES: Final = {**_CLUSTER, "faults": ("tool_access",)}
_USERS: Final = Staged("user")
_ADDITION: Final = Staged("addition")
_REASSIGNMENT: Final = Staged("reassignment")

DIRECTED: Final[Mapping[str, Staged | Directions]] = {
    "a controller writes without checking its epoch": {
        **_CLUSTER,
        "faults": ("late_writes", "pause_controller", "flip", "recreate"),
    },
    "an elected controller does not check the version of the controller epoch": Staged(
        "election", Step(11, EXPIRE)
    ),
    "a broker keeps its registration after its session has expired": Staged(
        "election", Step(1, EXPIRE_ANOTHER)
    ),
    "a controller that has resigned keeps its znode": Staged("election", Step(37, RESIGN)),
    "a controller stays active without a connection": {
        **_CLUSTER,
        "faults": ("disconnect_controller",),
    },
    "a deposed controller stays active": {
        **_CLUSTER,
        "faults": ("pause_controller", "zookeeper_cut"),
    },
    "brokers do not watch the controller znode": Staged("election"),
    "a controller stays active after a failed write": Staged(
        "reassignment", Step(2, ANOTHER_WRITES)
    ),
    "the controller does not watch the broker znodes": Staged("election", Step(6, EXPIRE)),
    "the controller ignores that a broker has a new session": {**_CLUSTER, "faults": ("bounce",)},
    "a broker that failed before the election stays in ISRs": Staged("loss"),
    "a new controller does not send its metadata": Staged("creation", Step(1, RESIGN)),
    "the controller sends changes before they are written to ZooKeeper": {
        **_CLUSTER,
        "faults": ("expire_controller", "flip", "recreate"),
    },
    "the controller does not retry a request that got no response": Staged(
        "creation", Step(14, LOSE_REQUEST)
    ),
    "a broker accepts a request of an earlier controller epoch": _LATE,
    "a broker accepts an older partition state": Staged("early state"),
    "a broker refuses a request because ZooKeeper does not answer": {
        **_CLUSTER,
        "faults": ("zookeeper_cut", "disconnect", "recreate"),
    },
    "a controller that has resigned keeps its timers": {
        **_CLUSTER,
        "factor": 3,
        "chaos_ms": 6_000,
        "fault_pause_ms": 100,
        "faults": ("late_resignation",),
    },
    "the controller does not check the version of a partition state": Staged(
        "reassignment", Step(2, ANOTHER_WRITES)
    ),
    "the controller deletes ISR notifications without reading the ISRs": Staged("ISR note"),
    "a topic znode lacks the adding replicas": _REASSIGNMENT,
    "a broker that becomes a replica during its start does not follow": Staged("reading"),
    "a killed broker truncates batches of an epoch that is in no checkpoint": {
        **_CLUSTER,
        "factor": 3,
        "fault_pause_ms": 500,
        "chaos_ms": 6_000,
        "faults": ("stop", "kill"),
    },
    "the controller answers AlterPartition before the write": {
        **_CLUSTER,
        "factor": 3,
        "lag_ms": 500,
        "faults": ("disconnect_controller", "flap", "late_writes"),
    },
    "a new controller does not continue deletions": Staged("deletion", Step(1, KILL)),
    "a returning broker keeps the replicas of a topic under deletion": {
        **_CLUSTER,
        "outage_ms": 2_500,
        "faults": ("kill", "pause", "recreate", "mark_for_deletion"),
    },
    "the controller does not send pending deletions to a returning broker": Staged(
        "marking", Step(2, EXPIRE_ANOTHER)
    ),
    "the controller does not send completed deletions to a returning broker": Staged("return"),
    "a returning broker does not look for deleted topics": Staged("absence"),
    "a broker does not look for deleted topics after a failover": {
        **_CLUSTER,
        "factor": 1,
        "weather": Weather(latency_ms=(1, 10), slow=0.05, slow_ms=1_500),
        "faults": ("disconnect_controller", "recreate", "recreate"),
    },
    "the settings of a deleted topic stay in ZooKeeper": {
        **_CLUSTER,
        "faults": ("recreate", "alter_config", "kill_controller"),
    },
    "the controller does not watch deletion marks": Staged("marking"),
    "a broker reads the settings of a new topic from a lagging server": {
        **_CLUSTER,
        "servers": 3,
        "member_lag_ms": 40,
        "faults": ("recreate", "alter_config"),
    },
    "a broker knows only those partitions of a new topic that a request names": {
        **_CLUSTER,
        "factor": 1,
        "members": ((False, False), (False, False)),
        "transactions": 1,
        "faults": ("kill", "kill_controller"),
    },
    "brokers do not watch the settings": Staged("settings"),
    "the controller does not watch for reassignments that tools request": _ADDITION,
    "a completed reassignment that a tool requested stays in ZooKeeper": _ADDITION,
    "the controller deletes a reassignment that a tool has just changed": _ADDITION,
    "the controller does not watch for elections that tools request": {
        **_CLUSTER,
        "faults": ("admin_elect", "kill"),
    },
    "the controller gives no id to a topic that a tool created": Staged("adoption"),
    "a new controller creates a partition's state without a leader": Staged(
        "automatic creation", Step(4, RESIGN)
    ),
    "a broker does not check the version of a user's znode": _USERS,
    "a change of a user creates no notification": _USERS,
    "a broker does not apply its own change of a user": _USERS,
    "brokers do not watch the notifications of ACLs": _RULES,
    "a broker keeps entries that a znode no longer has": _RULES,
    "a new controller allocates the last block of producer ids again": {
        **_CLUSTER,
        "transactions": 3,
        "producers": 3,
        "idempotent": 1.0,
        "faults": ("kill", "kill_controller"),
    },
    "a broker on ZooKeeper serves requests that were sent to its former process": _POWER,
    "a leader on ZooKeeper that restarted unnoticed keeps its leader epoch": _POWER,
    "a broker on ZooKeeper acknowledges a batch before it is flushed": {
        **_CLUSTER,
        "factor": 1,
        "faults": ("power_loss",),
        "disk_ms": (1, 30),
    },
}


def play_directed(name: str, seed: int) -> object:
    """Run the script of a bug, or the simulation of a seed with the options that the bug needs."""
    directions = DIRECTED[name]
    if isinstance(directions, Staged):
        return zk_scripts.play(*directions)
    return zk_history.live(replace(draw_options(seed), **directions))
