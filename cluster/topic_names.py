"""What a topic may be called, and who counts partitions: what is needed before any is created.

Source: ``Topic.validate``, ``ControllerMutationQuota``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from fencepost.cluster.controller.errors import InvalidTopicError

MAX_NAME_CHARACTERS: Final = 249
"""Characters of a topic name: with partition number and suffix it still fits a file name of 255."""

_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+")

Take = Callable[[int], None]
"""Counts partitions that are about to be created or deleted; raises where they may not be."""


def unlimited(_partitions: int) -> None:
    """Nobody counts."""


def check_name(name: str) -> None:
    """Raise InvalidTopicError unless ``name`` may name a topic."""
    if not name:
        raise InvalidTopicError("the topic name is empty")
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidTopicError(f"the topic name is longer than {MAX_NAME_CHARACTERS} characters")
    if name in {".", ".."} or not _NAME.fullmatch(name):
        raise InvalidTopicError(
            f"the topic name {name!r} is not made of letters, digits, '.', '_' and '-' alone"
        )


def hint(name: str, topics: Iterable[str]) -> str:
    """The end of a sentence about a missing topic: which one may be meant, or nothing."""
    import difflib  # noqa: PLC0415 - only errors need it

    close = difflib.get_close_matches(name, list(topics), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
