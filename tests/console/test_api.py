"""The console's responses, from a real server connected to a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from fencepost import Broker
from fencepost.cli import main
from fencepost.client.queries.session import ClusterSession
from fencepost.console import history, limits, live, messages, server
from fencepost.console.guard import CONTENT_SECURITY_POLICY, is_loopback
from fencepost.console.pulse import HealthProbe
from fencepost.console.server import VIEWS, Console, ConsoleSettings
from fencepost.testing import Cluster as BrokerCluster
from tests.console.scenes import (
    MARKUP,
    TOKEN,
    commit,
    fence,
    members,
    open_transaction,
    stuck_rebalance,
    write,
)
from tests.support.cluster import Cluster, unique
from tests.support.processes import Child
from tests.support.targets import SETTINGS
from tests.support.waits import until, until_async
from tests.wire.test_cli_txns import hang

STREAM = {"Accept": "text/event-stream"}


async def get(console: TestClient, path: str, status: int = 200, **params: Any) -> Any:
    async with console.get(f"/api/{path}", params=params) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def events(response: Any) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.content:
        text = line.decode().rstrip("\n")
        if text.startswith("event: "):
            name = text.removeprefix("event: ")
        elif text.startswith("data: "):
            yield name, json.loads(text.removeprefix("data: "))


async def search(console: TestClient, topic: str, **params: Any) -> tuple[list[Any], Any]:
    """Return the rows of a search and its final event."""
    rows: list[Any] = []
    async with console.get("/api/messages", params={"topic": topic, **params}) as response:
        assert response.status == 200, await response.text()
        async for name, data in events(response):
            if name == "rows":
                rows += data["rows"]
            if name in {"end", "failed"}:
                return rows, data
    raise AssertionError("a search without an end")


def values(rows: list[Any]) -> list[str]:
    return [row["value"]["text"] for row in rows if row["value"]]


# --- access ---


@pytest.mark.parametrize("view", ["about", "overview", "messages", "record", "nothing"])
async def test_request_without_the_token_is_refused(console, view):
    for wrong in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Basic {TOKEN}"}):
        headers = {"Authorization": "", **wrong}
        async with console.get(f"/api/{view}", headers=headers) as answer:
            assert answer.status == 401
            assert (await answer.json())["error"] == "wrong-token"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "[::2]:8080", ""])
async def test_another_host_is_refused_even_with_the_token(console, host):
    for path in ("/", "/static/app.js", "/api/overview"):
        async with console.get(path, headers={"Host": host}) as answer:
            assert answer.status in {400, 421}
    async with console.get("/", headers={"Host": "localhost:1"}) as answer:
        assert answer.status == 200


async def test_additional_host_names_are_allowed_by_setting(bootstrap, headers):
    settings = ConsoleSettings(bootstrap=bootstrap, token=TOKEN, hosts=("console.example",))
    async with (
        TestClient(TestServer(Console(settings).application())) as client,
        client.get("/", headers={"Host": "CONSOLE.example:443"}) as answer,
    ):
        assert answer.status == 200


async def test_every_response_has_the_security_headers(console):
    for path in ("/", "/static/app.js", "/api/about", "/api/nothing", "/else"):
        async with console.get(path, headers={"Origin": "http://evil.example"}) as answer:
            assert answer.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cache-Control"] == "no-store"
            assert not [name for name in answer.headers if name.startswith("Access-Control")]
    async with console.get("/api/overview", headers=STREAM) as answer:
        assert answer.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY


async def test_page_is_served_without_token_and_no_other_files(console):
    headers = {"Authorization": ""}
    async with console.get("/", headers=headers) as answer:
        page = await answer.text()
        assert answer.status == 200
    # The page has no inline scripts or styles, because the content security policy blocks them.
    assert "<script>" not in page
    assert "style=" not in page
    for name in ("server.py", "..%2fserver.py", "__init__.py"):
        async with console.get(f"/static/{name}", headers=headers) as answer:
            assert answer.status == 404


async def test_write_request_needs_the_csrf_header_and_the_same_origin(console, headers):
    url = f"http://{console.host}:{console.port}"
    without = {"Authorization": headers["Authorization"]}
    async with aiohttp.ClientSession() as foreign:
        for told, status, word in (
            (without, 403, "no-csrf-header"),
            ({**headers, "Origin": "http://evil.example"}, 403, "foreign-origin"),
            ({**headers, "Origin": "null"}, 403, "foreign-origin"),
            ({**headers, "Origin": url}, 400, "refused"),
            (headers, 400, "refused"),
        ):
            async with foreign.post(f"{url}/api/reset", json={}, headers=told) as answer:
                assert (answer.status, (await answer.json())["error"]) == (status, word)


def test_loopback_hosts_are_recognized():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"))


# --- the command ---


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fencepost", "console", *arguments]


def test_console_command_prints_its_url_and_ends_on_sigterm(bootstrap):
    child = Child(command("-b", bootstrap, "--listen", "127.0.0.1:0"))
    try:
        url = child.wait_for_line(
            r"^console (http://127\.0\.0\.1:\d+/)#token=(\S{40,})$", deadline_s=60
        )
        asked = urllib.request.Request(
            f"{url[1]}api/about", headers={"Authorization": f"Bearer {url[2]}"}
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            about = json.load(answer)
        assert (about["bootstrap"], about["allow_writes"]) == (bootstrap, False)
        assert about["limits"]["max_clients"] == limits.MAX_CLIENTS
        assert child.terminate() == 0
    finally:
        child.kill()


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (
            ("--listen", "127.0.0.1:x"),
            2,
            "--listen: '127.0.0.1:x' is not an address of the form HOST:",
        ),
        (("--listen", "foo"), 2, "--listen: 'foo' is not an address of the form HOST:PORT"),
        (("-b", "x:y"), 2, "host:port"),
        (("--undo-dir", "/nowhere"), 2, "does not exist"),
    ],
)
def test_invalid_command_line_is_refused_with_a_reason(arguments, status, told):
    done = CliRunner().invoke(main, ["console", *arguments])
    assert (done.exit_code, told in done.stderr) == (status, True), done.stderr


def test_port_in_use_is_reported(bootstrap):
    done = subprocess.run(
        command("-b", bootstrap, "--listen", bootstrap),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "in use" in done.stderr


def test_missing_extra_names_what_to_install():
    code = "import sys; sys.modules['aiohttp'] = None; from fencepost.cli import main;"
    done = subprocess.run(
        [sys.executable, "-c", f"{code} main(['console'])"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert ".[console]" in done.stderr


# --- bad requests ---


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("nothing", 404),
        ("group", 400),
        ("group?id=never-seen", 404),
        ("groups?limit=0", 400),
        ("groups?limit=201", 400),
        ("groups?offset=x", 400),
        ("topic?name=never-seen", 404),
        ("transaction?id=never-seen", 404),
        ("messages?topic=never-seen", 404),
        ("messages", 400),
        ("messages?topic=t&isolation=else", 400),
        ("messages?topic=t&limit=1001", 400),
        ("record?topic=t&partition=-1&offset=0", 400),
    ],
)
async def test_bad_request_gets_a_message(console, path, status):
    async with console.get(f"/api/{path}") as answer:
        told = await answer.json()
        assert answer.status == status, told
        assert told["message"]


async def test_unreachable_broker_is_an_error_response(tmp_path, headers):
    settings = ConsoleSettings(bootstrap="127.0.0.1:1", token=TOKEN, timeout_s=0.5)
    app = Console(settings).application()
    async with TestClient(TestServer(app), headers=headers) as client:
        for view in VIEWS:
            told = await get(client, view, 503, id="x", name="x")
            assert told["error"] == "unreachable"


# --- overview and transactions ---


async def test_overview_counts_transactions_and_lists_held_back_topics(console, bootstrap, topic):
    before = await get(console, "overview")
    assert [row["fenced"] for row in before["brokers"]] == [False]
    with open_transaction(bootstrap, topic, ["a", "b"]) as (name, _):
        found = await get(console, "overview")
        assert found["transactions"]["Ongoing"] == before["transactions"].get("Ongoing", 0) + 1
        (matter,) = [notice for notice in found["attention"] if notice.get("topic") == topic]
        assert matter["kind"] == "held-back"
        assert (matter["transactional_id"], matter["behind"]) == (name, 2)
    assert not [
        partition
        for partition in (await get(console, "overview"))["held"]
        if partition["topic"] == topic
    ]


async def test_transactions_view_names_blocking_transaction_and_waiting_group(
    console, bootstrap, topic
):
    write(bootstrap, topic, ["before"])
    group = unique("waits")
    commit(bootstrap, group, topic, 1)
    with open_transaction(bootstrap, topic) as (name, _):
        write(bootstrap, topic, ["behind"])
        found = await get(console, "transactions", q=name)
        (row,) = [partition for partition in found["held"] if partition["topic"] == topic]
        assert (row["stable"], row["end"], row["behind"]) == (1, 3, 2)
        assert (row["transactional_id"], row["state"], row["hanging"]) == (name, "Ongoing", None)
        assert row["since_ms"] > 0
        (waits,) = [waiting for waiting in row["groups"] if waiting["group"] == group]
        assert waits["stuck"] is True
        (listed,) = found["transactions"]["rows"]
        assert listed["partitions"] == [f"{topic}:0"]
        assert listed["started_ms"] == row["since_ms"]
        transaction = await get(console, "transaction", id=name)
        assert [held["topic"] for held in transaction["held"]] == [topic]
    ended = await get(console, "transactions", q=name)
    assert not [partition for partition in ended["held"] if partition["topic"] == topic]
    assert ended["transactions"]["rows"][0]["started_ms"] is None


async def test_hanging_transaction_is_listed_at_the_worst_level(console, cluster, topic):
    name, producer_id = hang(cluster, topic)
    try:
        found = await get(console, "overview")
        (matter,) = [notice for notice in found["attention"] if notice.get("topic") == topic]
        assert (matter["kind"], matter["level"]) == ("hanging", "bad")
        held = (await get(console, "transactions"))["held"]
        (row,) = [partition for partition in held if partition["topic"] == topic]
        assert row["producer_id"] == producer_id
        assert row["hanging"] == f"{name} is Empty"
    finally:
        cluster.call("delete_topics", 5, topic_names=[topic], timeout=30_000)


async def test_fenced_producers_are_listed_with_their_epochs(console, bootstrap, topic):
    name = unique("fenced")
    fence(bootstrap, topic, name)

    async def look() -> Any:
        found = await get(console, "transactions")
        return [row for row in found["fences"]["rows"] if row["subject"] == name]

    rows = await until_async(look, "a fence in the history")
    (fenced,) = [row for row in rows if row["what"] == "producer-fenced"]
    assert fenced["change"] == "epoch 0 → 1"
    assert fenced["client"] == "the-successor"
    told = await get(console, "transaction", id=name)
    assert told["history"]["kept"] is True
    assert "producer-fenced" in {row["what"] for row in told["history"]["rows"]}


async def test_history_topic_created_later_is_found(tmp_path, headers):
    with Broker.in_thread(tmp_path / "young", config=SETTINGS) as broker:
        settings = ConsoleSettings(bootstrap=broker.bootstrap, token=TOKEN)
        app = Console(settings).application()
        async with TestClient(TestServer(app), headers=headers) as client:

            async def all_of_them(view: str) -> list[Any]:
                """Send as many concurrent requests as the console has sessions."""
                asked = (get(client, view) for _ in range(limits.MAX_CALLS))
                return [row["kept"] for row in map(_history, await asyncio.gather(*asked))]

            assert await all_of_them("overview") == [False] * limits.MAX_CALLS
            with Cluster(broker.bootstrap) as cluster:
                cluster.init_producer("the-first")
                cluster.init_producer("the-first")

            async def found() -> bool:
                return all(await all_of_them("overview")) and all(await all_of_them("transactions"))

            await until_async(found, "the history in all sessions")


def _history(view: Any) -> Any:
    return view.get("history") or view["fences"]


# --- groups ---


async def test_lag_counts_only_records_that_can_be_read(console, bootstrap, topic):
    group = unique("reads")
    with open_transaction(bootstrap, topic, ["a", "b"]) as (_, producer):
        commit(bootstrap, group, topic, 0)
        total = (await get(console, "group", id=group))["total"]
        assert (total["lag"], total["held_back"]) == (0, 2)
        producer.commit_transaction(60)
        assert (await get(console, "group", id=group))["total"]["lag"] == 2
        # After this offset there is only the end marker, which is not a record to read.
        commit(bootstrap, group, topic, 2)
        found = await get(console, "group", id=group)
        assert found["offsets"][0]["end"] == 3
        assert found["total"] == {
            **found["total"], "lag": 0, "held_back": 0, "lag_uncommitted": 0
        }  # fmt: skip
    (row,) = (await get(console, "groups", q=group))["groups"]["rows"]
    assert (row["group"], row["lag"], row["members"]) == (group, 0, 0)


async def test_classic_group_shows_members_causes_and_plan(console, bootstrap, cluster):
    topic, group = cluster.create_topic(unique("topic"), 4), unique("team")
    with members(bootstrap, group, topic, "first", "second"):
        found = await get(console, "group", id=group)
        assert {row["client"] for row in found["members"]} == {"first", "second"}
        assert sum(row["count"] for row in found["members"]) == 4

        async def causes() -> Any:
            rows = (await get(console, "group", id=group))["history"]["rows"]
            return [row for row in rows if row["what"] == "rebalance-started"]

        started = await until_async(causes, "a rebalance in the history")
        assert any("new member" in row["why"] for row in started)

        plan = await get(console, "plan", id=group, add=2)
        assert (plan["partitions"], len(plan["rows"])) == (4, 4)
        assert plan["moved"] == sum(len(row["gets"]) for row in plan["rows"]) > 0
        leaver = found["members"][0]["member"]
        alone = await get(console, "plan", id=group, remove=leaver, assignor="sticky")
        assert [row["then"] for row in alone["rows"] if row["member"] == leaver] == [None]
        await get(console, "plan", 400, id=group, assignor="nobody")
        await get(console, "plan", 400, id=group, add=1001)


async def test_consumer_group_shows_targets_plan_and_epoch_causes(console, bootstrap, cluster):
    topic, group = cluster.create_topic(unique("topic"), 4), unique("modern")
    with members(bootstrap, group, topic, "first", "second", protocol="consumer"):

        async def settled() -> Any:
            found = await get(console, "group", id=group)
            done = all(row["assigned"] == row["target"] for row in found["members"])
            return found if done and found["state"] == "Stable" else None

        found = await until_async(settled, "a stable group")
        assert (found["type"], len(found["members"])) == ("consumer", 2)
        assert {row["epoch"] for row in found["members"]} == {found["epoch"]}
        plan = await get(console, "plan", id=group, add=2)
        assert plan["known"] == ["range", "uniform"]
        assert len([row for row in plan["rows"] if row["then"]]) == 4
        causes = [row for row in found["history"]["rows"] if row["what"] == "group-epoch-bumped"]
        assert causes
        assert all(row["why"] for row in causes)


async def test_offset_reset_is_previewed_executed_and_has_an_undo_file(
    console, bootstrap, topic, tmp_path
):
    write(bootstrap, topic, ["a", "b", "c"])
    group = unique("resets")
    commit(bootstrap, group, topic, 3)
    asked = {"group": group, "topics": [], "where": {"to_earliest": True}}
    async with console.post("/api/reset", json=asked) as answer:
        shown = await answer.json()
        assert answer.status == 200, shown
    assert shown["rows"] == [{"topic": topic, "partition": 0, "committed": 3, "new": 0}]
    assert shown["done"] is False
    assert (await get(console, "group", id=group))["offsets"][0]["committed"] == 3

    commit(bootstrap, group, topic, 2)
    body = {**asked, "execute": True, "plan": shown["plan"]}
    async with console.post("/api/reset", json=body) as answer:
        assert answer.status == 409, "what was shown is not what is there"
    async with console.post("/api/reset", json=asked) as answer:
        shown = await answer.json()
    async with console.post("/api/reset", json={**body, "plan": shown["plan"]}) as answer:
        done = await answer.json()
        assert answer.status == 200, done
    assert (await get(console, "group", id=group))["offsets"][0]["committed"] == 0
    (undo,) = tmp_path.iterdir()
    assert done["undo"] == str(undo)
    assert undo.read_text().splitlines()[0].startswith(f"{topic},0,2")


async def test_offset_reset_is_refused_for_an_active_group_or_read_only(
    console, bootstrap, cluster, tmp_path, headers
):
    topic, group = cluster.create_topic(unique("topic")), unique("busy")
    write(bootstrap, topic, ["a"])
    asked = {"group": group, "topics": [topic], "where": {"to_latest": True}}
    with members(bootstrap, group, topic, "one"):
        async with console.post("/api/reset", json=asked) as answer:
            shown = await answer.json()
            assert shown["is_active"] is True
        body = {**asked, "execute": True, "plan": shown["plan"]}
        async with console.post("/api/reset", json=body) as answer:
            assert answer.status == 400
            assert "active" in (await answer.json())["message"]
    assert not list(tmp_path.iterdir())
    for wrong in (
        [],
        "text",
        {"group": group},
        {**asked, "where": {"from_file": "/etc/passwd"}},
        {**asked, "where": {"to_moon": True}},
        {**asked, "where": {"to_latest": True, "to_earliest": True}},
        {**asked, "topics": ["never-seen"]},
    ):
        async with console.post("/api/reset", json=wrong) as answer:
            assert answer.status in {400, 404}, wrong
    settings = ConsoleSettings(bootstrap=bootstrap, token=TOKEN, undo_dir=tmp_path)
    app = Console(settings).application()
    async with TestClient(TestServer(app), headers=headers) as reader:
        async with reader.post("/api/reset", json={**asked, "group": group}) as answer:
            assert answer.status == 200, "to look is allowed"
        async with reader.post("/api/reset", json=body) as answer:
            assert (answer.status, (await answer.json())["error"]) == (403, "read-only")


# --- lists ---


async def test_lists_are_filtered_and_paged(console, cluster):
    stem = unique("paged")
    for number in range(7):
        cluster.create_topic(f"{stem}-{number}")
    first = (await get(console, "topics", q=stem.upper(), limit=3))["topics"]
    assert [row["topic"][-1] for row in first["rows"]] == ["0", "1", "2"]
    assert (first["total"], first["offset"], first["limit"]) == (7, 0, 3)
    last = (await get(console, "topics", q=stem, limit=3, offset=900))["topics"]
    assert [row["topic"][-1] for row in last["rows"]] == ["6"]
    assert (await get(console, "topics", q="nothing-like-it"))["topics"]["rows"] == []
    inside = await get(console, "topics", internal=1, q="__")
    assert {row["topic"] for row in inside["topics"]["rows"]} >= {"__consumer_offsets"}
    assert not (await get(console, "topics", q="__"))["topics"]["rows"]


async def test_topic_view_shows_partitions_producers_and_settings(console, bootstrap, cluster):
    topic = cluster.create_topic(unique("topic"), 2, {"retention.ms": "3600000"})
    with open_transaction(bootstrap, topic, ["a"], partition=1):
        found = await get(console, "topic", name=topic)
        assert [row["partition"] for row in found["partitions"]] == [0, 1]
        assert [row["stable"] for row in found["partitions"]] == [0, 0]
        assert [row["end"] for row in found["partitions"]] == [0, 1]
        assert [(row["elr"], row["offline"]) for row in found["partitions"]] == [([], [])] * 2
        assert [row["start_offset"] for row in found["producers"]] == [0]
    assert found["settings"][0] == {
        "name": "retention.ms", "value": "3600000", "is_default": False
    }  # fmt: skip


# --- messages ---


async def test_isolation_levels_report_the_hidden_records(console, bootstrap, topic):
    write(bootstrap, topic, ["plain"])
    with open_transaction(bootstrap, topic, ["dead"]):
        pass
    with open_transaction(bootstrap, topic, ["done"]) as (_, producer):
        producer.commit_transaction(60)
    with open_transaction(bootstrap, topic, ["open"]):
        with open_transaction(bootstrap, topic, ["late"]) as (_, producer):
            producer.commit_transaction(60)
        committed, end = await search(console, topic)
        assert values(committed) == ["plain", "done"]
        assert end["hidden"] == {"aborted": 1, "control": 2}
        assert (end["scanned"], end["matched"], end["remaining"]) == (5, 2, 0)
        everything, end = await search(console, topic, isolation="read_uncommitted")
        assert [row["state"] for row in everything] == [
            *("plain", "aborted", "control", "committed", "control"),
            *("open", "committed", "control"),
        ]
        assert [row["control"] for row in everything if row["state"] == "control"] == [
            *("ABORT", "COMMIT", "COMMIT"),
        ]
        assert end["hidden"] == {}
        record = await get(console, "record", topic=topic, partition=0, offset=1)
        assert (record["state"], record["value"]["text"]) == ("aborted", "dead")
        late = await get(console, "record", topic=topic, partition=0, offset=5)
        assert late["state"] == "open"


async def test_search_counts_scanned_and_matched_records(console, bootstrap, cluster):
    topic = cluster.create_topic(unique("topic"), 2)
    write(bootstrap, topic, [f"value {number}" for number in range(300)], partition=0, key="a")
    write(bootstrap, topic, ["Größe 299"], partition=1, key="b", headers={"trace": b"\x00\xff"})
    rows, end = await search(console, topic, **{"from": "earliest", "value": "299"})
    assert sorted(values(rows)) == ["Größe 299", "value 299"]
    assert (end["scanned"], end["matched"], end["remaining"]) == (301, 2, 0)
    assert end["why"] == "end"
    for asked in ({"value": "GRÖSSE"}, {"value": "größe"}, {"key": "B"}, {"header": "race"}):
        rows, end = await search(console, topic, **{"from": "earliest"}, **asked)
        # Case folding is Unicode's, which folds ß to ss.
        assert values(rows) == ["Größe 299"], asked
    assert rows[0]["headers"] == [["trace", {"size": 2, "cut": False, "base64": "AP8="}]]

    rows, end = await search(console, topic, **{"from": "earliest", "limit": "20"}, partition=0)
    assert (len(rows), end["why"], end["remaining"]) == (20, "limit", 280)
    rows, end = await search(
        console, topic, **{"from": "earliest", "limit": "1000"}, partition=0, resume=end["resume"]
    )
    assert values(rows) == [f"value {number}" for number in range(20, 300)]
    rows, _ = await search(console, topic, limit="3", partition=0)
    assert values(rows) == ["value 297", "value 298", "value 299"]
    rows, _ = await search(console, topic, **{"from": "298"}, partition=0)
    assert values(rows) == ["value 298", "value 299"]
    for begin, count in (("-1h", 301), ("-99999999999d", 301), ("2100-01-01", 0), ("latest", 0)):
        rows, _ = await search(console, topic, **{"from": begin, "limit": "1000"})
        assert len(rows) == count, begin


async def test_search_stops_at_its_record_budget_and_can_be_resumed(
    console, bootstrap, topic, monkeypatch
):
    write(bootstrap, topic, ["x" * 100] * 50)
    write(bootstrap, topic, ["y" * 100] * 50)
    monkeypatch.setattr(messages, "BUDGET_RECORDS", 30)
    monkeypatch.setattr(messages, "STEP_BYTES", 1)
    rows, end = await search(console, topic, **{"from": "earliest", "value": "nothing"})
    assert (rows, end["why"]) == ([], "budget")
    assert 30 <= end["scanned"] < 100
    assert end["scanned"] + end["remaining"] == 100
    _, more = await search(
        console, topic, **{"from": "earliest", "value": "nothing"}, resume=end["resume"]
    )
    assert more["total"] == end["remaining"]


async def test_following_search_ends_when_its_reader_disconnects(console, bootstrap, topic):
    asked = {"topic": topic, "from": "latest", "follow": "1"}
    async with console.get("/api/messages", params=asked) as response:
        told = events(response)
        assert (await anext(told))[0] == "begin"
        write(bootstrap, topic, ["fresh"])
        async for name, data in told:
            if name == "rows" and data["rows"]:
                assert values(data["rows"]) == ["fresh"]
                break
    app = console.app
    assert app is not None
    # A new search may start at once, because the previous search has ended.
    await search(console, topic)


async def test_values_are_shown_as_text_base64_or_tombstone(console, bootstrap, topic):
    write(bootstrap, topic, [b"\xff\x00", None, "", MARKUP, "ü" * 5000], key=MARKUP)
    rows, _ = await search(console, topic)
    binary, tombstone, nothing, markup, long = (row["value"] for row in rows)
    assert binary == {"size": 2, "cut": False, "base64": "/wA="}
    assert tombstone is None
    assert nothing == {"size": 0, "cut": False, "text": ""}
    assert markup["text"] == MARKUP == rows[0]["key"]["text"]
    assert (long["size"], long["cut"]) == (10_000, True)
    assert long["text"] == "ü" * (limits.SHOWN_BYTES // 2)
    record = await get(console, "record", topic=topic, partition=0, offset=4)
    assert record["value"]["text"] == "ü" * 5000
    await get(console, "record", 404, topic=topic, partition=0, offset=5)


def test_text_cut_inside_a_character_is_still_text():
    assert messages.bytes_shown("aü".encode(), 2) == {"size": 3, "cut": True, "text": "a"}
    assert messages.bytes_shown(b"\xff\xff\xff", 2) == {
        "size": 3, "cut": True, "base64": "//8="
    }  # fmt: skip


# --- live ---


async def test_changed_view_is_pushed_to_its_stream(console, bootstrap, topic):
    async with console.get("/api/transactions", headers=STREAM) as response:
        told = events(response)

        async def held() -> bool:
            name, frame = await anext(told)
            while name == "pulse":
                name, frame = await anext(told)
            assert name == "data"
            assert frame["at_ms"] > 0
            return topic in {row["topic"] for row in frame["data"]["held"]}

        assert not await held()
        with open_transaction(bootstrap, topic):
            while not await held():
                pass
        while await held():
            pass


async def test_silent_brokers_are_checked_at_the_same_time():
    """If checked in turn, each silent broker would delay the report by another timeout."""
    loop, pulse = asyncio.get_running_loop(), HealthProbe("127.0.0.1:1", timeout_s=5)
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        for broker, listener in enumerate(listening):
            listener.setblocking(False)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            pulse._clients[broker, address] = pulse._client(address)
        checking = asyncio.create_task(pulse.probe())
        async with asyncio.timeout(60):
            connected = [
                stack.enter_context((await loop.sock_accept(listener))[0]) for listener in listening
            ]
            assert all([await loop.sock_recv(connection, 1 << 16) for connection in connected])
        for connection in connected:
            with pytest.raises(BlockingIOError):  # the check is still waiting
                connection.recv(1)
        found = await checking
    pulse.close()
    assert found["silent"] == [0, 1, 2, 3]
    assert found["away"]


async def test_streams_of_one_view_share_one_query(monkeypatch):
    asked = 0
    monkeypatch.setattr(live, "MIN_INTERVAL_S", 0.01)

    async def look() -> dict[str, int]:
        nonlocal asked
        asked += 1
        return {"n": asked // 10}

    watches = live.ViewWatches(well)
    async with asyncio.timeout(20):
        one = watches.follow(("v",), look, lambda error: {"message": str(error)})
        two = watches.follow(("v",), look, lambda error: {"message": str(error)})
        first = await anext(one)
        assert await anext(two) == first
        assert await anext(one) != first
        await one.aclose()
        await anext(two)
        await two.aclose()
        # Without a client that watches the page, the broker gets no requests.
        before = asked
        await asyncio.sleep(0)
        third = watches.follow(("v",), look, lambda error: {"message": str(error)})
        await anext(third)
        assert asked <= before + 2
        await third.aclose()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_rebalancing_group_needs_attention_and_names_the_awaited_member(
    console, bootstrap, cluster, protocol
):
    topic, group = cluster.create_topic(unique("topic"), 4), unique("waits")
    with stuck_rebalance(bootstrap, group, topic, protocol):

        async def look() -> Any:
            found = (await get(console, "overview"))["attention"]
            rows = [row for row in found if row["kind"] == "rebalancing" and row["group"] == group]
            return rows and rows[0]["awaited"] and rows[0]

        row = await until_async(look, "the group among what needs attention")
        assert row["awaited"].startswith("polls-no-more@")
        assert row["count"] == 2
        if protocol == "consumer":
            assert row["state"] == "Reconciling"
            return
        assert row["state"] == "PreparingRebalance"
        told = await get(console, "plan", 400, id=group)
        assert "rebalances (PreparingRebalance); it waits for polls-no-more@" in told["message"]


async def test_views_name_groups_hidden_from_the_principal(tmp_path, headers):
    config = {
        **SETTINGS,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    group, other = unique("secret"), unique("waits")
    acl = {
        "resource_type": 3,
        "resource_name": group,
        "resource_pattern_type": 3,
        "principal": "User:owner",
        "host": "*",
        "operation": 2,
        "permission_type": 3,
    }
    with (
        Broker.in_thread(tmp_path / "guarded", config=config) as broker,
        Cluster(broker.bootstrap) as cluster,
        stuck_rebalance(broker.bootstrap, group, cluster.create_topic("t", 4)),
        open_transaction(broker.bootstrap, "t"),
    ):
        commit(broker.bootstrap, other, "t", 0)
        settings = ConsoleSettings(bootstrap=broker.bootstrap, token=TOKEN)
        app = Console(settings).application()
        async with TestClient(TestServer(app), headers=headers) as client:

            async def look() -> Any:
                return (await get(client, "overview"))["attention"]

            async def is_listed() -> bool:
                return "rebalancing" in {notice["kind"] for notice in await look()}

            await until_async(is_listed, "the group among what needs attention")
            (created,) = cluster.call("create_acls", 3, creations=[acl])["results"]
            assert created["error_code"] == "none", created
            rows = {notice["kind"]: notice for notice in await look()}
            listed = {
                group_row["group"]: group_row
                for group_row in (await get(client, "groups"))["groups"]["rows"]
            }
            found = await get(client, "transactions")
    assert "GROUP_AUTHORIZATION_FAILED" in listed[group]["error"]
    assert rows.keys() == {"rebalancing", "held-back"}
    row = rows["rebalancing"]
    assert (row["group"], row["count"]) == (group, 0)
    assert "GROUP_AUTHORIZATION_FAILED" in row["error"]
    (held,) = found["held"]
    assert [waiting["group"] for waiting in held["groups"]] == [other]
    assert (held["topic"], held["hidden_groups"]) == ("t", [group])
    assert held["transactional_id"] == rows["held-back"]["transactional_id"]
    assert rows["held-back"]["hidden_groups"] == [group]
    assert rows["held-back"]["stuck"] == [other]


async def test_partition_without_committed_offset_has_unknown_lag(console, bootstrap, topic):
    write(bootstrap, topic, ["a", "b"])
    group = unique("reads")
    with members(bootstrap, group, topic, "reader"):
        found = await get(console, "group", id=group)
        assert (found["total"]["lag"], found["total"]["unknown"]) == (None, 1)
        (row,) = found["offsets"]
        assert (row["lag"], row["lag_at_most"], row["unknown"]) == (None, 2, True)
        listed = (await get(console, "groups", q=group))["groups"]["rows"]
        assert (listed[0]["lag"], listed[0]["unknown"]) == (None, 1)


async def test_topic_sums_are_unknown_with_a_leaderless_partition(tmp_path, headers):
    def cluster() -> BrokerCluster:
        started = BrokerCluster(2, tmp_path).start()
        started.topic("t", 2, replicas=1)
        write(started.bootstrap, "t", ["x"])
        return started

    started = await asyncio.to_thread(cluster)
    try:
        settings = ConsoleSettings(bootstrap=started.bootstrap, token=TOKEN)
        app = Console(settings).application()
        async with TestClient(TestServer(app), headers=headers) as client:

            async def row() -> Any:
                return (await get(client, "topics"))["topics"]["rows"][0]

            before = await row()
            assert (before["offsets"], before["held_back"], before["leaderless"]) == (1, 0, 0)
            await asyncio.to_thread(started.kill, started.leader("t", 1))

            async def leaderless() -> Any:
                with contextlib.suppress(AssertionError):  # until the broker is fenced
                    found = await row()
                    return found if found["leaderless"] else None

            after = await until_async(leaderless, "a partition without a leader")
            assert (after["offsets"], after["held_back"], after["leaderless"]) == (None, None, 1)
    finally:
        await asyncio.to_thread(started.close)


async def well() -> Mapping[str, Any]:
    return live.ALL_WELL


async def test_silent_brokers_are_reported_while_a_view_is_pending(monkeypatch):
    monkeypatch.setattr(live, "PULSE_S", 0.01)
    beat: Mapping[str, Any] = live.ALL_WELL
    never = asyncio.Event()

    async def probe() -> Mapping[str, Any]:
        return beat

    async def look() -> dict[str, int]:
        await never.wait()
        return {}

    watches = live.ViewWatches(probe)
    frames = watches.follow(("v",), look, lambda error: {"message": str(error)})
    async with asyncio.timeout(20):
        # A healthy state is sent as well, because an earlier stream may have had silent brokers.
        assert '"silent": []' in await anext(frames)
        beat = {"silent": [2], "away": None}
        assert json.loads((await anext(frames)).partition("data: ")[2]) == beat
        # A page that is opened later also gets the state.
        late = watches.follow(("w",), look, lambda error: {"message": str(error)})
        assert '"silent": [2]' in await anext(late)
        beat = live.ALL_WELL
        assert '"silent": []' in await anext(frames)
        await frames.aclose()
        await late.aclose()
    assert watches._pulse is None, "nothing is asked while nothing is watched"


async def test_stream_reports_a_lost_broker_and_its_return(monkeypatch):
    monkeypatch.setattr(live, "MIN_INTERVAL_S", 0.01)
    away = True

    async def look() -> dict[str, bool]:
        if away:
            raise ConnectionError("gone")
        return {"well": True}

    frames = live.ViewWatches(well).follow(("v",), look, lambda error: {"message": str(error)})

    async def kind() -> str:
        async for frame in frames:
            told = frame.partition("\n")[0]
            if told != "event: pulse":
                return told
        raise AssertionError("the stream has ended")

    async with asyncio.timeout(20):
        assert await kind() == "event: away"
        away = False
        assert await kind() == "event: data"
        await frames.aclose()


async def test_streams_and_searches_are_bounded(console, topic, monkeypatch):
    monkeypatch.setattr(live, "MAX_CLIENTS", 2)
    monkeypatch.setattr(server, "MAX_SEARCHES", 1)
    follow = {"topic": topic, "from": "latest", "follow": "1"}
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(console.get("/api/messages", params=follow))
        await anext(events(first))
        told = await get(console, "messages", 429, topic=topic)
        assert "1 searches" in told["message"]
        second = await stack.enter_async_context(console.get("/api/overview", headers=STREAM))
        await anext(events(second))
        async with console.get("/api/overview", headers=STREAM) as third:
            assert third.status == 429
        await get(console, "overview")

    async def free() -> bool:
        async with console.get("/api/messages", params=follow) as again:
            return again.status == 200

    await until_async(free, "the streams have ended")


# --- the console's resource limits ---


async def test_search_stops_at_its_byte_budget(console, bootstrap, topic, monkeypatch):
    for _ in range(4):
        write(bootstrap, topic, ["x" * 1_000])
    monkeypatch.setattr(messages, "STEP_BYTES", 1)
    monkeypatch.setattr(messages, "BUDGET_BYTES", 2_500)
    _, end = await search(console, topic, **{"from": "earliest"})
    assert (end["why"], end["matched"], end["remaining"]) == ("budget", 3, 1)
    monkeypatch.setattr(messages, "BUDGET_BYTES", 10_000)
    _, end = await search(console, topic, **{"from": "earliest"})
    assert (end["why"], end["matched"]) == ("end", 4)


async def test_request_body_beyond_the_limit_is_refused(console):
    for size, status in ((limits.MAX_BODY_BYTES + 1, 413), (limits.MAX_BODY_BYTES, 400)):
        async with console.post("/api/reset", data=b"[" + b" " * (size - 2) + b"]") as answer:
            assert answer.status == status


async def test_shown_headers_and_bytes_of_a_record_are_limited(
    console, bootstrap, topic, monkeypatch
):
    many = {f"h{number:03}": b"" for number in range(limits.SHOWN_HEADERS + 1)}
    write(bootstrap, topic, ["x" * 10], headers=many)
    monkeypatch.setattr(messages, "RECORD_BYTES", 9)
    record = await get(console, "record", topic=topic, partition=0, offset=0)
    assert (len(record["headers"]), record["header_count"]) == (limits.SHOWN_HEADERS, len(many))
    assert record["value"] == {"size": 10, "cut": True, "text": "x" * 9}
    monkeypatch.setattr(messages, "RECORD_BYTES", 10)
    record = await get(console, "record", topic=topic, partition=0, offset=0)
    assert record["value"]["cut"] is False


def test_cached_history_keeps_only_the_newest_entries(bootstrap, cluster, monkeypatch):
    for number in range(5):
        cluster.init_producer(unique(f"claim-{number}"))
    with ClusterSession(bootstrap, 10) as session:
        whole = history.HistoryCache()
        assert until(lambda: whole.read_on(session) and len(whole.rows(_any)) > 4, "five claims")
        monkeypatch.setattr(history, "HISTORY_ENTRIES", 3)
        short = history.HistoryCache()

        def agree() -> bool:
            # The brokers may still be writing entries about clients of earlier tests.
            whole.read_on(session)
            short.read_on(session)
            return short.rows(_any) == whole.rows(_any, 3)

        assert until(agree, "the same newest entries")
        assert short.rows(_any, 2) == whole.rows(_any, 2)


def _any(_entry: object) -> bool:
    return True


# --- the doctor ---


async def test_doctor_shows_a_breach_with_its_request(
    console: TestClient, bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("t"))
    write(bootstrap, topic, ["plain"])
    with open_transaction(bootstrap, topic) as (name, _):

        async def breach() -> Any:
            found = await get(console, "doctor")
            assert found["observes"]
            return next(
                (finding for finding in found["findings"] if topic in finding["topics"]), None
            )

        row = await until_async(breach, "the finding")
    assert (
        row["what"] == f"{topic} is written outside of transactions, and in transactions of {name}"
    )
    assert (row["rule"], row["level"], row["request"]) == ("plain-producer", "breaks", "Produce")
    assert row["fields"]["transactional_id"] is None
