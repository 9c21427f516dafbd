"""Errors between a broker and ZooKeeper."""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class ZooKeeperError(Exception):
    """ZooKeeper has rejected an operation, or cannot be reached."""


class NotOurFormatError(ZooKeeperError):
    """A znode does not hold what Kafka writes there."""


class NotInZooKeeperError(DomainError):
    """A change that a cluster on ZooKeeper does not store (UNSUPPORTED_VERSION)."""


class NotWrittenError(DomainError):
    """ZooKeeper has rejected a change of users, quotas or ACLs (UNKNOWN_SERVER_ERROR)."""
