"""A driver for the share coordinator of one partition of ``__share_group_state``."""

from __future__ import annotations

from collections.abc import Sequence

from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.state import (
    InitializeState,
    ShareStateLimits,
    ShareStateMachine,
    StateChanged,
    WriteShareState,
)
from fencepost.groups.share.state_records import decode
from fencepost.logcore.machine import Record

TOPIC = bytes(range(16))
KEY = SharePartitionKey("orders", TOPIC, 0)
LIMITS = ShareStateLimits(update_records_per_snapshot=3)
ACKNOWLEDGED = (StateBatch(0, 4, 2, 1),)


class Coordinator:
    """A shard with its log."""

    def __init__(self, limits: ShareStateLimits = LIMITS) -> None:
        self.limits = limits
        self.counts = {TOPIC: 3}
        self.now_ms = 1_000_000
        self.log: list[Record] = []
        self.start = 0
        self.machine = self.loaded()

    def loaded(self, start: int = 0) -> ShareStateMachine:
        """Return a machine that has loaded the log from this offset."""
        machine = ShareStateMachine(self.limits, self.counts.get)
        for offset, record in enumerate(self.log):
            if offset >= start:
                machine.replay(record, offset, self.now_ms, None)
        machine.on_loaded(self.now_ms)
        machine.check()
        return machine

    def __call__(self, command: object) -> object:
        decision = self.machine.decide(1, command, self.now_ms)
        for record in decision.records:
            self.machine.replay(record, len(self.log), self.now_ms, None)
            self.log.append(record)
        self.machine.check()
        (reply,) = decision.replies
        assert reply.token == 1
        return reply.response

    def initialize(
        self, key: SharePartitionKey = KEY, state_epoch: int = 1, start: int = 0
    ) -> None:
        assert self(InitializeState(key, state_epoch, start)) == StateChanged()

    def write(
        self,
        batches: Sequence[StateBatch] = ACKNOWLEDGED,
        *,
        key: SharePartitionKey = KEY,
        state_epoch: int = 1,
        leader_epoch: int = 5,
        start: int = 0,
        count: int = 5,
    ) -> None:
        command = WriteShareState(key, state_epoch, leader_epoch, start, count, tuple(batches))
        assert self(command) == StateChanged()

    def kinds(self) -> list[str]:
        return [type(decode(record).value).__name__ for record in self.log]  # type: ignore[union-attr]
