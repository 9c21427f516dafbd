"""Metadata of missing topics: the error, and whether the topic is created."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, unique
from tests.support.own_broker import own_broker
from tests.support.waits import until

UNKNOWN, INVALID = "unknown_topic_or_partition", "invalid_topic_exception"
VERSIONS = (4, 9, 12, 13)

ILLEGAL = ("", ".", "..", "a b", "ä", "a/b", "a\x00b", "x" * 250, "a:b", "a,b", " ", "a\n")
"""Topic names that ``Topic.validate`` refuses."""

AUTO_CREATE = {"auto.create.topics.enable": "true"}
SETTINGS = {
    "auto-create": AUTO_CREATE,
    "not enough brokers": {**AUTO_CREATE, "default.replication.factor": "3"},
    "no auto-create": {},
}


@pytest.fixture(scope="module", params=SETTINGS)
def asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    settings = SETTINGS[request.param]
    with (
        own_broker(request, tmp_path_factory.mktemp("missing"), settings) as broker,
        Cluster(broker.bootstrap) as cluster,
    ):
        yield cluster


def error(cluster: Cluster, name: str, version: int, *, allow: bool) -> str:
    ask = {"topics": [{"name": name}], "allow_auto_topic_creation": allow}
    (found,) = cluster.call("metadata", version, **ask)["topics"]
    assert found["name"] == name
    assert found["partitions"] == [] or found["error_code"] == "none"
    return str(found["error_code"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("allow", [True, False])
def test_illegal_topic_names_are_invalid_and_legal_ones_unknown(
    asked: Cluster, version: int, allow: bool
) -> None:
    """A name that collides with an existing topic's name is valid, but cannot be created."""
    for name in ILLEGAL:
        assert error(asked, name, version, allow=allow) == INVALID, name
    there = asked.create_topic(unique("a.b_c"))
    colliding = there.replace(".", "_")
    for _ in range(2):
        assert error(asked, colliding, version, allow=allow) == UNKNOWN
        assert error(asked, "__cluster_metadata", version, allow=allow) == UNKNOWN
    assert error(asked, there, version, allow=allow) == "none"


@pytest.mark.parametrize("version", VERSIONS)
def test_legal_topic_name_is_unknown_until_auto_created(
    request: pytest.FixtureRequest, asked: Cluster, version: int
) -> None:
    for name in (unique("new"), "x" * (249 - 12) + unique("y")[:12]):
        assert error(asked, name, version, allow=False) == UNKNOWN
        assert error(asked, name, version, allow=True) == UNKNOWN
        if request.node.callspec.params["asked"] == "auto-create":
            until(
                lambda name=name: error(asked, name, version, allow=False) == "none",
                "the topic is there",
            )
        else:
            assert error(asked, name, version, allow=True) == UNKNOWN
            assert error(asked, name, version, allow=False) == UNKNOWN
