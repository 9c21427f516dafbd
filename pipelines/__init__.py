"""Client-side pipelines that read from and write to a broker of Fencepost or Apache Kafka."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fencepost.pipelines.exactly_once import ExactlyOnce

__all__ = ["ExactlyOnce"]

if not __name__.startswith("fencepost."):
    raise ImportError("this package is fencepost.pipelines: import it by that name")


def __getattr__(name: str) -> object:
    # Spark's part does not need aiokafka, and may be installed without it.
    if name == "ExactlyOnce":
        from fencepost.pipelines.exactly_once import ExactlyOnce  # noqa: PLC0415

        return ExactlyOnce
    raise AttributeError(name)
