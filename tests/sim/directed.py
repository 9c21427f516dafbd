"""The options of simulated runs of daemons that reveal planted bugs, by the names of the bugs."""

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
from fencepost.logcore import (
    cleanup,
    durable,
    marks,
    producers,
    record_retention,
    replica,
    retention,
)
from tests.sim.bug import Bug
from tests.sim.bugs import BUGS
from tests.sim.cleanup import RETAIN
from tests.sim.network import Weather

Directions = Mapping[str, Any]
"""Options that override the options drawn from the seed of a simulated run."""

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
    "a metadata snapshot lacks the topic settings": {
        **_SNAPSHOTS,
        "faults": ("kill", "pause", "alter_config"),
    },
    "a metadata snapshot lacks the ELR": _SNAPSHOTS,
    "an observer skips one record after a snapshot": _SNAPSHOTS,
    "an observer keeps metadata that a later snapshot lacks": _SNAPSHOTS,
    "the high watermark advances while the ISR is under min ISR": {**_ISR, "acks": 1},
    "the maximal ISR lacks a replica whose removal is pending": _LAGS,
    "the maximal ISR lacks a replica whose addition is pending": _LAGS,
    "the leader treats a pending ISR as committed": _LAGS,
    "a replica joins the ISR before it reaches the start of the leader epoch": {
        **_JOINS,
        "faults": ("join_behind_epoch",),
    },
    "a replica joins the ISR with any log end offset": _LAGS,
    "the leader accepts fetches with an old broker epoch": _LATE_FETCH,
    "the leader acknowledges before the high watermark": _FLIPS,
    "a parked Produce is acknowledged after a loss of leadership": _FLIPS,
    "the leader records the offset of a diverging fetch": _FLIPS,
    "the leader reverts an ISR change that may have been applied": {
        **_JOINS,
        "faults": ("take_back_expansion",),
    },
    "a pending ISR change outlives newer metadata": _LAGS,
    "a new leader assumes that its followers have its log end offset": _TURNS,
    "a leader that missed leader epochs keeps the states of its followers": {
        **_TURNED,
        "faults": ("miss_epoch",),
    },
    "the high watermark does not wait for followers": _CLUSTER,
    "a follower with an unknown offset does not hold back the high watermark": _CLUSTER,
    "a new follower truncates its log to the high watermark": _CLUSTER,
    "a follower takes the high watermark of a diverging response": _FLIPS,
    "a follower loses its last fetched epoch in an empty response": _FLIPS,
    "a follower truncates to the leader's end of an epoch that it lacks (KIP-279)": _TURNED,
    "the leader ignores an epoch end below the fetch offset": _FLIPS,
    "the leader ignores a last fetched epoch that it lacks": _TURNED,
    "the leader never detects divergence": _FLIPS,
    "a truncation keeps leader epochs that start after it": _FLIPS,
    "a failed fetch stays in flight forever": _CLUSTER,
    "a fetch session only resends a partition when its fetch offset changes": _FLIPS,
    "the controller accepts an old partition epoch": _LATE,
    "the controller accepts an ISR change of a former leader": _FORMER,
    "a fenced replica joins the ISR": _LAGS,
    "the controller adds a former incarnation of a broker to the ISR": _LATE_FETCH,
    "a reassignment completes when one target replica is in sync": _MOVES,
    "a reassignment completes at once": _MOVES,
    "an election does not raise the leader epoch": _CLUSTER,
    "an unclean election does not raise the leader epoch": _UNCLEAN,
    "a broker stays in the ELR after an unclean shutdown": _LOSES,
    "the ELR is kept when the ISR reaches min ISR": _ISR,
    "any live replica is elected leader": _CLUSTER,
    "a new incarnation of a broker gets the broker epoch of the former one": _LATE_FETCH,
    "a fenced broker stays in the ISR": _CLUSTER,
    "the controller allocates a block of producer ids twice": _TRANSACTIONS,
    "a broker keeps a replica after its removal by a reassignment": _MOVES,
    "the log detects neither duplicate nor missing batches of a producer": _ALONE,
    "a coordinator sends markers before the high watermark": {
        **_STARVED,
        "transactions": 5,
        "readers": 0,
        "producers": 0,
    },
    "a marker of a former transaction ends the next transaction": {
        **_STARVED,
        "faults": ("late_markers",),
    },
    "a coordinator treats a refused marker as written": _ENDS,
    "the last stable offset passes a marker before it is replicated": _STARVED,
    "a coordinator only loads records below the high watermark": {
        **_STARVED_GROUP,
        "faults": ("kill_ahead",),
    },
    "a coordinator responds before the high watermark": _STARVED_GROUP,
    "a loading coordinator skips the last batch": _TRANSACTIONS,
    "a loaded group has an earlier generation": _CLASSIC,
    "a loaded group does not start its members' session timers": _CONSUMER,
    "offsets of aborted transactions become visible": _TXN_CLASSIC,
    "a loading coordinator treats transactional offsets as committed": _TXN_CLASSIC,
    "a loading coordinator skips the ends of transactions": _TXN_CLASSIC,
    "OffsetFetch ignores the pending offsets of open transactions": _TXN_CLASSIC,
    "a group accepts a commit of a former generation": {
        **_CLASSIC,
        "outage_ms": 3_000,
        "faults": ("cut",),
    },
    "a consumer is assigned a partition that its owner has not revoked": _CONSUMER,
}
"""Name of a bug in :data:`BUGS` → the directions that reveal it; the simulated runs of daemons do
not search for the other bugs.
"""

_PRODUCT: Final = (
    (
        Bug(
            "the leader forgets an AlterPartition that could not be sent",
            (
                (cluster_broker.ClusterBroker._begin, "self.channel(None)", "self.channel(1)"),
                (
                    alter_partition.AlterPartitions.on_answer,
                    "self.retry_at_ms = now_ms + RETRY_MS",
                    "self._unanswered.clear()",
                ),
            ),
        ),
        {**_JOINS, "fault_pause_ms": 2_000, "faults": ("lose_expansion",)},
    ),
    (
        Bug(
            "a batch overtakes one that was refused under min ISR",
            ((producers.ProducerStateManager.note_refused, "not in self._producers", "is None"),),
        ),
        {**_JOINS, "min_isr": 3, "faults": ("overtake",)},
    ),
    (
        Bug(
            "a follower takes a high watermark above its log end offset",
            (
                (
                    follower.PartitionFollower._apply_offsets,
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
            "a killed broker reports a clean shutdown",
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
            "a coordinator that has resigned stays active",
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
            "a recreated topic has the committed offsets of the deleted topic",
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
            "a broker acknowledges a batch before it is flushed",
            ((flusher.Flusher.after, "if not held:", "if held or not held:"),),
        ),
        {**_ALONE, "faults": ("power_loss",), "disk_ms": (1, 30)},
    ),
    (
        Bug(
            "a start does not flush records that a killed process left unflushed",
            ((durable.FlushState.recovered, "self.run(now_ms)", "pass"),),
        ),
        {**_ALONE, "faults": ("power_loss", "kill"), "disk_ms": (1, 30)},
    ),
    (
        Bug(
            "retention deletes records that are younger than retention.ms",
            ((retention.beyond_age, "> retention_ms,", "> retention_ms // 8,"),),
        ),
        {**_ALONE, "faults": (RETAIN,), "fault_pause_ms": 500},
    ),
    (
        Bug(
            "retention does not move the log start offset",
            (
                (
                    cleanup.Cleanup._remove_segments,
                    "self._move_log_start(following.base_offset)",
                    "pass",
                ),
            ),
        ),
        {**_ALONE, "faults": (RETAIN,), "fault_pause_ms": 500},
    ),
    (
        Bug(
            "retention deletes records above the high watermark",
            ((retention._leading, "end > high_watermark or ", ""),),
        ),
        {**_CLUSTER, "faults": (RETAIN, "flap"), "fault_pause_ms": 300},
    ),
    (
        Bug(
            "compaction removes the last record of a key",
            (
                (
                    record_retention.OffsetMap.put,
                    "self._offsets[digest] = offset",
                    "self._offsets[digest] = offset + 1",
                ),
            ),
        ),
        {**_ALONE, "faults": ("kill",), "compacts": True},
    ),
    (
        Bug(
            "the leader acknowledges before the high watermark",
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
            "a parked Produce is acknowledged after a loss of leadership",
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
            "the leader records the offset of a diverging fetch",
            (
                (
                    fetches._Reading._read_one,
                    "if diverging is not None:",
                    (
                        "if diverging is not None and self._is_follower:\n"
                        "            replicas.fetched(name, index, self._fetch.replica_id,"
                        " self._fetch.broker_epoch, requested.offset,"
                        " requested.replica_log_start, end)\n"
                        "        if diverging is not None:"
                    ),
                ),
            ),
        ),
        _FLIPS,
    ),
    (
        Bug(
            "a truncation keeps the producer states",
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
            "a restarted broker takes its log end offset as the high watermark",
            ((marks.Marks.replicate, "min(high_watermark, self.flushed_end)", "self.flushed_end"),),
        ),
        _FLIPS,
    ),
    (
        Bug(
            "a broker leads before it is registered",
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
            "the leader acknowledges a marker before the high watermark",
            (
                (write_txn_markers.run, "if committed is not None:", "if False:"),
                (write_txn_markers.run, "appends.settle()", "pass"),
            ),
        ),
        {**_STARVED, "faults": ("starve_leader",)},
    ),
    (
        Bug(
            "the leader does not verify the first batch of a transaction",
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
            "a coordinator responds to parked requests after it has resigned",
            (
                (shard.ShardRuntime._still_stands, "not self._leads or", "False and"),
                (shards.ShardSet._drop, "shard.end()", "pass"),
            ),
        ),
        _TRANSACTIONS,
    ),
    (
        Bug(
            "a coordinator does not verify transactional offset commits",
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
"""Bugs outside of the state machines, with their directions."""

DIRECTED: Final[Mapping[str, tuple[Bug, Directions]]] = {
    **{bug.name: (bug, OF_DAEMONS[bug.name]) for bug in BUGS if bug.name in OF_DAEMONS},
    **{bug.name: (bug, directions) for bug, directions in _PRODUCT},
}
"""Name → bug and directions, for each bug that is searched for in daemons."""
