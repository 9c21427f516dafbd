"""What goes wrong between a broker and its cluster."""

from __future__ import annotations


class MembershipError(Exception):
    """The broker is no member of the cluster, and can not be one; the message says why."""
