"""A broker in a thread, and a client of the console that sends the token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp.test_utils import TestClient, TestServer

from fencepost import Broker
from fencepost.console.server import Console, ConsoleSettings
from tests.console.scenes import TOKEN
from tests.support.cluster import Cluster, unique
from tests.support.targets import SETTINGS


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = {**SETTINGS, "fencepost.history.enable": "true"}
    with Broker.in_thread(tmp_path_factory.mktemp("broker"), config=config) as broker:
        yield broker.bootstrap


@pytest.fixture
def cluster(bootstrap: str) -> Iterator[Cluster]:
    with Cluster(bootstrap) as connected:
        yield connected


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return cluster.create_topic(unique("topic"))


@pytest.fixture
def headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKEN}", "X-Fencepost-Console": "1"}


@pytest.fixture
async def console(bootstrap: str, tmp_path, headers) -> AsyncIterator[TestClient]:
    """Yield a client of a console that may write, with its undo files in ``tmp_path``."""
    settings = ConsoleSettings(
        bootstrap=bootstrap, token=TOKEN, allow_writes=True, undo_dir=tmp_path
    )
    async with TestClient(TestServer(Console(settings).application()), headers=headers) as client:
        yield client
