"""Makes a cluster's broker standalone again, with the controllers' metadata as its metadata log.

This is the reverse of ``promotion.py``, with stopped controllers. Beforehand, this broker must have
an in-sync replica of every partition. Until the snapshot of the controllers' metadata is written
and ``quorum-state`` says that the log is authoritative, the broker still starts in the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fencepost.cluster.controller.handover import as_standalone
from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.metadata.metadata import FEATURES
from fencepost.coordinator.metadata.quorum_state import (
    is_of_fencepost,
    is_of_member,
    mark_standalone,
    promoted_as,
)
from fencepost.coordinator.metadata.snapshots import write_snapshot
from fencepost.coordinator.metadata.stopped import StoppedMetadata, read_stopped
from fencepost.logcore.checkpoints import (
    CLEAN_SHUTDOWN,
    META_PROPERTIES,
    CheckpointError,
    MetaProperties,
    read_meta_properties,
)
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.values import dataclass
from fencepost.tools.promotion import METADATA_DIRECTORY, PromotionError
from fencepost.tools.transfer import TransferError, refuse_if_in_use

_MOST_REASONS: Final = 5


@dataclass(frozen=True, slots=True)
class Demotion:
    """The checked metadata that the broker continues with; None if it never joined the cluster."""

    data_dir: Path
    metadata: StoppedMetadata | None
    forgotten: Sequence[str]
    """Brokers and features of the cluster that are lost."""

    @property
    def image(self) -> MetadataImage | None:
        """The image that the broker continues with."""
        return None if self.metadata is None else self.metadata.image


def make_plan(fs: FileSystem, data_dir: Path, controllers: Sequence[Path]) -> Demotion:
    """Check whether the broker can become standalone. The caller holds the lock of ``data_dir``.

    ``controllers`` are the directories of stopped controllers, a majority of them, as every
    majority has all committed records. Raises PromotionError, MetadataError, OSError.
    """
    log = f"{data_dir}/{METADATA_DIRECTORY}"
    meta = _identity(fs, data_dir)
    if not is_of_fencepost(fs, log):
        raise PromotionError(f"the broker of {data_dir} has never been standalone")
    if not is_of_member(fs, log):
        return Demotion(data_dir, None, ())
    if fs.read_file(f"{data_dir}/{CLEAN_SHUTDOWN}") is None:
        raise PromotionError(
            f"the broker on {data_dir} was not stopped cleanly: start it in its cluster once more,"
            " and stop it, so that its logs are whole"
        )
    newest = _newest(fs, meta, controllers)
    supported = {name: (low, high) for name, (low, high, _) in FEATURES.items()}
    image, reasons = as_standalone(newest.image, meta.node_id, meta.directory_id, supported)
    if reasons:
        more = f" and {len(reasons) - _MOST_REASONS} more" if len(reasons) > _MOST_REASONS else ""
        raise PromotionError(
            "the broker cannot continue standalone:"
            f" {'; '.join(reasons[:_MOST_REASONS])}{more}. First move the replicas to it"
            " (fencepost topics reassign), while the cluster runs"
        )
    return Demotion(
        data_dir,
        StoppedMetadata(image, newest.last_timestamp_ms),
        [*_forgotten(newest.image, image)],
    )


def _identity(fs: FileSystem, directory: Path) -> MetaProperties:
    try:
        meta = read_meta_properties(fs, str(directory))
    except CheckpointError as error:
        raise PromotionError(f"{directory}/{META_PROPERTIES} is damaged: {error}") from error
    if meta is None:
        raise PromotionError(f"{directory} is not a data directory")
    return meta


def _newest(fs: FileSystem, meta: MetaProperties, controllers: Sequence[Path]) -> StoppedMetadata:
    """Return the metadata of the controller that is ahead of the others."""
    candidates: list[StoppedMetadata] = []
    for path in controllers:
        owner = _identity(fs, path)
        if owner.cluster_id != meta.cluster_id:
            raise PromotionError(f"{path} is of another cluster, {owner.cluster_id}")
        try:
            refuse_if_in_use(fs, path)
        except TransferError as error:
            raise PromotionError(str(error)) from error
        metadata = read_stopped(fs, f"{path}/{METADATA_DIRECTORY}")
        if metadata is None:
            raise PromotionError(f"{path} has no metadata log")
        candidates.append(metadata)
    newest = max(
        candidates,
        key=lambda candidate: (candidate.image.epoch, candidate.image.offset),
        default=None,
    )
    if newest is None:
        raise PromotionError("the metadata is in the directories of the controllers: name them")
    voters = len(newest.image.controllers)
    if 2 * len({*controllers}) <= voters:
        raise PromotionError(
            f"the cluster has {voters} controllers: the directories of {voters // 2 + 1} are"
            " needed to find the last committed metadata"
        )
    return newest


def _forgotten(before: MetadataImage, after: MetadataImage) -> list[str]:
    """Describe the cluster's brokers and features that a standalone broker lacks."""
    brokers = sorted(before.brokers.keys() - after.brokers.keys())
    features = sorted(before.features.keys() - after.features.keys())
    return [
        *(f"broker {broker}, and the replicas it has" for broker in brokers),
        *(f"{name} {before.features[name]}" for name in features),
    ]


def carry_out(fs: FileSystem, plan: Demotion, now_ms: int) -> None:
    """Make the broker standalone. The caller holds the directory's lock. Raises OSError."""
    log = f"{plan.data_dir}/{METADATA_DIRECTORY}"
    if plan.metadata is not None:
        write_snapshot(fs, log, plan.metadata.image, now_ms, plan.metadata.last_timestamp_ms)
    if plan.metadata is not None or promoted_as(fs, log) is not None:
        mark_standalone(fs, log)
