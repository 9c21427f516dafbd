"""A bridge from MQTT to Kafka topics that acknowledges what is committed, and nothing before."""
