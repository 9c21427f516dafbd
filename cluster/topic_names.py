"""The rules for topic names, and the quota on created and deleted partitions.

Source: ``Topic.validate``, ``ControllerMutationQuota``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from fencepost.cluster.controller.errors import InvalidTopicError

MAX_NAME_CHARACTERS: Final = 249
"""The maximum length of a topic name: with partition index and suffix, such a name fits into a file
name of 255 bytes."""

_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+")

ChargeQuota = Callable[[int], None]
"""Charges the quota for partitions to create or delete; raises if the quota is exceeded."""


def unlimited(_partitions: int) -> None:
    """Do nothing: the :data:`ChargeQuota` of callers without a quota."""


def check_name(name: str) -> None:
    """Raise InvalidTopicError unless ``name`` is a valid topic name."""
    if not name:
        raise InvalidTopicError("the topic name is empty")
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidTopicError(f"the topic name is longer than {MAX_NAME_CHARACTERS} characters")
    if name in {".", ".."} or not _NAME.fullmatch(name):
        raise InvalidTopicError(
            f"the topic name {name!r} has characters other than letters, digits, '.', '_' and '-'"
        )


def hint(name: str, topics: Iterable[str]) -> str:
    """Return the end of a message about a missing topic: a similar topic name, or nothing."""
    import difflib  # noqa: PLC0415 - only errors need it

    close = difflib.get_close_matches(name, list(topics), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
