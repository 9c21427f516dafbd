"""A broker's work as a follower, with one fetch loop per leader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fencepost.cluster.errors import Errors
from fencepost.cluster.fetcher import FetchRequest, FetchResponse, LeaderFetcher, PartitionResult
from fencepost.cluster.follower import (
    FollowerStep,
    ListOffsetsRequest,
    PartitionFetch,
    PartitionFollower,
    PartitionResponse,
)
from fencepost.cluster.image import LocalPartition
from fencepost.logcore.errors import UnexpectedAppendOffsetError
from tests.sim.disk import Key
from tests.sim.leading import FollowerFetch, Listed, ListOffset

if TYPE_CHECKING:
    from tests.sim.process import Process


LAST_WORDS: Final = 3
"""How many copies of a last request may arrive after the process that sent it has ended."""


class Following:
    """The partitions that one process follows."""

    def __init__(self, broker: Process) -> None:
        self.broker = broker
        self.followers: dict[Key, PartitionFollower] = {}
        self._fetchers: dict[int, LeaderFetcher] = {}
        self._sleeping: set[int] = set()

    # --- images ---

    def follow(self, one: LocalPartition, *, fetches: bool = True) -> None:
        """Become a follower by a registration; without ``fetches``, leave the log unchanged."""
        broker, key = self.broker, (one.topic_id, one.index)
        log = broker.log(key)
        machine = self.followers.get(key)
        if machine is None:
            machine = self.followers[key] = PartitionFollower(
                one.topic, one.topic_id, one.index, log, backoff_ms=broker.options.backoff_ms
            )
        before = machine.leader, machine.leader_epoch
        step = machine.become_follower(one.registration)
        if (machine.leader, machine.leader_epoch) != before:
            broker.node.say(f"follows {machine} of {machine.leader} in {machine.leader_epoch}")
        self._carry_out(machine, step, None)
        if not fetches:
            machine.stop()
        for leader, fetcher in self._fetchers.items():
            if leader != machine.leader or not fetches:
                fetcher.remove(key)
        if machine.leader >= 0 and fetches:
            fetcher = self._fetchers.setdefault(machine.leader, LeaderFetcher(machine.leader))
            if key not in fetcher:
                fetcher.add(machine)
            self.fetch(machine.leader)

    def stop(self, key: Key, *, is_gone: bool = False) -> None:
        """Stop following: this broker leads the partition, or no longer has a replica of it."""
        machine = self.followers.get(key)
        if machine is None:
            return
        machine.stop()
        for fetcher in self._fetchers.values():
            fetcher.remove(key)
        if is_gone:
            del self.followers[key]

    # --- the loop ---

    def fetch(self, leader: int) -> None:
        """Send the next fetch to a leader, unless one is in flight or no partition is due."""
        broker, fetcher = self.broker, self._fetchers[leader]
        now_ms = broker.node.now_ms
        request = fetcher.next_request(now_ms)
        if request is None:
            wake_ms = fetcher.wake_at()
            if fetcher.in_flight is None and wake_ms is not None and leader not in self._sleeping:
                self._sleeping.add(leader)
                broker.node.after(max(wake_ms - now_ms, 1), self._wake, leader)
            return
        fetch = FollowerFetch(broker.broker_id, broker.broker_epoch, request)

        def answered(answer: FetchResponse | None) -> None:
            self._fetched(leader, answer)

        broker.cluster.network.call(
            broker.node,
            f"b{leader}",
            fetch,
            answered,
            timeout_ms=broker.options.fetch_timeout_ms,
            purpose="fetch",
        )

    def last_words(self) -> None:
        """Send each leader a full fetch that may arrive after this process has ended."""
        broker = self.broker
        for leader, fetcher in self._fetchers.items():
            parts = tuple(
                PartitionFetch(
                    one.topic,
                    one.topic_id,
                    one.index,
                    one.leader_epoch,
                    one.fetch_offset,
                    one.last_fetched_epoch,
                    broker.log(one.key).start,
                )
                for one in fetcher.followers
            )
            request = FetchRequest(0, 0, parts, (), is_full=True)
            fetch = FollowerFetch(broker.broker_id, broker.broker_epoch, request)
            for _ in range(LAST_WORDS):
                broker.cluster.network.send_late(broker.node, f"b{leader}", fetch)

    def _wake(self, leader: int) -> None:
        self._sleeping.discard(leader)
        self.fetch(leader)

    def _fetched(self, leader: int, answer: FetchResponse | None) -> None:
        fetcher, now_ms = self._fetchers[leader], self.broker.node.now_ms
        if answer is None:
            fetcher.failed(now_ms)
        else:
            for result in fetcher.answered(answer, now_ms):
                self._take(result)
        self.fetch(leader)

    def _take(self, result: PartitionResult) -> None:
        part = result.answer
        if part.error:
            self.broker.node.say(f"{result.follower} is refused: {part.error}")
        self._carry_out(result.follower, result.step, part)

    # --- steps ---

    def _carry_out(
        self, machine: PartitionFollower, step: FollowerStep, answer: PartitionResponse | None
    ) -> None:
        """Carry out a step of a follower's state machine, and the steps that result from it."""
        broker, key = self.broker, machine.key
        log = broker.log(key)
        for event in step.events:
            broker.node.say(f"{event.kind} {event.subject} {event.detail}")
        if step.append_up_to_epoch is not None:
            assert answer is not None
            try:
                log.append_as_follower(answer.records, step.append_up_to_epoch)
                after = machine.appended()
            except UnexpectedAppendOffsetError as error:
                broker.node.say(f"{error}")
                after = machine.append_failed(Errors.OFFSET_OUT_OF_RANGE, broker.node.now_ms)
            broker.touched(key)
            self._carry_out(machine, after, None)
        if step.truncate is not None:
            if step.truncate.full:
                log.restart_at(step.truncate.offset)
            else:
                log.truncate_to(step.truncate.offset)
            broker.touched(key)
            self._carry_out(machine, machine.truncated(), None)
        if step.log_start_offset is not None:
            log.move_start(step.log_start_offset)
            broker.touched(key)
        if step.high_watermark is not None:
            log.move_high_watermark(step.high_watermark)
            broker.touched(key)
        if step.ask is not None:
            self._ask(machine, step.ask)

    def _ask(self, machine: PartitionFollower, asked: ListOffsetsRequest) -> None:
        broker, leader = self.broker, machine.leader
        request = ListOffset(broker.broker_id, machine.key, asked.current_leader_epoch, asked.end)

        def answered(answer: Listed | None) -> None:
            if machine is self.followers.get(machine.key):
                found = answer or Listed(Errors.NETWORK_EXCEPTION)
                step = machine.offset_listed(asked, found.offset, found.error, broker.node.now_ms)
                self._carry_out(machine, step, None)
                self.fetch(leader)

        broker.cluster.network.call(
            broker.node,
            f"b{leader}",
            request,
            answered,
            timeout_ms=broker.options.fetch_timeout_ms,
            purpose="fetch",
        )
