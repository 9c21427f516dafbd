"""Runs of a user's pipeline, one for each crash point: ``fencepost crash-sweep``.

``points`` counts durable operations and responses of the broker, ``daemon`` is a broker that kills
itself at one of these, ``judge`` reads all records back, and ``run`` combines them.
"""
