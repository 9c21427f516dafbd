"""A cluster in a separate process that is controlled over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import pytest
from confluent_kafka import Producer

from tests.unit.testing.test_hooks import Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served(None, "-m", "fencepost.testing", "--brokers", "3")
    yield served
    served.process.terminate()
    assert served.process.wait(60) == 0


def test_leader_is_killed_and_restarted_over_http(served: Served) -> None:
    assert served.ask("/topics", {"name": "orders", "partitions": 1})["partitions"] == 1
    before = served.ask("/leader?topic=orders")
    assert len(before["isr"]) == 3
    leader = before["leader"]
    states = served.ask(f"/brokers/{leader}/kill", {})["brokers"]
    assert [state["id"] for state in states if state["state"] == "down"] == [leader]
    assert served.ask("/leader?topic=orders&partition=0")["leader"] != leader
    producer = Producer({"bootstrap.servers": served.bootstrap, "log_level": 0})
    lost = served.ask(
        "/faults", {"api": "Produce", "error": "NOT_LEADER_OR_FOLLOWER", "only": {"orders": [0]}}
    )
    producer.produce("orders", b"tea")
    assert producer.flush(30) == 0
    assert served.ask(f"/faults/{lost['id']}?hits=1")["hits"] == 1
    states = served.ask(f"/brokers/{leader}/restart", {})["brokers"]
    assert {state["state"] for state in states} == {"running"}


def test_restart_does_not_wait_for_a_pending_query(served: Served) -> None:
    served.ask("/topics", {"name": "waiting", "partitions": 1})
    for broker in (1, 2, 3):
        served.ask(f"/brokers/{broker}/kill", {})
    with ThreadPoolExecutor(1) as other:
        leader = other.submit(served.ask, "/leader?topic=waiting")
        with pytest.raises(TimeoutError):
            leader.result(1)
        for broker in (1, 2, 3):
            served.ask(f"/brokers/{broker}/restart", {})
        assert leader.result(60)["leader"] in {1, 2, 3}


def test_clock_groups_and_network_are_controlled_over_http(served: Served) -> None:
    now_ms = served.ask("/clock")["now_ms"]
    assert served.ask("/clock/advance", {"seconds": 60})["now_ms"] >= now_ms + 60_000
    assert served.ask("/groups?group=shop&state=Dead&wait_s=20")["members"] == []
    assert served.ask("/history?group=shop") == {"history": []}
    assert served.ask("/shares?group=shop") == {"shares": []}
    assert served.ask("/network", {"nodes": [1], "others": [2, 3]}) == {}
    assert served.ask("/network", method="DELETE") == {}
    states = served.ask("/brokers/2/pause", {})["brokers"]
    assert [state["id"] for state in states if state["state"] == "paused"] == [2]
    served.ask("/brokers/2/resume", {})


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("/brokers/7/kill", {}, 400, "there is no broker 7; this cluster has 1, 2, 3"),
        ("/brokers/1/hurt", {}, 404, "kill, pause, restart, resume, stop"),
        ("/network", {"nodes": [], "others": [1]}, 400, "empty"),
        ("/topics", {"name": "a b"}, 400, "a b"),
        ("/topics", {"name": "t", "config": {"retention.ms": None}}, 400, "a setting is a str"),
    ],
)
def test_invalid_requests_are_refused(
    served: Served, path: str, body: object, status: int, why: str
) -> None:
    with pytest.raises(HTTPError) as refused:
        served.ask(path, body)
    assert refused.value.code == status
    assert why in refused.value.read().decode()
