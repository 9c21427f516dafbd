"""Errors about names that a cluster does not have, with the most similar existing name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from fencepost.coordinator import light_imports  # noqa: F401  # isort: skip - before anything that imports kio
from kio.schema.errors import ErrorCode

from fencepost.client.client import ApiError
from fencepost.coordinator.config.key import nearest
from fencepost.protocol.errors import WireError


class UnknownNameError(ApiError):
    """There is no topic, group or transactional id of that name."""

    def __init__(
        self, code: ErrorCode, api: str, what: str, name: str, existing: Iterable[str]
    ) -> None:
        super().__init__(code, api, name)
        self.args = (f"there is no {what} {name!r}{nearest(name, existing)}",)


def unknown_topic(name: str, existing: Iterable[str]) -> UnknownNameError:
    """Return the error about a topic."""
    code = ErrorCode.unknown_topic_or_partition
    return UnknownNameError(code, "Metadata", "topic", name, existing)


def unknown_group(name: str, listed: Callable[[], Iterable[str]]) -> UnknownNameError:
    """Return the error about a group; without a suggestion if groups cannot be listed."""
    code = ErrorCode.group_id_not_found
    return UnknownNameError(code, "DescribeGroups", "group", name, _list_names(listed))


def unknown_transactional_id(name: str, listed: Callable[[], Iterable[str]]) -> UnknownNameError:
    """Return the error about a transactional id, as :func:`unknown_group`."""
    code, api = ErrorCode.transactional_id_not_found, "DescribeTransactions"
    return UnknownNameError(code, api, "transactional id", name, _list_names(listed))


def _list_names(listed: Callable[[], Iterable[str]]) -> list[str]:
    with contextlib.suppress(WireError):
        return list(listed())
    return []
