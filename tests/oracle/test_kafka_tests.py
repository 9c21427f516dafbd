"""Apache Kafka 4.3's own tests of requests run on this broker; 4.4 publishes no tests.

The tests get their cluster from a JUnit extension, in which RaftClusterInvocationContext.java
replaces Kafka's class of this name: each test gets its own daemon. Every test must pass, except
the tests in ``OTHERWISE``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.support.kafka import JAVA_OPTIONS, ROOT, java_command, required, unavailable
from tests.support.kafka43 import TESTS, jars

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

REPORT = "TEST-junit-jupiter.xml"
EXTENSION = Path(__file__).with_name("RaftClusterInvocationContext.java")

MOST_S = 650
"""Timeout in seconds, for a busy machine."""

REQUESTS = (
    "ApiVersions",
    "ConsumerGroupDescribe",
    "ConsumerGroupHeartbeat",
    "DeleteGroups",
    "DescribeGroups",
    "Heartbeat",
    "JoinGroup",
    "LeaveGroup",
    "ListGroups",
    "OffsetCommit",
    "OffsetDelete",
    "OffsetFetch",
    "ShareFetchAcknowledge",
    "ShareGroupDescribe",
    "ShareGroupHeartbeat",
    "SyncGroup",
    "TxnOffsetCommit",
    "WriteTxnMarkers",
)
CLASSES = (
    *(f"kafka.server.{request}RequestTest" for request in REQUESTS),
    "kafka.server.ConsumerProtocolMigrationTest",
)

REMEMBERED = "a refused JoinGroup tells the id that was asked; Kafka's tells none"
FEATURES = "features of level 0 are not finalized: streams groups, eligible leader replicas"
IN_ORDER = "in the order in which they came; Kafka's order is that of a hash table"
NO_CONTROLLER = "there is no controller that listens beside the broker"
SEVERAL_BROKERS = "a test's cluster is one daemon"

OTHERWISE: dict[str, tuple[str, str]] = {
    **{
        f"ApiVersionsRequestTest.{name}": ("expected: <6> but was: <4>", FEATURES)
        for name in ("testApiVersionsRequest", "testApiVersionsRequestIncludesUnreleasedApis")
    },
    "ApiVersionsRequestTest.testApiVersionsRequestValidationV0": (
        "API keys in ApiVersionsResponse must match API keys supported by broker",
        "ApiVersions tells what is served here, not every request of Kafka's",
    ),
    "ApiVersionsRequestTest.testApiVersionsRequestWithUnsupportedVersion": (
        "expected: <4> but was: <5>",
        "the highest version of ApiVersions is that of Kafka 4.4",
    ),
    "ConsumerProtocolMigrationTest.testDowngradeWithDisabledMigrationPolicy": (
        "groupState='Empty'",
        "without migration a consumer group refuses classic members, as in Kafka 4.4 (KAFKA-20640)",
    ),
    "ConsumerGroupDescribeRequestTest.testConsumerGroupDescribeWithNewGroupCoordinator": (
        "expected: <List(DescribedGroup(",
        f"members are described {IN_ORDER}",
    ),
    "ListGroupsRequestTest.testListGroupsWithNewConsumerGroupProtocol": (
        "expected: <List(ListedGroup(",
        f"groups are listed {IN_ORDER}",
    ),
    **{
        f"ConsumerProtocolMigrationTest.testOnlineMigrationWithEagerAssignmentStrategyAnd{kind}": (
            "memberId=''",
            REMEMBERED,
        )
        for kind in ("DynamicMembers", "StaticMembers")
    },
    **{
        f"ApiVersionsRequestTest.{name}ThroughControllerListener": (
            "asks a controller",
            NO_CONTROLLER,
        )
        for name in ("testApiVersionsRequest", "testApiVersionsRequestValidationV0")
    },
    **{
        f"ShareFetchAcknowledgeRequestTest.testShareFetchRequest{name}": (
            "needs several brokers",
            SEVERAL_BROKERS,
        )
        for name in ("SuccessMultiplePartitionsMultipleBrokers", "ToNonLeaderReplica")
    },
}
"""Tests that must fail: a part of the failure's message, and the reason."""


def outcomes(report: Path) -> dict[str, str]:
    """Return each test's failure message from JUnit's report, "" for a passed test."""
    found = {}
    for case in ET.parse(report).iter("testcase"):
        method, number = case.attrib["name"].removesuffix("]").split("()[")
        if number != "1":  # the same test on another cluster type; Fencepost has only one
            continue
        said = [
            f"{element.get('message')} {element.text}"
            for kind in ("failure", "error", "skipped")
            for element in case.findall(kind)
        ]
        name = case.attrib["classname"].rsplit(".", 1)[-1]
        found[f"{name}.{method}"] = said[0] if said else ""
    return found


@pytest.mark.timeout(MOST_S + 60)
def test_broker_passes_kafkas_own_request_tests(tmp_path: Path) -> None:
    if shutil.which("javac") is None:
        unavailable("`javac` is not on the PATH", "what Apache Kafka tests")
    with required():
        libs = jars()
    compiled, reports = tmp_path / "classes", tmp_path / "reports"
    compiler = ("javac", "-XDignore.symbol.file", "-d", compiled, "-cp", f"{libs}/*:{TESTS}/*")
    subprocess.run([*compiler, EXTENSION], check=True)
    options = {
        "junit.jupiter.extensions.autodetection.enabled": "true",
        "junit.jupiter.execution.timeout.default": "60s",
    }
    done = subprocess.run(
        java_command(
            "org.junit.platform.console.ConsoleLauncher",
            "execute",
            f"--reports-dir={reports}",
            *(f"--config={key}={value}" for key, value in options.items()),
            *(f"--select-class={name}" for name in CLASSES),
            options=(
                *JAVA_OPTIONS,
                f"-Dfencepost.python={sys.executable}",
                f"-Dfencepost.data={tmp_path}",
            ),
            class_path=(compiled, TESTS / "*"),
            libs=jars,
        ),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    assert (reports / REPORT).exists(), done.stdout
    found = outcomes(reports / REPORT)
    assert {name.split(".")[0] for name in found} == {name.split(".")[-1] for name in CLASSES}
    others = {name: said for name, said in found.items() if said}
    assert others.keys() == OTHERWISE.keys(), others
    for name, (part, _) in OTHERWISE.items():
        assert part in others[name], others[name]
