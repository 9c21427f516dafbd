"""Random requests to a group keep the invariants, and the log loads to the same state.

A step is three small numbers, so that Hypothesis shrinks a failing run to a few steps. The
responses are checked as well: a generation has one leader, members get the assignments of the
leader, and generations never decrease while the shard serves.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings

from fencepost.groups.commands import (
    DeleteGroup,
    DeleteOffsets,
    ExpireOffsets,
    JoinGroupResult,
    SyncGroupResult,
    TopicsDeleted,
)
from fencepost.groups.errors import GroupError, MemberIdRequiredError
from fencepost.groups.limits import GroupLimits
from tests.support.quick import seeds
from tests.unit.groups.churn import (
    every_prefix_loads,
    every_variant_loads_back,
    live,
    lives,
    log_loads_back,
    long_life,
)
from tests.unit.groups.group_driver import (
    DELAY,
    PARKED,
    RETENTION,
    SESSION,
    Driver,
    G,
    completing,
    empty,
    preparing,
    stable,
    subscription,
)
from tests.unit.groups.log_compaction import every_variant

PROTOCOLS = (
    (("range", subscription("t")),),
    (("range", subscription("t", "u")), ("sticky", b"s")),
    (("sticky", b"s"), ("range", subscription("u"))),
)


class Churn:
    """Clients that send any request at any time to one group, and record the responses."""

    def __init__(self) -> None:
        limits = GroupLimits(max_group_size=5, max_pending_members=3, max_looks_per_pass=3)
        self.driver = Driver(limits)
        self.ids: list[str] = []
        self.joins: dict[int, str | None] = {}
        self.plans: dict[int, dict[str, bytes]] = {}
        self.syncs: dict[int, tuple[str, int]] = {}
        self.generation = 0

    def step(self, action: int, who: int, what: int) -> None:
        actions = (
            *(self.join_new, self.join_old_client, self.join_static),
            *(self.rejoin, self.rejoin, self.rejoin, self.rejoin),
            *(self.sync, self.sync, self.sync),
            *(self.settle, self.settle),
            *(self.heartbeat, self.leave, self.commit, self.transaction, self.wait, self.wait),
            *(self.upkeep, self.crash if what == 0 else self.commit),
        )
        with contextlib.suppress(GroupError):
            actions[action % len(actions)](who, what)
        self.look()

    def member(self, who: int) -> str:
        """Return the id of a member, sometimes of a former member."""
        group = self.driver.groups.get(G)
        alive = [*group.members, *group.pending_members] if group else []
        known = alive * 3 + self.ids[-2:]
        return known[who * 5 % len(known)] if known else "nobody"

    def settle(self, who: int, what: int) -> None:
        """Let most members of the group follow the protocol for a while."""
        if G not in self.driver.groups:
            return
        for token, member_id in (
            (token, member_id) for member_id, token in self.driver.rejoin_all().items()
        ):
            self.joins[token] = member_id
        self.driver.advance(DELAY)
        for index in range(len(self.driver.group().members) if G in self.driver.groups else 0):
            self.sync(index, what)

    def join_new(self, who: int, what: int) -> None:
        self.joins[self.driver.join(protocols=PROTOCOLS[what % 3])] = None

    def join_old_client(self, who: int, what: int) -> None:
        self.joins[self.driver.join(version=3, protocols=PROTOCOLS[what % 3])] = None

    def join_static(self, who: int, what: int) -> None:
        token = self.driver.join(instance=f"i{who % 2}", protocols=PROTOCOLS[what % 3])
        self.joins[token] = None

    def rejoin(self, who: int, what: int) -> None:
        member_id = self.member(who)
        members = self.driver.groups[G].members if G in self.driver.groups else {}
        known = members.get(member_id)
        protocols = PROTOCOLS[what % 3] if known is None or what % 4 == 0 else known.protocols
        self.joins[self.driver.join(member_id, protocols=protocols)] = member_id

    def sync(self, who: int, what: int) -> None:
        if G not in self.driver.groups:
            return
        group = self.driver.group()
        members = [*group.members, "nobody"]
        member_id = members[who % len(members)]
        plan = {other: f"{group.generation_id}:{other}".encode() for other in group.members}
        if member_id == group.leader_id and group.state == "CompletingRebalance":
            self.plans[group.generation_id] = plan
        token = self.driver.sync(member_id, assignments=list(plan.items()))
        self.syncs[token] = (member_id, group.generation_id)

    def heartbeat(self, who: int, what: int) -> None:
        for _ in range(what * 4):
            self.driver.advance(SESSION - 1)
            for member_id in list(self.driver.groups[G].members if G in self.driver.groups else ()):
                with contextlib.suppress(GroupError):
                    self.driver.heartbeat(member_id)
        self.driver.heartbeat(self.member(who))

    def leave(self, who: int, what: int) -> None:
        self.driver.leave(*{self.member(who + index) for index in range(1 + what % 2)})

    def commit(self, who: int, what: int) -> None:
        generation = self.driver.groups[G].generation_id if G in self.driver.groups else 0
        retention = {"retention_time_ms": 5_000} if what == 3 else {}
        self.driver.commit(
            ("t" if what % 2 else "u", who % 2, who),
            member_id=self.member(who) if who % 2 else "",
            generation=generation if who % 2 else -1,
            **retention,
        )

    def transaction(self, who: int, what: int) -> None:
        if what < 2:
            self.driver.commit(("t", who % 2, who), ("u", 0, who), producer=1 + who % 2)
        else:
            self.driver.marker(1 + who % 2, commit=what == 2)

    def wait(self, who: int, what: int) -> None:
        if what == 0:
            self.driver.jump((-3_600_000, 3_600_000)[who % 2])
        self.driver.advance((0, 500, DELAY, SESSION - 1)[what])

    def upkeep(self, who: int, what: int) -> None:
        match what:
            case 0:
                self.driver.ask(ExpireOffsets())
            case 1:
                self.driver.ask(DeleteOffsets(G, (("t", (0, 1)), ("u", (0,)))))
            case 2:
                self.driver.ask(DeleteGroup(G))
            case _:
                self.driver.ask(TopicsDeleted((("t", None),)))

    def crash(self, who: int, what: int) -> None:
        self.driver.reload()
        self.generation = 0
        self.plans.clear()
        self.syncs.clear()
        if what == 3:
            self.driver.advance(RETENTION)

    def look(self) -> None:
        """Compare the responses that have arrived with their requests."""
        answers = self.driver.answers
        for token in [token for token in self.joins if answers[token] is not PARKED]:
            asked = self.joins.pop(token)
            answer = answers[token]
            if isinstance(answer, MemberIdRequiredError):
                self.ids.append(answer.member_id)
            elif isinstance(answer, JoinGroupResult):
                assert asked in {None, answer.member_id}
                self.ids.append(answer.member_id)
                if answer.members:
                    assert answer.leader == answer.member_id
                    assert answer.member_id in {member.member_id for member in answer.members}
        for token in [token for token in self.syncs if answers[token] is not PARKED]:
            member_id, generation = self.syncs.pop(token)
            answer = answers[token]
            if isinstance(answer, SyncGroupResult) and generation in self.plans:
                expected = self.plans[generation].get(member_id, answer.assignment)
                assert answer.assignment == expected
        group = self.driver.groups.get(G)
        if group is None:
            self.generation = 0
            self.plans.clear()
        else:
            assert group.generation_id >= self.generation
            self.generation = group.generation_id

    def finish(self) -> None:
        """Check that every request was answered, and that compacted logs load to the same state."""
        self.driver.reload()
        assert PARKED not in self.driver.answers.values()
        log_loads_back(self.driver.log, self.driver.machine.digest(), variants=20)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(lives(max_size=80))
def test_random_history_keeps_classic_group_invariants(steps):
    live(Churn(), steps)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(lives(max_size=80))
def test_further_random_histories_keep_classic_group_invariants(steps):
    live(Churn(), steps)


@pytest.mark.parametrize("seed", seeds(12))
def test_long_random_history_keeps_classic_group_invariants(seed):
    long_life(Churn(), seed, 400)


# --- every compacted variant of the scenarios' logs ----------------------------------------------


def life_with_everything() -> Driver:
    driver, ids = stable(2, static=["i1"])
    driver.commit(("t", 0, 1), ("u", 0, 1), generation=1, member_id=ids[0])
    driver.join(instance="i1")
    driver.commit(("t", 0, 2), producer=1, generation=1, member_id=ids[0])
    driver.commit(("t", 0, 3), generation=1, member_id=ids[0])
    driver.marker(1, commit=True)
    driver.commit(("t", 1, 2), ("u", 0, 4), producer=2)
    driver.marker(2, commit=False)
    driver.commit(("t", 1, 5), producer=2)
    driver.marker(2, commit=True)
    driver.leave(ids[0])
    driver.rejoin_all()
    driver.sync_all()
    driver.ask(DeleteOffsets(G, (("u", (0,)),)))
    driver.commit(("u", 1, 9), producer=3)
    driver.commit(("u", 2, 9), retention_time_ms=10, member_id="", producer=None, group_id="h")
    driver.advance(10)
    driver.ask(ExpireOffsets())
    driver.commit(("t", 0, 6), generation=2, member_id=ids[1])
    return driver


def died_and_lives_again() -> Driver:
    driver = empty()
    driver.commit(("t", 0, 1))
    driver.commit(("t", 1, 1), producer=1)
    driver.ask(DeleteGroup(G))
    driver.marker(1, commit=True)
    driver.commit(("t", 0, 2))
    driver.join(version=3)
    driver.finish_initial_delay()
    driver.sync_all()
    return driver


def deleted() -> Driver:
    driver = died_and_lives_again()
    driver.leave(*driver.group().members)
    driver.ask(DeleteGroup(G))
    return driver


SCENARIOS = {
    "stable": lambda: stable(3)[0],
    "completing": lambda: completing(2)[0],
    "preparing": lambda: preparing(2)[0],
    "empty": empty,
    "everything": life_with_everything,
    "died and lives again": died_and_lives_again,
    "deleted": deleted,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_compacted_variant_loads_to_the_same_state(name):
    every_variant_loads_back(SCENARIOS[name])


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_prefix_of_the_log_loads(name):
    every_prefix_loads(SCENARIOS[name])


def test_compaction_shortens_the_log():
    log = life_with_everything().log
    sizes = {len(variant) for variant in every_variant(log)}
    assert min(sizes) < len(log) - 8
