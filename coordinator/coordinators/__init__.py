"""The two coordinators of a broker: which machines run on which topic, and what they ask for."""
