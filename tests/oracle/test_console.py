"""The console has the same pages for an Apache Kafka, with a note that there is no history."""

from __future__ import annotations

import re

import pytest

from tests.console.browsing import chromium, tab
from tests.console.scenes import commit, fence, members, open_transaction, running, write
from tests.support.cluster import Cluster, unique

pytestmark = pytest.mark.oracle


def test_console_pages_on_apache_kafka_note_the_missing_history(kafka, tmp_path):
    bootstrap = kafka.bootstrap
    group = unique("reads")
    with Cluster(bootstrap) as cluster:
        topic, busy = cluster.create_topic(unique("topic")), cluster.create_topic(unique("busy"), 2)
    with (
        running(bootstrap, allow_writes=True, undo_dir=tmp_path) as url,
        chromium() as browser,
        tab(browser, url) as page,
    ):
        page.enter()
        page.reads("No history")
        write(bootstrap, topic, ["before"])
        commit(bootstrap, group, topic, 1)
        with open_transaction(bootstrap, topic, ["thrown away"]) as (name, producer):
            page.go("transactions")
            row = page.page.locator("tr", has_text=f"{topic}:0")
            for text in (name, "Ongoing", group):
                row.filter(has_text=text).wait_for()
            page.reads("Apache Kafka keeps no such history")
            page.go("topic", name=topic, isolation="read_uncommitted")
            page.reads("thrown away", ".message.open")
            producer.abort_transaction(60)
        # Apache Kafka writes the marker after its response.
        page.go("transactions")
        page.reads("Nobody is held back")
        page.go("topic", name=topic, isolation="read_uncommitted", limit=20)
        page.reads("thrown away", ".message.aborted")
        page.reads("ABORT marker", ".message.control")
        page.go("group", id=group)
        page.reads(re.compile("^0$"), "#total-lag")
        page.keep("apache-kafka-group")

        page.go("group", id=group, tab="reset")
        page.page.get_by_role("button", name="Preview").click()
        page.page.get_by_role("button", name="Set 1 offset").click()
        page.reads("Done: 1 partition set.")

        team = unique("team")
        with members(bootstrap, team, busy, "first", "second"):
            page.go("group", id=team, tab="plan", add=1)
            page.reads("added-1")
            page.go("group", id=team, tab="why")
            page.reads("No history")
        fence(bootstrap, topic, unique("fenced"))
        page.go("transactions")
        page.reads("Apache Kafka keeps no such history")
        page.keep("apache-kafka-transactions")
