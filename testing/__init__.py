"""A Kafka broker for tests: fixtures, a clock that the test owns, faults.

``pip install 'fencepost[pytest]'`` is all that a project needs: pytest finds ``plugin`` by itself.
Without pytest, :class:`Kafka` is a context manager. Nothing of a broker is imported before its
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fencepost.testing.cluster import Cluster
    from fencepost.testing.kafka import Kafka
    from fencepost.testing.views import OpenTransaction, Record

__all__ = ["Cluster", "Kafka", "OpenTransaction", "Record"]


def __getattr__(name: str) -> object:
    if name == "Cluster":
        from fencepost.testing.cluster import Cluster  # noqa: PLC0415

        return Cluster
    if name == "Kafka":
        from fencepost.testing.kafka import Kafka  # noqa: PLC0415

        return Kafka
    if name in __all__:
        from fencepost.testing import views  # noqa: PLC0415

        return getattr(views, name)
    raise AttributeError(name)
