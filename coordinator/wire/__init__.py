"""The Kafka wire protocol: frames in, messages out, and the way back.

Nothing here knows a broker; ``pipelines`` may import this package and nothing else of
``coordinator``. What a message looks like comes from kio's generated schemas alone.
"""

from fencepost.coordinator.wire.api import ApiKey
from fencepost.coordinator.wire.schema import Entity

__all__ = ["ApiKey", "Entity"]
