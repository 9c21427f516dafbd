from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.logcore.checkpoints import LEADER_EPOCH_CHECKPOINT, write_epochs
from fencepost.logcore.epochs import LeaderEpochs
from fencepost.logcore.fs import OsFileSystem

FS = OsFileSystem()


def epochs(path: Path, *entries: tuple[int, int]) -> LeaderEpochs:
    cache = LeaderEpochs(FS, str(path))
    for epoch, start in entries:
        cache.assign(epoch, start)
    return cache


def flush(cache: LeaderEpochs) -> bool:
    """Write the epochs as a flush of the log does; return whether there were any changes."""
    entries = cache.plan_flush()
    if entries is not None:
        write_epochs(FS, cache._directory, entries)
    return entries is not None


def test_assigning_the_same_epoch_again_changes_nothing(tmp_path: Path) -> None:
    cache = epochs(tmp_path, (1, 0))
    assert flush(cache)
    cache.assign(1, 10)
    assert cache.entries == [(1, 0)]
    assert not flush(cache)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ((5, 60), [(1, 0), (3, 20), (4, 50), (5, 60)]),
        ((5, 50), [(1, 0), (3, 20), (5, 50)]),
        ((5, 10), [(1, 0), (5, 10)]),
        ((3, 60), [(1, 0), (3, 60)]),
        ((2, 0), [(2, 0)]),
    ],
)
def test_assigned_epoch_removes_conflicting_entries(
    tmp_path: Path, entry: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    cache = epochs(tmp_path, (1, 0), (3, 20), (4, 50))
    cache.assign(*entry)
    assert cache.entries == expected
    flush(cache)
    again = LeaderEpochs(FS, str(tmp_path))
    assert again.load()
    assert again.entries == expected


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [
        (-1, (-1, -1)),
        (0, (0, 10)),
        (2, (2, 30)),
        (3, (2, 30)),
        (5, (5, 99)),
        (6, (-1, -1)),
    ],
)
def test_end_offset_for_an_epoch_is_the_start_of_the_next_epoch(
    tmp_path: Path, epoch: int, expected: tuple[int, int]
) -> None:
    assert epochs(tmp_path, (2, 10), (5, 30)).end_offset_for(epoch, 99) == expected


def test_empty_epoch_cache_has_no_end_offset_and_no_epoch(tmp_path: Path) -> None:
    cache = epochs(tmp_path)
    assert not cache.load()
    assert cache.end_offset_for(0, 5) == (-1, -1)
    assert cache.epoch_at(5) == -1


def test_truncation_removes_epochs_at_either_end(tmp_path: Path) -> None:
    cache = epochs(tmp_path, (1, 0), (3, 20), (4, 50))
    cache.truncate_from_end(50)
    assert cache.entries == [(1, 0), (3, 20)]
    assert cache.latest == 3
    cache.truncate_from_start(25)
    assert cache.entries == [(3, 25)]
    cache.truncate_from_start(10)
    assert cache.entries == [(3, 25)]
    cache.truncate_from_end(25)
    assert (cache.entries, cache.latest) == ([], -1)


def test_damaged_epoch_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    epochs(tmp_path, (1, 0))
    (tmp_path / LEADER_EPOCH_CHECKPOINT).write_text("0\n2\n1 0\n")
    assert not LeaderEpochs(FS, str(tmp_path)).load()


@settings(deadline=None)  # it syncs
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("assign"), st.integers(0, 12), st.integers(0, 100)),
            st.tuples(st.just("end"), st.integers(0, 100), st.just(0)),
            st.tuples(st.just("start"), st.integers(0, 100), st.just(0)),
        ),
        max_size=25,
    )
)
def test_epoch_entries_increase_strictly_and_equal_the_file(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("epochs")
    cache = LeaderEpochs(FS, str(path))
    for kind, first, second in steps:
        if kind == "assign":
            cache.assign(first, second)
        elif kind == "end":
            cache.truncate_from_end(first)
        else:
            cache.truncate_from_start(first)
        entries = cache.entries
        assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(entries))
        assert cache.latest == (entries[-1][0] if entries else -1)
    flush(cache)
    again = LeaderEpochs(FS, str(path))
    again.load()
    assert again.entries == cache.entries
