"""Planted bugs in share groups, and the options of the simulated runs that reveal them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fencepost.coordinator.handlers import share_acknowledge, share_requests
from fencepost.coordinator.replication import share_state_sender
from fencepost.coordinator.runtime import shard
from fencepost.coordinator.services.share_coordinator import ShareCoordinator
from fencepost.coordinator.services.share_fetches import _Reading
from fencepost.coordinator.services.share_groups import ShareGroups
from fencepost.coordinator.services.share_partitions import SharePartitions
from fencepost.groups.share import aborted, acknowledge, acquire, completion, state
from fencepost.groups.share.partition import SharePartition
from fencepost.groups.share.state import ShareStateMachine
from tests.sim.bug import Bug
from tests.sim.network import Weather

_ALONE: Final = {"brokers": 1, "factor": 1, "min_isr": 1, "faults": ("break_off", "kill")}
_BUSY: Final = {**_ALONE, "partitions": 1, "producers": 2, "share_members": 3, "chaos_ms": 4_000}
_PLAIN: Final = {**_BUSY, "is_committed": False, "transactions": 0}
_SLOW_DISK: Final = {**_PLAIN, "disk_ms": (1, 30), "fault_pause_ms": 200}
_UPDATES: Final = {**_PLAIN, "updates_per_snapshot": 500}
_COMMITTED: Final = {**_BUSY, "is_committed": True, "transactions": 2}
_CLUSTER: Final = {
    "brokers": 3,
    "factor": 3,
    "min_isr": 1,
    "partitions": 1,
    "producers": 2,
    "share_members": 3,
    "chaos_ms": 4_000,
    "transactions": 0,
    "is_committed": False,
    "fault_pause_ms": 200,
    "weather": Weather(latency_ms=(1, 3)),
    "disk_ms": (0, 0),
    "snapshot_records": None,
}
_ZOMBIES: Final = {**_CLUSTER, "session_ms": 900, "faults": ("deaf_leader",)}
_LONE: Final = {**_CLUSTER, "faults": ("lone_share_coordinator",)}
_CUT_OFF: Final = {
    **_LONE,
    "min_isr": 2,
    "outage_ms": 2_500,
    "session_ms": 900,
    "updates_per_snapshot": 0,
}
_LOSSY: Final = {
    **_CLUSTER,
    "partitions": 2,
    "weather": Weather(latency_ms=(1, 3), lost=0.03),
    "disk_ms": (0, 3),
    "session_ms": 900,
    "lag_ms": 2_000,
    "chaos_ms": 1_000,
    "faults": ("break_off",),
    "updates_per_snapshot": 3,
}
_SLOW_NETWORK: Final = {
    **_CLUSTER,
    "factor": 2,
    "min_isr": 2,
    "weather": Weather(latency_ms=(1, 10), slow=0.05, slow_ms=1_500),
    "disk_ms": (0, 3),
    "session_ms": 900,
    "lag_ms": 1_000,
    "chaos_ms": 1_000,
    "fault_pause_ms": 400,
    "faults": ("kill_leader", "elect_preferred", "elect_share_coordinator"),
    "updates_per_snapshot": 500,
}

SHARES: Final[tuple[tuple[Bug, Mapping[str, Any]], ...]] = (
    (
        Bug(
            "a member may acknowledge records of another member",
            ((acknowledge._require_owner, "if run.member_id != member_id:", "if False:"),),
        ),
        {**_PLAIN, "chaos_ms": 10_000, "faults": ("break_off",)},
    ),
    (
        Bug(
            "a member may acknowledge records that are not acquired",
            (
                (
                    acknowledge._require_owner,
                    "if run.state is not RecordState.ACQUIRED:",
                    "if run.state.is_terminal:",
                ),
                (acknowledge._require_owner, "if run.member_id != member_id:", "if False:"),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "a record at the delivery limit becomes available again",
            (
                (
                    acknowledge.released_state,
                    "if run.count < settings.delivery_count_limit:",
                    "if True:",
                ),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "an acknowledgement succeeds before its state is written",
            (
                (
                    acknowledge.acknowledge,
                    "_write_transition(partition, decision, write_id, changed, token)",
                    (
                        "_write_transition(partition, decision, write_id, changed, None);"
                        " decision.reply(token, Acknowledged())"
                    ),
                ),
            ),
        ),
        _LONE,
    ),
    (
        Bug(
            "an acknowledgement succeeds although its state write failed",
            (
                (
                    completion.state_written,
                    "Acknowledged() if error is None else writing_failed(error)",
                    "Acknowledged()",
                ),
            ),
        ),
        _ZOMBIES,
    ),
    (
        Bug(
            "acquisition locks never expire",
            (
                (
                    acknowledge.expire_locks,
                    "if partition.state is not PartitionState.ACTIVE:",
                    "if True:",
                ),
            ),
        ),
        {**_PLAIN, "faults": ("pause",)},
    ),
    (
        Bug(
            "a record is archived when its acquisition lock expires",
            (
                (
                    acknowledge.expire_locks,
                    "partition.write(decision, partition.next_write_id(), expired, pending)",
                    "pass",
                ),
                (
                    acknowledge.expire_locks,
                    "partition.change(run, released_state(partition, run), Cause.LOCK_EXPIRED)",
                    "partition.change(run, RecordState.ARCHIVED, Cause.LOCK_EXPIRED)",
                ),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "an accepted record is written as available",
            (
                (
                    SharePartition.write,
                    "StateBatch(run.first, run.last, run.state, run.count)",
                    "StateBatch(run.first, run.last, RecordState.AVAILABLE, run.count)",
                ),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "the persisted start offset is one too high",
            (
                (
                    SharePartition.write,
                    "self.start_offset,\n            self.delivery_complete_count",
                    "self.start_offset + 1,\n            self.delivery_complete_count",
                ),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "the start offset passes available records",
            (
                (
                    SharePartition.first_open_offset,
                    "if not run.is_final:",
                    "if run.state is RecordState.ACQUIRED:",
                ),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "the start offset passes the gaps of a loaded state",
            (
                (
                    SharePartition.first_open_offset,
                    "if self.gap is not None and self.has_gaps:",
                    "if False:",
                ),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "a share partition ignores the gaps of a loaded state",
            ((SharePartition._activate, "if gap_start is not None:", "if False:"),),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "the delivery complete count does not change",
            (
                (
                    SharePartition.change,
                    "run.size if state.is_terminal else -run.size",
                    "0",
                ),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "another delivery does not increase the delivery count",
            ((acquire._Acquisition._acquire_run, "run.count += 1", "run.count = 1"),),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "a loaded state lacks the delivery counts",
            (
                (
                    SharePartition._activate,
                    "RecordState(batch.state), batch.delivery_count)",
                    "RecordState(batch.state), 0)",
                ),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "a share partition ignores the log start offset",
            (
                (
                    _Reading._read_one,
                    "if share.next_fetch_offset() < log.log_start_offset:",
                    "if False:",
                ),
            ),
        ),
        {**_PLAIN, "faults": ("delete_records", "kill", "delete_records")},
    ),
    (
        Bug(
            "a read_committed group reads open transactions",
            (
                (
                    _Reading._isolation,
                    "_ISOLATIONS[self._shares.settings.of(self._fetch.group_id).isolation_level]",
                    "Isolation.READ_UNCOMMITTED",
                ),
            ),
        ),
        _COMMITTED,
    ),
    (
        Bug(
            "a read_committed group gets records of aborted transactions",
            ((aborted.aborted_ranges, "if not aborted:", "if True:"),),
        ),
        _COMMITTED,
    ),
    (
        Bug(
            "a new share partition reads its state before the last write of the former one ends",
            (
                (
                    SharePartitions._hold_successor,
                    "if share.writes and share not in former:",
                    "if False:",
                ),
            ),
        ),
        {
            **_CLUSTER,
            "share_members": 1,
            "faults": ("strand_write",),
        },
    ),
    (
        Bug(
            "a lost state write counts as written",
            (
                (
                    share_state_sender.ShareStateSender._exchange,
                    'failure = CoordinatorNotAvailableError(f"broker {broker_id}: {error}")',
                    (
                        'failure = CoordinatorNotAvailableError(f"broker {broker_id}: {error}");'
                        " replies = {(c.key.topic_id, c.key.partition): _changed(None)"
                        " for c in commands if kind is WriteShareState}"
                    ),
                ),
            ),
        ),
        _LONE,
    ),
    (
        Bug(
            "the share coordinator accepts writes of a former leader",
            (
                (
                    ShareStateMachine._write,
                    "if command.leader_epoch < entry.leader_epoch:",
                    "if False:",
                ),
            ),
        ),
        _ZOMBIES,
    ),
    (
        Bug(
            "the share coordinator does not record the leader epoch of a read",
            (
                (
                    ShareStateMachine._read,
                    "if command.leader_epoch != entry.leader_epoch:",
                    "if False:",
                ),
            ),
        ),
        _ZOMBIES,
    ),
    (
        Bug(
            "a ShareSnapshot record lacks the state batches",
            (
                (
                    ShareStateMachine._append,
                    "snapshot = _merged(entry.value, update)._replace(",
                    "snapshot = _merged(entry.value, update)._replace(batches=(),",
                ),
            ),
        ),
        {**_PLAIN, "updates_per_snapshot": 3},
    ),
    (
        Bug(
            "a loading share coordinator skips ShareUpdate records",
            (
                (
                    ShareStateMachine.replay,
                    "entry.value = _merged(entry.value, value)",
                    (
                        "entry.value = _merged(entry.value, value) if self._is_serving"
                        " else entry.value"
                    ),
                ),
            ),
        ),
        _UPDATES,
    ),
    (
        Bug(
            "the state topic is pruned up to the newest snapshot",
            ((ShareStateMachine.redundant_offset, "lowest = min(", "lowest = max("),),
        ),
        {**_PLAIN, "partitions": 3},
    ),
    (
        Bug(
            "the state topic is pruned up to a snapshot that is not committed",
            (
                (
                    ShareCoordinator._prune,
                    "for known, end in (now, former) if _is_committed(end)",
                    "for known in [min(now[0], partition.high_watermark)]",
                ),
            ),
        ),
        _CUT_OFF,
    ),
    (
        Bug(
            "an initialization that is repeated too late resets the state",
            (
                (
                    ShareGroups._initialize_new,
                    "self._initializing.union(_keys(group_id, listed.partitions))",
                    "self._initializing",
                ),
            ),
        ),
        _LOSSY,
    ),
    (
        Bug(
            "a repeated initialization of the same epoch resets the state",
            (
                (
                    ShareStateMachine._initialize,
                    "is_unknown and command.state_epoch == entry.state_epoch",
                    "False",
                ),
            ),
        ),
        _SLOW_NETWORK,
    ),
    (
        Bug(
            "a ShareUpdate record drops the earlier state batches",
            (
                (
                    state._merged,
                    "batches=combine(value.batches, update.batches, start_offset)",
                    "batches=combine((), update.batches, start_offset)",
                ),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "each state read resets the start offset",
            (
                (
                    SharePartition.state_read,
                    "if result.start_offset == UNKNOWN_OFFSET:",
                    "if True:",
                ),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "the share coordinator responds before the high watermark",
            ((shard.ShardRuntime._deliver, "not self._commits.is_idle", "False"),),
        ),
        _LONE,
    ),
    (
        Bug(
            "acknowledgement errors are missing from responses",
            (
                (
                    share_requests.response_error,
                    "return ResponseError(error_code(error), str(error) or None)",
                    "return NO_ERROR",
                ),
            ),
        ),
        _PLAIN,
    ),
    (
        Bug(
            "ShareAcknowledge does not wait for its state writes",
            (
                (
                    share_acknowledge.run,
                    "yield from settled(ctx, acknowledged.values())",
                    "acknowledged = {key: None for key in acknowledged}",
                ),
            ),
        ),
        {**_SLOW_DISK, "faults": ("kill",)},
    ),
)
"""Each bug, with options that override the options drawn from the seed of a simulated run."""
