"""The console as users see it: in a real Chromium, on a real broker."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from fencepost.testing import Cluster as BrokerCluster
from tests.console.browsing import Tab, chromium, tab
from tests.console.scenes import (
    MARKUP,
    commit,
    fence,
    members,
    open_transaction,
    running,
    share_member,
    stuck_rebalance,
    write,
)
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.wire.test_share_groups import starts_at_the_beginning

expect.set_options(timeout=30_000)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def url(bootstrap, tmp_path_factory) -> Iterator[str]:
    undo_dir = tmp_path_factory.mktemp("undo")
    with running(bootstrap, allow_writes=True, undo_dir=undo_dir) as started:
        yield started


@pytest.fixture
def page(browser, url) -> Iterator[Tab]:
    with tab(browser, url) as opened:
        yield opened.enter()


@pytest.fixture
def another(browser) -> Iterator[Callable[..., Tab]]:
    """Yield a function that opens further pages, for other consoles or with other preferences."""
    with ExitStack() as stack:
        yield lambda url, **how: stack.enter_context(tab(browser, url, **how))


def test_open_transaction_appears_and_disappears_without_reload(page, bootstrap, topic):
    page.go("transactions")
    page.reads("Held back now")
    row = page.page.locator("tr", has_text=f"{topic}:0")
    expect(row).to_have_count(0)
    with open_transaction(bootstrap, topic, ["a", "b"]) as (name, _):
        expect(row).to_contain_text(name)
        expect(row).to_contain_text("Ongoing")
        page.keep("transactions")
        page.go("overview")
        page.reads("Open transaction holds readers back")
        page.reads(name)
        page.keep("overview")
        page.go("transactions")
        expect(row).to_have_count(1)
    expect(row).to_have_count(0)


def test_fenced_producer_is_shown_with_its_epochs(page, bootstrap, topic):
    name = unique("fenced")
    fence(bootstrap, topic, name)
    page.go("transactions")
    row = page.page.locator("tr", has_text=name).filter(has_text="InitProducerId")
    expect(row).to_contain_text("epoch 0 → 1")
    expect(row).to_contain_text("the-successor")
    row.get_by_role("link", name=name).click()
    expect(page.page.get_by_role("heading", level=1)).to_contain_text(name)
    page.reads("Producer fenced", ".timeline")
    page.keep("transaction")


def test_held_back_row_names_the_transaction_and_the_waiting_group(page, bootstrap, topic):
    write(bootstrap, topic, ["before"])
    group = unique("waits")
    commit(bootstrap, group, topic, 1)
    with open_transaction(bootstrap, topic) as (name, _):
        write(bootstrap, topic, ["behind"] * 4)
        page.go("transactions")
        row = page.page.locator("tr", has_text=f"{topic}:0")
        expect(row).to_contain_text(name)
        expect(row.locator("td").nth(1)).to_contain_text("5")
        expect(row).to_contain_text(group)
        expect(row).to_contain_text("waits")
        page.reads(f"fencepost txns terminate {name}")
        page.keep("held-back")
        page.go("group", id=group)
        page.reads("5 records held back by open transactions")


def test_lag_reaches_zero_after_a_commit(page, bootstrap, topic):
    group = unique("reads")
    with open_transaction(bootstrap, topic, ["a", "b", "c"]) as (_, producer):
        commit(bootstrap, group, topic, 0)
        page.go("group", id=group)
        lag = page.page.locator("#total-lag")
        expect(lag).to_have_text("0")
        page.reads("3 records held back")
        producer.commit_transaction(60)
        expect(lag).to_have_text("3")
        # After this offset there is only the end marker, which is not a record to read.
        commit(bootstrap, group, topic, 3)
        expect(lag).to_have_text("0")
    page.keep("lag")


def test_rebalance_cause_is_on_the_timeline(page, bootstrap, cluster):
    topic, group = cluster.create_topic(unique("topic"), 6), unique("team")
    with members(bootstrap, group, topic, "first", "second", "third"):
        page.go("group", id=group, tab="why")
        page.reads(re.compile("because new member (first|second|third)"), ".timeline")
        page.keep("timeline")
        page.go("group", id=group, tab="members")
        expect(page.page.locator("tbody tr")).to_have_count(3)
        page.reads(f"{topic}")
        page.keep("members")


def test_share_group_shows_in_flight_and_blamed_records(page, bootstrap, cluster):
    topic, group = cluster.create_topic(unique("jobs"), 2), unique("workers")
    starts_at_the_beginning(cluster, group)
    write(bootstrap, topic, ["a", "b", "c"])
    with share_member(bootstrap, group, topic, "packer"):
        page.go("group", id=group)
        blamed = page.page.get_by_role("region", name="blamed records").locator("tbody tr")
        expect(blamed).to_have_count(1)
        for text in (f"{topic}:0", "0–2", "acquired", "1 of 5", "packer @ 127.0.0.1"):
            expect(blamed).to_contain_text(text)
        expect(blamed).to_contain_text("its owner acknowledges it, or the lock ends")
        offsets = page.page.get_by_role("region", name="offsets").locator("tbody tr")
        expect(offsets).to_have_count(2)
        expect(offsets.first.locator("td").nth(3)).to_have_text("3")
        page.reads(f"fencepost groups blame {group}")
        page.keep("share-records")
        page.go("group", id=group, tab="members")
        page.reads("packer")
        page.reads(f"{topic}")
        page.keep("share-members")
    page.go("group", id=group, tab="why")
    page.reads("Records are available again", ".timeline")
    page.reads(f"{topic}:0 0-2", ".timeline")
    page.keep("share-history")


def test_plan_page_shows_moves_for_added_and_removed_members(page, bootstrap, cluster):
    topic, group = cluster.create_topic(unique("topic"), 6), unique("team")
    with members(bootstrap, group, topic, "first", "second"):
        page.go("group", id=group, tab="plan")
        page.reads("0 of 6 partitions would move")
        page.page.get_by_label("More members").fill("1")
        page.reads("added-1")
        page.reads("partitions would move")
        page.page.get_by_label("first").check()
        page.reads("leaves")
        assert "add=1" in page.page.url
        assert "remove=first" in page.page.url
        page.page.get_by_label("Assignor").select_option("sticky")
        page.reads("with sticky")
        page.keep("what-if")


def test_offset_reset_is_previewed_and_executed(page, bootstrap, topic):
    write(bootstrap, topic, ["a", "b", "c", "d"])
    group = unique("resets")
    commit(bootstrap, group, topic, 3)
    page.go("group", id=group, tab="reset")
    page.page.get_by_label("To", exact=True).select_option("shift_by")
    page.page.get_by_label("offsets; negative is back").fill("-2")
    page.page.wait_for_url(re.compile("value=-2"))
    page.page.get_by_role("button", name="Preview").click()
    row = page.page.locator("tr", has_text=f"{topic}:0")
    expect(row).to_contain_text("−2, again")
    page.reads("1 partition of 1 would change. Nothing is done yet.")
    page.keep("reset-preview")
    page.page.get_by_role("button", name="Set 1 offset").click()
    page.reads("Done: 1 partition set.")
    page.reads(re.compile(r"--from-file \S*undo-resets-\S+\.csv --execute"))
    page.keep("reset-done")
    page.go("group", id=group)
    expect(page.page.locator("#total-lag")).to_have_text("3")


def test_read_only_console_disables_the_offset_reset(another, bootstrap, topic, tmp_path):
    write(bootstrap, topic, ["a"])
    group = unique("resets")
    commit(bootstrap, group, topic, 1)
    with running(bootstrap, undo_dir=tmp_path) as url:
        page = another(url).enter()
        page.reads("read only", ".foot")
        page.go("group", id=group, tab="reset")
        page.page.get_by_role("button", name="Preview").click()
        page.reads("1 partition of 1 would change")
        page.reads("start it with --allow-writes")
        expect(page.page.get_by_role("button", name="Set 1 offset")).to_be_disabled()
    assert not list(tmp_path.iterdir())


def test_search_shows_its_counts_and_can_be_stopped(page, bootstrap, topic):
    write(bootstrap, topic, [f"value {number}" for number in range(3_000)], key="k")
    page.go("topic", name=topic, **{"from": "earliest", "value": "value 2999"})
    page.reads("at the end", ".search-status")
    assert (page.count("scanned"), page.count("matched"), page.count("remaining")) == (3000, 1, 0)
    page.keep("search")
    page.page.get_by_label("New ones").select_option("1")
    page.reads("waits for new ones", ".search-status")
    write(bootstrap, topic, ["value 2999 again"])
    page.reads("value 2999 again", ".messages")
    page.page.get_by_role("button", name="Stop").click()
    page.reads("stopped", ".search-status")
    write(bootstrap, topic, ["value 2999 too late"])
    expect(page.page.locator(".messages")).not_to_contain_text("too late")
    page.page.get_by_role("button", name="Search").click()
    page.reads("too late", ".messages")

    # The input in several fields survives a redrawn page, and makes up one search.
    page.go("topic", name=topic)
    page.page.get_by_label("Key has").fill("K")
    page.page.get_by_label("Value has").fill("value 2998")
    page.page.get_by_label("Header has").fill("none such")
    with open_transaction(bootstrap, topic):
        page.reads("1", ".fact dd.held")
        expect(page.page.get_by_label("Key has")).to_have_value("K")
        page.page.get_by_label("Header has").fill("")
        page.page.get_by_label("From").select_option("earliest")
        page.page.get_by_role("button", name="Search").click()
        expect(page.page.locator(".messages tbody tr")).to_have_count(1)
    page.page.wait_for_url(re.compile("key=K&value=value"))
    with page.page.expect_download() as saved:
        page.page.get_by_role("button", name="save as JSON").click()
    (line,) = Path(saved.value.path()).read_text("utf-8").splitlines()
    assert json.loads(line)["value"]["text"] == "value 2998"


def test_record_is_shown_with_its_whole_value_and_headers(page, bootstrap, topic):
    write(bootstrap, topic, ['{"größe":1,"text":"注文"}'], key="k", headers={"trace": b"\x01"})
    write(bootstrap, topic, [b"\xff\xfe\x00"], key="binary")
    write(bootstrap, topic, [None], key="gone")
    page.go("topic", name=topic)
    page.reads("tombstone", ".messages")
    page.reads("binary", ".messages")
    page.page.get_by_role("button", name="0:0").click()
    page.reads('"größe": 1', ".drawer pre >> nth=1")
    page.reads("trace", ".drawer")
    page.keep("record")
    page.page.keyboard.press("Escape")
    expect(page.page.locator(".drawer")).to_have_count(0)
    page.page.get_by_role("button", name="0:1").click()
    page.reads("ff fe 00", ".drawer")


def test_isolation_level_decides_on_the_records_shown(page, bootstrap, topic):
    write(bootstrap, topic, ["plain"])
    with open_transaction(bootstrap, topic, ["thrown away"]):
        pass
    with open_transaction(bootstrap, topic, ["not yet"]):
        page.go("topic", name=topic)
        page.reads("hidden by read_committed: 1 aborted, 1 control")
        page.reads("1 offset held back by an open transaction")
        expect(page.page.locator(".messages tbody tr")).to_have_count(1)
        page.page.get_by_role("button", name="read_uncommitted").click()
        shown = page.page.locator(".messages tbody tr")
        expect(shown).to_have_count(4)
        expect(shown.filter(has_text="thrown away")).to_contain_text("aborted")
        expect(shown.filter(has_text="not yet")).to_contain_text("open")
        expect(shown.filter(has_text="ABORT marker")).to_contain_text("control")
        page.keep("messages")


def test_markup_in_values_is_only_text(page, bootstrap, cluster):
    topic = cluster.create_topic(unique("topic"))
    group = f"{MARKUP}-{unique('group')}"
    write(bootstrap, topic, [MARKUP], key=MARKUP, headers={MARKUP: MARKUP.encode()})
    with members(bootstrap, group, topic, MARKUP), open_transaction(bootstrap, topic):
        page.go("topic", name=topic, isolation="read_uncommitted")
        page.page.get_by_role("button", name="0:0").click()
        page.reads(MARKUP, ".drawer")
        page.go("groups", q=group)
        page.reads(group)
        for part in ("lag", "members", "why", "plan", "reset"):
            page.go("group", id=group, tab=part)
            expect(page.page.get_by_role("heading", level=1)).to_contain_text(MARKUP)
        page.go("group", id=group, tab="members")
        page.reads(MARKUP, "tbody")
        page.go("overview")
        page.reads(group)
    assert page.page.evaluate("window.hacked") is None
    assert page.page.locator("main img, main script").count() == 0


def test_wrong_token_can_be_replaced(another, url):
    page = another(url).enter("wrong")
    page.reads("Which token?")
    page.keep("token")
    page.page.get_by_label("token").fill(f"{url}#token=a-token-of-the-tests")
    page.page.get_by_role("button", name="Enter").click()
    page.reads("Needs attention")
    assert "token" not in page.page.url, "it does not stay in the address"


def test_wrong_token_is_reported_and_missing_one_only_requested(another, url):
    page = another(url).enter("wrong")
    page.reads("That token is wrong")
    page.page.get_by_label("token").fill("wrong again")
    page.page.get_by_role("button", name="Enter").click()
    page.reads("That token is wrong")
    nothing = another(url)
    nothing.page.goto(nothing.url)
    nothing.reads("Which token?")
    expect(nothing.page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize(
    ("view", "params", "told", "back"),
    [
        ("group", {"id": "no-such"}, "There is no group of this name", "All groups"),
        ("topic", {"name": "no-such"}, "There is no topic of this name", "All topics"),
        ("transaction", {"id": "no-such"}, "There is no transactional id", "All transactions"),
        ("group", {}, "Which group?", "All groups"),
        ("no-such-page", {}, "The console has no page “no-such-page”", "Topics"),
    ],
)
def test_missing_resource_has_a_page_with_a_link_back(page, view, params, told, back):
    page.reads("Needs attention")
    page.go(view, **params)
    page.reads(told)
    page.keep(f"missing-{view}{len(params)}")
    page.page.locator("main").get_by_role("link", name=back).click()
    page.reads(re.compile("Consumer groups|Offsets kept|No topics|Held back now"))


def test_group_deleted_while_shown_is_reported_missing(page, bootstrap, cluster, topic):
    group = unique("deleted")
    commit(bootstrap, group, topic, 0)
    page.go("group", id=group)
    expect(page.page.locator("#total-lag")).to_have_text("0")
    cluster.call("delete_groups", 2, groups_names=[group])
    page.reads("There is no group of this name")


def test_sort_order_of_columns_is_kept_in_the_url(page, bootstrap, cluster):
    stem = unique("sorted")
    for number, count in ((1, 9), (2, 1_200), (3, 30)):
        write(bootstrap, cluster.create_topic(f"{stem}-{number}"), ["x"] * count)
    page.go("topics", q=stem)
    names = page.page.locator("tbody tr td:first-child a")
    expect(names).to_have_text([f"{stem}-{number}" for number in (1, 2, 3)])
    page.page.get_by_role("button", name="Offsets kept").click()
    expect(names).to_have_text([f"{stem}-{number}" for number in (1, 3, 2)])
    head = page.page.get_by_role("columnheader", name="Offsets kept")
    expect(head).to_have_attribute("aria-sort", "ascending")
    page.page.get_by_role("button", name="Offsets kept").click()
    expect(names).to_have_text([f"{stem}-{number}" for number in (2, 3, 1)])
    expect(head).to_have_attribute("aria-sort", "descending")
    page.page.reload()
    expect(names).to_have_text([f"{stem}-{number}" for number in (2, 3, 1)])
    page.page.get_by_role("button", name="Offsets kept").click()
    expect(names).to_have_text([f"{stem}-{number}" for number in (1, 2, 3)])
    assert "sort" not in page.page.url.partition("?")[2].replace(stem, "")


def test_unknown_lag_is_shown_as_unknown(page, bootstrap, topic):
    write(bootstrap, topic, ["a", "b"])
    group = unique("reads")
    with members(bootstrap, group, topic, "reader"):
        page.go("group", id=group)
        lag = page.page.locator("#total-lag")
        expect(lag).to_have_text("unknown")
        expect(lag.locator(".lag")).to_have_attribute("title", re.compile("at most 2 records"))
        page.keep("lag-unknown")
        with open_transaction(bootstrap, topic):
            page.go("transactions")
            row = page.page.locator("tr", has_text=f"{topic}:0").filter(has_text="Ongoing")
            expect(row.first).to_contain_text(group)


def test_waiting_rebalance_names_the_member(page, bootstrap, topic):
    group = unique("waits")
    with stuck_rebalance(bootstrap, group, topic):
        page.go("overview")
        matter = page.page.locator(".attention", has_text=group)
        expect(matter).to_contain_text("Group waits for members")
        expect(matter).to_contain_text("waits for polls-no-more@")
        page.keep("rebalance-waits")


TOO_WIDE = """
() => document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("*")]
  .filter((one) => one.getBoundingClientRect().right > innerWidth)
  .filter((one) => !one.closest(".table-wrap, nav"))
  .map((one) => `${one.tagName}.${one.className}`)
"""
"""Finds elements that make the page scroll sideways; tables and tabs may scroll by themselves."""


@pytest.mark.parametrize("width", [320, 390, 768])
def test_no_page_is_wider_than_a_narrow_screen(page, bootstrap, cluster, width):
    topic, group = cluster.create_topic(unique("a-rather-long-name-of-a-topic")), unique("group")
    write(bootstrap, topic, ["x" * 300], key="k" * 100)
    page.page.set_viewport_size({"width": width, "height": 800})
    with (
        members(bootstrap, group, topic, "member-with-a-rather-long-client-id"),
        open_transaction(bootstrap, topic) as (name, _),
    ):
        for view, params, text in (
            ("overview", {}, "Needs attention"),
            ("transactions", {}, "Held back now"),
            ("transaction", {"id": name}, "What happened"),
            ("groups", {}, "Consumer groups"),
            *(
                ("group", {"id": group, "tab": tab}, group)
                for tab in ("lag", "members", "why", "plan", "reset")
            ),
            ("topics", {}, "Offsets kept"),
            ("topic", {"name": topic}, "xxx"),
            ("topic", {"name": topic, "tab": "partitions"}, topic),
            ("doctor", {}, f"{topic} is written outside of transactions"),
            ("group", {"id": "no-such"}, "There is no group"),
        ):
            page.go(view, **params)
            page.reads(text)
            assert not page.page.evaluate(TOO_WIDE), (view, params)
            if width == 390:
                page.keep(f"narrow-{view}-{params.get('tab', '')}")


def test_foreign_host_name_is_refused(another, url):
    page = another(url.replace("127.0.0.1", "127.0.0.2")).page
    # This name resolves to the console's address, so Chromium can connect.
    name = url.replace("127.0.0.1", "console.localhost")
    answer = page.goto(name)
    assert answer.status == 421
    assert "does not accept the host name" in page.content()


def test_reload_keeps_filters_and_switches(page, cluster):
    stem = unique("kept")
    for number in range(3):
        cluster.create_topic(f"{stem}-{number}")
    page.go("topics")
    page.page.get_by_label("Filter by name").fill(f"{stem}-1")
    expect(page.page.locator("tbody tr")).to_have_count(1)
    page.page.get_by_role("button", name=re.compile("internal")).click()
    page.page.wait_for_url(re.compile("internal=1"))
    before = page.page.url
    page.page.reload()
    expect(page.page.locator("tbody tr")).to_have_count(1)
    expect(page.page.get_by_label("Filter by name")).to_have_value(f"{stem}-1")
    assert page.page.url == before
    pressed = page.page.get_by_role("button", name=re.compile("internal"))
    expect(pressed).to_have_attribute("aria-pressed", "true")


def test_pages_can_be_used_by_keyboard_alone(page, cluster, bootstrap):
    topic = cluster.create_topic(unique("by-keys"))
    write(bootstrap, topic, ["found"])
    keys = page.page.keyboard
    page.reads("Needs attention")
    keys.press("?")
    page.reads("filter, or search", ".dialog")
    page.keep("keys")
    keys.press("Escape")
    expect(page.page.locator(".dialog")).to_have_count(0)
    for key, title in (("x", "Transactions"), ("g", "Groups"), ("o", "Overview"), ("t", "Topics")):
        keys.press("g")
        keys.press(key)
        expect(page.page.get_by_role("heading", level=1)).to_contain_text(title)
    page.reads(re.compile("Offsets kept"))
    keys.press("/")
    keys.type(topic)
    expect(page.page.locator("tbody tr")).to_have_count(1)
    keys.press("Escape")
    keys.press("j")
    expect(page.page.get_by_role("link", name=topic)).to_be_focused()
    keys.press("Enter")
    page.reads("found", ".messages")
    keys.press("j")
    keys.press("Enter")
    page.reads("found", ".drawer")
    keys.press("Escape")
    # On a new page, Tab goes to the skip link first, and then to the navigation.
    page.page.reload()
    page.reads("found", ".messages")
    keys.press("Tab")
    expect(page.page.locator(".skip")).to_be_focused()
    keys.press("Tab")
    keys.press("Tab")
    expect(page.page.get_by_role("link", name="Overview")).to_be_focused()


def test_colour_scheme_follows_the_system_until_changed(another, url):
    colours = {}
    for scheme in ("light", "dark"):
        page = another(url, color_scheme=scheme).enter()
        page.reads("Needs attention")
        page.keep(f"overview-{scheme}")
        colours[scheme] = ground(page)
    assert colours["light"] != colours["dark"]
    page.page.keyboard.press("d")
    page.reads("light", ".tools")
    assert ground(page) == colours["light"]
    page.page.reload()
    page.reads("Needs attention")
    assert ground(page) == colours["light"], "what was chosen stays"


def ground(page: Tab) -> str:
    found: str = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return found


def test_console_recovers_after_a_broker_restart(another, tmp_path):
    daemon = Daemon(tmp_path / "data").start()
    try:
        with running(daemon.bootstrap, timeout_s=1.0) as url:
            page = another(url).enter()
            page.reads("Needs attention")
            daemon.kill()
            page.reads("No broker can be reached")
            page.reads("What you see is of")
            page.reads("away", ".foot")
            page.keep("away")
            daemon.start()
            expect(page.page.locator(".banner")).to_have_count(0)
            page.reads("live", ".foot")
            with Cluster(daemon.bootstrap) as cluster:
                cluster.create_topic("after-the-start")
            page.go("topics")
            page.reads("after-the-start")
    finally:
        daemon.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_unresponsive_broker_is_noticed_within_three_seconds(another, tmp_path, how):
    daemon = Daemon(tmp_path / "data").start()
    assert daemon.child is not None
    try:
        with running(daemon.bootstrap, timeout_s=10.0) as url:  # the timeout of the command
            page = another(url).enter()
            page.reads("live", ".foot")
            began = time.monotonic()
            os.kill(daemon.child.pid, how)
            expect(page.page.locator(".status")).to_have_text("away")
            assert time.monotonic() - began < 3
            page.reads("No broker can be reached")
            if how == signal.SIGSTOP:
                os.kill(daemon.child.pid, signal.SIGCONT)
                page.reads("live", ".foot")
    finally:
        daemon.kill()


def test_one_silent_broker_of_several_is_noticed_within_three_seconds(another, tmp_path):
    config = {"broker.session.timeout.ms": "60000"}
    with BrokerCluster(2, tmp_path, config) as cluster, running(cluster.bootstrap) as url:
        page = another(url).enter()
        page.reads("live", ".foot")
        page.reads("controller", ".tile")
        began = time.monotonic()
        cluster.kill(2)
        expect(page.page.locator(".status")).to_have_text("live, broker 2 silent")
        assert time.monotonic() - began < 3
        page.go("overview")
        page.reads("Broker does not answer")
        cluster.restart(2)
        expect(page.page.locator(".status")).to_have_text("live")


def test_thousands_of_topics_are_listed_in_pages(another, tmp_path):
    daemon = Daemon(tmp_path / "data").start()
    try:
        with Cluster(daemon.bootstrap) as cluster:
            topics = [
                {"name": f"topic-{number:05}", "num_partitions": 1, "replication_factor": 1}
                for number in range(9_000)
            ]
            for begin in range(0, len(topics), 1_000):
                cluster.call(
                    "create_topics", 5, timeout=60_000, topics=topics[begin : begin + 1_000]
                )
        with running(daemon.bootstrap) as url:
            page = another(url).enter()
            page.reads("9,000")
            page.go("topics")
            page.reads("1–50 of 9,000")
            page.page.keyboard.press("n")
            page.reads("51–100 of 9,000")
            page.page.get_by_label("Filter by name").fill("08999")
            page.reads("1 in all")
            assert page.page.locator("tbody tr").count() == 1
    finally:
        daemon.stop()
