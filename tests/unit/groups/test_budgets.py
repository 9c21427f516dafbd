"""The memory that a budget counts is close to the real use, as docs/operating.md states."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from fencepost.groups.commands import CommitOffsets, JoinGroup, OffsetToCommit
from fencepost.groups.consumer_commands import ConsumerHeartbeat, Environment, TopicsImage
from fencepost.groups.limits import GroupLimits
from fencepost.groups.machine import GroupMachine
from fencepost.logcore.budget import Account

pytestmark = pytest.mark.slow

NAMES = 300
LIMITS = GroupLimits(max_group_size=1 << 20, max_groups=1 << 20)
ENOUGH = 4 << 20
"""The size in bytes to which a state grows before it is measured."""


def machine() -> tuple[GroupMachine, Account, Account]:
    topics = TopicsImage({"t": (bytes(16), 4_000)}, 1)
    memory, offset_memory = Account(), Account()
    made = GroupMachine(
        LIMITS,
        memory=memory,
        offset_memory=offset_memory,
        max_batch_bytes=lambda: 1 << 30,
        environment=lambda _: Environment(topics),
    )
    made.on_loaded(0)
    return made, memory, offset_memory


def join(number: int, group_id: str, metadata: bytes = b"") -> JoinGroup:
    return JoinGroup(
        group_id=group_id,
        member_id="",
        group_instance_id=f"instance-{number}",
        client_id=f"client-{number}",
        client_host="/127.0.0.1",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=(("range", metadata),),
        require_known_member_id=True,
        supports_skip_assignment=True,
        new_member_id=f"instance-{number}-{number:036}",
    )


def beat(number: int, names: tuple[str, ...]) -> ConsumerHeartbeat:
    return ConsumerHeartbeat(
        group_id=f"group-{number}",
        member_id=f"{number:036}",
        member_epoch=0,
        client_id=f"client-{number}",
        client_host="/127.0.0.1",
        rebalance_timeout_ms=10_000,
        subscribed_topic_names=names,
        owned=(),
    )


def names(number: int) -> tuple[str, ...]:
    return tuple(f"{number:06}.region.service-{at:04}.order-events" for at in range(NAMES))


COMMANDS: dict[str, Callable[[int], object]] = {
    "groups": lambda n: join(n, f"group-{n}"),
    "members": lambda n: join(n, "group"),
    "metadata": lambda n: join(n, "group", bytes([n % 256]) * 20_000),
    "subscriptions": lambda n: beat(n, names(n)),
    "partitions": lambda n: beat(n, ("t",)),
    "offsets": lambda n: CommitOffsets(
        "g", -1, "", None, (OffsetToCommit("t", n, n + 1_000, -1, "", bytes(range(16))),), -1, True
    ),
    "metadata of offsets": lambda n: CommitOffsets(
        "g", -1, "", None, (OffsetToCommit("t", n, n + 1_000, -1, f"{n:04000}"),), -1, True
    ),
}


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("kind", COMMANDS)
def test_budget_approximates_the_memory_taken_by_group_state(kind: str) -> None:
    made, memory, offset_memory = machine()
    before, number = tracemalloc.get_traced_memory()[0], 0
    while memory.used + offset_memory.used < ENOUGH:
        decision = made.decide(number, COMMANDS[kind](number), 1_000)
        for record in decision.records:
            made.replay(record, number, 1_000, None)
        del decision
        number += 1
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    used = memory.used + offset_memory.used
    print(f"{kind}: {taken / used:.2f} bytes taken for each that is counted")
    assert 0.3 * used < taken < 1.25 * used
    made.check()
