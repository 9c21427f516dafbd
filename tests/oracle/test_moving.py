"""Live members and open transactions of Apache Kafka continue on Fencepost.

Apache Kafka is killed while it has members and open transactions, and Fencepost imports its log.
Then Fencepost must answer the members and producers exactly as a restarted Apache Kafka with the
same log does.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.interchange import fencepost
from tests.oracle.moving import MOVES, Move, looked_at
from tests.oracle.test_traces import differences, unexpected
from tests.oracle.tracer import Step, Tracer
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka
from tests.support.targets import SETTINGS

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("java_tools"),
    pytest.mark.timeout(400),
]

SESSION_MS = {False: "600000", True: "8000"}
"""Session timeouts of consumer groups, short in scenarios that wait until a member expires."""


def settings(*, short: bool) -> dict[str, str]:
    return {
        **SETTINGS,
        "group.consumer.session.timeout.ms": SESSION_MS[short],
        "group.consumer.min.session.timeout.ms": SESSION_MS[short],
        "group.consumer.max.session.timeout.ms": SESSION_MS[short],
    }


# A killed broker stays fenced until its last session has expired.
QUICK_RETURN = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}


@dataclass
class Killed:
    """The files of a killed Apache Kafka, and its responses after a restart."""

    image: Path
    tracers: dict[str, Tracer]
    states: dict[str, Any]
    seen: dict[str, list[Step]]
    """The last responses of the admin APIs before the kill."""
    afterwards: dict[str, list[Step]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, java_tools: Path) -> Killed:
    root = tmp_path_factory.mktemp("moving")
    found = Killed(root / "image", {}, {}, {}, {})
    home = root / "first"
    home.mkdir()
    kafka = Kafka(home, {**settings(short=False), **QUICK_RETURN})
    try:
        kafka.start()
        for move in MOVES:
            tracer = Tracer(kafka.bootstrap)
            found.states[move.name] = move.before(tracer)
            tracer.steps.clear()
            found.tracers[move.name] = tracer
        for move in MOVES:
            tracer = found.tracers[move.name]
            looked_at(tracer, move.groups)
            found.seen[move.name] = list(tracer.steps)
            tracer.close()
    finally:
        kafka.stop()
    shutil.copytree(kafka.data_dir, found.image)
    for short in (False, True):
        home = root / f"again-{short}"
        home.mkdir()
        shutil.copytree(found.image, home / "data")
        again = Kafka(home, {**settings(short=short), **QUICK_RETURN})
        try:
            again.start()
            for move in MOVES:
                if move.is_short == short:
                    found.afterwards[move.name] = goes_on(move, found, again.bootstrap)
        finally:
            again.stop()
    return found


def goes_on(move: Move, found: Killed, bootstrap: str) -> list[Step]:
    tracer = found.tracers[move.name].after_a_move(bootstrap)
    try:
        looked_at(tracer, move.groups)
        move.after(tracer, found.states[move.name])
    finally:
        tracer.close()
    return tracer.steps


@pytest.fixture(scope="module")
def taken_over(
    killed: Killed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[bool, Daemon]]:
    """Yield two daemons with imported logs, one with long and one with short session timeouts."""
    directories = sorted(
        path
        for path in killed.image.glob("*-[0-9]*")
        if path.is_dir() and not path.name.startswith("__cluster_metadata")
    )
    daemons = {}
    for short in (False, True):
        daemon = Daemon(tmp_path_factory.mktemp("taken-over") / "data", settings(short=short))
        fencepost(
            *("log", "import", "--data-dir", daemon.data_dir, *directories),
            *("--config", "offsets.topic.num.partitions=4"),
        )
        daemons[short] = daemon
    yield daemons
    for daemon in daemons.values():
        if daemon.child is not None:
            daemon.stop()


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_members_and_transactions_of_kafka_continue_on_fencepost(
    move: Move, killed: Killed, taken_over: dict[bool, Daemon]
) -> None:
    daemon = taken_over[move.is_short]
    if daemon.child is None:
        daemon.start()
    ours, theirs = goes_on(move, killed, daemon.bootstrap), killed.afterwards[move.name]
    found = unexpected(move.name, ours, theirs)
    assert not found, f"{len(found)} differences:\n" + "\n".join(found)
    before = killed.seen[move.name]
    for (step, saw), (_, sees) in zip(before, ours[: len(before)], strict=True):
        assert not differences(sees, saw), step
