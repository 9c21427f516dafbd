"""If Kafka executes a request and the response is lost, every message is still written once."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from fencepost.pipelines.mqtt.routes import Mapped, MessageId, Route
from tests.mqtt.test_sessions import Gateway, broker
from tests.support.cluster import Cluster
from tests.support.mosquitto import Mosquitto
from tests.support.own_broker import behind_proxy
from tests.support.proxy import LosingProxy

__all__ = ["broker"]

PRODUCE, INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, END_TXN = 0, 22, 24, 26

ROUNDS = 3


@pytest.fixture(scope="module")
def proxied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LosingProxy]]:
    """Yield the address of a broker that advertises a proxy's address, and the proxy."""
    with behind_proxy(request, tmp_path_factory.mktemp("lost")) as (started, proxy):
        yield started.bootstrap, proxy


@pytest.mark.parametrize(
    ("api", "qos"),
    [
        pytest.param(PRODUCE, 1, id="Produce-1"),
        pytest.param(PRODUCE, 2, id="Produce-2", marks=pytest.mark.slow),
        pytest.param(INIT_PRODUCER_ID, 1, id="InitProducerId-1", marks=pytest.mark.slow),
        pytest.param(INIT_PRODUCER_ID, 2, id="InitProducerId-2"),
        pytest.param(ADD_PARTITIONS_TO_TXN, 1, id="AddPartitionsToTxn-1"),
        pytest.param(ADD_PARTITIONS_TO_TXN, 2, id="AddPartitionsToTxn-2", marks=pytest.mark.slow),
        pytest.param(END_TXN, 1, id="EndTxn-1", marks=pytest.mark.slow),
        pytest.param(END_TXN, 2, id="EndTxn-2"),
    ],
)
async def test_lost_kafka_response_duplicates_no_message(
    proxied: tuple[str, LosingProxy], broker: Mosquitto, api: int, qos: int
) -> None:
    """QoS 1 is tested with message ids, QoS 2 without them."""
    address, proxy = proxied
    with Cluster(address) as cluster:
        gateway = Gateway(f"127.0.0.1:{proxy.port}", cluster, broker, 5)
        route = Route("a/#", gateway.topic, qos=qos)
        ids = {"message_id": MessageId.parse("json:id")} if qos == 1 else {}
        wanted: list[bytes] = []
        for number in range(ROUNDS):
            # InitProducerId is sent only when the bridge starts, so arm the proxy before that.
            proxy.lose(api)
            async with gateway.running(gateway.mapped_bridge(Mapped((route,), **ids))):
                fresh = [b'{"id": %d}' % (number * 100 + n) for n in range(20)]
                await gateway.publish(*fresh, qos=qos)
                wanted += fresh
                await gateway.written(*wanted)
            assert proxy.lost == {api}
        found = [json.loads(value or b"")["id"] for value in await gateway.values()]
        assert len(found) == len(set(found)) == ROUNDS * 20
