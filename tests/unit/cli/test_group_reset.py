"""The time and file arguments of ``groups reset-offsets``."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import click
import pytest

from fencepost.cli import group_reset
from fencepost.cli.group_reset import (
    OffsetAndMetadata,
    ResetTarget,
    moment_ms,
    read_file,
    undo_name,
    write_undo,
)

TEXT = 'a "quoted", two-line\n\r\ntext, ü'
NOW = dt.datetime(2013, 1, 31, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("P1D", dt.timedelta(days=1)),
        ("PT2H30M", dt.timedelta(hours=2, minutes=30)),
        ("P1DT1S", dt.timedelta(days=1, seconds=1)),
        ("P0D", dt.timedelta(0)),
    ],
)
def test_duration_is_subtracted_from_now(text, ago):
    assert moment_ms(ResetTarget(by_duration=text), NOW) == (NOW - ago).timestamp() * 1000


@pytest.mark.parametrize("text", ["", "P", "PT", "1D", "P1Y", "P-1D", "PT1H2D", "P9999999999D"])
def test_invalid_duration_is_refused(text):
    with pytest.raises(click.BadParameter):
        moment_ms(ResetTarget(by_duration=text), NOW)


def test_time_without_a_zone_is_utc():
    for text in ("2013-01-31T12:00:00.000", "2013-01-31T14:00:00+02:00", "12:00"):
        assert moment_ms(ResetTarget(to_datetime=text), NOW) == NOW.timestamp() * 1000


def test_undo_file_is_read_back_and_never_overwritten(tmp_path):
    name = str(tmp_path / "undo.csv")
    before = {
        ("a", 1): OffsetAndMetadata(7),
        ("c", 2): OffsetAndMetadata(9, 3),
        ("d", 0): OffsetAndMetadata(1, -1, TEXT),
    }
    write_undo(name, [("b", 0), *before], before)
    assert read_file(name) == {**before, ("b", 0): group_reset.NOTHING}
    lines = Path(name).read_text(encoding="utf-8")
    assert lines.startswith("a,1,7\nb,0,-1\nc,2,9,3,\nd,0,1,-1,")
    with pytest.raises(click.ClickException, match="undo file"):
        write_undo(name, [], {})


def test_undo_file_above_the_size_limit_is_not_written(tmp_path, monkeypatch):
    file = tmp_path / "undo.csv"
    monkeypatch.setattr(group_reset, "MAX_FILE_BYTES", 5)
    with pytest.raises(click.ClickException, match="fewer topics"):
        write_undo(str(file), [("t", 0)], {("t", 0): OffsetAndMetadata(1, 2, "long")})
    assert not file.exists()


@pytest.mark.parametrize(
    "line",
    [
        "a,0",
        "a,0,1,2",
        "a,0,1,x,m",
        "a,0,1,-2,m",
        "a,0,1,2,m,m",
        "a,x,1",
        "a,0,x",
        "a,-1,1",
        "a,0,-2",
        "",
    ],
)
def test_invalid_line_is_refused_with_its_number(tmp_path, line):
    file = tmp_path / "f.csv"
    file.write_text(f"good,0,1\n{line}\n")
    with pytest.raises(click.ClickException, match=r"f\.csv:2"):
        read_file(str(file))


def test_offsets_file_above_size_limit_or_with_duplicates_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "f.csv"
    file.write_text("t,0,1\n")
    monkeypatch.setattr(group_reset, "MAX_FILE_BYTES", 6)
    assert read_file(str(file)) == {("t", 0): OffsetAndMetadata(1)}
    monkeypatch.setattr(group_reset, "MAX_FILE_BYTES", 5)
    with pytest.raises(click.ClickException, match="longer"):
        read_file(str(file))
    monkeypatch.setattr(group_reset, "MAX_FILE_BYTES", 100)
    file.write_text("t,0,1\nt,0,2\n")
    with pytest.raises(click.ClickException, match=r"f\.csv:2"):
        read_file(str(file))


def test_undo_file_name_has_only_safe_characters_and_is_short():
    assert undo_name("a/../b c", NOW) == "undo-a_.._b_c-20130131T120000Z.csv"
    assert len(undo_name("x" * 5_000, NOW)) < 140
