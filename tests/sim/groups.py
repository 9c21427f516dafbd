"""The group coordinator of a process, and a ledger of what it has acknowledged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from fencepost.coordinator.runtime.errors import NotCoordinatorError, ShardError
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.commands import (
    CommitOffsets,
    Heartbeat,
    HeartbeatResult,
    OffsetToCommit,
    TopicsDeleted,
    TxnCommitOffsets,
)
from fencepost.groups.consumer_commands import ConsumerSettings, Environment, TopicsImage
from fencepost.groups.limits import GroupLimits
from fencepost.groups.machine import GroupMachine
from fencepost.logcore.machine import DomainError, EndMarker
from tests.sim.invariants import BrokenInvariantError, Invariants
from tests.sim.network import Answer
from tests.sim.shards import SHARD, Shards

if TYPE_CHECKING:
    from tests.sim.process import Process

GROUPS_TOPIC: Final = "__consumer_offsets"
GROUP: Final = "readers"
SESSION_MS: Final = 2_000
REBALANCE_MS: Final = 1_500
SETTINGS: Final = ConsumerSettings(
    session_timeout_ms=SESSION_MS, heartbeat_interval_ms=200, assignment_interval_ms=0
)
LIMITS: Final = GroupLimits(min_session_timeout_ms=100)


Key = tuple[UUID | None, int]
"""A partition of the topic that the group reads, by the id that the topic had."""
Known = dict[Key, dict[int, int]]
"""The largest acknowledged offset by partition and coordinator epoch."""


RETRY_MS: Final = 1_000
"""The pause before a shard is told again of deleted topics."""


class RefusedError(DomainError):
    """A refusal of a request that does not reach the group; the message is Kafka's error name."""


class AskGroup(NamedTuple):
    """A command for the group coordinator; ``transactional_id`` is set for one in a transaction."""

    command: Any
    transactional_id: str | None = None


class GroupAnswer(NamedTuple):
    """A result or a DomainError, and the coordinator epoch that gave it; -1 without a shard."""

    epoch: int
    response: Any


class Groups(Shards):
    """The group coordinator of one process."""

    topic = GROUPS_TOPIC

    def __init__(self, broker: Process) -> None:
        super().__init__(broker)
        self._topics = TopicsImage({})
        self._topics_of: object = None

    def build(self, partition: Any, coordinator_epoch: int) -> GroupMachine:
        """Return an empty state machine."""
        del partition, coordinator_epoch
        return GroupMachine(
            LIMITS, initial_rebalance_delay_ms=50, environment=lambda _group: self._environment()
        )

    def _environment(self) -> Environment:
        image = self.broker.image
        if self._topics_of is not image.topics:
            self._topics_of = image.topics
            topics = {
                one.name: (one.topic_id.bytes, len(one.partitions)) for one in image.topics.values()
            }
            self._topics = TopicsImage(topics, self._topics.version + 1)
        return Environment(self._topics, SETTINGS)

    def while_loading(self, command: object) -> object | None:
        """Accept a heartbeat, so that its member stays in the group."""
        return HeartbeatResult() if isinstance(command, Heartbeat) else None

    def activated(self, shard: Any) -> None:
        """Check that the loaded state has everything that former coordinators acknowledged."""
        machine = shard.machine
        assert isinstance(machine, GroupMachine)
        self.broker.cluster.ledger.loaded(shard.coordinator_epoch, machine)

    def complete_transaction(self, end: EndMarker) -> None:
        """Append an end marker, which commits or drops offsets. Raises NotCoordinatorError."""
        if self.shard is None:
            raise NotCoordinatorError("the group is not coordinated here")
        self.shard.complete_transaction(end)

    def topics_deleted(self, topics: Iterable[tuple[str, bytes]]) -> None:
        """Delete the offsets of deleted topics (``ShardSet.send_to_all``)."""
        self.open_now()
        if self.shard is not None:
            self._send(self.shard, TopicsDeleted(tuple(topics)))

    def _send(self, shard: Any, command: TopicsDeleted) -> None:
        def answered(response: object) -> None:
            if isinstance(response, ShardError) and shard.state is not ShardState.CLOSED:
                self.broker.node.after(RETRY_MS, self._send, shard, command)

        if shard.state is not ShardState.CLOSED:
            shard.submit(command).then(answered)

    def _knows(self, offsets: Iterable[OffsetToCommit]) -> bool:
        """Return whether the partitions of offsets exist, by topic id (``sort_out``)."""
        image = self.broker.image
        return all(
            (topic := image.topics_by_id.get(UUID(bytes=one.topic_id))) is not None
            and one.partition < len(topic.partitions)
            for one in offsets
        )

    def ask(self, request: AskGroup, reply: Answer) -> None:
        """Serve a member's request."""
        shard = self.shard
        epoch = -1 if shard is None else shard.leader_epoch
        if isinstance(request.command, CommitOffsets | TxnCommitOffsets) and not self._knows(
            request.command.offsets
        ):
            reply(GroupAnswer(epoch, RefusedError("UNKNOWN_TOPIC_ID")))
            return

        def answered(response: object) -> None:
            reply(GroupAnswer(epoch, response))

        command = request.command
        if not isinstance(command, TxnCommitOffsets) or shard is None or self.key is None:
            self.submit(command, answered)
            return
        producer_id, producer_epoch = command.producer.producer_id, command.producer.producer_epoch
        producers = self.broker.log(self.key).producers
        if producers.has_open_transaction(producer_id, producer_epoch):
            self.submit(command, answered)
            return
        self.broker.coordinator.verify(
            (GROUPS_TOPIC, SHARD),
            (request.transactional_id, producer_id, producer_epoch),
            lambda code: answered(RefusedError(code.name)),
            lambda: self.submit(command, answered),
        )


@dataclass(slots=True)
class GroupLedger:
    """The answers that a group's members got, by coordinator epoch."""

    invariants: Invariants
    topic: str
    commits: int = 0
    generations: dict[int, int] = field(default_factory=dict)
    """The largest generation in which a member got an assignment, by coordinator epoch."""
    owners: dict[tuple[int, int], str] = field(default_factory=dict)
    """The owner by generation and partition, in the classic protocol."""
    topics: dict[str, UUID | None] = field(default_factory=dict)
    """The topic id of each commit, by the commit's metadata."""
    aborted: set[str] = field(default_factory=set)
    """The metadata of commits whose transactions were aborted."""
    open: dict[str, tuple[int, dict[Key, int]]] = field(default_factory=dict)
    """Coordinator epoch and offsets of commits in open transactions, by the commits' metadata."""
    _passed_over: set[str] = field(default_factory=set)
    """The metadata of those commits for which a stable fetch returned a smaller offset."""
    _offsets: Known = field(default_factory=dict)

    @property
    def is_void(self) -> bool:
        """Whether the groups' partition may have lost acknowledged records."""
        topic = self.invariants.image.topics.get(GROUPS_TOPIC)
        return topic is None or self.invariants.truth((topic.topic_id, SHARD)).was_void

    def _holds(self, partition: Key) -> bool:
        """Return whether a partition's acknowledged offsets must still exist."""
        return not self.is_void and partition[0] in self.invariants.image.topics_by_id

    def acknowledged(self, partitions: Iterable[Key]) -> Known:
        """Return the offsets of these partitions that were acknowledged so far."""
        return {one: dict(self._offsets.get(one, {})) for one in partitions}

    def committed(self, epoch: int, offsets: Mapping[Key, int], known: Known) -> None:
        """Add acknowledged offsets; ``known`` were acknowledged before the member's request."""
        self.commits += 1
        for partition, offset in offsets.items():
            floor = _largest(known.get(partition, {}), epoch)
            if self._holds(partition) and offset < floor:
                raise BrokenInvariantError(
                    f"an offset goes back: {offset} of partition {partition} is committed in epoch"
                    f" {epoch}, where {floor} was acknowledged"
                )
            mine = self._offsets.setdefault(partition, {})
            mine[epoch] = max(mine.get(epoch, -1), offset)

    def ends(self, tag: str, *, commits: bool) -> None:
        """End a transaction with offsets."""
        _, offsets = self.open.pop(tag, (-1, {}))
        if not commits:
            self.aborted.add(tag)
        elif tag in self._passed_over and all(map(self._holds, offsets)):
            raise BrokenInvariantError(
                f"{offsets} were committed by {tag}, and meanwhile less was shown as stable"
            )

    def fetched(
        self,
        epoch: int,
        offsets: Mapping[Key, tuple[int, str]],
        known: Known,
        were_open: Iterable[str],
    ) -> None:
        """Check the stable offsets and the metadata that a member has fetched.

        ``known`` and ``were_open`` are from before the member's request.
        """
        for tag in were_open:
            since, pending = self.open.get(tag, (1 << 30, {}))
            if since <= epoch and any(
                one in offsets and offsets[one][0] < offset for one, offset in pending.items()
            ):
                self._passed_over.add(tag)
        for partition, (offset, metadata) in offsets.items():
            if metadata and self.topics[metadata] != partition[0]:
                raise BrokenInvariantError(
                    f"{offset} of partition {partition} is of the topic's former life: {metadata}"
                )
            if metadata in self.aborted:
                raise BrokenInvariantError(
                    f"{offset} of partition {partition} is shown, and {metadata} was aborted"
                )
            floor = _largest(known[partition], epoch)
            if self._holds(partition) and offset < floor:
                raise BrokenInvariantError(
                    f"an offset is lost: partition {partition} has {offset} in epoch {epoch}, where"
                    f" {floor} was acknowledged"
                )

    def joined(self, epoch: int, generation: int, known: Mapping[int, int]) -> None:
        """Check a member's new generation; ``known`` is from before the member's request."""
        floor = _largest(known, epoch)
        if not self.is_void and generation < floor:
            raise BrokenInvariantError(
                f"the generation goes back: {generation} in epoch {epoch}, after {floor}"
            )

    def assigned(self, epoch: int, generation: int, member: str, owned: Iterable[int]) -> None:
        """Add a member's assignment in a generation."""
        self.generations[epoch] = max(self.generations.get(epoch, -1), generation)
        for partition in owned:
            other = self.owners.setdefault((generation, partition), member)
            if other != member and not self.is_void:
                raise BrokenInvariantError(
                    f"{other} and {member} own partition {partition} in generation {generation}"
                )

    def loaded(self, epoch: int, machine: GroupMachine) -> None:
        """Check that a coordinator has loaded everything that former ones acknowledged."""
        if self.is_void:
            return
        stored = machine.offsets.of_group(GROUP)
        topics = self.invariants.image.topics_by_id
        for (topic_id, partition), known in self._offsets.items():
            if topic_id not in topics:
                continue  # it was deleted meanwhile
            floor = _largest(known, epoch - 1)
            found = []
            if stored is not None:
                name = self.topic, partition
                if name in stored.committed:
                    found.append(stored.committed[name])
                found += stored.pending.get(name, {}).values()
            if floor > max((one.value.offset for one in found), default=-1):
                raise BrokenInvariantError(
                    f"the coordinator of epoch {epoch} does not know offset {floor} of partition"
                    f" {partition}: {known}, it has {found}"
                )
        group = machine.groups.get(GROUP)
        generation = _largest(self.generations, epoch - 1)
        has = group.generation_id if isinstance(group, ClassicGroup) else -1
        if has < generation:
            raise BrokenInvariantError(
                f"the coordinator of epoch {epoch} knows generation {has}, {generation} was"
                " acknowledged"
            )


def _largest(known: Mapping[int, int], epoch: int) -> int:
    """Return the largest value that was acknowledged up to a coordinator epoch, -1 if none was."""
    return max((one for at, one in known.items() if at <= epoch), default=-1)
