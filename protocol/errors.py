"""Errors of the wire protocol."""

from __future__ import annotations


class WireError(Exception):
    """Base of all errors of this package."""


class MalformedRequest(WireError):  # noqa: N818 - reads better at `except`, like UnsupportedVersion
    """The bytes of a frame do not match the message of its header, or exceed a limit.

    The connection must be closed, as in Kafka: if the framing is in doubt, no response is safe.
    """


class UnsupportedVersion(WireError):  # noqa: N818 - Kafka's name of the condition
    """The API key is unknown, or not served at that version."""

    def __init__(
        self,
        api_key: int,
        version: int,
        correlation_id: int = 0,
        served: tuple[int, int] | None = None,
        client_id: str | None = None,
    ) -> None:
        super().__init__(f"API key {api_key} is not served at version {version}")
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.served = served
        """The lowest and the highest served version; None for an API that is not served at all."""
        self.client_id = client_id


class EncodeError(WireError):
    """A value of a message does not fit its field, which is a bug of the broker."""
