"""The state transitions of a record."""

from __future__ import annotations

import pytest

from fencepost.groups.share.diagram import states
from fencepost.groups.share.states import (
    TRANSITIONS,
    Cause,
    RecordState,
    require_legal,
    throttle_count,
)
from fencepost.logcore.machine import InvariantViolation
from tests.test_tidy import ROOT


def test_terminal_states_are_left_only_by_a_rollback() -> None:
    for (old, new), causes in TRANSITIONS.items():
        if old is not None and old.is_terminal:
            assert (new, causes) == (RecordState.ACQUIRED, (Cause.ROLLED_BACK,))


def test_every_other_transition_is_an_invariant_violation() -> None:
    for old in (None, *RecordState):
        for new in RecordState:
            for cause in Cause:
                if cause in TRANSITIONS.get((old, new), ()):
                    require_legal(old, new, cause)
                else:
                    with pytest.raises(InvariantViolation):
                        require_legal(old, new, cause)


@pytest.mark.parametrize(
    ("limit", "count"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 3), (6, 3), (10, 5)]
)
def test_throttling_begins_at_half_the_limit_and_not_below_2(limit: int, count: int) -> None:
    assert throttle_count(limit) == count


def test_readme_shows_the_table() -> None:
    assert states() in (ROOT / "groups" / "share" / "README.md").read_text()
