"""Regular expressions that take more than one turn, and invalid expressions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fencepost.groups import consumer_records as cr
from fencepost.groups.commands import DeleteGroup, TopicVisibility
from fencepost.groups.consumer_records import ConsumerRecordType as Kind
from fencepost.groups.limits import GroupLimits
from fencepost.groups.regex import RegexScan
from fencepost.logcore.machine import InvalidRegularExpressionError
from fencepost.logcore.regex import AT_ONCE, BUILD_STEPS, Regex
from tests.unit.groups.consumer_driver import ConsumerDriver, T, TopicsImage, V, changed, settle
from tests.unit.groups.group_driver import Entry, G

TOPICS = 40
MANY = TopicsImage(
    {f"topic-{number:02}": (bytes([number]) * 16, 1) for number in range(1, TOPICS + 1)}, 1
)
SLOW = GroupLimits(max_regex_steps_per_turn=50)


def subscribed(driver: ConsumerDriver) -> int:
    return len(driver.consumer_group().subscribed_topics())


# --- slices --------------------------------------------------------------------------------------


def test_regex_resolution_continues_over_several_heartbeats():
    driver = ConsumerDriver(SLOW, image=MANY)
    client = driver.client("m", subscribed_topic_names=None, subscribed_topic_regex="topic-[0-3].*")
    assert not client.owned
    epoch = driver.consumer_group().epoch
    turns = 0
    while not subscribed(driver):
        driver.advance(5)
        client.beat()
        turns += 1
    assert turns > 5
    assert driver.consumer_group().epoch == epoch + 1
    settle(client)
    assert len(client.owned) == 39
    assert driver.kinds().count("regex-resolved") == 1
    driver.reload()
    assert subscribed(driver) == 39


def test_second_regex_is_resolved_after_the_one_in_progress():
    driver = ConsumerDriver(SLOW, image=MANY)
    driver.join("m", subscribed_topic_names=None, subscribed_topic_regex="topic-1.*")
    driver.advance(5)
    driver.join("n", subscribed_topic_names=None, subscribed_topic_regex="topic-2.*")
    driver.advance(1_000)
    assert {name: len(found.topics) for name, found in driver.consumer_group().regexes.items()} == {
        "topic-1.*": 10,
        "topic-2.*": 10,
    }
    assert driver.consumer_group().scan is None
    driver.image = changed(driver.image, **{"topic-1": (V, 1), "topic-2": None})
    driver.beat("m", driver.consumer_group().current("m").member_epoch)
    driver.advance(1_000)
    assert "topic-1" in driver.consumer_group().regexes["topic-1.*"].topics


def test_join_by_an_unmatched_expression_keeps_the_group_epoch():
    driver = ConsumerDriver(image=MANY)
    client = driver.client("m", subscribed_topic_names=None, subscribed_topic_regex="foo*")
    assert driver.consumer_group().epoch == client.epoch == 1
    driver.image = changed(driver.image, foo=(V, 3))
    driver.advance(10_001)
    settle(client)
    assert driver.consumer_group().epoch == client.epoch == 2
    assert len(client.owned) == 3


def test_join_by_a_resolved_expression_bumps_the_group_epoch():
    driver = ConsumerDriver(image=MANY)
    driver.client("m", subscribed_topic_names=None, subscribed_topic_regex="topic-0.*")
    epoch = driver.consumer_group().epoch
    driver.client("n", subscribed_topic_names=None, subscribed_topic_regex="topic-0.*")
    assert driver.consumer_group().epoch == epoch + 1


def test_expression_of_topics_subscribed_by_name_bumps_the_group_epoch():
    driver = ConsumerDriver(image=MANY)
    driver.client("m", subscribed_topic_names=("topic-01",))
    epoch = driver.consumer_group().epoch
    driver.client("n", subscribed_topic_names=None, subscribed_topic_regex="topic-01")
    assert driver.consumer_group().epoch == epoch + 1


def test_join_without_a_subscription_keeps_the_group_epoch():
    driver = ConsumerDriver(image=MANY)
    driver.client("m", subscribed_topic_names=("topic-01",))
    epoch = driver.consumer_group().epoch
    driver.client("n", subscribed_topic_names=())
    assert driver.consumer_group().epoch == epoch


@pytest.mark.parametrize("how", ["leave", "clear", "crash", "delete"])
def test_regex_resolution_ends_with_its_last_subscriber_and_restarts_after_reload(how):
    driver = ConsumerDriver(SLOW, image=MANY)
    driver.join("m", subscribed_topic_names=None, subscribed_topic_regex="topic-1.*")
    driver.advance(5)
    assert driver.consumer_group().scan is not None
    if how == "crash":
        driver.reload()
        driver.beat("m", 1)
        driver.advance(1_000)
        assert subscribed(driver) == 10
        return
    if how == "clear":
        driver.beat("m", 1, subscribed_topic_names=("topic-01",), subscribed_topic_regex="")
    else:
        driver.beat("m", -1)
        if how == "delete":
            driver.ask(DeleteGroup(G))
    driver.advance(1_000)
    assert "regex-resolved" not in driver.kinds()
    assert not any(key[0] == "regex" for key in driver.timers)


@pytest.mark.parametrize(
    "pattern", ["(.?){600}", "(((a?){10}){10}){9}", "(" + "[ace]?" * 160 + ")", "(a*)*(a|a)*"]
)
def test_each_step_of_regex_matching_is_bounded_for_any_pattern(pattern):
    regex = Regex(pattern)
    assert max(regex.build(), default=0) <= 2 * BUILD_STEPS * AT_ONCE
    assert max(regex.walk("a" * 249)) <= AT_ONCE
    scan = RegexScan([pattern], ["a" * 249, "ab" * 100], 1)
    turns = 0
    while not scan.advance(500):
        turns += 1
    assert turns >= (0 if pattern.startswith("(a*)*") else 20)
    assert scan.matches == {
        pattern: tuple(name for name in ("a" * 249, "ab" * 100) if regex.matches(name))
    }


# --- invalid expressions --------------------------------------------------------------------------


def imported(driver: ConsumerDriver, regex: str) -> ConsumerDriver:
    """Return a group loaded from another broker's records, with ``regex`` as its expression."""
    log = []
    for entry in driver.log:
        record = entry.record
        assert record is not None
        if record.key == cr.tombstone(Kind.MEMBER_METADATA, G, "m").key:
            said = driver.consumer_group().members["m"]
            record = cr.member(G, "m", replace(said, subscribed_topic_regex=regex))
        elif record.key == cr.tombstone(Kind.REGULAR_EXPRESSION, G, "t.*").key:
            record = cr.regular_expression(G, regex, driver.consumer_group().regexes["t.*"])
        log.append(Entry(entry.offset, record, entry.stamp))
    return ConsumerDriver(log=log, image=driver.image)


def test_loaded_regex_of_unsupported_syntax_keeps_its_topics_and_members():
    driver = ConsumerDriver()
    driver.join("m", subscribed_topic_names=None, subscribed_topic_regex="t.*")
    driver.join("n", "u")
    moved = imported(driver, r"\Ct.*")
    assert moved.beat("m", 2, owned=((T, (0, 1, 2, 3)),)).member_epoch == 3
    moved.beat("n", 3)
    moved.advance(1_000)
    moved.image = changed(moved.image, tt=(V, 1))
    moved.beat("n", 3)
    assert moved.consumer_group().subscribed_topics() == {"t", "u"}
    assert moved.kinds().count("regex-refused") == 1
    assert "invalid escape" in moved.event("regex-refused")["reason"]
    moved.reload()
    with pytest.raises(InvalidRegularExpressionError):
        moved.join("o", subscribed_topic_names=None, subscribed_topic_regex=r"\Ct.*")


def test_regex_matching_more_topics_than_a_record_holds_keeps_its_topics():
    driver = ConsumerDriver(max_batch_bytes=1_100)
    driver.join("m", "t", subscribed_topic_regex="t.*")
    fit = {"t" * 200: (V, 1), "t" * 201: (V[:-1] + b"w", 1)}
    driver.image = changed(driver.image, **fit)
    driver.advance(1_000)
    driver.beat("m", 2)
    assert subscribed(driver) == 3
    driver.image = changed(driver.image, **{"t" * 202: (V[:-1] + b"x", 1)})
    driver.advance(1_000)
    driver.beat("m", driver.consumer_group().current("m").member_epoch)
    assert subscribed(driver) == 3
    assert driver.event("regex-refused")["reason"] == "its topics do not fit a record"
    driver.image = changed(driver.image, **{"t" * 201: None})
    driver.advance(1_000)
    driver.beat("m", driver.consumer_group().current("m").member_epoch)
    assert "t" * 202 in driver.consumer_group().subscribed_topics()


def test_regexes_too_large_for_one_batch_are_written_in_several():
    driver = ConsumerDriver(max_batch_bytes=1_500)
    driver.image = changed(driver.image, **{"t" * 200: (V, 1)})
    for number in range(5):
        driver.join(
            f"m{number}", subscribed_topic_names=None, subscribed_topic_regex="t*" * (number + 1)
        )
    driver.image = changed(driver.image, **{"t" * 199: (V[:-1] + b"w", 1)})
    driver.advance(1_000)
    driver.beat("m0", driver.consumer_group().current("m0").member_epoch)
    assert subscribed(driver) == 3
    found = driver.consumer_group().regexes
    assert 0 < sum(len(regex.topics) == 3 for regex in found.values()) < 5
    driver.advance(100)
    assert all(len(regex.topics) == 3 for regex in driver.consumer_group().regexes.values())


# --- topics visible to the sender -----------------------------------------------------------------


def test_regex_matches_only_visible_topics_and_follows_acl_changes():
    driver = ConsumerDriver(image=MANY)
    seen = {"topic-01", "topic-02"}

    def visibility(version: int) -> TopicVisibility:
        return TopicVisibility(version, seen.__contains__)

    pattern = "topic-0.*"
    driver.join(
        "m", subscribed_topic_names=None, subscribed_topic_regex=pattern, visibility=visibility(1)
    )

    def beat(version: int) -> tuple[str, ...]:
        driver.advance(1_000)
        driver.beat(
            "m", driver.consumer_group().current("m").member_epoch, visibility=visibility(version)
        )
        return driver.consumer_group().regexes[pattern].topics

    assert beat(1) == ("topic-01", "topic-02")
    epoch = driver.consumer_group().epoch
    seen |= {"topic-03", "other"}
    assert beat(1) == ("topic-01", "topic-02")
    assert beat(2) == ("topic-01", "topic-02", "topic-03")
    assert driver.consumer_group().epoch == epoch + 1
    seen.clear()
    assert beat(3) == ()
    assert driver.consumer_group().epoch == epoch + 2
    assert beat(3) == ()
    assert driver.consumer_group().epoch == epoch + 2


def test_regex_resolution_by_timer_matches_only_visible_topics():
    driver, pattern = ConsumerDriver(SLOW, image=MANY), "topic-[0-3].*"
    visibility = TopicVisibility(1, {"topic-39"}.__contains__)
    driver.join(
        "m", subscribed_topic_names=None, subscribed_topic_regex=pattern, visibility=visibility
    )
    # The group was new, so the sender's visible topics are unknown until its next heartbeat.
    driver.advance(1_000)
    assert not driver.consumer_group().regexes
    driver.beat("m", 1, visibility=visibility)
    assert driver.consumer_group().scan is not None
    driver.advance(1_000)
    assert driver.consumer_group().regexes[pattern].topics == ("topic-39",)
    driver.image = changed(driver.image, **{"topic-39": None, "topic-3x": (V, 1)})
    driver.beat("m", driver.consumer_group().current("m").member_epoch, visibility=visibility)
    driver.advance(1_000)
    assert driver.consumer_group().regexes[pattern].topics == ()
