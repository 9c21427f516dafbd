"""Request sequences about feature levels, and about transactions while levels change."""

from __future__ import annotations

from typing import Any, Final

from tests.oracle.tracer import Tracer
from tests.oracle.traces_txn import Identity, add, claimed, end, ended, init, produce, settle
from tests.support import requests
from tests.support.waits import until

FEATURE = "transaction.version"
UPGRADE, SAFE, UNSAFE = 1, 2, 3


def level(t: Tracer) -> int:
    """Return the finalized level of transaction.version, 0 if there is none."""
    answer = t.cluster.ask("api_versions", 4, requests.api_versions())
    found = {
        feature["name"]: feature["max_version_level"] for feature in answer["finalized_features"]
    }
    return int(found.get(FEATURE, 0))


def update(t: Tracer, version: int, *updates: dict[str, Any], **more: Any) -> None:
    t("update_features", version, **requests.update_features(*updates, **more))


def to(number: int, kind: int = SAFE, feature: str = FEATURE) -> dict[str, Any]:
    """Return one update with the fields of all versions."""
    return requests.feature_update(feature, number, kind)


def move(t: Tracer, number: int) -> None:
    """Change the level, and wait until the broker has replayed it."""
    update(t, 2, to(number, SAFE if number < level(t) else UPGRADE))
    until(lambda: level(t) == number, f"{FEATURE} {number}")


UPDATES: Final = (
    to(3, UPGRADE),
    to(-1, SAFE),
    to(1, UPGRADE),
    to(1, UPGRADE, "no.such.feature"),
    to(0, SAFE, "no.such.feature"),
    to(1, UPGRADE, ""),
    to(2, UPGRADE),
)
"""Updates that are refused, or that leave the level at 2."""


def updating_features(t: Tracer) -> None:
    until(lambda: level(t) == 2, "the level to begin with")
    for version in (0, 1, 2):
        for change in UPDATES:
            update(t, version, change)
        update(t, version)
        update(t, version, to(2, UPGRADE), to(9, UPGRADE, "group.version"))
    for version in (1, 2):
        for kind in (0, 4, -1):
            update(t, version, to(1, kind))
        for kind in (UPGRADE, SAFE, UNSAFE):
            update(t, version, to(2, kind))
            update(t, version, to(3, kind))
            update(t, version, to(1, kind), validate_only=True)
            t.note("level", level(t))
    for version, change, reached in (
        (1, to(0), 0),
        (0, to(2, UPGRADE), 2),
        (1, to(0), 0),
        (1, to(1, UPGRADE), 1),
        (2, to(0, UNSAFE), 0),
        (2, to(2, UPGRADE), 2),
    ):
        update(t, version, change)
        until(lambda reached=reached: level(t) == reached, f"{FEATURE} {reached}")
    move(t, 1)
    for kind in (SAFE, UNSAFE):
        update(t, 2, to(2, kind))
    move(t, 2)


def lowering_by_version_0(t: Tracer) -> None:
    until(lambda: level(t) == 2, "the level to begin with")
    update(t, 0, to(1))
    if level(t) != 2:
        t.quietly("update_features", 2, **requests.update_features(to(2, UPGRADE)))
        until(lambda: level(t) == 2, "the level of before")


def levels_that_move_under_open_transactions(t: Tracer) -> None:
    t.cluster.create_topic("moving")
    until(lambda: level(t) == 2, "the level to begin with")
    for begun, then in ((2, 1), (1, 2), (0, 2)):
        for how in ("commit", "abort", "takeover"):
            name = f"moving-{begun}-{then}-{how}"
            move(t, begun)
            who = claimed(t, name)
            if begun == 2:
                produce(t, 12, "moving", name, who, 0)
            else:
                add(t, 3, name, who, [("moving", [0])])
                produce(t, 9, "moving", name, who, 0)
            move(t, then)
            produce(t, 12 if begun == 2 else 9, "moving", name, who, 1)
            if how == "takeover":
                init(t, name)
            else:
                end(t, 5 if begun == 2 else 4, name, who, how == "commit")
            ended(t, name)
            settle(t, "moving")
            if how != "takeover":
                t("describe_transactions", 0, transactional_ids=[name])
            # The next transaction uses the protocol of the other transaction version.
            again = claimed(t, name)
            if then == 2:
                produce(t, 12, "moving", name, again, 0)
            else:
                add(t, 3, name, again, [("moving", [0])])
                produce(t, 9, "moving", name, again, 0)
            end(t, 5 if then == 2 else 4, name, again, True)
            ended(t, name)
            settle(t, "moving")
    move(t, 2)


def level_0_under_ids_of_level_2(t: Tracer) -> None:
    topic = "lowered"
    t.cluster.create_topic(topic, 2)
    until(lambda: level(t) == 2, "the level to begin with")

    def begun(name: str) -> Identity:
        who = claimed(t, name)
        produce(t, 12, topic, name, who, 0)
        return who

    finished = begun("lowered-finished")
    end(t, 5, "lowered-finished", finished, True)
    ended(t, "lowered-finished")
    begun("lowered-taken")
    old, new, growing = (begun(f"lowered-{name}") for name in ("old", "new", "growing"))
    move(t, 0)
    # Apache Kafka can handle these requests, because their records can be written in version 0.
    end(t, 4, "lowered-old", old, True)
    ended(t, "lowered-old")
    add(t, 3, "lowered-old", claimed(t, "lowered-old"), [(topic, [0])])
    init(t, "lowered-taken")
    claimed(t, "lowered-fresh")
    # These requests fail, because their records need the field for clients of level 2.
    for _ in range(2):
        init(t, "lowered-finished")
        end(t, 5, "lowered-new", new, True)
    produce(t, 12, topic, "lowered-growing", growing, 0, partition=1)
    end(t, 5, "lowered-growing", growing, False)
    t.note("readers wait", t.cluster.lso(topic) < t.cluster.offset(topic))
    move(t, 2)
    # The transition that Apache Kafka could not write stays pending until the log is loaded again.
    init(t, "lowered-finished")


TRACES = [
    updating_features,
    lowering_by_version_0,
    levels_that_move_under_open_transactions,
    level_0_under_ids_of_level_2,
]
