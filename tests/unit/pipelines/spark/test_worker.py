"""Only imported code is excluded from garbage collection."""

from __future__ import annotations

import gc
import socket
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest

from fencepost.pipelines.spark import worker
from fencepost.pipelines.spark.worker import prompt, settle

pytestmark = pytest.mark.usefixtures("refrozen")


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker, "_modules_seen", 0)
    monkeypatch.setattr(worker, "_to_jvm", None)
    yield
    gc.unfreeze()


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_imported_code_is_frozen_and_later_garbage_is_collected(
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


def test_garbage_is_collected_before_freezing(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = weakref.ref(Node())
    monkeypatch.setitem(sys.modules, "imported_after_that", ModuleType("m"))
    settle()
    assert watched() is None


def test_objects_are_frozen_again_after_later_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    settle()
    kept = [Node() for _ in range(1_000)]
    more = {id(node) for node in kept}
    assert more <= {id(tracked) for tracked in gc.get_objects()}
    monkeypatch.setitem(sys.modules, "imported_once_more", ModuleType("m"))
    settle()
    assert more.isdisjoint(id(tracked) for tracked in gc.get_objects()), (
        "what is frozen is not listed"
    )


def test_tcp_nodelay_is_set_on_the_connection_to_the_jvm() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    pair = socket.socketpair()
    with near, far, pair[0], pair[1]:
        prompt()
        for end in (near, far):
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert worker._to_jvm is not None
        found = {stream.getsockname() for stream in worker._to_jvm}
        assert {near.getsockname(), far.getsockname()} <= found
        assert all(stream.family != socket.AF_UNIX for stream in worker._to_jvm)
        for stream in worker._to_jvm:
            stream.close()
