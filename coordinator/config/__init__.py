"""The configuration: keys, their defaults, and their current values."""
