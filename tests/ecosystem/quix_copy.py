"""Copy a topic exactly once with Quix Streams, and count its records in a changelog topic.

Arguments: bootstrap servers, source, target, and a folder for the state. The program runs until it
is killed.
"""

import sys

from quixstreams import Application, State

bootstrap, source, target, folder = sys.argv[1:]
application = Application(
    broker_address=bootstrap,
    consumer_group="quix-copy",
    auto_offset_reset="earliest",
    processing_guarantee="exactly-once",
    commit_interval=0.2,
    state_dir=folder,
    producer_extra_config={"transaction.timeout.ms": 10_000},
    consumer_extra_config={"session.timeout.ms": 6000, "heartbeat.interval.ms": 1000},
)


def counted(value: bytes, state: State) -> bytes:
    """Count the record, and return its value."""
    state.set("count", state.get("count", 0) + 1)
    return value


numbers = application.topic(source, key_deserializer="bytes", value_deserializer="bytes")
copies = application.topic(target, key_serializer="bytes", value_serializer="bytes")
application.dataframe(numbers).apply(counted, stateful=True).to_topic(copies)
application.run()
