"""The methods of a broker or a cluster under test, for coroutines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from fencepost.testing.under_test import KafkaUnderTest

K = TypeVar("K", bound=KafkaUnderTest)
P = ParamSpec("P")
T = TypeVar("T")


def beside(
    method: Callable[Concatenate[K, P], T],
) -> Callable[Concatenate[Aio[K], P], Coroutine[Any, Any, T]]:
    """Return a coroutine function that runs ``method`` in a thread."""

    @wraps(method)
    async def call(self: Aio[K], *args: P.args, **kwargs: P.kwargs) -> T:
        return await _in_thread(partial(method, self.kafka, *args, **kwargs))

    return call  # type: ignore[return-value]  # it takes its ``self`` by position only


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # Without asyncio, coroutines run on trio, which is then already imported.
        trio = sys.modules["trio"]
        result: T = await trio.to_thread.run_sync(work)
        return result
    return await asyncio.to_thread(work)


class Aio(Generic[K]):
    """``kafka.aio``: each method runs in a thread, so that the test's loop continues."""

    def __init__(self, kafka: K) -> None:
        self.kafka = kafka

    acl = beside(KafkaUnderTest.acl)
    feature = beside(KafkaUnderTest.feature)
    produce = beside(KafkaUnderTest.produce)
    records = beside(KafkaUnderTest.records)
    wait_for_group = beside(KafkaUnderTest.wait_for_group)
    wait_for_fetch = beside(KafkaUnderTest.wait_for_fetch)
    shares = beside(KafkaUnderTest.shares)
    wait_for_shares = beside(KafkaUnderTest.wait_for_shares)
    committed = beside(KafkaUnderTest.committed)
    assert_committed = beside(KafkaUnderTest.assert_committed)
    transactions = beside(KafkaUnderTest.transactions)
    history = beside(KafkaUnderTest.history)
