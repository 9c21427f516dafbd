"""Random runs with several leaders and a real share coordinator must find planted bugs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from fencepost.groups.share import acknowledge, completion, state
from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import Acknowledged, StateRead
from fencepost.groups.share.partition import SharePartition
from fencepost.groups.share.state import ShareStateMachine
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.machine import InvariantViolation
from tests.support.quick import seeds
from tests.unit.groups.share.leaders import Cluster

LIVES = int(os.environ.get("HISTORIES", "40"))
STEPS = 200
MAX_LIVES_TO_FIND = 150
"""A planted bug must be found within this number of random runs."""

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("seed", seeds(LIVES))
def test_records_end_once_across_leaders_and_reloads(seed: int) -> None:
    Cluster(seed).run(STEPS)


def epoch_of_a_read_is_kept_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    """KAFKA-17796."""

    def in_memory(machine, decision, token, command):
        entry = machine._entry(command.key, "")
        if command.leader_epoch < entry.leader_epoch:
            raise state.errors.FencedShareLeaderEpochError("")
        entry.leader_epoch = command.leader_epoch
        value = entry.value
        decision.reply(token, StateRead(value.state_epoch, value.start_offset, value.batches))

    patch.setattr(ShareStateMachine, "_read", in_memory)


def former_leader_is_not_fenced(patch: pytest.MonkeyPatch) -> None:
    write = ShareStateMachine._write

    def of_any_leader(machine, decision, token, command):
        entry = machine._entry(command.key, "")
        epoch = max(command.leader_epoch, entry.leader_epoch)
        write(machine, decision, token, replace(command, leader_epoch=epoch))

    patch.setattr(ShareStateMachine, "_write", of_any_leader)


def altered_offset_does_not_fence(patch: pytest.MonkeyPatch) -> None:
    write = ShareStateMachine._write

    def of_any_state(machine, decision, token, command):
        entry = machine._entry(command.key, "")
        epoch = max(command.state_epoch, entry.state_epoch)
        write(machine, decision, token, replace(command, state_epoch=epoch))

    patch.setattr(ShareStateMachine, "_write", of_any_state)


def later_arrival_wins(patch: pytest.MonkeyPatch) -> None:
    """The write of an expired lock arrives late and makes an acknowledged record available."""

    def overwriting(old, new, start_offset):
        known: dict[int, StateBatch] = {}
        for batch in (*old, *new):
            for offset in range(max(batch.first, start_offset), batch.last + 1):
                known[offset] = batch._replace(first=offset, last=offset)
        return tuple(known[offset] for offset in sorted(known))

    patch.setattr(state, "combine", overwriting)


def start_offset_of_a_late_write_is_taken_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "max", min, raising=False)


def log_is_pruned_to_the_last_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShareStateMachine, "redundant_offset", lambda machine: machine._last_offset)


def acknowledgement_is_answered_before_its_write(patch: pytest.MonkeyPatch) -> None:
    write = acknowledge._write_transition

    def early(partition, decision, write_id, changed, token):
        write(partition, decision, write_id, changed, None)
        if token is not None:
            decision.reply(token, Acknowledged())

    patch.setattr(acknowledge, "_write_transition", early)


def fenced_leader_serves_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(completion, "FENCING_ERRORS", ())


def read_batches_are_ignored(patch: pytest.MonkeyPatch) -> None:
    activate = SharePartition._activate
    patch.setattr(
        SharePartition,
        "_activate",
        lambda partition, decision, start, _batches: activate(partition, decision, start, ()),
    )


def new_share_partition_begins_before_the_writes_of_the_old_one_end(
    patch: pytest.MonkeyPatch,
) -> None:
    def at_once(cluster):
        leader = cluster.leader
        if leader.driver.partition.state.value in ("fenced", "failed"):
            cluster._lead(leader.epoch)

    patch.setattr(Cluster, "_replace_dropped", at_once)

    def step(cluster):
        if cluster.rng.random() < 0.05:
            # The group's last session on the broker ends, and another begins.
            driver = cluster.leader.driver
            driver.run(lambda decision: driver.partition.fence(decision, "no session"))
            at_once(cluster)
        original(cluster)

    original = Cluster.step
    patch.setattr(Cluster, "step", step)


PLANTS: tuple[Plant, ...] = (
    epoch_of_a_read_is_kept_in_memory_only,
    former_leader_is_not_fenced,
    altered_offset_does_not_fence,
    later_arrival_wins,
    start_offset_of_a_late_write_is_taken_over,
    log_is_pruned_to_the_last_record,
    acknowledgement_is_answered_before_its_write,
    fenced_leader_serves_on,
    read_batches_are_ignored,
    new_share_partition_begins_before_the_writes_of_the_old_one_end,
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_random_histories_find_the_planted_bug(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(MAX_LIVES_TO_FIND):
        try:
            Cluster(seed).run(STEPS)
        except (AssertionError, InvariantViolation, CorruptRecordError):
            return
    pytest.fail(f"{plant.__name__} was not found in {MAX_LIVES_TO_FIND} lives")
