"""Tests that the checks for random requests find violations."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.lives import admin, shares
from tests.lives.closed import broken
from tests.lives.judge import foreign, unlike
from tests.lives.life import SHARE_ROLES, Life, Step
from tests.support.batches import CONTROL, TRANSACTIONAL, batch


def shapes(life: Life, count: int) -> list[tuple[int, int, str, int]]:
    steps: list[Step] = [*life.prologue(), *(life.step() for _ in range(count))]
    return [(s.number, s.client, s.request.api, s.request.version) for s in steps]


def test_seed_determines_the_requests_of_a_life() -> None:
    assert shapes(Life(7), 3_000) == shapes(Life(7), 3_000)
    assert shapes(Life(7), 3_000) != shapes(Life(8), 3_000)


@pytest.mark.slow
@pytest.mark.parametrize("calm", [False, True])
def test_every_api_is_requested_in_every_version(calm: bool) -> None:
    from tests.lives.draw import VERSIONS

    life = Life(1, calm=calm)
    draw = life._draw
    asked = {row[2:] for row in shapes(life, 40_000)}
    served = set()
    for api in VERSIONS:
        low, high = draw.versions(api)
        served |= {(api, version) for version in range(low, high + 1)}
    # Feature levels would affect other tests on the broker; traces compare the admin APIs.
    makers = (*admin.REQUESTS, *shares.REQUESTS)
    left_out = {"update_features", *(make.__name__ for make in makers)} if calm else set()
    assert asked == {api for api in served if api[0] not in left_out}


def test_calm_life_of_share_consumers_sends_their_requests_in_every_version() -> None:
    from tests.lives.draw import VERSIONS

    wanted = {
        (make.__name__, version)
        for make in shares.OF_GROUPS
        for version in range(VERSIONS[make.__name__][0], VERSIONS[make.__name__][1] + 1)
    }
    asked = {row[2:] for row in shapes(Life(1, calm=True, roles=SHARE_ROLES), 2_000)}
    assert wanted <= asked
    assert not {make.__name__ for make in shares.OF_STATES} & {api for api, _ in asked}


def part(topic: str, error: str) -> dict[str, object]:
    return {
        "topics": [{"name": topic, "partitions": [{"partition_index": 0, "error_code": error}]}]
    }


def test_change_or_read_of_a_closed_internal_topic_is_a_violation() -> None:
    for topic, api in itertools.product(("__consumer_offsets", "topic-a"), ("delete_records",)):
        assert broken(api, {}, part(topic, "unknown_topic_or_partition")) == []
    assert broken("delete_records", {}, part("topic-a", "none")) == []
    assert broken("delete_records", {}, part("__transaction_state", "none")) != []
    assert broken("list_offsets", {}, part("__transaction_state", "none")) == []
    assert broken("list_offsets", {}, part("__cluster_metadata", "none")) != []
    # Coordinators write markers into the offsets topic, and administrators may do the same.
    assert broken("write_txn_markers", {}, part("__consumer_offsets", "none")) == []
    assert broken("write_txn_markers", {}, part("__fencepost_history", "none")) != []


def test_changed_state_of_a_reloaded_shard_is_found() -> None:
    def line(digest: str) -> str:
        return json.dumps(
            {"event": "shard loaded", "shard": "__consumer_offsets-1", "digest": digest}
        )

    before = {
        "__consumer_offsets-1": ["Active", 7, "abc"],
        "__consumer_offsets-2": ["Active", 0, ""],
    }
    assert unlike(before, ["listening", line("abc")]) == []
    assert unlike(before, [line("abd")]) != []
    assert unlike(before, ["listening"]) != []
    assert unlike({"__consumer_offsets-1": ["Failed", 7, "abc"]}, [line("abc")]) != []


@pytest.mark.parametrize(
    ("topic", "data", "is_foreign"),
    [
        ("__transaction_state", batch([b"state"]), False),
        ("__transaction_state", batch([b"71.0"]), True),
        (
            "__transaction_state",
            batch([b"state"], producer_id=3, producer_epoch=0, sequence=0),
            True,
        ),
        ("__cluster_metadata", batch([b"x"], key=b"\0\0\0\1", attributes=CONTROL), True),
        (
            "__consumer_offsets",
            batch([b"x"], key=b"\0\0\0\1", producer_id=1, attributes=0x30),
            False,
        ),
        (
            "__consumer_offsets",
            batch([b"x"], key=b"\0\0\0\2", producer_id=1, attributes=0x30),
            True,
        ),
        ("__consumer_offsets", batch([b"offset"], attributes=TRANSACTIONAL), True),
    ],
    # The parameters contain timestamps, so a case would have another name in each test worker.
    ids=itertools.count(),
)
def test_foreign_record_in_a_coordinator_log_is_found(
    tmp_path: Path, topic: str, data: bytes, is_foreign: bool
) -> None:
    (tmp_path / f"{topic}-0").mkdir()
    (tmp_path / f"{topic}-0" / f"{0:020}.log").write_bytes(data)
    assert bool(foreign(tmp_path)) == is_foreign
