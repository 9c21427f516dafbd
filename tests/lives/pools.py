"""A small number of names that all clients of a test share, so that the clients collide."""

from __future__ import annotations

from dataclasses import dataclass

INTERNAL_TOPICS = (
    "__consumer_offsets",
    "__transaction_state",
    "__cluster_metadata",
    "__fencepost_history",
    "__share_group_state",
)

COMMON_INTERNAL = INTERNAL_TOPICS[:3]
"""Apache Kafka's internal topics. Its group and transaction coordinators use the first two."""

LONGEST_STRING = 32_767
"""The maximum length of a protocol string in bytes."""

LONG = ("x" * 249, "ß" * 500, "y" * 1_024, "z" * 1_025, "w" * LONGEST_STRING)
ODD = ("", " ", ".", "..", "with space", "emoji-𝄞", "a/b", "tab\there", "null\0byte", *LONG)

TOO_LONG = "v" * (LONGEST_STRING + 1)
"""A length that a compact string can encode, but for which every broker closes the connection."""

SMALL_INTS = (-2, -1, 0, 1, 2, 7)


@dataclass(frozen=True)
class Pools:
    """The names in one test's requests; because of ``stem`` no other test has them."""

    stem: str = ""

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(f"{self.stem}g{n}" for n in range(6))

    @property
    def share_groups(self) -> tuple[str, ...]:
        """Share groups that begin at the earliest offset; the second one reads committed."""
        return tuple(f"{self.stem}s{n}" for n in range(2))

    @property
    def txn_ids(self) -> tuple[str, ...]:
        return tuple(f"{self.stem}t{n}" for n in range(6))

    @property
    def topics(self) -> tuple[str, ...]:
        """Two short names, one of medium length, and one of the maximum length."""
        a, b, c, d = (f"{self.stem}topic-{letter}" for letter in "abcd")
        return a, b, c.ljust(60, "c"), d.ljust(249, "d")

    @property
    def missing_topic(self) -> str:
        return f"{self.stem}nowhere"
