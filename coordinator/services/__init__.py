"""The group and transaction coordinators of a broker: their machines, topics and effects."""
