"""UpdateFeatures over the wire: the fields of each version, and levels that survive kill -9."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from fencepost.coordinator.handlers.update_features import MAX_FEATURE_UPDATES
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.waits import until
from tests.wire.command_line import cli

FEATURE = "transaction.version"
UPGRADE, SAFE_DOWNGRADE = 1, 2


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = Daemon(tmp_path_factory.mktemp("features")).start()
    yield started
    started.stop()


def finalized(cluster: Cluster) -> tuple[dict[str, int], int]:
    answer = cluster.call("api_versions", 4, client_software_name="t", client_software_version="1")
    levels = {
        feature["name"]: feature["max_version_level"]
        for feature in answer["finalized_features"]
        if feature["name"] == FEATURE
    }
    return levels, answer["finalized_features_epoch"]


def test_feature_level_is_lowered_and_raised_in_every_request_version(daemon: Daemon) -> None:
    with Cluster(daemon.bootstrap) as cluster:
        levels, epoch = finalized(cluster)
        assert levels == {FEATURE: 2}
        steps = [
            (1, {"max_version_level": 0, "upgrade_type": SAFE_DOWNGRADE}, {}),
            (0, {"max_version_level": 1}, {FEATURE: 1}),
            (1, {"max_version_level": 2, "upgrade_type": UPGRADE}, {FEATURE: 2}),
            (2, {"max_version_level": 1, "upgrade_type": SAFE_DOWNGRADE}, {FEATURE: 1}),
            (2, {"max_version_level": 2, "upgrade_type": UPGRADE}, {FEATURE: 2}),
        ]
        for version, update, expected in steps:
            answer = cluster.call(
                "update_features", version, feature_updates=[{"feature": FEATURE, **update}]
            )
            assert answer["error_code"] == "none", answer
            if version < 2:
                (result,) = answer["results"]
                assert (result["feature"], result["error_code"]) == (FEATURE, "none")
            # The epoch is a metadata offset; the first change also creates the history topic.
            before, (levels, epoch) = epoch, finalized(cluster)
            assert levels == expected
            assert epoch > before


def test_version_0_cannot_downgrade(daemon: Daemon) -> None:
    """Apache Kafka's controller ignores the flag of version 0, which has no upgrade type."""
    lower = {"feature": FEATURE, "max_version_level": 1, "allow_downgrade": True}
    with Cluster(daemon.bootstrap) as cluster:
        answer = cluster.call("update_features", 0, feature_updates=[lower])
        assert answer["error_code"] == "invalid_update_version"
        assert "Can't downgrade" in answer["error_message"]
        assert finalized(cluster)[0] == {FEATURE: 2}


def test_feature_change_is_recorded_in_the_cluster_history(daemon: Daemon) -> None:
    with Cluster(daemon.bootstrap) as cluster:
        lower = {"feature": FEATURE, "max_version_level": 1, "upgrade_type": SAFE_DOWNGRADE}
        raise_again = {"feature": FEATURE, "max_version_level": 2, "upgrade_type": UPGRADE}
        for update in (lower, raise_again):
            answer = cluster.call("update_features", 2, feature_updates=[update])
            assert answer["error_code"] == "none", answer

    def changes() -> list[tuple[str, str, str]]:
        told = cli(daemon.bootstrap, "cluster", "history", "--format", "json")
        return [
            (row["subject"], row["change"], row["trigger"])
            for row in json.loads(told.stdout)
            if row["what"] == "feature-finalized"
        ]

    expected = [
        (FEATURE, change, "request UpdateFeatures") for change in ("level 2 → 1", "level 1 → 2")
    ]
    until(lambda: changes()[-2:] == expected, "both changes in the history")


def test_unsupported_level_fails_the_whole_update_features_request(daemon: Daemon) -> None:
    with Cluster(daemon.bootstrap) as cluster:
        before = finalized(cluster)
        for version in (0, 1, 2):
            answer = cluster.call(
                "update_features",
                version,
                feature_updates=[{"feature": FEATURE, "max_version_level": 3}],
            )
            assert answer["error_code"] == "invalid_update_version"
            assert answer["error_message"] == (
                "The update failed for all features since the following feature had an error: "
                f"Invalid update version 3 for feature {FEATURE}. "
                "Local controller 1 only supports versions 0-2"
            )
        assert finalized(cluster) == before


def test_validate_only_changes_nothing_and_a_change_survives_kill(daemon: Daemon) -> None:
    lower = [{"feature": FEATURE, "max_version_level": 1, "upgrade_type": SAFE_DOWNGRADE}]
    with Cluster(daemon.bootstrap) as cluster:
        before = finalized(cluster)
        answer = cluster.call("update_features", 2, feature_updates=lower, validate_only=True)
        assert answer["error_code"] == "none"
        assert finalized(cluster) == before
        assert cluster.call("update_features", 2, feature_updates=lower)["error_code"] == "none"
        after = finalized(cluster)
    daemon.kill()
    daemon.start()
    with Cluster(daemon.bootstrap) as cluster:
        levels, epoch = finalized(cluster)
        assert levels == after[0] == {FEATURE: 1}
        assert before[1] < after[1] <= epoch


def test_update_features_beyond_the_feature_limit_is_refused(
    request: pytest.FixtureRequest, cluster: Cluster
) -> None:
    if request.config.getoption("--target") != "fencepost":
        pytest.skip("Apache Kafka sets no bound")
    update = {"feature": "nothing", "max_version_level": 1, "upgrade_type": 1}
    for count, code in ((MAX_FEATURE_UPDATES, "invalid_update_version"), (None, "invalid_request")):
        updates = [update] * (count or MAX_FEATURE_UPDATES + 1)
        answer = cluster.call("update_features", 2, feature_updates=updates)
        assert answer["error_code"] == code
