"""The clock and the faults over HTTP, on a broker in a separate process."""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from confluent_kafka import Consumer, Producer

from tests.support.batches import batch
from tests.support.cluster import Cluster
from tests.support.quick import only
from tests.support.raw import ConnectionLostError, RawClient
from tests.support.share import Member, initialize, parts_of
from tests.support.waits import until

WAITING = 40
"""More requests than asyncio's executor has threads."""


class Served:
    """A broker with its hooks, or another command that serves them."""

    def __init__(self, directory: Path | None, *other: str) -> None:
        serve = ["-m", "fencepost", "serve", "--data-dir", str(directory), "--listen=127.0.0.1:0"]
        command = [sys.executable, *(other or serve), "--test-hooks", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        said = [self.process.stdout.readline().split() for _ in range(2)]
        assert [line[:-1] for line in said] == [["listening"], ["test", "hooks"]]
        self.bootstrap, self.hooks = (line[-1] for line in said)

    def ask(self, path: str, body: object = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(
            f"http://{self.hooks}{path}",
            data,
            {"Content-Type": "application/json"},
            method=method,
        )
        with urlopen(request, timeout=20) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("hooks"))
    yield served
    served.process.terminate()
    assert served.process.wait(20) == 0


def test_clock_is_stopped_and_advanced_over_http(served: Served) -> None:
    assert served.ask("/clock")["auto"] is True
    assert re.fullmatch(r"\S{10}T\S{8}\.\d{3}Z", served.ask("/clock")["now"])
    stopped = served.ask("/clock", {"auto": False})
    assert served.ask("/clock") == stopped
    with RawClient(served.bootstrap) as client:
        client.call("find_coordinator", 3, key="g", key_type=0)
        client.call(
            "join_group",
            3,
            group_id="g",
            session_timeout=30_000,
            rebalance_timeout=30_000,
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b""}],
        )
    moved = served.ask("/clock/advance", {"seconds": 30})
    assert moved["now_ms"] - stopped["now_ms"] == 30_000
    told = [(deadline["what"], deadline["who"]) for deadline in moved["fired"]]
    assert told == [("session", "g")]
    assert served.ask(f"/fired?since_ms={moved['now_ms']}")["fired"] == moved["fired"]
    kinds = [event["what"] for event in served.ask("/history?group=g")["history"]]
    assert "member-expired" in kinds
    assert served.ask("/history?transactional_id=g")["history"] == []


def test_faults_are_added_awaited_and_removed_over_http(served: Served) -> None:
    fault = served.ask("/faults", {"api": "EndTxn", "close": "before", "match": {"group": "x"}})
    lost = served.ask(
        "/faults",
        {"api": "InitProducerId", "error": "NOT_COORDINATOR", "match": {"client_id": "me"}},
    )
    seen = served.ask("/faults", {"observe": True})
    waited: list[Any] = []
    waiting = threading.Thread(
        target=lambda: waited.append(served.ask(f"/faults/{lost['id']}?hits=1&wait_s=20"))
    )
    waiting.start()
    with RawClient(served.bootstrap, client_id="me") as client:
        told = {"transaction_timeout": 1, "transactional_id": None}
        assert client.call("init_producer_id", 2, **told)["error_code"] == "not_coordinator"
        assert client.call("init_producer_id", 2, **told)["error_code"] == "none"
    waiting.join(20)
    assert waited[0]["hits"] == 1
    assert waited[0]["seen"][0]["client_id"] == "me"
    assert served.ask(f"/faults/{seen['id']}")["hits"] == 2
    left = served.ask(f"/faults/{fault['id']}", method="DELETE")["faults"]
    assert [row["id"] for row in left] == [lost["id"], seen["id"]]
    assert served.ask("/faults", method="DELETE") == {"faults": []}
    assert served.ask("/faults") == {"faults": []}


def test_topics_are_created_and_listed_over_http(served: Served) -> None:
    made = served.ask("/topics", {"name": "t", "partitions": 3, "config": {"retention.ms": "1000"}})
    assert made == {"name": "t", "partitions": 3}
    (topic,) = [row for row in served.ask("/topics")["topics"] if row["name"] == "t"]
    assert topic["partitions"] == 3


def test_share_acquisition_locks_expire_by_the_clock(served: Served) -> None:
    served.ask("/topics", {"name": "queue", "partitions": 1})
    (topic,) = [row for row in served.ask("/topics")["topics"] if row["name"] == "queue"]
    assert served.ask("/shares?group=workers") == {"shares": []}
    with Cluster(served.bootstrap) as client:
        topic_id = uuid.UUID(topic["id"])
        initialize(client, "workers", topic_id)
        parts = [{"index": 0, "records": batch([b"a", b"b"])}]
        topics = [{"name": "queue", "partition_data": parts}]
        client.call("produce", 9, acks=-1, timeout=10_000, topic_data=topics)
        served.ask("/clock", {"auto": False})
        now_ms = served.ask("/clock")["now_ms"]
        member = Member(client, "workers")
        until(lambda: parts_of(member.fetch({topic_id: {0: []}})), "records are fetched")
        assert served.ask("/shares?group=workers")["shares"] == [
            {
                "topic": "queue",
                "partition": 0,
                "first": 0,
                "last": 1,
                "state": "ACQUIRED",
                "delivery_count": 1,
                "member": member.member,
                "locked_until_ms": now_ms + 30_000,
                "is_pending": False,
            }
        ]
        fired = served.ask("/clock/advance", {"seconds": 30})["fired"]
        assert ("share-lock", "workers") in [
            (deadline["what"], deadline["who"]) for deadline in fired
        ]
        (share,) = served.ask("/shares?group=workers")["shares"]
        assert (share["state"], share["locked_until_ms"]) == ("AVAILABLE", None)


def test_group_query_waits_until_the_group_is_stable_and_fetches(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.ask("/topics", {"name": "orders", "partitions": 2})
    assert served.ask("/groups?group=shop")["state"] == "Dead"
    with pytest.raises(HTTPError) as late:
        served.ask("/groups?group=shop&members=1&wait_s=0")
    assert late.value.code == 408
    assert "there is no group 'shop'" in late.value.read().decode()
    settings = {"bootstrap.servers": served.bootstrap, "group.id": "shop", "log_level": 0}
    consumer = Consumer({**settings, "auto.offset.reset": "latest"})
    consumer.subscribe(["orders"])
    read: list[Any] = []
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            read.extend(consumer.consume(1, 0.05))

    polling = threading.Thread(target=poll)
    polling.start()
    try:
        found = served.ask("/groups?group=shop&members=1&fetching=true&wait_s=20")
        assert (found["state"], found["kind"]) == ("Stable", "classic")
        (member,) = found["members"]
        assert sorted(member["assigned"]) == [["orders", 0], ["orders", 1]]
        producer = Producer({"bootstrap.servers": served.bootstrap})
        for partition in (0, 1):
            producer.produce("orders", b"tea", partition=partition)
        producer.flush(20)
        until(lambda: len(read) == 2, "both records are read")
    finally:
        ended.set()
        polling.join()
    consumer.commit(asynchronous=False)
    assert served.ask("/groups?group=shop&lag=0&wait_s=20")["state"] == "Stable"
    consumer.close()
    assert served.ask("/groups?group=shop&state=Empty&wait_s=20")["members"] == []
    served.process.terminate()
    assert served.process.wait(20) == 0


def test_dropped_response_does_not_delay_the_stop(tmp_path: Path) -> None:
    served = Served(tmp_path)
    fault = served.ask("/faults", {"api": "ApiVersions", "drop": True})
    with RawClient(served.bootstrap) as client:
        client.send("api_versions", 0)
        assert served.ask(f"/faults/{fault['id']}?hits=1")["hits"] == 1
        served.process.terminate()
        assert served.process.wait(20) == 0
        with pytest.raises(ConnectionLostError):
            client.receive()


def test_waiting_queries_delay_neither_requests_nor_the_stop(tmp_path: Path) -> None:
    served = Served(tmp_path)
    fault = served.ask("/faults", {"observe": True, "api": "EndTxn"})
    path = f"/faults/{fault['id']}?hits=1&wait_s=60"
    with contextlib.ExitStack() as stack:
        host, _, port = served.hooks.rpartition(":")
        for _ in range(WAITING):
            waiting = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            waiting.sendall(f"GET {path} HTTP/1.1\r\nHost: {served.hooks}\r\n\r\n".encode())
        # The free space of a disk is determined in a thread of the executor.
        with RawClient(served.bootstrap) as client:
            assert client.call("describe_log_dirs", 4, topics=None)["results"]
        served.process.terminate()
        assert served.process.wait(20) == 0


@pytest.mark.parametrize("wait_s", ["0", "-1", "nan"])
def test_query_with_a_wait_of_zero_times_out_at_once(served: Served, wait_s: str) -> None:
    fault = served.ask("/faults", {"observe": True, "api": "EndTxn"})
    path = f"/faults/{fault['id']}"
    assert served.ask(f"{path}?hits=0&wait_s={wait_s}")["hits"] == 0
    with pytest.raises(HTTPError) as refused:
        served.ask(f"{path}?hits=1&wait_s={wait_s}")
    assert refused.value.code == 408
    served.ask(path, method="DELETE")


@pytest.mark.parametrize(
    ("path", "body", "method", "status", "why"),
    [
        ("/nope", None, "GET", 404, "there is no /nope"),
        ("/clock", None, "DELETE", 405, "knows GET, POST"),
        ("/clock/advance", {"seconds": -1}, "POST", 400, "0 or more"),
        ("/clock/advance", {"seconds": 1e300}, "POST", 400, "year 9999"),
        ("/clock/advance", {"seconds": math.inf}, "POST", 400, "finite"),
        ("/clock/advance", {"ms": math.nan}, "POST", 400, "finite"),
        ("/clock/advance", {"seconds": 1, "speed": 0}, "POST", 400, "above 0"),
        ("/clock/advance", {"seconds": 1, "speed": -1}, "POST", 400, "0 or more"),
        ("/clock/advance", {"seconds": 1, "speed": math.inf}, "POST", 400, "finite"),
        ("/clock/advance", {"hours": 1}, "POST", 400, "no 'hours'"),
        ("/clock/advance", {"seconds": True}, "POST", 400, "seconds"),
        ("/clock/advance", [], "POST", 400, "object"),
        ("/faults", {"api": "Nope", "drop": True}, "POST", 400, "no API 'Nope'"),
        ("/faults", {"api": "EndTxn"}, "POST", 400, "without effect"),
        ("/faults/99", None, "DELETE", 404, "no fault 99"),
        ("/shares", None, "GET", 400, "needs ?group="),
        ("/groups", None, "GET", 400, "needs ?group="),
        ("/groups?group=g&member=1", None, "GET", 400, "did you mean members?"),
        ("/groups?group=g&state=stable", None, "GET", 400, "did you mean Stable?"),
        ("/groups?group=g&members=x", None, "GET", 400, "invalid literal"),
        ("/groups?group=g&fetching=yes", None, "GET", 400, "fetching is one of"),
        ("/faults", {"drop": True, "only": {"t": "0"}}, "POST", 400, "a partition or a list"),
        ("/topics", {"name": "a b"}, "POST", 400, "a b"),
    ],
)
def test_invalid_request_is_refused_with_a_reason(
    served: Served, path: str, body: object, method: str, status: int, why: str
) -> None:
    with pytest.raises(HTTPError) as refused:
        served.ask(path, body, method)
    assert refused.value.code == status
    assert why in refused.value.read().decode()


def test_request_of_a_page_in_a_browser_is_refused(served: Served) -> None:
    for headers, status in (
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json", "Host": "example.com"}, 403),
    ):
        request = Request(f"http://{served.hooks}/clock/advance", b'{"seconds": 1}', headers)
        with pytest.raises(HTTPError) as refused:
            urlopen(request, timeout=20)
        assert refused.value.code in {status, 421, 400}


@pytest.mark.parametrize(
    "address",
    only(("0.0.0.0:7000", "192.0.2.1:7000", "example.com:0", "7000"), "0.0.0.0:7000"),
)
def test_hooks_address_outside_of_loopback_is_refused(tmp_path: Path, address: str) -> None:
    command = [sys.executable, "-m", "fencepost", "serve", "--data-dir", str(tmp_path / "d")]
    ended = subprocess.run(
        [*command, "--test-hooks", address], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "--test-hooks" in ended.stderr
    assert not (tmp_path / "d").exists()
