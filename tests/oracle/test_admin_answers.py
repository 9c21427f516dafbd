"""The admin APIs' responses in mixed clusters equal recorded responses (``tests/answers``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.answers.clusters import MODES, WITHOUT_JAVA
from tests.answers.recording import differences, play, recorded
from tests.support.kafka import required

pytestmark = pytest.mark.oracle


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in WITHOUT_JAVA])
def test_admin_responses_of_a_mixed_cluster_equal_the_recorded_ones(
    mode: str, tmp_path: Path
) -> None:
    with required(), MODES[mode](tmp_path) as places:
        found = differences(play(places), recorded(mode))
    assert not found, f"{len(found)} differences:\n" + "\n".join(found)
