"""Errors between a broker and its cluster."""

from __future__ import annotations


class MembershipError(Exception):
    """The broker is not a member of the cluster and cannot become one; the message says why."""
