"""A bridge from MQTT to Kafka topics that acknowledges a message only after its commit."""
