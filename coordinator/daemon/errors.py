"""The error of a broker that cannot start, or must stop."""

from __future__ import annotations


class BrokerError(Exception):
    """The broker cannot start or continue; the message tells the operator why."""
