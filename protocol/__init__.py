"""The Kafka wire protocol: decoding of requests and responses, encoding, and frames.

The package is independent of the broker; ``pipelines`` may import it and nothing else of
``coordinator``. The layout of messages comes only from kio's generated schemas.
"""

from fencepost.protocol.api import ApiKey
from fencepost.protocol.schema import Entity

__all__ = ["ApiKey", "Entity"]
