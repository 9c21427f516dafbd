"""``bench.sections`` replaces functions of the broker, which must exist."""

from __future__ import annotations

from bench.sections import Clocks
from fencepost.coordinator.handlers import Registry
from fencepost.logcore.partition import Partition


def test_clocks_replace_the_timed_functions_and_put_them_back() -> None:
    appends, handler = Partition.append_validated, Registry.handler
    with Clocks().placed():
        assert Partition.append_validated is not appends
        assert Registry.handler is not handler
    assert (Partition.append_validated, Registry.handler) == (appends, handler)
