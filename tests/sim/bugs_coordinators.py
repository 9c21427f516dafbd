"""Planted bugs in transactions, in groups, and in the runtime of their coordinators."""

from __future__ import annotations

from typing import Final

from fencepost.coordinator.runtime import shard, shard_load
from fencepost.groups import consumer_members, member_update, offsets
from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.machine import GroupMachine
from fencepost.groups.offset_store import OffsetStore
from fencepost.logcore.producers import ProducerStateManager
from fencepost.txn import marker_queues
from tests.sim.bug import Bug

_Shard = shard.ShardRuntime
_EACH = (
    "for header, batch in partition.reader.read_all():\n        if not goes_on(header.base_offset)"
)
_MARK = "partition.marks.high_watermark"

_TRANSACTIONS: Final = (
    Bug(
        "a coordinator sends markers before the high watermark",
        (
            (
                _Shard._carry_out,
                "if not self._commits.after((self.partition,), later):",
                "if True:",
            ),
        ),
    ),
    Bug(
        "a marker of a former transaction ends the next transaction",
        ((ProducerStateManager.check_marker, "if epoch > entry.epoch:", "if True:"),),
    ),
    Bug(
        "a coordinator treats a refused marker as written",
        (
            (
                marker_queues.MarkerQueues.on_answer,
                'OUTCOMES.get(errors.get(partition, ""), MarkerOutcome.RETRY)',
                "MarkerOutcome.WRITTEN",
            ),
        ),
    ),
    Bug(
        "the last stable offset passes a marker before it is replicated",
        ((ProducerStateManager._update_first_unstable, "if self._unreplicated:", "if False:"),),
    ),
)

_RUNTIME: Final = (
    Bug(
        "a coordinator only loads records below the high watermark",
        ((shard_load.replay_log, _EACH, f"{_EACH} or header.base_offset >= {_MARK}"),),
    ),
    Bug(
        "a coordinator responds before the high watermark",
        ((_Shard._deliver, "not self._commits.is_idle", "False"),),
    ),
    Bug(
        "a loading coordinator skips the last batch",
        (
            (
                shard_load.replay_log,
                _EACH,
                f"{_EACH} or header.base_offset + header.record_count >= end",
            ),
        ),
    ),
)

_GROUPS: Final = (
    Bug(
        "a loaded group has an earlier generation",
        (
            (
                ClassicGroup.from_record,
                "group.generation_id = saved.generation_id",
                "group.generation_id = saved.generation_id - 1",
            ),
        ),
    ),
    Bug(
        "a loaded group does not start its members' session timers",
        (
            (
                consumer_members.group_loaded,
                'decision.arm(group.timer("session", member_id), chosen.session_timeout_ms)',
                "pass",
            ),
        ),
    ),
    Bug(
        "offsets of aborted transactions become visible",
        ((OffsetStore.end_transaction, "if commit and is_newer:", "if is_newer:"),),
    ),
    Bug(
        "a loading coordinator treats transactional offsets as committed",
        (
            (
                GroupMachine._replay_offset,
                "if stamp is None:",
                "if stamp is None or not self._active:",
            ),
        ),
    ),
    Bug(
        "a loading coordinator skips the ends of transactions",
        (
            (
                shard_load._replay,
                "if stamp is not None and control.type in _END_MARKERS:",
                "if False:",
            ),
        ),
    ),
    Bug(
        "OffsetFetch ignores the pending offsets of open transactions",
        (
            (
                offsets._fetched,
                "require_stable and partition in offsets.pending",
                "False",
            ),
        ),
    ),
    Bug(
        "a group accepts a commit of a former generation",
        (
            (ClassicGroup.validate_commit, "generation_id != self.generation_id", "False"),
            (
                ClassicGroup.validate_commit,
                "self.validate_member(member_id, group_instance_id)",
                "pass",
            ),
        ),
    ),
    Bug(
        "a consumer is assigned a partition that its owner has not revoked",
        (
            (
                member_update.reconcile_member,
                "return owner is not None and owner not in own_ids",
                "return False",
            ),
        ),
    ),
)


COORDINATORS: Final = (*_TRANSACTIONS, *_RUNTIME, *_GROUPS)
