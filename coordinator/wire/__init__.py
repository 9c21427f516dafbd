"""The Kafka wire protocol: frames in, messages out, and the way back.

Nothing here knows a broker; ``pipelines`` may import this package and nothing else of
``coordinator``. What a message looks like comes from kio's generated schemas alone.
"""

from fencepost.coordinator.wire.api import APIS, Api, ApiKey
from fencepost.coordinator.wire.codec import (
    Request,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from fencepost.coordinator.wire.errors import (
    EncodeError,
    MalformedRequest,
    UnsupportedVersion,
    WireError,
)
from fencepost.coordinator.wire.messages import (
    RequestFactory,
    ResponseFactory,
    request_factory,
    response_factory,
)
from fencepost.coordinator.wire.schema import Entity

__all__ = [
    "APIS",
    "Api",
    "ApiKey",
    "EncodeError",
    "Entity",
    "MalformedRequest",
    "Request",
    "RequestFactory",
    "ResponseFactory",
    "UnsupportedVersion",
    "WireError",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_response",
    "request_factory",
    "response_factory",
]
