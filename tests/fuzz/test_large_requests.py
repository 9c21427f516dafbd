"""A refused request leaves no memory behind, whatever its API."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from fencepost import Broker
from fencepost.coordinator.wire.api import APIS
from tests.support.large_requests import KNOWN, send_large
from tests.support.raw import RawClient
from tests.support.targets import SETTINGS

OURS = "fencepost."
CONFIG = {
    **SETTINGS,
    # Rules are asked for and kept, and nobody has to log in.
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker of this process with a topic and a transactional id."""
    with Broker.in_thread(tmp_path_factory.mktemp("data"), config=CONFIG) as broker:
        with RawClient(broker.bootstrap) as client:
            topic = {"name": KNOWN, "num_partitions": 2, "replication_factor": 1}
            client.call("create_topics", 5, topics=[topic], timeout=10_000)
            client.call("find_coordinator", 3, key=KNOWN, key_type=0)
            client.call("find_coordinator", 3, key=KNOWN, key_type=1)
            client.call("init_producer_id", 2, transactional_id=KNOWN, transaction_timeout=60_000)
        gc.collect()
        gc.freeze()  # what there is by now is not looked at again and again
        yield broker.bootstrap
        gc.unfreeze()


@pytest.mark.parametrize("api_key", sorted(APIS), ids=lambda key: APIS[key].name)
def test_large_request_leaves_no_cycle(bootstrap: str, api_key: int) -> None:
    """Reference counts alone free it: the collector may come late, or have set it aside."""
    send_large(bootstrap, api_key, 5, 100_000, random.Random(api_key))  # what is made once
    gc.collect()
    gc.disable()
    try:
        client = threading.Thread(
            target=send_large, args=(bootstrap, api_key, 20, 100_000, random.Random(api_key))
        )
        client.start()
        client.join()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = {_described(one) for one in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert [one for one in left if OURS in one] == []


def _described(one: object) -> str:
    if isinstance(one, FrameType):
        return f"frame of {one.f_globals.get('__name__')}.{one.f_code.co_name}"
    return f"{type(one).__module__}.{type(one).__qualname__}"
