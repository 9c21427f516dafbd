"""The store of a controller's decisions: what a decision looks at, and how its records are kept.

There are two: the node's own log of metadata, and the znodes of a cluster on ZooKeeper. A change
that was appended is visible to the next decision at once; an answer that depends on it waits for
:meth:`MetadataStore.durable`. Where the controllers are other nodes there is none: requests are
checked in view of :class:`ReadOnlyStore` and forwarded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import MetadataRecord
from fencepost.coordinator.errors import MetadataUnavailableError
from fencepost.coordinator.metadata.metadata import Metadata


class MetadataStore(Protocol):
    """Belongs to the loop of the controller; nothing else changes the metadata meanwhile."""

    @property
    def image(self) -> MetadataImage:
        """All changes that were appended, durable or not."""

    @property
    def epoch(self) -> int:
        """The controller's epoch."""

    @property
    def next_offset(self) -> int:
        """The offset of the next record."""

    def append(self, records: Sequence[MetadataRecord]) -> None:
        """Append the records of one change, and install the image with them.

        Raises LogError or a DomainError; nothing has changed then.
        """

    def durable(self) -> asyncio.Future[None] | None:
        """Done once all that was appended by now is durable; None if it is already.

        The future raises StorageError, or NotControllerError where another controller was elected.
        """

    def unforced(self) -> AbstractContextManager[None]:
        """Let appends inside return before they are durable; :meth:`durable` must follow."""


class ReadOnlyStore:
    """The metadata of a broker whose controllers are other nodes, for checks of requests."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    @property
    def image(self) -> MetadataImage:
        """The metadata as the controller has told them."""
        return self._metadata.image

    @property
    def epoch(self) -> int:
        """The controller's epoch, as far as it has told."""
        return self.image.epoch

    @property
    def next_offset(self) -> int:
        """The offset of the next record, as far as the controller has told."""
        return self.image.offset + 1

    def append(self, _records: Sequence[MetadataRecord]) -> None:
        """Raise MetadataUnavailableError: only the controller makes changes."""
        raise MetadataUnavailableError("the controller is elsewhere")

    def durable(self) -> asyncio.Future[None] | None:
        """None: nothing is written here."""
        return None

    def unforced(self) -> AbstractContextManager[None]:
        """Nothing is written here."""
        return nullcontext()
