"""Images of metadata from records."""

from __future__ import annotations

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import MetadataRecord


def image_after(image: MetadataImage, *records: MetadataRecord) -> MetadataImage:
    """Return the image after the replay of these records."""
    delta = MetadataDelta(image)
    for record in records:
        delta.replay(record)
    return delta.apply(image.offset + len(records), 1)
