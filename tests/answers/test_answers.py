"""A single broker, and two brokers under a controller, respond as recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.answers.clusters import MODES, WITHOUT_JAVA
from tests.answers.recording import differences, play, record, recorded


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=() if mode == "alone" else pytest.mark.slow)
        for mode in WITHOUT_JAVA
    ],
)
def test_answers_are_those_recorded(mode: str, tmp_path: Path) -> None:
    with MODES[mode](tmp_path) as places:
        found = differences(play(places), recorded(mode))
    assert not found, f"{len(found)} differences:\n" + "\n".join(found)


def test_changed_answer_is_a_difference() -> None:
    asked = ("delete_topics v6", {"topics": []})
    expected = {"part": [(*asked, {"error_code": "none"}), (*asked, 1)]}
    assert differences(expected, expected) == []
    assert differences({"part": [(*asked, {"error_code": "x"}), (*asked, 1)]}, expected) == [
        'part: delete_topics v6 {"topics":[]}\n    .error_code: "x" instead of "none"'
    ]


def test_missing_and_new_requests_are_differences() -> None:
    asked = ("delete_topics v6", {"topics": []})
    expected = {"part": [(*asked, 1)]}
    assert len(differences({"part": [(*asked, 1), (*asked, 1)]}, expected)) == 1
    assert len(differences({"part": []}, expected)) == 1
    assert len(differences({}, expected)) == 1
    assert len(differences({**expected, "other": [(*asked, 1)]}, expected)) == 1


def test_recording_keeps_answers_of_other_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.answers.recording.RECORDED", tmp_path)
    first, second = ("a v1", {"x": 1}, "told"), ("b v1", None, ["other"])
    record("alone", {"part": [first, second, first]})
    record("own controller", {"part": [first, (*second[:2], [])]})
    assert recorded("alone") == {"part": [first, second, first]}
    assert recorded("own controller") == {"part": [first, (*second[:2], [])]}
    assert recorded("ZooKeeper") == {}
    record("alone", {"part": [second]})
    assert recorded("alone") == {"part": [second]}
    assert recorded("own controller") == {"part": [first, (*second[:2], [])]}
