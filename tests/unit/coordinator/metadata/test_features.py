"""Finalized features: refusals and their messages, persistence, and their effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fencepost.cluster.controller.activation import METADATA_VERSION
from fencepost.cluster.controller.features import FeatureUpdate, UpgradeType
from fencepost.coordinator.errors import InvalidUpdateVersionError
from fencepost.coordinator.metadata.log import COMPACT_SLACK_RECORDS
from fencepost.coordinator.metadata.metadata import (
    KRAFT_VERSION,
    SHARE_VERSION,
    STREAMS_VERSION,
    TRANSACTION_VERSION,
)
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.batch import decode_records
from fencepost.protocol.steps import finish
from fencepost.tools.decisions import decide
from fencepost.txn.commands import AddPartitions, InitProducerId
from fencepost.txn.machine import TxnMachine
from tests.unit.coordinator.services.coordinators import Services, storage

UP, SAFE, UNSAFE = UpgradeType.UPGRADE, UpgradeType.SAFE_DOWNGRADE, UpgradeType.UNSAFE_DOWNGRADE


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return storage(tmp_path)


def update(store: Storage, *updates: FeatureUpdate, validate_only: bool = False) -> None:
    decide(
        store, lambda controller: controller.update_features(updates, validate_only=validate_only)
    )


def level(store: Storage) -> int:
    return store.metadata.feature_level(TRANSACTION_VERSION)


def test_feature_level_change_in_either_direction_bumps_the_features_epoch(store: Storage) -> None:
    assert level(store) == 2
    epochs = [store.metadata.features_epoch]
    for change, then in (
        (FeatureUpdate(TRANSACTION_VERSION, 1, SAFE), 1),
        (FeatureUpdate(TRANSACTION_VERSION, 0, UNSAFE), 0),
        (FeatureUpdate(TRANSACTION_VERSION, 2), 2),
    ):
        update(store, change)
        assert level(store) == then
        epochs.append(store.metadata.features_epoch)
    assert sorted(set(epochs)) == epochs
    assert store.metadata.features[TRANSACTION_VERSION] == (0, 2, 2)


def test_share_and_streams_versions_can_be_upgraded_and_downgraded(store: Storage) -> None:
    for name, first, levels in (
        (SHARE_VERSION, 1, (2, 1, 0, 1)),
        (STREAMS_VERSION, 0, (1, 0, 1)),
    ):
        assert store.metadata.feature_level(name) == first
        for wanted in levels:
            kind = UP if wanted > store.metadata.feature_level(name) else SAFE
            update(store, FeatureUpdate(name, wanted, kind))
            assert store.metadata.features[name][2] == wanted


@pytest.mark.parametrize("kind", [UP, SAFE, UNSAFE])
def test_feature_update_to_the_current_level_is_no_change(
    store: Storage, kind: UpgradeType
) -> None:
    before = store.metadata.features_epoch
    update(store, FeatureUpdate(TRANSACTION_VERSION, 2, kind))
    assert (level(store), store.metadata.features_epoch) == (2, before)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (FeatureUpdate(TRANSACTION_VERSION, 3), "Local controller 1 only supports versions 0-2"),
        (FeatureUpdate(TRANSACTION_VERSION, -1), "A feature version cannot be less than 0."),
        (FeatureUpdate(METADATA_VERSION, 34), "Local controller 1 only supports versions 30-33"),
        (FeatureUpdate(METADATA_VERSION, 29, SAFE), "only supports versions 30-33"),
        (FeatureUpdate(KRAFT_VERSION, 1), "Local controller 1 only supports versions 0-0"),
        (FeatureUpdate("odd", 1), "Local controller 1 does not support this feature."),
        (FeatureUpdate("odd", 0, SAFE), "Local controller 1 does not support this feature."),
        (FeatureUpdate(TRANSACTION_VERSION, 1), "Can't downgrade the version of this feature"),
        (FeatureUpdate(TRANSACTION_VERSION, 2, UpgradeType.UNKNOWN), "the given upgrade type"),
    ],
)
def test_invalid_feature_update_is_refused_with_the_reason(
    store: Storage, wanted: FeatureUpdate, reason: str
) -> None:
    with pytest.raises(InvalidUpdateVersionError) as refused:
        update(store, wanted)
    assert reason in str(refused.value)
    assert f"Invalid update version {wanted.level} for feature {wanted.name}." in str(refused.value)
    assert level(store) == 2


def test_kraft_version_update_to_its_only_level_is_no_change(store: Storage) -> None:
    before = store.metadata.features_epoch
    for kind in (UP, SAFE, UNSAFE):
        update(store, FeatureUpdate(KRAFT_VERSION, 0, kind))
    assert store.metadata.features[KRAFT_VERSION] == (0, 0, 0)
    assert store.metadata.features_epoch == before


def test_metadata_version_downgrade_over_new_metadata_is_refused(store: Storage) -> None:
    """As in Apache Kafka 4.4: levels 32 and 33 add metadata, level 31 does not."""
    update(store, FeatureUpdate(METADATA_VERSION, 31))
    update(store, FeatureUpdate(METADATA_VERSION, 30, SAFE))
    for now, wanted in ((33, 32), (33, 30), (33, 31)):
        update(store, FeatureUpdate(METADATA_VERSION, now))
        for kind, reason in ((SAFE, "Refusing to perform"), (UNSAFE, "Unsafe metadata downgrade")):
            words = f"Unsupported metadata.version downgrade from {now} to {wanted}. {reason}"
            with pytest.raises(InvalidUpdateVersionError, match=words):
                update(store, FeatureUpdate(METADATA_VERSION, wanted, kind))
    assert store.metadata.features[METADATA_VERSION] == (30, 33, 33)


def test_standalone_broker_starts_at_a_higher_metadata_version(tmp_path: Path) -> None:
    first = storage(tmp_path)
    update(first, FeatureUpdate(METADATA_VERSION, 33))
    first.logs.close()
    assert storage(tmp_path).metadata.features[METADATA_VERSION] == (30, 33, 33)


def test_downgrade_to_a_higher_feature_level_is_refused(store: Storage) -> None:
    update(store, FeatureUpdate(TRANSACTION_VERSION, 0, SAFE))
    for kind in (SAFE, UNSAFE):
        with pytest.raises(InvalidUpdateVersionError, match="Can't downgrade to a newer version"):
            update(store, FeatureUpdate(TRANSACTION_VERSION, 1, kind))


def test_failed_or_validate_only_feature_update_changes_nothing(store: Storage) -> None:
    lower = FeatureUpdate(TRANSACTION_VERSION, 1, SAFE)
    with pytest.raises(InvalidUpdateVersionError):
        update(store, lower, FeatureUpdate("odd", 1))
    update(store, lower, validate_only=True)
    assert level(store) == 2


def test_feature_level_survives_restart_and_metadata_log_compaction(tmp_path: Path) -> None:
    first = storage(tmp_path)
    with first.metadata.unforced():
        for _ in range(COMPACT_SLACK_RECORDS // 2 + 50):
            update(first, FeatureUpdate(TRANSACTION_VERSION, 0, SAFE))
            update(first, FeatureUpdate(TRANSACTION_VERSION, 1))
    before = level(first)
    assert before == 1
    start = first.metadata.partition.log_start_offset
    first.metadata.compact()
    assert first.metadata.partition.log_start_offset > start
    first.logs.close()
    assert level(storage(tmp_path)) == before


@pytest.mark.parametrize(("version", "form"), [(0, 0), (1, 1), (2, 1)])
async def test_transaction_record_version_follows_the_transaction_version(
    tmp_path: Path, version: int, form: int
) -> None:
    services = await Services(tmp_path).start()
    update(services.storage, FeatureUpdate(TRANSACTION_VERSION, version, SAFE))
    finish(services.txns.open_in_steps())
    await services.txns.submit("t", InitProducerId("t", 1000))
    partition = services.logs.partition("__transaction_state", services.txns.partition_for("t"))
    ((header, batch),) = partition.reader.read_all()
    (record,) = decode_records(batch, 0, header)
    assert record.value is not None
    assert int.from_bytes(record.value[:2], "big") == form
    await services.stop()


@pytest.mark.parametrize(("version", "epoch"), [(0, 2), (2, 2)])
async def test_init_producer_id_uses_a_new_transaction_version_without_restart(
    tmp_path: Path, version: int, epoch: int
) -> None:
    """InitProducerId uses the new version at once, also if a transaction is open."""
    services = await Services(tmp_path).start()
    services.topic("t")
    finish(services.txns.open_in_steps())
    first: Any = await services.txns.submit("t", InitProducerId("t", 1000))
    add = AddPartitions("t", first.producer_id, first.producer_epoch, (("t", 0),))
    await services.txns.submit("t", add)
    update(services.storage, FeatureUpdate(TRANSACTION_VERSION, version, SAFE))
    second: Any = await services.txns.submit("t", InitProducerId("t", 1000))
    assert second.producer_epoch == epoch
    shard = services.txns._shards.shards[services.txns.partition_for("t")]
    assert isinstance(shard.machine, TxnMachine)
    stored = shard.machine.transaction("t")
    assert stored is not None
    assert stored.client_transaction_version == version
    await services.stop()
