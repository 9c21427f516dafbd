"""Imported code is out of garbage collection, and nothing else is."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest

from fencepost.pipelines.spark import worker
from fencepost.pipelines.spark.worker import settle


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker, "_modules_seen", 0)
    yield
    gc.unfreeze()


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_imported_is_left_alone_and_later_garbage_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "imported_for_the_first_time", ModuleType("m"))
    settle()
    frozen = gc.get_freeze_count()
    assert frozen > 1_000
    later = [Node() for _ in range(1_000)]
    settle()
    assert gc.get_freeze_count() <= frozen, "nothing was imported since"
    watched = weakref.ref(later[0])
    del later
    gc.collect()
    assert watched() is None


def test_garbage_of_the_work_before_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = weakref.ref(Node())
    monkeypatch.setitem(sys.modules, "imported_after_that", ModuleType("m"))
    settle()
    assert watched() is None


def test_modules_that_came_later_are_left_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    settle()
    kept = [Node() for _ in range(1_000)]
    more = {id(one) for one in kept}
    assert more <= {id(one) for one in gc.get_objects()}
    monkeypatch.setitem(sys.modules, "imported_once_more", ModuleType("m"))
    settle()
    assert more.isdisjoint(id(one) for one in gc.get_objects()), "what is frozen is not listed"
