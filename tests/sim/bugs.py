"""Planted bugs: each replaces lines of the product's state machines."""

from __future__ import annotations

from typing import Final

from fencepost.cluster import (
    divergence,
    fetcher,
    follower,
    image,
    image_records,
    leader,
    observer,
)
from fencepost.cluster.controller import brokers, partition_change, producer_ids
from fencepost.cluster.controller import isr as controller_isr
from fencepost.cluster.controller import reassignment_steps as reassignments
from fencepost.cluster.image_loader import ImageLoader
from fencepost.logcore.epochs import LeaderEpochs
from fencepost.logcore.producers import ProducerStateManager
from tests.sim.bug import Bug
from tests.sim.bugs_coordinators import COORDINATORS

_Leader = leader.PartitionLeader
_Follower = follower.PartitionFollower
_Change = partition_change.PartitionChangeBuilder

_SNAPSHOTS: Final = (
    Bug(
        "a metadata snapshot lacks the topic settings",
        (
            (
                image_records._records_after_topics,
                "for (kind, resource), values in image.configs.items():",
                "for (kind, resource), values in () if image.topics else image.configs.items():",
            ),
        ),
    ),
    Bug(
        "a metadata snapshot lacks the ELR",
        (
            (
                image_records.partition_record,
                "eligible_leader_replicas=registration.elr or None",
                "eligible_leader_replicas=None",
            ),
        ),
    ),
    Bug(
        "an observer skips one record after a snapshot",
        (
            (
                observer.Observer._install,
                "self.log_end = self._committed_end = snapshot",
                "self.log_end = self._committed_end = OffsetAndEpoch(snapshot[0] + 1, snapshot[1])",
            ),
        ),
    ),
    Bug(
        "an observer keeps metadata that a later snapshot lacks",
        ((ImageLoader.begin_snapshot, "self._delta.begin_snapshot()", "pass"),),
    ),
)

BUGS: Final = (
    # --- the leader ---
    Bug(
        "the high watermark advances while the ISR is under min ISR",
        ((_Leader._advance, "or self.is_under_min_isr", ""),),
    ),
    Bug(
        "the maximal ISR lacks a replica whose removal is pending",
        (
            (
                _Leader._propose,
                "frozenset(self.isr + joins)",
                "frozenset(broker_id for broker_id in self.isr + joins if broker_id not in leaves)",
            ),
        ),
    ),
    Bug(
        "the maximal ISR lacks a replica whose addition is pending",
        (
            (_Leader._propose, "frozenset(self.isr + joins)", "frozenset(self.isr)"),
            (_Leader._advance, "replica.is_caught_up(end, now_ms, lag) and", "False and"),
        ),
    ),
    Bug(
        "the leader treats a pending ISR as committed",
        (
            (
                _Leader._propose,
                "self.pending = change",
                "self.pending, self.isr = change, members",
            ),
            (
                _Leader._propose,
                "frozenset(self.isr + joins)",
                "frozenset(broker_id for broker_id in self.isr + joins if broker_id not in leaves)",
            ),
        ),
    ),
    Bug(
        "a replica joins the ISR before it reaches the start of the leader epoch",
        (
            (
                _Leader._maybe_expand,
                "max(self.high_watermark, self.epoch_start_offset)",
                "self.high_watermark",
            ),
        ),
    ),
    Bug(
        "a replica joins the ISR with any log end offset",
        (
            (
                _Leader._maybe_expand,
                "end < max(self.high_watermark, self.epoch_start_offset)",
                "False",
            ),
        ),
    ),
    Bug(
        "the leader accepts fetches with an old broker epoch",
        (
            (_Leader.update_follower_fetch_state, "broker.epoch > broker_epoch", "False"),
            (_Leader._eligible, "replica.broker_epoch in (ANY_BROKER_EPOCH, broker.epoch)", "True"),
            (_Leader._epoch_of, "return replica.broker_epoch", "return ANY_BROKER_EPOCH"),
        ),
    ),
    Bug(
        "the leader reverts an ISR change that may have been applied",
        (
            (
                _Leader._refused,
                "trigger = ALTER_PARTITION_ERRORS.get(error, IsrTrigger.AGAIN)",
                "trigger = IsrTrigger.REFUSED",
            ),
            (_Leader._advance, "replica.is_caught_up(end, now_ms, lag) and", "False and"),
        ),
    ),
    Bug(
        "a pending ISR change outlives newer metadata",
        (
            (
                _Leader.become_leader,
                "self._commit(IsrTrigger.METADATA, registration.isr)",
                "self.isr = registration.isr",
            ),
        ),
    ),
    Bug(
        "a new leader assumes that its followers have its log end offset",
        ((_Leader._assign, "ReplicaState(replica)", "ReplicaState(replica, self.log_end_offset)"),),
    ),
    Bug(
        "a leader that missed leader epochs keeps the states of its followers",
        ((_Leader.become_leader, "registration.leader_epoch > self.leader_epoch + 1", "False"),),
    ),
    Bug(
        "the high watermark does not wait for followers",
        (
            (
                _Leader._advance,
                "replica.log_end_offset < candidate and (",
                "replica.log_end_offset < candidate and False and (",
            ),
        ),
    ),
    Bug(
        "a follower with an unknown offset does not hold back the high watermark",
        (
            (
                _Leader._advance,
                "replica.log_end_offset < candidate",
                "0 <= replica.log_end_offset < candidate",
            ),
        ),
    ),
    # --- the follower ---
    Bug(
        "a new follower truncates its log to the high watermark",
        (
            (
                _Follower._start,
                "self.last_fetched_epoch != NO_EPOCH or log.high_watermark",
                "log.high_watermark",
            ),
        ),
    ),
    Bug(
        "a follower takes the high watermark of a diverging response",
        (
            (
                _Follower._diverging,
                "return self._truncate_to(",
                "from dataclasses import replace\n    return replace(self._truncate_to(",
            ),
            (
                _Follower._diverging,
                "truncation_offset(self._log, epoch, end, self.fetch_offset))",
                (
                    "truncation_offset(self._log, epoch, end, self.fetch_offset)),"
                    " high_watermark=self._log.log_end_offset)"
                ),
            ),
        ),
    ),
    Bug(
        "a follower loses its last fetched epoch in an empty response",
        (
            (
                _Follower._apply_offsets,
                "self.lag = max(",
                (
                    "self.last_fetched_epoch = self.last_fetched_epoch if answer.size else -1\n"
                    "    self.lag = max("
                ),
            ),
            (
                _Follower._start,
                "self._set_position()",
                "self.fetch_offset = self._log.log_end_offset",
            ),
        ),
    ),
    Bug(
        "a follower truncates to the leader's end of an epoch that it lacks (KIP-279)",
        (
            (
                divergence.truncation_offset,
                "return min(own_epoch_end, own_end)",
                "return min(end, own_end)",
            ),
        ),
    ),
    Bug(
        "the leader ignores an epoch end below the fetch offset",
        (
            (
                divergence.diverging_epoch,
                "epoch < last_fetched_epoch or end < fetch_offset",
                "epoch < last_fetched_epoch",
            ),
        ),
    ),
    Bug(
        "the leader ignores a last fetched epoch that it lacks",
        (
            (
                divergence.diverging_epoch,
                "epoch < last_fetched_epoch or end < fetch_offset",
                "end < fetch_offset",
            ),
        ),
    ),
    Bug(
        "the leader never detects divergence",
        ((divergence.diverging_epoch, "if last_fetched_epoch == NO_EPOCH:", "if True:"),),
    ),
    Bug(
        "a truncation keeps leader epochs that start after it",
        ((LeaderEpochs.truncate_from_end, "if count < len(self._starts):", "if False:"),),
    ),
    Bug(
        "a failed fetch stays in flight forever",
        ((fetcher.LeaderFetcher.on_failure, "self.in_flight = None", "pass"),),
    ),
    Bug(
        "a fetch session only resends a partition when its fetch offset changes",
        (
            (
                fetcher.FetchSessionHandler.build,
                "in_session.get(key) != partition",
                "key not in in_session or in_session[key].fetch_offset != partition.fetch_offset",
            ),
        ),
    ),
    # --- the controller ---
    Bug(
        "the controller accepts an old partition epoch",
        ((controller_isr._validate, "item.partition_epoch < partition.partition_epoch", "False"),),
    ),
    Bug(
        "the controller accepts an ISR change of a former leader",
        (
            (controller_isr._validate, "item.leader_epoch < partition.leader_epoch", "False"),
            (controller_isr._validate, "broker_id != partition.leader", "False"),
            (
                controller_isr._validate,
                "item.partition_epoch < partition.partition_epoch",
                "False",
            ),
            (controller_isr._check_isr, "partition.leader not in isr", "False"),
        ),
    ),
    Bug(
        "a fenced replica joins the ISR",
        (
            (controller_isr._ineligible, "broker.fenced", "False"),
            (_Leader._eligible, "broker.is_active", "True"),
        ),
    ),
    Bug(
        "the controller adds a former incarnation of a broker to the ISR",
        (
            (controller_isr._ineligible, "epoch not in (-1, broker.epoch)", "False"),
            (_Leader.update_follower_fetch_state, "broker.epoch > broker_epoch", "False"),
            (_Leader._eligible, "replica.broker_epoch in (ANY_BROKER_EPOCH, broker.epoch)", "True"),
        ),
    ),
    Bug(
        "a reassignment completes when one target replica is in sync",
        ((reassignments.completed, "not set(staying) <= set(in_sync)", "False"),),
    ),
    Bug(
        "a reassignment completes at once",
        (
            (
                reassignments.completed,
                "if not staying or not in_sync or not set(staying) <= set(in_sync):",
                "in_sync = in_sync or staying\n    if False:",
            ),
        ),
    ),
    Bug(
        "an election does not raise the leader epoch",
        (
            (
                image.PartitionRegistration.merge,
                "self.leader_epoch + elects",
                "self.leader_epoch",
            ),
        ),
    ),
    Bug(
        "an unclean election does not raise the leader epoch",
        (
            (
                image.PartitionRegistration.merge,
                "self.leader_epoch + elects",
                "self.leader_epoch + (elects and change.leader_recovery_state != 1)",
            ),
        ),
    ),
    Bug(
        "a broker stays in the ELR after an unclean shutdown",
        ((brokers.register, "existing.epoch == request.previous_broker_epoch", "True"),),
    ),
    Bug(
        "the ELR is kept when the ISR reaches min ISR",
        ((_Change._elr, "or len(isr) >= min(self.min_isr, len(replicas))", ""),),
    ),
    Bug(
        "any live replica is elected leader",
        (
            (
                _Change._elect,
                "replica in eligible and self.is_acceptable(replica)",
                "self.is_acceptable(replica)",
            ),
        ),
    ),
    Bug(
        "a new incarnation of a broker gets the broker epoch of the former one",
        (
            (
                brokers.register,
                "broker_epoch=next_offset,",
                "broker_epoch=existing.epoch if existing else next_offset,",
            ),
        ),
    ),
    Bug(
        "a fenced broker stays in the ISR",
        ((brokers.fence, "removed=broker_id", "removed=-1"),),
    ),
    Bug(
        "the controller allocates a block of producer ids twice",
        (
            (
                producer_ids.allocate_producer_ids,
                "first + BLOCK_SIZE, broker_epoch",
                "first, broker_epoch",
            ),
        ),
    ),
    Bug(
        "a broker keeps a replica after its removal by a reassignment",
        ((image.local_changes, "deletes.append(replace(local, registration=was))", "pass"),),
    ),
    # --- the log, the process ---
    Bug(
        "the log detects neither duplicate nor missing batches of a producer",
        (
            (
                ProducerStateManager.find_duplicate,
                "for cached in entry.batches:",
                "for cached in ():",
            ),
            (ProducerStateManager._check_sequence, "sequence != expected", "False"),
        ),
    ),
    *_SNAPSHOTS,
    *COORDINATORS,
)
