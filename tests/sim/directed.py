"""Options of histories of daemons in which planted bugs show, by the names of the bugs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fencepost.cluster import alter_partition, follower, leader
from fencepost.coordinator.daemon import cluster_broker
from fencepost.coordinator.handlers import txn_offset_commit, write_txn_markers
from fencepost.coordinator.replication import membership
from fencepost.coordinator.runtime import flusher, shard, shards
from fencepost.coordinator.services import groups
from fencepost.coordinator.storage import appends, fetches
from fencepost.groups import offsets
from fencepost.logcore import marks, producers, replica
from tests.sim.bug import Bug
from tests.sim.bugs import BUGS
from tests.sim.network import Weather

Directions = Mapping[str, Any]
"""Options that replace those that a history's seed has drawn."""

_ALONE: Final = {"brokers": 1, "factor": 1, "min_isr": 1, "faults": ("break_off", "kill")}
_CLUSTER: Final = {"brokers": 3, "factor": 3, "min_isr": 1, "faults": ("kill", "break_off")}
_QUIET: Final = {"transactions": 0, "members": ()}
_ISR: Final = {
    **_CLUSTER,
    "min_isr": 2,
    "elr": True,
    "lag_ms": 500,
    "fault_pause_ms": 200,
    "faults": ("flap", "pause", "isolate", "kill_leader"),
}
_LAGS: Final = {**_ISR, "min_isr": 1, "elr": False, "outage_ms": 2_000}
_TURNS: Final = {**_CLUSTER, "fault_pause_ms": 200, "faults": ("flip", "kill_leader", "isolate")}
_BREAKS: Final = {
    **_LAGS,
    "outage_ms": 700,
    "session_ms": 1_500,
    "fault_pause_ms": 200,
    "weather": Weather(latency_ms=(5, 40), lost=0.1),
    "faults": ("flap",),
}
_FORMER: Final = {
    **_LAGS,
    "session_ms": 900,
    "outage_ms": 3_000,
    "fault_pause_ms": 500,
    "faults": ("isolate", "pause"),
}
_FLIPS: Final = {
    **_CLUSTER,
    "partitions": 1,
    "producers": 3,
    "disk_ms": (1, 30),
    "weather": Weather(latency_ms=(5, 40)),
    "fault_pause_ms": 200,
    "outage_ms": 3_000,
    "session_ms": 900,
    "faults": ("flip", "kill_leader", "isolate", "isolate"),
}
_MOVES: Final = {
    **_CLUSTER,
    "factor": 2,
    "fault_pause_ms": 200,
    "faults": ("reassign", "call_off", "isolate", "flap"),
}
_LOSES: Final = {
    **_CLUSTER,
    **_QUIET,
    "elr": True,
    "min_isr": 2,
    "is_forced": False,
    "fault_pause_ms": 200,
    "faults": ("power_loss", "flap", "isolate"),
}
_REBOOTS: Final = {
    **_CLUSTER,
    **_QUIET,
    "session_ms": 900,
    "weather": Weather(latency_ms=(1, 3), slow=0.05, slow_ms=3_000),
    "fault_pause_ms": 500,
    "faults": ("reboot", "pause", "flap"),
}
_UNCLEAN: Final = {**_REBOOTS, "unclean": True, "faults": ("lose_disk", "kill_leader", "isolate")}
_TRANSACTIONS: Final = {
    **_CLUSTER,
    "partitions": 3,
    "transactions": 3,
    "producers": 1,
    "members": (),
    "readers": 3,
    "lag_ms": 1_000,
    "outage_ms": 2_500,
    "disk_ms": (1, 30),
    "weather": Weather(latency_ms=(5, 40)),
    "faults": ("kill_coordinator", "flap", "flip", "isolate"),
    "fault_pause_ms": 200,
}
_ENDS: Final = {
    **_CLUSTER,
    "transactions": 2,
    "producers": 1,
    "members": (),
    "faults": ("kill_leader", "flip", "isolate"),
    "fault_pause_ms": 200,
}
_FROZEN: Final = {
    **_TRANSACTIONS,
    "session_ms": 1_500,
    "fault_pause_ms": 300,
    "faults": ("kill_coordinator", "kill_leader", "flap", "flap"),
}
_CLASSIC: Final = {
    **_CLUSTER,
    "members": ((False, False),) * 3,
    "transactions": 0,
    "producers": 1,
    "fault_pause_ms": 300,
    "faults": ("kill", "isolate", "pause"),
}
_TXN_CLASSIC: Final = {
    **_CLASSIC,
    "transactional_members": 1.0,
    "faults": ("kill_coordinator", "isolate", "pause"),
}
_CONSUMER: Final = {**_CLASSIC, "members": ((True, False),) * 3}
_STAGED: Final = {
    **_CLUSTER,
    "partitions": 1,
    "min_isr": 2,
    "producers": 2,
    "acks": -1,
    "members": (),
    "transactions": 0,
    "weather": Weather(latency_ms=(2, 6)),
    "lag_ms": 1_000,
    "session_ms": 1_500,
    "fault_pause_ms": 200,
    "chaos_ms": 6_000,
}
"""Common options of the directions for stories."""
_JOINS: Final = {**_STAGED, "lag_ms": 500, "elr": False}
_LATE: Final = {**_JOINS, "faults": ("late_change", "flap"), "weather": Weather(latency_ms=(1, 3))}
_LATE_FETCH: Final = {
    **_STAGED,
    "min_isr": 3,
    "is_forced": False,
    "lag_ms": 2_000,
    "elr": False,
    "session_ms": 900,
    "faults": ("late_incarnation",),
}
_TURNED: Final = {
    **_STAGED,
    "acks": 1,
    "producers": 3,
    "idempotent": 0.0,
    "lag_ms": 4_000,
    "session_ms": 1_500,
    "faults": ("lead_in_turns",),
}
_STARVED: Final = {
    **_STAGED,
    "transactions": 3,
    "gives_up": 0.6,
    "readers": 3,
    "lag_ms": 1_500,
    "faults": ("starve",),
}
_STARVED_GROUP: Final = {**_STARVED, "transactions": 0, "members": ((False, False),) * 3}
_SNAPSHOTS: Final = {**_ISR, "snapshot_records": 5, "faults": ("kill", "flap", "alter_config")}

OF_DAEMONS: Final[Mapping[str, Directions]] = {
    "a snapshot lacks the settings of topics": {
        **_SNAPSHOTS,
        "faults": ("kill", "pause", "alter_config"),
    },
    "a snapshot lacks who is eligible": _SNAPSHOTS,
    "an observer goes on one record too late behind a snapshot": _SNAPSHOTS,
    "an observer keeps what a snapshot no longer has": _SNAPSHOTS,
    "the high watermark moves below min ISR": {**_ISR, "acks": 1},
    "a removed replica no longer counts before the controller has said so": _LAGS,
    "an added replica does not count before the controller has said so": _LAGS,
    "the pending ISR is taken as committed": _LAGS,
    "the start of the epoch is not looked at when a replica joins": {
        **_JOINS,
        "faults": ("join_behind_epoch",),
    },
    "a replica joins wherever it stands": _LAGS,
    "an old broker epoch is trusted": _LATE_FETCH,
    "acks=all is answered before the high watermark": _FLIPS,
    "who waits over a loss of leadership is answered": _FLIPS,
    "a fetch that diverges counts as an offset": _FLIPS,
    "a change that may have been made is taken back": {
        **_JOINS,
        "faults": ("take_back_expansion",),
    },
    "a pending change outlives metadata": _LAGS,
    "a new leader takes its followers to be where it is": _TURNS,
    "a leader that missed others in between believes what its followers told before": {
        **_TURNED,
        "faults": ("miss_epoch",),
    },
    "the high watermark is the end of the most advanced follower": _CLUSTER,
    "a follower whose offset is not known does not hold the high watermark": _CLUSTER,
    "a follower begins by cutting its log to the high watermark": _CLUSTER,
    "the high watermark of a diverging answer is taken": _FLIPS,
    "an empty answer loses the last fetched epoch for good": _FLIPS,
    "an unknown epoch cuts to where the leader's ends (KIP-279)": _TURNED,
    "an end of the epoch below the offset is no divergence": _FLIPS,
    "an older epoch is no divergence": _TURNED,
    "the leader does not compare epochs": _FLIPS,
    "a cut leaves the epochs that began behind it": _FLIPS,
    "a failed request is under way for ever": _CLUSTER,
    "the session names a partition again only when its offset moved": _FLIPS,
    "the controller takes an old partition epoch": _LATE,
    "the controller takes a change of a former leader": _FORMER,
    "a fenced replica joins the ISR": _LAGS,
    "the controller takes a replica of another incarnation": _LATE_FETCH,
    "a reassignment ends when one of its target is in sync": _MOVES,
    "a reassignment ends at once": _MOVES,
    "an election does not raise the leader epoch": _CLUSTER,
    "an unclean election does not raise the leader epoch": _UNCLEAN,
    "an unclean shutdown keeps its place among the eligible": _LOSES,
    "the eligible stay eligible when the ISR is large enough": _ISR,
    "anybody who lives is elected": _CLUSTER,
    "who has a new incarnation has the epoch of the old one": _LATE_FETCH,
    "a fenced broker stays in the ISR": _CLUSTER,
    "a block of producer ids is given twice": _TRANSACTIONS,
    "a replica that is taken away stays on its broker": _MOVES,
    "the five last batches of a producer are not looked at": _ALONE,
    "markers do not wait for the high watermark": {
        **_STARVED,
        "transactions": 5,
        "readers": 0,
        "producers": 0,
    },
    "a marker of a former transaction ends the next one": {
        **_STARVED,
        "faults": ("late_markers",),
    },
    "a marker that was refused counts as written": _ENDS,
    "a transaction is stable before its marker is replicated": _STARVED,
    "a coordinator loads what is below the high watermark alone": {
        **_STARVED_GROUP,
        "faults": ("kill_ahead",),
    },
    "a coordinator answers before the high watermark": _STARVED_GROUP,
    "a coordinator forgets the last batch when it loads": _TRANSACTIONS,
    "the generation goes back when a group is loaded": _CLASSIC,
    "the sessions of members do not begin when a group is loaded": _CONSUMER,
    "offsets of aborted transactions become visible": _TXN_CLASSIC,
    "a load takes offsets of transactions for plain ones": _TXN_CLASSIC,
    "a load leaves out the ends of transactions": _TXN_CLASSIC,
    "offsets of open transactions count as stable": _TXN_CLASSIC,
    "the commit of a former generation is taken": {
        **_CLASSIC,
        "outage_ms": 3_000,
        "faults": ("cut",),
    },
    "a consumer is given what another one has not given up": _CONSUMER,
}
"""Name of a bug in :data:`BUGS` → its directions; the other bugs are not searched for here."""

_PRODUCT: Final = (
    (
        Bug(
            "a change that could not be sent is forgotten",
            (
                (cluster_broker.ClusterBroker._begin, "self.channel(None)", "self.channel(1)"),
                (
                    alter_partition.AlterPartitions.answered,
                    "self.retry_at_ms = now_ms + RETRY_MS",
                    "self._unanswered.clear()",
                ),
            ),
        ),
        {**_JOINS, "fault_pause_ms": 2_000, "faults": ("lose_expansion",)},
    ),
    (
        Bug(
            "who was refused below min ISR may be overtaken",
            ((producers.ProducerStateManager.refused, "not in self._producers", "is None"),),
        ),
        {**_JOINS, "min_isr": 3, "faults": ("overtake",)},
    ),
    (
        Bug(
            "the leader's high watermark is taken whole",
            (
                (
                    follower.PartitionFollower._take,
                    "min(answer.high_watermark, end)",
                    "answer.high_watermark",
                ),
                (
                    replica.ReplicaLog.move_high_watermark,
                    "min(offset, self._log.log_end_offset)",
                    "offset",
                ),
            ),
        ),
        {**_LAGS, "fetch_bytes": 100},
    ),
    (
        Bug(
            "a process that was killed says that it stopped in order",
            (
                (
                    cluster_broker.ClusterBroker.serve,
                    "services.logs.broker_epoch = self.membership.broker_epoch",
                    (
                        "services.logs.broker_epoch = self.membership.broker_epoch\n"
                        "    from fencepost.logcore.checkpoints import write_clean_shutdown\n"
                        "    logs = services.logs\n"
                        "    write_clean_shutdown(logs._fs, logs._directory, logs.broker_epoch)"
                    ),
                ),
            ),
        ),
        _LOSES,
    ),
    (
        Bug(
            "a coordinator that has resigned goes on",
            (
                (
                    shards.ShardSet.resigned,
                    "self._drop(index)",
                    "pass",
                ),
                (shard.ShardRuntime._append, "if not self._leads:", "if False:"),
                (shard.ShardRuntime._still_stands, "not self._leads or", "False and"),
            ),
        ),
        {**_STARVED_GROUP, "faults": ("move_coordinator",)},
    ),
    (
        Bug(
            "offsets of a topic that is gone are those of the next one of its name",
            (
                (offsets._is_of_topic, "return topic_id is None or", "return True or"),
                (
                    groups.GroupCoordinator.on_topics_deleted,
                    "await self._shards.send_to_all(TopicsDeleted(deleted))",
                    "pass",
                ),
            ),
        ),
        {**_STAGED, "faults": ("forget_offsets",)},
    ),
    (
        Bug(
            "acknowledged before it is on disk",
            ((flusher.Flusher.after, "if not held:", "if held or not held:"),),
        ),
        {**_ALONE, "faults": ("power_loss",), "disk_ms": (1, 30)},
    ),
    (
        Bug(
            "acks=all is answered before the high watermark",
            (
                (
                    appends.Appends._wait_for_replicas,
                    "if self._commits.after((partition,), partial(settle, part.key)):",
                    "if False:",
                ),
                (
                    leader.PartitionLeader.acks_verdict,
                    "return AcksVerdict.WAITING",
                    "return AcksVerdict.DONE",
                ),
            ),
        ),
        _CLUSTER,
    ),
    (
        Bug(
            "who waits over a loss of leadership is answered",
            (
                (
                    appends.Appends._verdict,
                    "verdict = AcksVerdict.NOT_LEADER_OR_FOLLOWER",
                    "verdict = AcksVerdict.DONE",
                ),
                (
                    leader.PartitionLeader.acks_verdict,
                    "not self.is_leader or leader_epoch < self.leads_since_epoch",
                    "False",
                ),
                (
                    leader.PartitionLeader.acks_verdict,
                    "return AcksVerdict.WAITING",
                    "return AcksVerdict.DONE",
                ),
            ),
        ),
        _FLIPS,
    ),
    (
        Bug(
            "a fetch that diverges counts as an offset",
            (
                (
                    fetches._Reading._read_one,
                    "if diverging is not None:",
                    (
                        "if diverging is not None and self._is_follower:\n"
                        "            replicas.fetched(name, index, self._fetch.replica_id,"
                        " self._fetch.broker_epoch, asked.offset, asked.replica_log_start, end)\n"
                        "        if diverging is not None:"
                    ),
                ),
            ),
        ),
        _FLIPS,
    ),
    (
        Bug(
            "a cut leaves the producers' states as they were",
            (
                (
                    replica.ReplicaLog.truncate_to,
                    "self._reload_producers(end, now_ms)",
                    "pass",
                ),
            ),
        ),
        {**_FLIPS, **_QUIET, "idempotent": 1.0},
    ),
    (
        Bug(
            "the high watermark at a start is the end of the log",
            ((marks.Marks.replicate, "min(high_watermark, self.flushed_end)", "self.flushed_end"),),
        ),
        _FLIPS,
    ),
    (
        Bug(
            "a process leads before the controller knows of it",
            (
                (
                    membership.BrokerMembership.join,
                    "await self._caught_up",
                    "await asyncio.sleep(0.2)",
                ),
            ),
        ),
        {**_STAGED, "is_forced": False, "faults": ("late_registration",)},
    ),
    (
        Bug(
            "a marker is answered before the high watermark",
            (
                (write_txn_markers.run, "if committed is not None:", "if False:"),
                (write_txn_markers.run, "appends.settle()", "pass"),
            ),
        ),
        {**_STARVED, "faults": ("starve_leader",)},
    ),
    (
        Bug(
            "a first batch of a transaction is not verified",
            (
                (
                    appends.Appends._verify,
                    "if not partition.producers.has_open_transaction(producer_id, epoch):",
                    "if False:",
                ),
                (
                    appends.Appends._append_one,
                    "transaction_verified=part.key in verified,",
                    "transaction_verified=True,",
                ),
            ),
        ),
        _TRANSACTIONS,
    ),
    (
        Bug(
            "what waits over an election is answered",
            (
                (shard.ShardRuntime._still_stands, "not self._leads or", "False and"),
                (shards.ShardSet._drop, "shard.end()", "pass"),
            ),
        ),
        _TRANSACTIONS,
    ),
    (
        Bug(
            "offsets of a transaction are not verified",
            (
                (
                    txn_offset_commit._verify,
                    "if producers.has_open_transaction(body.producer_id, body.producer_epoch):",
                    "if True:",
                ),
            ),
        ),
        _TXN_CLASSIC,
    ),
)
"""Further bugs, outside of the state machines, with their directions."""

DIRECTED: Final[Mapping[str, tuple[Bug, Directions]]] = {
    **{bug.name: (bug, OF_DAEMONS[bug.name]) for bug in BUGS if bug.name in OF_DAEMONS},
    **{bug.name: (bug, directions) for bug, directions in _PRODUCT},
}
"""Name → bug and directions, for each bug that is searched for in daemons."""
