"""Client-side assignors and their bytes, compared with Apache Kafka's assignors in one JVM.

The assignments are compared byte for byte, including the order: Kafka's order follows from its
hash tables, and ``fencepost.groups.assignors.client.java_order`` iterates in the same order.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fencepost.groups.assignors.client.protocol import (
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from fencepost.groups.assignors.client.sticky import former_of
from fencepost.groups.assignors.testing import check_client_result
from tests.support.assignor_cases import ASSIGNORS, Case, cases
from tests.support.kafka import run_tool

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools")]

SEED, CASES = 20130101, 6_000
MAIN = Path(__file__).with_name("ClientAssignors.java")

MOST_SPARED = CASES // 30
"""The maximum number of cases that are not compared because of :func:`returns_to_a_stranger`."""


def returns_to_a_stranger(case: Case) -> bool:
    """Return whether a member claims a topic to which it is not subscribed, in an old generation.

    Kafka's general algorithm may nevertheless assign the partition to the member, or fail because
    it has removed the member (NullPointerException in performReassignments). Fencepost ignores the
    claim.
    """
    if case.assignor not in {"sticky", "cooperative-sticky"}:
        return False
    claims = {name: former_of(case.assignor, member) for name, member in case.members.items()}
    newest = max((claim.generation for claim in claims.values()), default=-1)
    alike = len({member.topics for member in case.members.values()}) == 1
    return not alike and any(
        claim.generation < newest and topic not in case.members[name].topics
        for name, claim in claims.items()
        for topic, _ in claim.partitions
    )


def asked(case: Case) -> str:
    return json.dumps(
        {
            "assignor": case.assignor,
            "topics": {
                name: [sorted(racks) for racks in rows] for name, rows in case.topics.items()
            },
            "members": [
                [name, member.instance_id, encode_subscription(member).hex()]
                for name, member in case.members.items()
            ],
        }
    )


def test_client_assignors_make_the_assignments_of_kafkas(tmp_path: Path) -> None:
    made = list(cases(SEED, CASES))
    questions, answers = tmp_path / "cases.jsonl", tmp_path / "answers.jsonl"
    questions.write_text("".join(asked(case) + "\n" for case in made))
    run_tool(str(MAIN), str(questions), str(answers), deadline_s=200)
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(rows) == CASES
    spared = 0
    for number, (case, row) in enumerate(zip(made, rows, strict=True)):
        where = f"case {number} of seed {SEED}: {case}"
        for name, member in case.members.items():
            ours = [encode_subscription(member, version).hex() for version in range(4)]
            assert ours == row["subscriptions"][name], where
            assert decode_subscription(bytes.fromhex(ours[3]), member.instance_id) == member
        assignor = ASSIGNORS[case.assignor]
        result = assignor.assign(case.topics, case.members)
        check_client_result(assignor, case.topics, case.members, result)
        if returns_to_a_stranger(case):
            spared += 1
            continue
        assert "error" not in row, where
        given = {name: encode_assignment(mine).hex() for name, mine in result.items()}
        assert given == row["assignments"], where
        for name, mine in result.items():
            data = assignor.user_data(mine, 7)
            assert (None if data is None else data.hex()) == row["user_data"][name], where
    assert spared <= MOST_SPARED
