"""Histories on ZooKeeper in which planted bugs show, by the names of the bugs."""

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
    """A script, and a step with a fault; None plays the script without a fault."""

    script: str
    step: Step | None = None


Directions = Mapping[str, Any]
"""Options that replace those that a history's seed has drawn."""

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
_RULES: Final = {**_CLUSTER, "faults": ("tool_access",)}
_USERS: Final = Staged("user")
_ADDITION: Final = Staged("addition")
_REASSIGNMENT: Final = Staged("reassignment")

DIRECTED: Final[Mapping[str, Staged | Directions]] = {
    "a controller writes without a look at its epoch": {
        **_CLUSTER,
        "faults": ("late_writes", "pause_controller", "flip", "recreate"),
    },
    "whoever is elected takes the epoch for what he has read": Staged("election", Step(11, EXPIRE)),
    "a registration outlives its session": Staged("election", Step(1, EXPIRE_ANOTHER)),
    "who has resigned keeps his node": Staged("election", Step(37, RESIGN)),
    "a controller goes on when its connection is lost": {
        **_CLUSTER,
        "faults": ("disconnect_controller",),
    },
    "a controller goes on that is none any more": {
        **_CLUSTER,
        "faults": ("pause_controller", "zookeeper_cut"),
    },
    "the controller's node is looked at once": Staged("election"),
    "a controller stays that could not write": Staged("reassignment", Step(2, ANOTHER_WRITES)),
    "brokers are looked at once": Staged("election", Step(6, EXPIRE)),
    "who is back in another session was never away": {**_CLUSTER, "faults": ("bounce",)},
    "who was gone before the election stays in ISRs": Staged("loss"),
    "a new controller does not tell what there is": Staged("creation", Step(1, RESIGN)),
    "brokers are told what ZooKeeper has not taken yet": {
        **_CLUSTER,
        "faults": ("expire_controller", "flip", "recreate"),
    },
    "a broker that does not answer is told nothing more of it": Staged(
        "creation", Step(14, LOSE_REQUEST)
    ),
    "a broker hears a controller of an earlier epoch": _LATE,
    "a broker takes an older state of a partition": Staged("early state"),
    "a broker refuses what is told while ZooKeeper does not answer": {
        **_CLUSTER,
        "faults": ("zookeeper_cut", "disconnect", "recreate"),
    },
    "the timers of a controller that has resigned go on": {
        **_CLUSTER,
        "factor": 3,
        "chaos_ms": 6_000,
        "fault_pause_ms": 100,
        "faults": ("late_resignation",),
    },
    "a state is written over whatever is there": Staged("reassignment", Step(2, ANOTHER_WRITES)),
    "notes of ISRs are deleted, not followed": Staged("ISR note"),
    "the node of a topic does not tell what is added": _REASSIGNMENT,
    "a broker that becomes a replica while it starts does not follow": Staged("reading"),
    "a killed broker cuts off batches of an epoch that no checkpoint has": {
        **_CLUSTER,
        "factor": 3,
        "fault_pause_ms": 500,
        "chaos_ms": 6_000,
        "faults": ("stop", "kill"),
    },
    "an AlterPartition is answered before it is written": {
        **_CLUSTER,
        "factor": 3,
        "lag_ms": 500,
        "faults": ("disconnect_controller", "flap", "late_writes"),
    },
    "the next controller does not go on deleting": Staged("deletion", Step(1, KILL)),
    "who comes back keeps what was deleted": {
        **_CLUSTER,
        "outage_ms": 2_500,
        "faults": ("kill", "pause", "recreate", "mark_for_deletion"),
    },
    "who comes is not told of deletions under way": Staged("marking", Step(2, EXPIRE_ANOTHER)),
    "who comes is not told of deletions that have ended": Staged("return"),
    "nobody looks for topics that are gone": Staged("absence"),
    "the settings of a deleted topic stay": {
        **_CLUSTER,
        "faults": ("recreate", "alter_config", "kill_controller"),
    },
    "marks of others are not looked at": Staged("marking"),
    "the settings of a new topic are read from a server that lags": {
        **_CLUSTER,
        "servers": 3,
        "member_lag_ms": 40,
        "faults": ("recreate", "alter_config"),
    },
    "settings are looked at once": Staged("settings"),
    "reassignments of tools are looked for once": _ADDITION,
    "a reassignment of a tool that is done stays": _ADDITION,
    "what a tool has added to a reassignment meanwhile is deleted": _ADDITION,
    "elections of tools are looked for once": {**_CLUSTER, "faults": ("admin_elect", "kill")},
    "a topic of a tool has no id": Staged("adoption"),
    "a change of users is written over whatever is there": _USERS,
    "a change of users leaves no note": _USERS,
    "a change of users is not known where it was made": _USERS,
    "notes of rules are looked at once": _RULES,
    "what is no longer in a znode stays known": _RULES,
    "the next controller gives the last block of producer ids again": {
        **_CLUSTER,
        "transactions": 3,
        "producers": 3,
        "idempotent": 1.0,
        "faults": ("kill", "kill_controller"),
    },
}


def play_directed(name: str, seed: int) -> object:
    """Play the script of a bug, or the history of a seed with the options that the bug needs."""
    directions = DIRECTED[name]
    if isinstance(directions, Staged):
        return zk_scripts.play(*directions)
    return zk_history.live(replace(draw_options(seed), **directions))
