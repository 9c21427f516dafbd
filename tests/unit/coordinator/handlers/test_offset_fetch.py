"""OffsetFetch requests whose client disconnects before the response."""

from __future__ import annotations

import asyncio
import gc
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kio.schema.offset_fetch.v9.request import OffsetFetchRequest, OffsetFetchRequestGroup

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.handlers.offset_fetch import run
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import Entity


async def test_errors_of_an_abandoned_offset_fetch_are_not_reported(tmp_path: Path) -> None:
    """The errors of groups that were already queried are dropped."""
    told: list[dict[str, Any]] = []
    stranger = OffsetFetchRequestGroup(
        group_id="g", topics=(), member_id="stranger", member_epoch=5
    )
    async with Broker(tmp_path) as broker:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        asked = OffsetFetchRequest(groups=(stranger,), require_stable=False)
        context = SimpleNamespace(
            broker=broker.services, body=asked, version=9, origin=None, may=lambda *_, **__: True
        )
        work = cast("Work[Entity]", run(cast("Context", context)))
        assert list(itertools.islice(work, 1)) == [None]
        cast("Any", work).close()
        del work
        gc.collect()
        await asyncio.sleep(0)
    assert told == []
