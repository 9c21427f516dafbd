"""What goes wrong between a broker and ZooKeeper."""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class ZooKeeperError(Exception):
    """ZooKeeper has refused something, or can not be reached."""


class NotOurFormatError(ZooKeeperError):
    """A znode does not hold what Kafka writes there."""


class NotInZooKeeperError(DomainError):
    """A change that this mode does not keep (UNSUPPORTED_VERSION)."""


class NotWrittenError(DomainError):
    """ZooKeeper has not taken a change of users, quotas or rules (UNKNOWN_SERVER_ERROR)."""
