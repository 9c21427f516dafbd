"""One life led on Apache Kafka and on Fencepost, step by step; the answers must be the same.

``make compared-lives SEED=7 N=1000`` leads one until so many answers are compared. Kinds of
difference that are known stand in deliberate.py; after one that leaves the brokers with different
things another life begins. Any other kind fails the run.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.lives.life import Life
from tests.lives.lockstep import Difference, LockStep
from tests.oracle.deliberate import KINDS, NOT_DRAWN, Kind
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(7200)]

CLIENTS = 12


def kind_of(found: Difference) -> Kind | None:
    """The listed kind that a difference is of, if any."""
    where = re.sub(r"\[\d+\]", "[]", found.where)
    for kind in KINDS:
        listed = kind.api, kind.where, kind.ours, kind.theirs
        told = found.api, where, found.ours, found.theirs
        if all(one in (..., seen) for one, seen in zip(listed, told, strict=True)) and kind.when(
            found.request
        ):
            return kind
    return None


def judged(found: list[Difference], seen: Counter[Kind]) -> bool:
    """Count the kinds of one step's differences; whether the life goes on. Others are an error."""
    kinds = [kind_of(one) for one in found]
    seen.update({kind for kind in kinds if kind is not None})
    if any(kind is not None and kind.parts for kind in kinds):
        return False
    strange = [str(one) for one, kind in zip(found, kinds, strict=True) if kind is None]
    assert not strange, f"{len(strange)} differences:\n" + "\n".join(strange)
    return True


def test_a_life_is_answered_the_same(
    kafka: Kafka, fencepost: Daemon, request: pytest.FixtureRequest
) -> None:
    seed, requests = (request.config.getoption(name) for name in ("--seed", "--requests"))
    compared, lives, seen = 0, 0, Counter[Kind]()
    while compared < requests:
        lives += 1
        life = Life(f"{seed} {lives}", clients=CLIENTS, stem=f"life{lives}-", calm=True)
        lockstep = LockStep(life, fencepost.bootstrap, kafka.bootstrap)
        try:
            goes_on = judged(lockstep.prologue(), seen)
            while goes_on and compared + lockstep.compared < requests:
                goes_on = judged(lockstep.step(), seen)
        except BaseException as broke:
            repeat = f"make compared-lives SEED={seed} N={requests}"
            at = f"in life {lives}, {compared + lockstep.compared} answers compared"
            raise AssertionError(f"{broke}\n{at}\n{repeat}") from broke
        finally:
            lockstep.close()
        compared += lockstep.compared
    print(f"\n{compared} answers compared in {lives} lives; steps with a known difference:")
    for kind, steps in seen.most_common():
        print(f"{steps:5}  {kind}")
    print("never drawn:", *NOT_DRAWN, sep="\n       ")


def test_only_listed_kinds_are_known() -> None:
    def found(theirs: object, instance_id: str | None) -> Difference:
        body = {"instance_id": instance_id}
        return Difference("consumer_group_heartbeat", 1, ".error_code", "none", theirs, 9, body)

    seen = Counter[Kind]()
    assert judged([], seen)
    assert not judged([found("unreleased_instance_id", "i")], seen)
    assert seen.total() == 1
    for other in (found("unreleased_instance_id", None), found("fenced_instance_id", "i")):
        with pytest.raises(AssertionError, match="consumer_group_heartbeat v1"):
            judged([other], seen)
