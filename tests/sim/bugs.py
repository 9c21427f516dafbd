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
        "a snapshot lacks the settings of topics",
        (
            (
                image_records._records_after_topics,
                "for (kind, resource), values in image.configs.items():",
                "for (kind, resource), values in () if image.topics else image.configs.items():",
            ),
        ),
    ),
    Bug(
        "a snapshot lacks who is eligible",
        (
            (
                image_records.partition_record,
                "eligible_leader_replicas=registration.elr or None",
                "eligible_leader_replicas=None",
            ),
        ),
    ),
    Bug(
        "an observer goes on one record too late behind a snapshot",
        (
            (
                observer.Observer._install,
                "self.log_end = self._committed_end = snapshot",
                "self.log_end = self._committed_end = OffsetAndEpoch(snapshot[0] + 1, snapshot[1])",
            ),
        ),
    ),
    Bug(
        "an observer keeps what a snapshot no longer has",
        ((ImageLoader.begin_snapshot, "self._delta.begin_snapshot()", "pass"),),
    ),
)

BUGS: Final = (
    # --- the leader ---
    Bug(
        "the high watermark moves below min ISR",
        ((_Leader._advance, "or self.is_under_min_isr", ""),),
    ),
    Bug(
        "a removed replica no longer counts before the controller has said so",
        (
            (
                _Leader._propose,
                "frozenset(self.isr + joins)",
                "frozenset(one for one in self.isr + joins if one not in leaves)",
            ),
        ),
    ),
    Bug(
        "an added replica does not count before the controller has said so",
        (
            (_Leader._propose, "frozenset(self.isr + joins)", "frozenset(self.isr)"),
            (_Leader._advance, "replica.is_caught_up(end, now_ms, lag) and", "False and"),
        ),
    ),
    Bug(
        "the pending ISR is taken as committed",
        (
            (
                _Leader._propose,
                "self.pending = change",
                "self.pending, self.isr = change, members",
            ),
            (
                _Leader._propose,
                "frozenset(self.isr + joins)",
                "frozenset(one for one in self.isr + joins if one not in leaves)",
            ),
        ),
    ),
    Bug(
        "the start of the epoch is not looked at when a replica joins",
        (
            (
                _Leader._maybe_expand,
                "max(self.high_watermark, self.epoch_start_offset)",
                "self.high_watermark",
            ),
        ),
    ),
    Bug(
        "a replica joins wherever it stands",
        (
            (
                _Leader._maybe_expand,
                "end < max(self.high_watermark, self.epoch_start_offset)",
                "False",
            ),
        ),
    ),
    Bug(
        "an old broker epoch is trusted",
        (
            (_Leader.fetched, "known.epoch > broker_epoch", "False"),
            (_Leader._eligible, "replica.broker_epoch in (ANY_BROKER_EPOCH, known.epoch)", "True"),
            (_Leader._epoch_of, "return replica.broker_epoch", "return ANY_BROKER_EPOCH"),
        ),
    ),
    Bug(
        "a change that may have been made is taken back",
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
        "a pending change outlives metadata",
        (
            (
                _Leader.become_leader,
                "self._commit(IsrTrigger.METADATA, registration.isr)",
                "self.isr = registration.isr",
            ),
        ),
    ),
    Bug(
        "a new leader takes its followers to be where it is",
        ((_Leader._assign, "ReplicaState(one)", "ReplicaState(one, self.log_end_offset)"),),
    ),
    Bug(
        "a leader that missed others in between believes what its followers told before",
        ((_Leader.become_leader, "registration.leader_epoch > self.leader_epoch + 1", "False"),),
    ),
    Bug(
        "the high watermark is the end of the most advanced follower",
        (
            (
                _Leader._advance,
                "replica.log_end_offset < candidate and (",
                "replica.log_end_offset < candidate and False and (",
            ),
        ),
    ),
    Bug(
        "a follower whose offset is not known does not hold the high watermark",
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
        "a follower begins by cutting its log to the high watermark",
        (
            (
                _Follower._start,
                "self.last_fetched_epoch != NO_EPOCH or log.high_watermark",
                "log.high_watermark",
            ),
        ),
    ),
    Bug(
        "the high watermark of a diverging answer is taken",
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
        "an empty answer loses the last fetched epoch for good",
        (
            (
                _Follower._take,
                "self.lag = max(",
                (
                    "self.last_fetched_epoch = self.last_fetched_epoch if answer.size else -1\n"
                    "    self.lag = max("
                ),
            ),
            (
                _Follower._start,
                "self._take_position()",
                "self.fetch_offset = self._log.log_end_offset",
            ),
        ),
    ),
    Bug(
        "an unknown epoch cuts to where the leader's ends (KIP-279)",
        (
            (
                divergence.truncation_offset,
                "return min(own_epoch_end, own_end)",
                "return min(end, own_end)",
            ),
        ),
    ),
    Bug(
        "an end of the epoch below the offset is no divergence",
        (
            (
                divergence.diverging_epoch,
                "epoch < last_fetched_epoch or end < fetch_offset",
                "epoch < last_fetched_epoch",
            ),
        ),
    ),
    Bug(
        "an older epoch is no divergence",
        (
            (
                divergence.diverging_epoch,
                "epoch < last_fetched_epoch or end < fetch_offset",
                "end < fetch_offset",
            ),
        ),
    ),
    Bug(
        "the leader does not compare epochs",
        ((divergence.diverging_epoch, "if last_fetched_epoch == NO_EPOCH:", "if True:"),),
    ),
    Bug(
        "a cut leaves the epochs that began behind it",
        ((LeaderEpochs.truncate_from_end, "if keep < len(self._starts):", "if False:"),),
    ),
    Bug(
        "a failed request is under way for ever",
        ((fetcher.LeaderFetcher.failed, "self.in_flight = None", "pass"),),
    ),
    Bug(
        "the session names a partition again only when its offset moved",
        (
            (
                fetcher.FetchSessionHandler.build,
                "known.get(key) != one",
                "key not in known or known[key].fetch_offset != one.fetch_offset",
            ),
        ),
    ),
    # --- the controller ---
    Bug(
        "the controller takes an old partition epoch",
        ((controller_isr._validated, "item.partition_epoch < known.partition_epoch", "False"),),
    ),
    Bug(
        "the controller takes a change of a former leader",
        (
            (controller_isr._validated, "item.leader_epoch < known.leader_epoch", "False"),
            (controller_isr._validated, "broker_id != known.leader", "False"),
            (controller_isr._validated, "item.partition_epoch < known.partition_epoch", "False"),
            (controller_isr._check_isr, "known.leader not in isr", "False"),
        ),
    ),
    Bug(
        "a fenced replica joins the ISR",
        (
            (controller_isr._ineligible, "broker.fenced", "False"),
            (_Leader._eligible, "known.is_active", "True"),
        ),
    ),
    Bug(
        "the controller takes a replica of another incarnation",
        (
            (controller_isr._ineligible, "epoch not in (-1, broker.epoch)", "False"),
            (_Leader.fetched, "known.epoch > broker_epoch", "False"),
            (_Leader._eligible, "replica.broker_epoch in (ANY_BROKER_EPOCH, known.epoch)", "True"),
        ),
    ),
    Bug(
        "a reassignment ends when one of its target is in sync",
        ((reassignments.completed, "not set(staying) <= set(in_sync)", "False"),),
    ),
    Bug(
        "a reassignment ends at once",
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
        "an unclean shutdown keeps its place among the eligible",
        ((brokers.register, "existing.epoch == request.previous_broker_epoch", "True"),),
    ),
    Bug(
        "the eligible stay eligible when the ISR is large enough",
        ((_Change._elr, "or len(isr) >= min(self.min_isr, len(replicas))", ""),),
    ),
    Bug(
        "anybody who lives is elected",
        (
            (
                _Change._elect,
                "replica in eligible and self.is_acceptable(replica)",
                "self.is_acceptable(replica)",
            ),
        ),
    ),
    Bug(
        "who has a new incarnation has the epoch of the old one",
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
        "a block of producer ids is given twice",
        (
            (
                producer_ids.allocate_producer_ids,
                "first + BLOCK_SIZE, broker_epoch",
                "first, broker_epoch",
            ),
        ),
    ),
    Bug(
        "a replica that is taken away stays on its broker",
        ((image.local_changes, "deletes.append(replace(one, registration=was))", "pass"),),
    ),
    # --- the log, the process ---
    Bug(
        "the five last batches of a producer are not looked at",
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
