"""Why a broker can not start, or has to stop."""

from __future__ import annotations


class BrokerError(Exception):
    """The broker can not start, or go on; the message says why and is for the operator."""
