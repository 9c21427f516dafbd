"""The Kafka wire protocol: decoding of requests and responses, encoding, and frames.

The package is independent of the broker; ``pipelines`` may import it and nothing else of
``coordinator``. The layout of messages comes only from kio's generated schemas.
"""

from fencepost.coordinator.wire.api import ApiKey
from fencepost.coordinator.wire.schema import Entity

__all__ = ["ApiKey", "Entity"]
