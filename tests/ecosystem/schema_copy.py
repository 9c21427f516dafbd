"""Use a schema registry through confluent-kafka's client, on a Python without Fencepost.

Arguments: what to do (``register``, ``write`` or ``read``), the registry's URL, bootstrap servers,
and a topic. ``register`` registers one schema after the other until it is killed, and prints each
id once the registry has acknowledged it. ``write`` commits a transaction of Avro records and
aborts another one. ``read`` prints the committed records, and the subjects with their ids.
"""

import json
import sys
from itertools import count

from confluent_kafka import Consumer, Producer
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

RECORDS = 100

action, url, bootstrap, topic = sys.argv[1:]
registry = SchemaRegistryClient({"url": url})
context = SerializationContext(topic, MessageField.VALUE)


def schema(name: str) -> str:
    """Return a schema with a name that no other subject has."""
    fields = [{"name": "number", "type": "int"}]
    return json.dumps({"type": "record", "name": name, "fields": fields})


def register() -> None:
    """Register schemas until the process is killed."""
    for number in count():
        subject = f"{topic}-{number}-value"
        schema_id = registry.register_schema(subject, Schema(schema(f"N{number}"), "AVRO"))
        print("registered", subject, schema_id, flush=True)


def write() -> None:
    """Commit one transaction, and abort another one."""
    serialize = AvroSerializer(registry, schema("Number"))
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"{topic}-writer"})
    producer.init_transactions()
    for first, end in ((0, producer.commit_transaction), (RECORDS, producer.abort_transaction)):
        producer.begin_transaction()
        for number in range(first, first + RECORDS):
            producer.produce(topic, serialize({"number": number}, context))
        producer.flush()
        end()


def read() -> None:
    """Print the committed records, and the id of each subject's schema."""
    deserialize = AvroDeserializer(registry)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"{topic}-reader",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.subscribe([topic])
    while (message := consumer.poll(60)) is not None and message.error() is None:
        print("record", deserialize(message.value(), context)["number"])
    consumer.close()
    for subject in registry.get_subjects():
        print("schema", subject, registry.get_latest_version(subject).schema_id)


{"register": register, "write": write, "read": read}[action]()
