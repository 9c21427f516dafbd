"""The check for records that a producer may have duplicated under a new epoch."""

from __future__ import annotations

import pytest

from fencepost.logcore.batch import parse_header
from tests.support.batches import batch
from tests.support.epochs import check_epochs, check_runs, runs_of

SENT = "abcdef"


@pytest.mark.parametrize(
    "runs",
    [
        ["abcdef"],
        ["abc", "def"],
        ["abc", "bcdef"],
        ["abc", "abcdef"],
        ["abcdef", "ef"],
        ["abcd", "cde", "ef"],
    ],
)
def test_next_epoch_may_repeat_the_end_of_the_former_epoch(runs: list[str]) -> None:
    check_runs("t-0", runs, SENT)


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        (["abccdef"], "in one epoch"),
        (["abcabcdef"], "in one epoch"),
        (["abdcef"], "in one epoch"),
        (["abcdef", "cdcd"], "in one epoch"),
        (["abdef"], "in one epoch"),
        (["abc", "ef"], "after"),
        (["bcdef", "abc"], "after"),
        (["abcd", "d"], "['e', 'f'] of 6"),
        (["bcdef"], "['a'] of 6"),
        ([], "of 6"),
        (["abcdef", "x"], "was not sent"),
    ],
)
def test_other_repetitions_and_gaps_are_reported(runs: list[str], told: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_runs("t-0", runs, SENT)
    assert told in str(caught.value)


def test_runs_are_grouped_by_producer_id_and_epoch() -> None:
    header = parse_header(batch([b""], producer_id=3, producer_epoch=0, sequence=0))
    batches = [
        (header, "ab"),
        (header._replace(producer_epoch=1), "bc"),
        (header._replace(producer_id=4), "c"),
        (header._replace(producer_epoch=1), "d"),
    ]
    assert runs_of(batches) == {(3, 0): ["a", "b"], (3, 1): ["b", "c", "d"], (4, 0): ["c"]}


def test_more_epochs_than_the_faults_explain_are_reported() -> None:
    check_epochs("t-0", 2, 1)
    check_epochs("t-0", 3, 10)
    with pytest.raises(AssertionError, match="3 epochs, 9 faults"):
        check_epochs("t-0", 3, 9)
