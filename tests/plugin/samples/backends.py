"""Coroutine tests on each of anyio's backends, without a client."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[name for name in ("asyncio", "trio") if find_spec(name)])
def anyio_backend(request):
    return request.param


async def test_aio_methods_work_on_either_backend(kafka, anyio_backend_name):
    orders = await kafka.aio.topic("orders", partitions=2)
    await kafka.aio.produce(orders, anyio_backend_name, "second")
    seen = await kafka.aio.records(orders, at_least=2)
    assert {record.value for record in seen} == {anyio_backend_name.encode(), b"second"}
    await kafka.aio.crash()
    await kafka.aio.restart()
    assert await kafka.aio.records(orders) == seen
    with pytest.raises(TimeoutError, match="there is no group"):
        await kafka.aio.wait_for_group("shop", timeout=0.05)
