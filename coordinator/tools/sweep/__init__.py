"""Sweeping a user's pipeline over crash points: ``fencepost crash-sweep``.

``points`` counts what the broker does durably and what it answers, ``daemon`` is a broker that is
killed at one of these, ``judge`` reads everything back, ``run`` puts them together.
"""
