"""``fencepost features``, and the effect of a transaction.version change on active producers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.crash.stubborn_client import RefusedError, StubbornClient
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.daemon import Daemon
from tests.support.waits import until
from tests.wire.command_line import cli
from tests.wire.transactional import transactional

VERSION = "transaction.version"
UPGRADE, SAFE_DOWNGRADE = 1, 2


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Yield a daemon for this module, because feature levels apply to the whole cluster."""
    started = Daemon(tmp_path_factory.mktemp("levels")).start()
    yield started
    started.stop()


def levels(daemon: Daemon) -> dict[str, int]:
    done = cli(daemon.bootstrap, "features", "describe", "--format", "json")
    return {row["feature"]: row["finalized"] for row in json.loads(done.stdout)}


def set_level(daemon: Daemon, level: int, *options: str, status: int = 0) -> str:
    done = cli(
        daemon.bootstrap,
        *("features", "set", f"{VERSION}={level}", *options),
        status=status,
    )
    return done.stdout + done.stderr


def move(cluster: Cluster, level: int) -> None:
    """Change the level by a request, for tests that do not test the command."""
    answer = cluster.call(
        "update_features",
        2,
        feature_updates=[{"feature": VERSION, "max_version_level": level, "upgrade_type": UPGRADE}],
    )
    if answer["error_code"] != "none":
        lower = {"feature": VERSION, "max_version_level": level, "upgrade_type": SAFE_DOWNGRADE}
        answer = cluster.call("update_features", 2, feature_updates=[lower])
    assert answer["error_code"] == "none", answer


@pytest.mark.slow
def test_feature_levels_are_shown_and_changed(daemon: Daemon) -> None:
    fixed = {
        "eligible.leader.replicas.version": 0,
        "group.version": 1,
        "kraft.version": 0,
        "metadata.version": 30,
        "share.version": 1,
        "streams.version": 0,
    }
    assert levels(daemon) == {**fixed, VERSION: 2}
    assert "upgrade type" in set_level(daemon, 1, status=1)
    assert set_level(daemon, 1, "--downgrade").startswith("would be:")
    assert levels(daemon)[VERSION] == 2
    set_level(daemon, 1, "--downgrade", "--execute")
    assert levels(daemon)[VERSION] == 1
    set_level(daemon, 0, "--unsafe", "--execute")
    assert levels(daemon)[VERSION] == 0
    assert "only supports versions 0-2" in set_level(daemon, 3, status=1)
    set_level(daemon, 2, "--execute")
    assert levels(daemon)[VERSION] == 2


@pytest.mark.parametrize("text", [VERSION, "=1", f"{VERSION}=-1", f"{VERSION}=1 {VERSION}=2"])
def test_invalid_feature_level_is_a_usage_error(daemon: Daemon, text: str) -> None:
    cli(daemon.bootstrap, "features", "set", *text.split(), status=2)


async def test_transactions_stay_atomic_while_transaction_version_changes(daemon: Daemon) -> None:
    """Transactions are committed or aborted completely, with requests of TV1 and of TV2."""
    wanted: list[bytes] = []
    with Cluster(daemon.bootstrap) as cluster:
        topic = cluster.create_topic(unique("moving"))
        raw = [StubbornClient(daemon.bootstrap, unique("raw"), version=v) for v in (1, 2)]
        for client in raw:
            client.claim()
        async with transactional("confluent", daemon.bootstrap, unique("id")) as real:
            for round_, (before, after) in enumerate(((2, 1), (1, 0), (0, 2), (2, 0), (0, 1))):
                move(cluster, before)
                await real.begin()
                await real.send(topic, b"real %d" % round_)
                for client in raw:
                    client.send(topic, 0, b"raw %d of %d" % (round_, client.version))
                move(cluster, after)
                await real.send(topic, b"real %d again" % round_)
                for client in raw:
                    client.send(topic, 0, b"raw %d of %d again" % (round_, client.version))
                    client.end(commit=round_ % 2 == 0)
                await real.commit()
                for words in ("raw %d of 1", "raw %d of 2") if round_ % 2 == 0 else ():
                    wanted += [words.encode() % round_, words.encode() % round_ + b" again"]
                wanted += [b"real %d" % round_, b"real %d again" % round_]
        for client in raw:
            client.close()
        move(cluster, 2)
        until(lambda: cluster.lso(topic) == cluster.offset(topic), "every end")
        assert sorted(cluster.values(topic, isolation=READ_COMMITTED)) == sorted(wanted)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_successor_fences_zombie_after_transaction_version_changed(
    daemon: Daemon, before: int, after: int
) -> None:
    with Cluster(daemon.bootstrap) as cluster:
        topic = cluster.create_topic(unique("taken"))
        move(cluster, before)
        zombie = StubbornClient(daemon.bootstrap, unique("id"), version=before)
        zombie.claim()
        zombie.send(topic, 0, b"zombie's")
        move(cluster, after)
        successor = StubbornClient(daemon.bootstrap, zombie.name, version=after)
        successor.claim()
        with pytest.raises(RefusedError, match="producer_fenced"):
            zombie.end(commit=True)
        successor.send(topic, 0, b"kept")
        successor.end(commit=True)
        until(lambda: cluster.lso(topic) == cluster.offset(topic), "every end")
        assert cluster.values(topic, isolation=READ_COMMITTED) == [b"kept"]
        zombie.close()
        successor.close()
        move(cluster, 2)
