"""The store of a controller's decisions: the image to decide on, and the log of its records.

There are two stores: the node's own metadata log, and the znodes of a cluster on ZooKeeper. An
appended change is visible to the next decision at once; a response that depends on it waits for
:meth:`MetadataStore.durable`. A broker whose controllers are other nodes has no store: it checks
requests against :class:`ReadOnlyStore` and forwards them.
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
    """A store for one controller, which is the only writer; not thread-safe."""

    @property
    def image(self) -> MetadataImage:
        """The image after all appended changes, durable or not."""

    @property
    def epoch(self) -> int:
        """The controller's epoch."""

    @property
    def next_offset(self) -> int:
        """The offset of the next record."""

    def append(self, records: Sequence[MetadataRecord]) -> None:
        """Append the records of one change, and install the resulting image.

        Raises LogError or a DomainError; after an error the metadata is unchanged.
        """

    def durable(self) -> asyncio.Future[None] | None:
        """Return a future that is done once all appended records are durable; None if all are.

        The future raises StorageError, or NotControllerError if another controller was elected.
        """

    def unforced(self) -> AbstractContextManager[None]:
        """Let appends in the block return before they are durable; call :meth:`durable` later."""


class ReadOnlyStore:
    """The metadata of a broker whose controllers are other nodes, for checks of requests."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    @property
    def image(self) -> MetadataImage:
        """The latest image received from the controller."""
        return self._metadata.image

    @property
    def epoch(self) -> int:
        """The controller's epoch in the latest image."""
        return self.image.epoch

    @property
    def next_offset(self) -> int:
        """The offset after the latest image."""
        return self.image.offset + 1

    def append(self, _records: Sequence[MetadataRecord]) -> None:
        """Raise MetadataUnavailableError: only the controller makes changes."""
        raise MetadataUnavailableError("the controller is elsewhere")

    def durable(self) -> asyncio.Future[None] | None:
        """Return None: this broker writes no metadata."""
        return None

    def unforced(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: this broker writes no metadata."""
        return nullcontext()
