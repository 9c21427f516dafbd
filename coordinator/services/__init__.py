"""The group, transaction and share coordinators of a broker, and its share partitions."""
