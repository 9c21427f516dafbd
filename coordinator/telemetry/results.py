"""The results of pushes, as words for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fencepost.coordinator.errors import (
    InvalidRequestError,
    TelemetryTooLargeError,
    TooEarlyError,
    UnknownSubscriptionIdError,
)
from fencepost.logcore.errors import UnsupportedCompressionError
from fencepost.logcore.machine import DomainError

ACCEPTED: Final = "accepted"
INVALID: Final = "invalid-record"

REFUSED: Final[Mapping[type[DomainError], str]] = {
    InvalidRequestError: "invalid-request",
    TooEarlyError: "too-early",
    UnknownSubscriptionIdError: "unknown-subscription",
    UnsupportedCompressionError: "unsupported-compression",
    TelemetryTooLargeError: "too-large",
}
"""The result for each error of a refused push; all other errors mean :data:`INVALID`."""

LOST: Final = frozenset({"too-large", INVALID})
"""The results of pushes whose metrics, although subscribed, are lost; such pushes are logged."""

RESULTS: Final = (ACCEPTED, *REFUSED.values(), INVALID)
