"""The error of the metadata log."""

from __future__ import annotations


class MetadataError(Exception):
    """The metadata log holds something that this release does not understand."""
