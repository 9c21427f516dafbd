"""Random requests to a group that clients of either protocol join in every phase.

A step may send any request of either protocol, with names that are known, stale, empty or too long.
Commits create groups, clocks are set back and topics change. Invalid requests must be refused, each
request must be answered exactly once, the invariants of both group types must hold, and compacted
logs must load to the same state.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.commands import (
    DeleteGroup,
    DeleteOffsets,
    ExpireOffsets,
    Heartbeat,
    JoinGroupResult,
    LeaveGroup,
    LeavingMember,
    SyncGroup,
    TopicsDeleted,
)
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.errors import MemberIdRequiredError
from fencepost.groups.limits import GroupLimits
from fencepost.logcore.machine import DomainError
from tests.support.quick import seeds
from tests.unit.groups.churn import live, lives, log_loads_back, long_life
from tests.unit.groups.consumer_driver import (
    CONSUMER_SESSION,
    ConsumerDriver,
    T,
    V,
    changed,
    settings,
)
from tests.unit.groups.group_driver import (
    DELAY,
    PARKED,
    REBALANCE,
    SESSION,
    Driver,
    G,
    subscription,
)
from tests.unit.groups.mixed_driver import assigned

LIMITS = GroupLimits(
    max_group_size=5,
    max_pending_members=3,
    max_string_bytes=24,
    max_regex_steps_per_turn=20,
    max_looks_per_pass=3,
)
SUBSCRIBED = (subscription("t"), subscription("t", "u"), subscription("u"), b"s")
OFFERS = (("cooperative-sticky", "range"), ("range",), ("range", "cooperative-sticky"), ("sticky",))
LONG = "n" * 40_000
"""A string longer than a record can hold."""
NAMES: tuple[tuple[str, ...], ...] = (("t",), ("t", "u"), ("u", "new"), (LONG,))
REGEXES = ("", "t|n.*", "(", "(.?){9}")
ODD_NAMES = ("", " ", "ü" * 12, "m" * 24, "m" * 25, LONG)


class Churn:
    """Requests of both protocols at any time, and their responses."""

    def __init__(self) -> None:
        self.driver = ConsumerDriver(
            LIMITS, consumer=settings(max_size=5, assignment_interval_ms=100)
        )
        self.ids: list[str] = []
        self.asked: list[int] = []

    def step(self, action: int, who: int, what: int) -> None:
        actions = (
            *(self.join, self.join, self.join_static, self.rejoin, self.rejoin, self.rejoin),
            *(self.sync, self.sync, self.heartbeat, self.settle, self.settle),
            *(self.enter, self.enter_static, self.beat, self.beat, self.leave),
            *(self.commit, self.wait, self.set_clock if what == 0 else self.wait, self.upkeep),
        )
        with contextlib.suppress(DomainError):
            actions[action % len(actions)](who, what)
        self.hear()

    # --- members ----------------------------------------------------------------------------------

    @property
    def members(self) -> list[str]:
        group = self.driver.groups.get(G)
        return [] if group is None else list(group.members)

    def member(self, who: int) -> str:
        """Return the id of a member, of a former or future member, or an invalid id."""
        known = [*self.members * 3, *self.ids[-3:], ODD_NAMES[who % len(ODD_NAMES)]]
        return known[who * 5 % len(known)]

    def epoch(self, member_id: str) -> int:
        group = self.driver.groups.get(G)
        if isinstance(group, ConsumerGroup):
            return group.current(member_id).member_epoch
        return group.generation_id if isinstance(group, ClassicGroup) else 0

    def send(self, command: Any) -> Any:
        token = self.driver.send(command)
        self.asked.append(token)
        return self.driver.answers[token]

    # --- the classic protocol ---------------------------------------------------------------------

    def join(self, who: int, what: int, member_id: str = "", **more: Any) -> None:
        offered = tuple((name, SUBSCRIBED[who % 4]) for name in OFFERS[what])
        version = 3 if who % 3 == 0 else 9
        fields = {"protocols": offered, **more}
        self.asked.append(Driver.join(self.driver, member_id, version=version, **fields))

    def join_static(self, who: int, what: int) -> None:
        self.join(who, what, instance=("i", "j", "", LONG)[who % 4])

    def rejoin(self, who: int, what: int) -> None:
        member_id = self.member(who)
        group = self.driver.groups.get(G)
        known = group.members.get(member_id) if isinstance(group, ClassicGroup) else None
        said = {} if known is None or what == 3 else {"protocols": known.protocols}
        instance = None if known is None else known.group_instance_id
        self.join(who, what, member_id, instance=instance, **said)

    def sync(self, who: int, what: int) -> None:
        member_id = self.member(who)
        group = self.driver.groups.get(G)
        plan: list[tuple[str, bytes]] = []
        if isinstance(group, ClassicGroup):
            for index, name in enumerate(group.members):
                mine = (index,) if what else (0,)  # sometimes all members get the same partition
                plan.append((name, assigned(("t", mine)) if what < 3 else b"odd"))
        generation = self.epoch(member_id)
        self.send(SyncGroup(G, generation, member_id, None, None, None, tuple(plan)))

    def settle(self, who: int, what: int) -> None:
        """Let most members of a classic group follow the protocol for a while."""
        for index in range(len(self.members)):
            self.rejoin(index * 2, 0)
        self.driver.advance(DELAY)
        for _ in self.members:
            self.sync(who, 1 + what % 2)

    def heartbeat(self, who: int, what: int) -> None:
        member_id = self.member(who)
        self.send(Heartbeat(G, self.epoch(member_id) - (what == 3), member_id, None))

    def leave(self, who: int, what: int) -> None:
        leaving = [LeavingMember(self.member(who + index)) for index in range(1 + what % 2)]
        self.send(LeaveGroup(G, tuple(leaving)))

    # --- the consumer protocol --------------------------------------------------------------------

    def enter(self, who: int, what: int, **more: Any) -> None:
        """Send a heartbeat with epoch 0, as a new client or an existing member."""
        member_id = f"m{who}" if what else self.member(who)
        fields = {"subscribed_topic_regex": REGEXES[who % 4], **more}
        self.driver.join(member_id, *NAMES[what], rebalance_timeout_ms=500, **fields)

    def enter_static(self, who: int, what: int) -> None:
        self.enter(who, what, instance_id=("i", "j", "", LONG)[who % 4])

    def beat(self, who: int, what: int) -> None:
        member_id = self.member(who)
        group = self.driver.groups.get(G)
        fields: dict[str, Any] = {"owned": ((T, (0, 1)),) if who % 2 else ()}
        if isinstance(group, ConsumerGroup) and member_id in group.members:
            fields["instance_id"] = group.members[member_id].instance_id
        epoch = (self.epoch(member_id), self.epoch(member_id), who - 3, -2)[what]
        if what == 1:
            fields |= {"subscribed_topic_names": NAMES[who % 4], "server_assignor": "range"}
        self.driver.beat(member_id, epoch, **fields)

    # --- both protocols ---------------------------------------------------------------------------

    def commit(self, who: int, what: int) -> None:
        """Commit as a member, in a transaction, or without an id, which may create a group."""
        member_id = self.member(who) if who % 2 else ""
        generation = self.epoch(member_id) if who % 2 else -1
        producer = {"producer": 1} if what == 2 else {"knows_member_epochs": True}
        if what == 3:
            self.driver.marker(1, commit=who > 3)
        self.driver.commit(
            ("t", who % 2, who, -1, "", T), generation=generation, member_id=member_id, **producer
        )

    def wait(self, who: int, what: int) -> None:
        longest = (REBALANCE, CONSUMER_SESSION)[who % 2] if who > 5 else SESSION - 1
        self.driver.advance((100, 500, DELAY, longest)[what])

    def set_clock(self, who: int, what: int) -> None:
        self.driver.jump((-3_600_000, 3_600_000)[who % 2])

    def upkeep(self, who: int, what: int) -> None:
        match who:
            case 0:
                # Delete the group, and create a group of the same name that has only offsets.
                self.send(LeaveGroup(G, tuple(map(LeavingMember, self.members))))
                self.driver.advance(REBALANCE)
                self.driver.ask(DeleteGroup(G))
                self.driver.commit(("t", 0, what))
            case 1:
                self.driver.ask(ExpireOffsets())
            case 2:
                self.driver.ask(DeleteOffsets(G, (("t", (0, 1)),)))
            case 3:
                self.driver.ask(TopicsDeleted((("t", None),)))
            case 4:
                self.driver.reload()
            case _:
                sizes = {"t": (T, 3 + what), "new": None if what == 1 else (V, 1)}
                self.driver.image = changed(self.driver.image, **sizes)

    def hear(self) -> None:
        """Record the member ids that were assigned."""
        for token in [token for token in self.asked if self.driver.answers[token] is not PARKED]:
            self.asked.remove(token)
            answer = self.driver.answers[token]
            if isinstance(answer, MemberIdRequiredError | JoinGroupResult):
                self.ids.append(answer.member_id)

    def finish(self) -> None:
        """Check that every request was answered, and that compacted logs load to the same state."""
        self.driver.reload()
        assert PARKED not in self.driver.answers.values()
        log_loads_back(self.driver.log, self.driver.machine.digest(), variants=10)


@pytest.mark.slow
@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(lives(max_size=60))
def test_random_history_keeps_the_invariants_of_both_group_types(steps):
    live(Churn(), steps)


@pytest.mark.parametrize("seed", seeds(12))
def test_long_random_history_keeps_the_invariants_of_both_group_types(seed):
    churn = Churn()
    long_life(churn, seed, 300)
    assert {"group-upgraded", "member-joined"} <= set(churn.driver.kinds())
