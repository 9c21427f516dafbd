"""A cluster whose controller is elected on ZooKeeper, in the formats of Apache Kafka 3.9."""
