"""What can go wrong between bytes and messages."""

from __future__ import annotations


class WireError(Exception):
    """Base of everything this package raises."""


class MalformedRequest(WireError):  # noqa: N818 - reads better at `except`, like UnsupportedVersion
    """The bytes of a frame are not the message its header promises, or break a limit.

    The only answer is to close the connection, as Kafka does: with the framing in doubt there is
    nothing that could be answered safely.
    """


class UnsupportedVersion(WireError):  # noqa: N818 - Kafka's name of the condition
    """The API key is unknown here, or is not served at that version."""

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
        """The lowest and the highest version; None for an API that is not served at all."""
        self.client_id = client_id


class EncodeError(WireError):
    """A message cannot be written: one of its values does not fit its field. Our own bug."""
