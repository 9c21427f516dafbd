"""The requests of two web consoles get the same results from Fencepost and Apache Kafka.

Kafbat UI (2026-07) uses Java's AdminClient, and Redpanda Console (2026-08) uses franz-go. The test
sends the same requests as the consoles, because only the responses determine the contents of a
page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.tool_scenes import FEATURES, LATEST_METADATA
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, run_tool
from tests.support.raw import errors_in

pytestmark = pytest.mark.oracle

KAFBAT = Path(__file__).with_name("KafbatCalls.java")


def asked_by_kafbat(bootstrap: str) -> dict[str, str]:
    said = run_tool(str(KAFBAT), bootstrap)
    calls = re.findall(r"^CALL (.*?): (.*)$", said, re.MULTILINE)
    return {what: re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", told) for what, told in calls}


@pytest.fixture
def upgraded(tmp_path: Path) -> Iterator[Daemon]:
    """Yield a broker of Fencepost with Apache Kafka's level of metadata.version."""
    daemon = Daemon(tmp_path).start()
    try:
        words = ("upgrade", "--metadata", LATEST_METADATA)
        run_tool(FEATURES, "--bootstrap-server", daemon.bootstrap, *words)
        yield daemon
    finally:
        daemon.stop()


def test_kafbat_ui_requests_have_the_same_results(kafka: Kafka, upgraded: Daemon) -> None:
    theirs, ours = (asked_by_kafbat(broker.bootstrap) for broker in (kafka, upgraded))
    assert len(theirs) > 30
    different = {what for what in theirs if ours.get(what) != theirs[what]}
    assert not different, {what: (ours.get(what), theirs[what]) for what in different}
    assert ours["describeFeatures"] == theirs["describeFeatures"] != "null"
    assert "UnsupportedVersionException" not in ours.values()


PAGES = {
    "cluster config": (32,),
    "consumer groups": (15, 16),
    "delete records": (21,),
    "edit offsets": (8,),
    "delete groups": (42,),
    "delete offsets": (47,),
    "reassign partitions": (44, 45, 46),
    "quotas": (48,),
    "users": (50, 51),
}
"""The pages of Redpanda Console, with the APIs that a broker must advertise for each page."""


def asked_by_console(bootstrap: str) -> list[tuple[str, list[str]]]:
    """Send each request; return the request's name with the errors of its response."""
    name, group = unique("console"), unique("console")
    said: list[tuple[str, list[str]]] = []
    with Cluster(bootstrap) as cluster:

        def ask(api: str, version: int, **body: Any) -> Any:
            answer = cluster.call(api, version, **body)
            said.append((f"{api} v{version}", sorted(set(errors_in(answer)))))
            return answer

        software = {"client_software_name": "kgo", "client_software_version": "1"}
        keys = {api["api_key"] for api in ask("api_versions", 4, **software)["api_keys"]}
        said.append(("pages", [page for page, needs in PAGES.items() if keys.issuperset(needs)]))
        cluster.create_topic(name, 2)
        cluster.produce(name, [b"value"])
        cluster.coordinator(group, 0)
        ask("metadata", 13, topics=None)
        ask("metadata", 13, topics=[{"name": name}])
        for kind, resource in ((2, name), (4, "1"), (4, "")):
            asked = {"resource_type": kind, "resource_name": resource, "configuration_keys": None}
            ask("describe_configs", 4, resources=[asked], include_synonyms=True)
        ask("describe_log_dirs", 5, topics=None)
        ask("describe_log_dirs", 5, topics=[{"topic": name, "partitions": [0, 1]}])
        ask("describe_cluster", 2, endpoint_type=1)
        for kind in (-1, -2):
            parts = [{"partition_index": 0, "timestamp": kind, "current_leader_epoch": -1}]
            topics = [{"name": name, "partitions": parts}]
            ask("list_offsets", 11, replica_id=-1, topics=topics, timeout=1000)
        commit = [{"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1}]
        ask(
            *("offset_commit", 8),
            group_id=group,
            generation_id_or_member_epoch=-1,
            topics=[{"name": name, "partitions": commit}],
        )
        ask("list_groups", 5, states_filter=[], types_filter=[])
        ask("describe_groups", 6, groups=[group])
        everything = {"group_id": group, "member_epoch": -1, "topics": None}
        ask("offset_fetch", 9, groups=[everything], require_stable=False)
        ask(
            *("describe_acls", 3),
            resource_type_filter=1,
            pattern_type_filter=1,
            operation=1,
            permission_type=1,
        )
        ask("describe_client_quotas", 1, components=[], strict=False)
        ask("describe_user_scram_credentials", 0, users=None)
        ask("list_partition_reassignments", 0, timeout=1000, topics=None)
        here = {"name": name, "partitions": [{"partition_index": 0, "replicas": [1]}]}
        ask("alter_partition_reassignments", 1, timeout=1000, topics=[here])
        change = {"name": "retention.ms", "config_operation": 0, "value": "5"}
        altered = {"resource_type": 2, "resource_name": name, "configs": [change]}
        ask("incremental_alter_configs", 1, resources=[altered])
        grown = {"name": name, "count": 3, "assignments": None}
        for only in (True, False):
            ask("create_partitions", 3, topics=[grown], timeout=1000, validate_only=only)
        trimmed = {"name": name, "partitions": [{"partition_index": 0, "offset": 1}]}
        ask("delete_records", 2, topics=[trimmed], timeout=1000)
        ask("offset_delete", 0, group_id=group, topics=[{**here, "partitions": [{}]}])
        ask("delete_groups", 2, groups_names=[group])
        ask("delete_topics", 6, topics=[{"name": name}], timeout=1000)
    return said


def test_redpanda_console_requests_have_the_same_responses(kafka: Kafka, fencepost: Daemon) -> None:
    theirs, ours = (asked_by_console(broker.bootstrap) for broker in (kafka, fencepost))
    assert ours == theirs
    assert ("pages", list(PAGES)) in ours
