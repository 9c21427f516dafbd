"""The invariants of TLA+ models of replication, under random steps of real state machines.

The actions come from the models Kip320 and AsyncIsr (github.com/hachikuji/kafka-specification):
elect, shrink, expand, become leader and follower, write, replicate, advance. The state machines of
three brokers execute the actions, with messages that are late, lost, duplicated and reordered.
"""

from __future__ import annotations

import random

import pytest

from fencepost.cluster.follower import FetchState
from fencepost.cluster.leader import AcksVerdict
from tests.unit.cluster.trio import Trio

SEEDS, STEPS = 40, 500


def leader_in_isr(trio: Trio) -> None:
    now = trio.registration
    assert now.leader < 0 or now.leader in now.isr


def weak_isr(trio: Trio) -> None:
    """Check that a presumed leader's committed records are on every member of its ISR."""
    for node in trio.nodes.values():
        if node.is_leader:
            for other in node.leader.isr:
                _holds(trio, node.broker_id, other)


def strong_isr(trio: Trio) -> None:
    """Check that a presumed leader's committed records are on every member of the controller's ISR.

    The next leader is elected from the members of this ISR.
    """
    for node in trio.nodes.values():
        if node.is_leader:
            for other in trio.registration.isr:
                _holds(trio, node.broker_id, other)


def _holds(trio: Trio, leader: int, other: int) -> None:
    log, theirs = trio.nodes[leader].log, trio.nodes[other].log
    high = log.high_watermark
    assert log.records[:high] == theirs.records[:high], f"{leader} and {other} differ below {high}"


def valid_high_watermark(trio: Trio) -> None:
    """Check that all logs of the controller's ISR reach the leader's high watermark (AsyncIsr)."""
    now = trio.registration
    node = trio.nodes.get(now.leader)
    if node is not None and node.is_leader and node.leader.leader_epoch == now.leader_epoch:
        ends = [trio.nodes[broker_id].log.log_end_offset for broker_id in now.isr]
        assert node.log.high_watermark <= min(ends)


def acknowledged_records_stay(trio: Trio) -> None:
    for write in trio.writes:
        if write.verdict is AcksVerdict.DONE:
            for broker_id in trio.registration.isr:
                records = trio.nodes[broker_id].log.records
                assert len(records) > write.offset
                assert records[write.offset] == (write.leader_epoch, write.value)


INVARIANTS = (
    leader_in_isr,
    weak_isr,
    strong_isr,
    valid_high_watermark,
    acknowledged_records_stay,
)


def _deliver(trio: Trio, draw: random.Random, _: int) -> None:
    if trio.messages:
        message, fate = draw.choice(trio.messages), draw.random()
        if fate < 0.05:
            trio.drop(message)
        elif fate < 0.1 and message.kind.startswith("fetch"):
            message.deliver()  # the message stays in flight, and is delivered again
        else:
            trio.deliver(message)


def _pass_time(trio: Trio, draw: random.Random, _: int) -> None:
    trio.now_ms += draw.choice((10, 1_000, 31_000))
    for node in trio.nodes.values():
        node.take(node.leader.check_isr(trio.now_ms))


def _elect(trio: Trio, draw: random.Random, _: int) -> None:
    now = trio.registration
    alive = [
        broker_id
        for broker_id in now.isr
        if trio.brokers[broker_id].is_active and broker_id != now.leader
    ]
    if alive and now.leader > 0:
        trio.change(leader=draw.choice(alive))


def _restart(trio: Trio, draw: random.Random, node_id: int) -> None:
    trio.register(node_id)
    node = trio.nodes[node_id]
    node.restart(draw.randint(0, node.log.high_watermark))
    trio.messages = [each for each in trio.messages if each.target != node_id]


def _shrink(trio: Trio, _: random.Random, node_id: int) -> None:
    now = trio.registration
    if now.leader > 0 and node_id != now.leader and node_id in now.isr:
        trio.change(isr=tuple(each for each in now.isr if each != node_id))


ACTIONS = {
    lambda trio, _, node_id: trio.fetch(node_id): 60,
    _deliver: 120,
    lambda trio, draw, node_id: trio.produce(node_id, draw.getrandbits(32)): 20,
    lambda trio, _, node_id: trio.nodes[node_id].apply(): 40,
    lambda trio, _, node_id: trio.propose(node_id): 12,
    _pass_time: 4,
    lambda trio, _, node_id: trio.fence(node_id): 1,
    lambda trio, _, node_id: trio.unfence(node_id): 3,
    _elect: 3,
    _restart: 2,
    _shrink: 2,
}
"""The actions on a random broker, with their weights."""


def heal(trio: Trio) -> None:
    """Unfence all brokers, deliver all messages, and let every replica catch up."""
    for member in trio.members:
        if trio.brokers[member].fenced:
            trio.unfence(member)
    while trio.messages:
        trio.deliver(trio.messages[0])
    for _ in range(200):
        trio.settle()
        trio.now_ms += 1_000
        trio.round_trip(*trio.members)
        trio.alter_now(trio.registration.leader)


@pytest.mark.parametrize("min_isr", [1, 2])
def test_random_steps_keep_the_invariants_of_the_tla_models(min_isr: int):
    actions = tuple(ACTIONS), tuple(ACTIONS.values())
    seen = dict.fromkeys(AcksVerdict, 0)
    for seed in range(SEEDS):
        draw, trio = random.Random(f"{seed}/{min_isr}"), Trio(min_isr=min_isr)
        for at in range(STEPS):
            (act,) = draw.choices(*actions)
            act(trio, draw, draw.choice(trio.members))
            for invariant in INVARIANTS:
                try:
                    invariant(trio)
                except AssertionError as broken:
                    raise AssertionError(f"seed {seed}, step {at}: {broken}") from None
        heal(trio)
        for invariant in INVARIANTS:
            invariant(trio)
        leader = trio.nodes[trio.registration.leader]
        assert sorted(trio.registration.isr) == [1, 2, 3], f"seed {seed}"
        for member in trio.members:
            node = trio.nodes[member]
            assert node.log.records == leader.log.records, f"seed {seed}, broker {member}"
            assert node.log.high_watermark == leader.log.log_end_offset, f"seed {seed}, {member}"
            assert node.is_leader or node.follower.state is FetchState.FETCHING
        for write in trio.writes:
            seen[write.verdict] += 1
    assert seen.pop(AcksVerdict.WAITING) == 0
    assert seen[AcksVerdict.DONE] > 50
    assert seen[AcksVerdict.NOT_LEADER_OR_FOLLOWER] > 20
