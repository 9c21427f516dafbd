"""franz-go's own tests of its share consumers, on this broker and on Apache Kafka.

These are the tests of the package ``kgo`` that use share groups and a broker. They read the
broker's address from ``KGO_SEEDS``. The source comes from Go's module proxy, in the version that
``franz_go/go.mod`` requires.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.daemon import Daemon
from tests.support.go_build import built_tests
from tests.support.kafka import Kafka, required
from tests.support.targets import SETTINGS

pytestmark = pytest.mark.oracle

PACKAGE: Final = "github.com/twmb/franz-go/pkg/kgo"
TESTS: Final = {
    "TestConsumeRegexShareSkipsInternal",
    "TestShareGroup",
    "TestShareGroupAckOnClose",
    "TestShareGroupETL",
    "TestShareGroupOffsetsAdmin",
}
RECORDS: Final = 20_000
"""How many records TestShareGroupETL copies through two share groups."""

LIMIT: Final = {"group.share.delivery.count.limit": "10"}
"""The highest value that the broker allows by default. In TestShareGroupETL one consumer releases
all records of three polls, two consumers release records once, and five close with unread records.
Together they may deliver a record five times. With the default limit the record would then be
archived, and the test would wait for it forever."""

OUTCOME: Final = re.compile(r"^--- (PASS|FAIL|SKIP): (\w+) ", re.MULTILINE)


@pytest.fixture(scope="module")
def program() -> Path:
    return built_tests(PACKAGE, "kgo.test")


@pytest.fixture(scope="module", params=["fencepost", "kafka"])
def bootstrap(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Yield the address of a broker."""
    directory = tmp_path_factory.mktemp(request.param)
    broker = (Kafka if request.param == "kafka" else Daemon)(directory, {**SETTINGS, **LIMIT})
    with required():
        broker.start()
    yield broker.bootstrap
    broker.stop()


@pytest.mark.timeout(420)
@pytest.mark.parametrize("connections", ["stable", "cut"])
def test_share_consumers_of_franz_go_pass_their_own_tests(
    program: Path, bootstrap: str, connections: str
) -> None:
    """With ``cut``, connections of the consumers are closed at random."""
    names = "|".join(sorted(TESTS))
    done = subprocess.run(
        [program, "-test.v", f"-test.run=^({names})$", "-test.timeout=300s"],
        env={
            **os.environ,
            "KGO_SEEDS": bootstrap,
            "KGO_TEST_RF": "1",
            "KGO_TEST_RECORDS": str(RECORDS),
            "KGO_TEST_CHAOS": str(int(connections == "cut")),
            "KGO_LOG_LEVEL": "none",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=330,
        check=False,
    )
    outcomes = {name: outcome for outcome, name in OUTCOME.findall(done.stdout)}
    assert outcomes == dict.fromkeys(TESTS, "PASS"), done.stdout
    assert done.returncode == 0, done.stdout
