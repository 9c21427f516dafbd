"""Ownership of a data directory: one broker of one cluster, and one process at a time."""

from __future__ import annotations

import uuid

import structlog

from fencepost.cluster.controller.handover import reasons_against_successor
from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.quorum_state import (
    is_of_apache_kafka,
    is_of_fencepost,
    is_of_member,
    mark_standalone,
    note_membership,
    promoted_as,
)
from fencepost.logcore.checkpoints import (
    LOCK,
    META_PROPERTIES,
    QUORUM_STATE,
    CheckpointError,
    MetaProperties,
    read_meta_properties,
    uuid_to_text,
    write_meta_properties,
)
from fencepost.logcore.fs import TEMPORARY_SUFFIX, FileSystem

_log = structlog.get_logger(__name__)

METADATA_DIRECTORY = f"{METADATA_TOPIC}-0"
_BEFORE_ITS_METADATA = frozenset(
    {LOCK, META_PROPERTIES, META_PROPERTIES + TEMPORARY_SUFFIX, "lost+found"}
)
"""Names that may exist in a data directory on which no broker has been started. A broker that is
interrupted on its first start leaves the first three; creating a file system leaves the last."""


def lock(fs: FileSystem, directory: str, *, is_member: bool) -> int:
    """Create the directory and lock it; return the file descriptor that holds the lock.

    With ``is_member``, the controllers are other nodes, which have the metadata. Raises
    BrokerError.
    """
    try:
        fs.make_directory(directory)
        if LOCK not in (fs.list_directory(directory) or ()):
            _refuse_foreign(fs, directory, is_member)  # before any file is created in it
        held = fs.lock(f"{directory}/{LOCK}")
        try:
            _refuse_foreign(fs, directory, is_member)
            if not is_member:
                _resume_standalone(fs, f"{directory}/{METADATA_DIRECTORY}")
        except BaseException:
            fs.close(held)
            raise
    except BlockingIOError as error:
        raise BrokerError(f"the data directory {directory} is in use by another process") from error
    except OSError as error:
        raise BrokerError(f"the data directory {directory} cannot be used: {error}") from error
    return held


def _refuse_foreign(fs: FileSystem, directory: str, is_member: bool) -> None:
    """Raise BrokerError for a directory whose contents never belonged to this broker.

    The startup renames partition directories whose topics it does not know, and it would know none
    of the topics in such a directory.
    """
    names = set(fs.list_directory(directory) or ())
    metadata = f"{directory}/{METADATA_DIRECTORY}"
    if is_member and META_PROPERTIES in names:
        return  # the first image tells which partitions belong to this broker
    if is_of_apache_kafka(fs, metadata):
        raise BrokerError(
            f"the data directory {directory} belongs to Apache Kafka: {metadata} has"
            f" {QUORUM_STATE}. Give another one; to import its partitions see `fencepost log"
            " import`"
        )
    if is_of_member(fs, metadata):
        raise BrokerError(
            f"the broker of the data directory {directory} has joined other controllers, and"
            " the metadata here is outdated. Start it with process.roles=broker and its"
            " controllers; to make it standalone again see `fencepost cluster stand-alone"
            " --help`"
        )
    foreign = sorted(names - _BEFORE_ITS_METADATA)
    missing = META_PROPERTIES
    if META_PROPERTIES in names:
        # The directory may be Apache Kafka's; without partitions, its small files are harmless.
        missing = METADATA_DIRECTORY
        foreign = [name for name in foreign if fs.is_directory(f"{directory}/{name}")]
    if missing not in names and foreign:
        raise BrokerError(
            f"the data directory {directory} has no {missing} but contains {foreign[0]}: it"
            " does not belong to this broker. Give an empty or a new directory; to import"
            " partitions of Apache Kafka see `fencepost log import`"
        )


def _resume_standalone(fs: FileSystem, log: str) -> None:
    """Resume as a standalone broker; any output of ``fencepost cluster promote`` is outdated."""
    snapshot = promoted_as(fs, log)
    if snapshot is not None:
        mark_standalone(fs, log)
        _log.warning(
            (
                "the broker continues standalone: the output of `fencepost cluster promote` is"
                " now outdated, and its controllers must not be used"
            ),
            end_offset=snapshot.end_offset,
        )


def standalone_metadata(fs: FileSystem, directory: str) -> MetadataImage | None:
    """Return the metadata that the broker had while it was standalone.

    Return None if the directory has no such metadata, or if the broker has joined controllers
    since. Raises MetadataError, OSError, and BrokerError if ``fencepost cluster promote`` has
    copied only a part of the metadata.
    """
    log = f"{directory}/{METADATA_DIRECTORY}"
    if not is_of_fencepost(fs, log) or is_of_member(fs, log):
        return None
    from fencepost.coordinator.metadata.stopped import read_stopped  # noqa: PLC0415 - needed once in a directory's life

    stopped = read_stopped(fs, log)
    if stopped is None:
        return None
    if promoted_as(fs, log) != (stopped.image.offset + 1, stopped.image.epoch):
        if not stopped.image.topics:
            return None  # no topics to lose
        raise BrokerError(
            f"the data directory {directory} belongs to a standalone broker, and no"
            " controller has its metadata: run `fencepost cluster promote`, and start the"
            " controllers from its output"
        )
    return stopped.image


def note_joined(
    fs: FileSystem, directory: str, before: MetadataImage, after: MetadataImage
) -> None:
    """Record that the broker has joined controllers, whose metadata are authoritative from now on.

    ``before`` is the image of the standalone broker, ``after`` the controllers' first image. Raises
    OSError, and BrokerError if ``after`` lacks something of ``before``.
    """
    reasons = reasons_against_successor(before, after)
    if reasons:
        more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise BrokerError(
            f"the cluster does not continue the metadata of {directory}:"
            f" {'; '.join(reasons[:3])}{more}. Start its controllers from the output of the"
            " last `fencepost cluster promote`"
        )
    note_membership(fs, f"{directory}/{METADATA_DIRECTORY}")


def has_identity(fs: FileSystem, directory: str) -> bool:
    """Return whether a broker has been started on the directory."""
    return META_PROPERTIES in (fs.list_directory(directory) or ())


def identify(fs: FileSystem, directory: str, node_id: int, cluster_id: str = "") -> MetaProperties:
    """Read the directory's identity, or write it at the first start. Raises BrokerError.

    Without ``cluster_id``, the first start generates the id of a new cluster.
    """
    try:
        meta = read_meta_properties(fs, directory)
    except CheckpointError as error:
        raise BrokerError(f"{directory}/meta.properties is damaged: {error}") from error
    if meta is None:
        name = cluster_id or uuid_to_text(uuid.uuid4())
        meta = MetaProperties(name, node_id, uuid.uuid4())
        write_meta_properties(fs, directory, meta)
    elif meta.node_id != node_id:
        raise BrokerError(
            f"{directory} belongs to node.id {meta.node_id}, but the configuration has {node_id}"
        )
    return meta
