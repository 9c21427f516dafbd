"""The Kafka wire protocol: decoding of requests and responses, encoding, and frames.

The package is independent of brokers and clients, which both use it. The layout of messages comes
from kio's generated schemas, and from ``overlay.py`` for messages that kio lacks.
"""

from fencepost.protocol.api import ApiKey
from fencepost.protocol.schema import Entity

__all__ = ["ApiKey", "Entity"]
