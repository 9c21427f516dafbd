"""Random requests to Apache Kafka and to Fencepost, step by step, must get the same responses.

Each of ``SEEDS`` determines a *life*, a sequence of the requests of many clients (``tests/lives``).
New brokers get each life. It ends when enough responses have been compared, or when an intended
difference makes the brokers' states differ. ``make compared-lives SEED=7 N=1000`` uses another
seed, for as many lives as it takes to compare 1000 responses. A difference whose kind is not in
deliberate.py fails the test.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.lives.life import ROLES, SHARE_ROLES, Life
from tests.lives.lockstep import Difference, LockStep
from tests.oracle.deliberate import NOT_DRAWN, Kind, kind_of
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, required
from tests.support.targets import SETTINGS

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(7200)]

CLIENTS = 12
SEEDS = (22, 27, 29)
SHARE_SEEDS = (1, 2)
"""Seeds of lives in which some clients are share consumers."""
REQUESTS = 300
LEAST = 100
"""Each seed must have this many compared responses; the number varies with random ids."""


HOUR = str(3_600_000)
PATIENT = {
    **SETTINGS,
    "group.share.max.record.lock.duration.ms": HOUR,
    "group.share.record.lock.duration.ms": HOUR,
    "group.share.max.session.timeout.ms": HOUR,
    "group.share.session.timeout.ms": HOUR,
}
"""Settings with which no acquisition lock and no session of a share group's member expires."""


def judged(found: list[Difference], seen: Counter[Kind]) -> bool:
    """Count the kinds of a step's differences; return whether the comparison can continue.

    AssertionError for a difference that is of no listed kind.
    """
    kinds = [kind_of(difference) for difference in found]
    seen.update({kind for kind in kinds if kind is not None})
    if any(kind is not None and kind.parts for kind in kinds):
        return False
    strange = [
        str(difference) for difference, kind in zip(found, kinds, strict=True) if kind is None
    ]
    assert not strange, f"{len(strange)} differences:\n" + "\n".join(strange)
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--seed")
        known = SHARE_SEEDS if "share" in metafunc.function.__name__ else SEEDS
        metafunc.parametrize("seed", known if asked is None else [asked])


def test_random_requests_get_the_same_responses(
    seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    compare_lives(seed, ROLES, tmp_path, request)


def test_random_requests_of_share_consumers_get_the_same_responses(
    seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    compare_lives(seed, SHARE_ROLES, tmp_path, request)


def compare_lives(
    seed: int, roles: Sequence[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_asked = request.config.getoption("--seed") is not None
    requests = request.config.getoption("--requests") or REQUESTS
    compared, lives, seen = 0, 0, Counter[Kind]()
    while compared < requests and (is_asked or lives == 0):
        lives += 1
        life = Life(f"{seed} {lives}", clients=CLIENTS, stem="life-", calm=True, roles=roles)
        try:
            compared += led(life, tmp_path / f"{lives}", requests - compared, seen)
        except Exception as broke:
            at = f"in life {lives}, behind {compared} answers of those before"
            repeat = f"make compared-lives SEED={seed} N={requests}"
            raise AssertionError(f"{broke}\n{at}\n{repeat}") from broke
    print(f"\n{compared} answers compared in {lives} lives; steps with a known difference:")
    for kind, steps in seen.most_common():
        print(f"{steps:5}  {kind}")
    print("never drawn:", *NOT_DRAWN, sep="\n       ")
    assert is_asked or compared >= LEAST, f"the brokers part too soon: {seed} is no seed for SEEDS"


def led(life: Life, root: Path, most: int, seen: Counter[Kind]) -> int:
    """Compare up to ``most`` responses, until the states differ; return the number."""
    with brokers(root) as (ours, theirs):
        lockstep = LockStep(life, ours, theirs)
        try:
            goes_on = judged(lockstep.prologue(), seen)
            while goes_on and lockstep.compared < most:
                goes_on = judged(lockstep.step(), seen)
        finally:
            lockstep.close()
    return lockstep.compared


@contextlib.contextmanager
def brokers(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the addresses of a new broker of Fencepost and a new broker of Apache Kafka."""
    (root / "kafka").mkdir(parents=True)
    with required():
        kafka = Kafka(root / "kafka", PATIENT)
        kafka.start()
    try:
        daemon = Daemon(root / "fencepost", PATIENT).start()
        try:
            yield daemon.bootstrap, kafka.bootstrap
        finally:
            daemon.stop()
    finally:
        kafka.stop()


def test_only_listed_differences_are_accepted() -> None:
    def found(theirs: object, member_epoch: int) -> Difference:
        body = {"member_epoch": member_epoch}
        return Difference("consumer_group_heartbeat", 1, ".error_code", "none", theirs, 9, body)

    seen = Counter[Kind]()
    assert judged([], seen)
    assert not judged([found("fenced_member_epoch", 1)], seen)
    assert seen.total() == 1
    for other in (found("fenced_member_epoch", 0), found("unknown_member_id", 1)):
        with pytest.raises(AssertionError, match="consumer_group_heartbeat v1"):
            judged([other], seen)
