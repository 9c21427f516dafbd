"""The interface of the receivers to which ``fencepost history export`` sends entries."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import click

from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.coordinator.history.entries import Entry


@dataclass(frozen=True, slots=True)
class Exported:
    """An entry with its partition and offset in the history."""

    partition: int
    offset: int
    entry: Entry

    def id(self, cluster_id: str) -> str:
        """Return an id that is the same in each attempt and each run."""
        return f"{cluster_id}-{self.partition}-{self.offset}"


class DeliveryError(Exception):
    """A receiver did not accept an entry. ``is_final``: another attempt would fail as well."""

    def __init__(self, cause: str, *, is_final: bool = False, pause_s: float | None = None) -> None:
        super().__init__(cause)
        self.is_final = is_final
        self.pause_s = pause_s
        """The pause that the receiver asks for."""


def check_url(url: str, option: str) -> None:
    """Raise click.BadParameter unless the URL of a receiver is an HTTP or HTTPS URL."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise click.BadParameter(f"{url!r} is not an http or https URL", param_hint=option)


class Sink(Protocol):
    """A receiver of entries."""

    max_batch: int
    """The maximum number of entries in one delivery."""

    def reset(self) -> None:
        """Forget the entries so far: partitions were assigned, and are read from other offsets."""

    def observe(self, entry: Exported) -> None:
        """Take note of an entry that was delivered before."""

    def prepare(self, batch: Sequence[Exported]) -> Callable[[], None]:
        """Return a function that delivers a batch; it raises DeliveryError, and can be repeated."""
