"""Sweeping a user's pipeline over crash points: ``fencepost crash-sweep``.

``points`` counts durable operations and responses of the broker, ``daemon`` is a broker that kills
itself at one of these, ``judge`` reads all records back, and ``run`` combines them.
"""
