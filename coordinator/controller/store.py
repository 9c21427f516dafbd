"""The store of a controller's decisions: what a decision looks at, and how its records are kept.

There are two: the node's own log of metadata, and the znodes of a cluster on ZooKeeper. A change
that was appended is visible to the next decision at once; an answer that depends on it waits for
:meth:`MetadataStore.durable`. The controllers of an Apache Kafka quorum keep a log of their own,
which is no store here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import MetadataRecord


class MetadataStore(Protocol):
    """Belongs to the loop of the controller; nothing else changes the metadata meanwhile."""

    image: MetadataImage
    """All changes that were appended, durable or not."""

    @property
    def epoch(self) -> int:
        """The controller's epoch."""

    @property
    def next_offset(self) -> int:
        """The offset of the next record."""

    def append(self, records: Sequence[MetadataRecord]) -> asyncio.Future[None] | None:
        """Append the records of one change, and install the image with them.

        Raises LogError or a DomainError; nothing has changed then.
        """

    def durable(self) -> asyncio.Future[None] | None:
        """Done once all that was appended by now is durable; None if it is already.

        The future raises StorageError, or NotControllerError where another controller was elected.
        """

    def unforced(self) -> AbstractContextManager[None]:
        """Let appends inside return before they are durable; :meth:`durable` must follow."""
