"""The authorization matrix: requests, the rights that they depend on, and all cases.

A :class:`Request` lists the rights that it needs, as in ``"write x, read t"``. A right is an
operation and a *slot*, a letter that stands for a resource. The resource may exist, be missing or
be internal. Each case of a request is the same request by another client. The clients have every
subset of the rights, or other rights, or the same rights granted by other rules or denied by an
additional rule.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from fencepost.cluster.acl import (
    CLUSTER_NAME,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)

STEM: Final = "m-"
"""The prefix of all names of the matrix."""

SLOTS: Final = {
    **dict.fromkeys("tuvw", ResourceType.TOPIC),
    **dict.fromkeys("ghkc", ResourceType.GROUP),
    **dict.fromkeys("xy", ResourceType.TRANSACTIONAL_ID),
    "cluster": ResourceType.CLUSTER,
}
"""Slot → type of its resource.

``k`` is a group of consumers, ``c`` a classic group with a member, ``x`` has an open transaction,
and ``w`` is a topic that the request writes to.
"""

NOBODYS: Final = uuid.UUID("aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee")
"""A topic id that no topic has."""

HERE, ABSENT, INTERNAL, UNNAMED = "here", "absent", "internal", "unnamed"
INTERNALS: Final = {"t": "__consumer_offsets", "u": "__transaction_state"}

OPERATIONS: Final = {
    ResourceType.TOPIC: "read write create delete alter describe describe_configs alter_configs",
    ResourceType.GROUP: "read delete describe describe_configs alter_configs",
    ResourceType.CLUSTER: (
        "create alter describe cluster_action describe_configs alter_configs idempotent_write"
    ),
    ResourceType.TRANSACTIONAL_ID: "write describe two_phase_commit",
}
ME: Final = "User:me"
"""A placeholder in a rule for the principal of the client."""

Body = dict[str, Any]


class Names(Protocol):
    """The names and ids of one case's resources on one broker."""

    def __getitem__(self, slot: str) -> str: ...

    def id(self, slot: str) -> uuid.UUID:
        """Return the id of a topic; for a missing topic an id that no topic has."""

    def producer(self, slot: str) -> tuple[int, int]:
        """Return (producer id, epoch) of a transactional id."""

    @property
    def member(self) -> str:
        """Return the member id of the groups that have a member."""


@dataclass(frozen=True)
class Request:
    """One request, at several versions, and the rights that it depends on."""

    api: str
    versions: Sequence[int]
    """Cases with subsets of the rights run at all these versions, other cases only at the last
    version.
    """
    rights: str
    body: Callable[[Names], Body]
    title: str = ""
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Slot → the kinds of resource in the slot; by default only an existing resource."""
    others: str = ""
    """Rights that the request may need instead of :attr:`rights`."""
    is_fresh: bool = False
    """Whether each case needs separate resources, because the request changes them."""
    is_silent: bool = False
    """Whether the request has no response, so that only a closed connection shows an error."""

    is_idle: bool = False
    """Whether the response does not depend on rights, because every client may send it."""

    @property
    def slots(self) -> list[str]:
        named = [slot for _, slot in _parsed(f"{self.rights},{self.others}")]
        return list(dict.fromkeys([*named, *self.kinds]))


@dataclass(frozen=True)
class Case:
    """One request by one client."""

    request: Request
    version: int
    kinds: Mapping[str, str]
    title: str
    rules: Sequence[Acl]
    """The ACLs of the client; their resource names come from :attr:`names`."""
    names: Mapping[str, str]

    def __str__(self) -> str:
        told = ", ".join(f"{slot} {kind}" for slot, kind in self.kinds.items() if kind != HERE)
        request = f"{self.request.api} v{self.version} {self.request.title}".strip()
        return f"{request} [{self.title}]" + (f" with {told}" if told else "")


def _parsed(rights: str) -> list[tuple[str, str]]:
    pairs = (right.split() for right in rights.split(",") if right.strip())
    return [(operation, slot) for operation, slot in pairs]


def rule(operation: str, resource_type: ResourceType, name: str) -> Acl:
    """Return the simplest rule that allows ``operation`` to the client."""
    return Acl(
        resource_type,
        PatternType.LITERAL,
        name,
        ME,
        "*",
        Operation[operation.upper()],
        Permission.ALLOW,
    )


def cases_of(request: Request, number: Iterator[int]) -> Iterator[Case]:
    """Yield all cases of a request; ``number`` numbers the resources of separate cases."""
    slots = [slot for slot in request.slots if slot != "cluster"]
    choices = [request.kinds.get(slot, (HERE,)) for slot in slots]
    for version in request.versions:
        for chosen in itertools.product(*choices):
            kinds = dict(zip(slots, chosen, strict=True))
            is_main = version == request.versions[-1] and chosen == tuple(c[0] for c in choices)
            shape = request, version, kinds
            for title, make in _variants(request, is_main=is_main):
                names = dict(_named(request, kinds, next(number)))
                rules = make({**names, "cluster": CLUSTER_NAME})
                yield Case(*shape, title, rules, names)


def _named(request: Request, kinds: Mapping[str, str], number: int) -> Iterator[tuple[str, str]]:
    for slot, kind in kinds.items():
        own = f"{STEM}{request.api}-{number}-{slot}" if request.is_fresh else f"{STEM}{slot}"
        named = {INTERNAL: INTERNALS.get(slot, ""), UNNAMED: "", ABSENT: f"{own}-absent"}
        yield slot, named.get(kind, own)


def all_but_one(request: Request, number: Iterator[int]) -> Iterator[Case]:
    """Yield the case with all rights, and the cases in which one right is missing."""
    rights = _parsed(request.rights)
    kinds = {
        slot: request.kinds.get(slot, (HERE,))[0] for slot in request.slots if slot != "cluster"
    }
    for missing in (None, *rights):
        given = [right for right in rights if right != missing]
        names = dict(_named(request, kinds, next(number)))
        title = f"without {_told(missing)}" if missing else "everything"
        rules = _plain(given)({**names, "cluster": CLUSTER_NAME})
        yield Case(request, request.versions[-1], kinds, title, rules, names)


def here_and_absent(request: Request, number: Iterator[int]) -> Iterator[tuple[Case, Case]]:
    """Yield pairs of cases without rights: one with an existing, one with a missing resource."""
    slots = [slot for slot in request.slots if slot != "cluster"]
    for version, slot in itertools.product(request.versions, slots):
        if ABSENT in request.kinds.get(slot, ()):
            pair = []
            for kind in (HERE, ABSENT):
                kinds = {**dict.fromkeys(slots, HERE), slot: kind}
                names = dict(_named(request, kinds, next(number)))
                pair.append(Case(request, version, kinds, "nothing", (), names))
            yield pair[0], pair[1]


Make = Callable[[Mapping[str, str]], list[Acl]]
"""Maps the slots' resource names to the rules for these resources."""


def _variants(request: Request, *, is_main: bool) -> Iterator[tuple[str, Make]]:
    rights = _parsed(request.rights)
    yield from _subsets(rights)
    for right in _parsed(request.others):
        yield f"{_told(right)} instead", _plain([right])
        yield f"{_told(right)} as well", _plain([*rights, right])
        for other in _parsed(request.others):
            if other > right:
                yield f"{_told(right)} and {_told(other)} instead", _plain([right, other])
    if not is_main:
        return
    yield from _given_otherwise(rights)
    for right in [*rights, *_parsed(request.others)]:
        yield from _one_right_otherwise(rights, right)


def _told(right: tuple[str, str]) -> str:
    return " ".join(right)


def _plain(rights: Sequence[tuple[str, str]]) -> Make:
    return lambda names: [
        rule(operation, SLOTS[slot], names[slot]) for operation, slot in rights if names[slot]
    ]


MOST_FOR_SUBSETS: Final = 4
"""If a request has more rights, only the subsets with none, one, all, or all but one are tried."""


def _subsets(rights: Sequence[tuple[str, str]]) -> Iterator[tuple[str, Make]]:
    sizes: Sequence[int] = range(len(rights) + 1)
    if len(rights) > MOST_FOR_SUBSETS:
        sizes = (0, 1, len(rights) - 1, len(rights))
    for size in sizes:
        for some in itertools.combinations(rights, size):
            yield ", ".join(map(_told, some)) or "nothing", _plain(some)


def _given_otherwise(rights: Sequence[tuple[str, str]]) -> Iterator[tuple[str, Make]]:
    """Yield variants in which all rules are changed alike. Some no longer grant the rights."""

    def each(change: Callable[[Acl], Acl]) -> Make:
        return lambda names: [change(acl) for acl in _plain(rights)(names)]

    prefixed = PatternType.PREFIXED
    changes: dict[str, Callable[[Acl], Acl]] = {
        "a prefix": lambda acl: replace(
            acl, pattern_type=prefixed, resource_name=acl.resource_name[:-1]
        ),
        "the whole name as a prefix": lambda acl: replace(acl, pattern_type=prefixed),
        "another prefix": lambda acl: replace(
            acl, pattern_type=prefixed, resource_name=acl.resource_name + "-"
        ),
        "a prefix of one letter": lambda acl: replace(
            acl, pattern_type=prefixed, resource_name=acl.resource_name[:1]
        ),
        "everything": lambda acl: replace(acl, resource_name="*"),
        "an asterisk as a prefix": lambda acl: replace(
            acl, pattern_type=prefixed, resource_name="*"
        ),
        "another name": lambda acl: replace(acl, resource_name=acl.resource_name[:-1]),
        "all operations": lambda acl: replace(acl, operation=Operation.ALL),
        "from here": lambda acl: replace(acl, host="127.0.0.1"),
        "from elsewhere": lambda acl: replace(acl, host="127.0.0.2"),
        "to others": lambda acl: replace(acl, principal="User:other"),
        "to another type": lambda acl: replace(acl, principal=ME.replace("User", "Group")),
        "in other letters": lambda acl: replace(acl, principal=ME.upper().replace("USER", "User")),
    }
    for title, change in changes.items():
        # The cluster resource has only one name.
        def unless_cluster(acl: Acl, change: Callable[[Acl], Acl] = change) -> Acl:
            changed = change(acl)
            if acl.resource_type is ResourceType.CLUSTER:
                changed = replace(
                    changed, resource_name=CLUSTER_NAME, pattern_type=PatternType.LITERAL
                )
            return changed

        yield title, each(unless_cluster)
    types = {slot: SLOTS[slot] for _, slot in rights}

    def refused(operation: str) -> Callable[[Mapping[str, str]], list[Acl]]:
        def make(names: Mapping[str, str]) -> list[Acl]:
            against = [
                replace(rule(operation, kind, names[slot]), permission=Permission.DENY)
                for slot, kind in types.items()
            ]
            return [*_plain(rights)(names), *against]

        return make

    yield "but nothing at all", refused("all")


def _one_right_otherwise(
    rights: Sequence[tuple[str, str]], right: tuple[str, str]
) -> Iterator[tuple[str, Make]]:
    """Yield variants in which another right replaces ``right``, or a rule denies it."""
    operation, slot = right
    kind = SLOTS[slot]
    rest = [other for other in rights if other != right]
    for other in (*OPERATIONS[kind].split(), "all"):
        if other != operation:
            yield f"{other} for {_told(right)}", _plain([*rest, (other, slot)])
    given = [*rest, right]

    def against(change: Callable[[Acl], Acl], other: str = operation) -> Make:
        def make(names: Mapping[str, str]) -> list[Acl]:
            denied = replace(rule(other, kind, names[slot]), permission=Permission.DENY)
            return [*_plain(given)(names), change(denied)]

        return make

    yield f"deny {_told(right)}", against(lambda acl: acl)
    for other in OPERATIONS[kind].split():
        if other != operation:
            yield f"deny {other} to {_told(right)}", against(lambda acl: acl, other)
    yield f"deny {_told(right)} from here", against(lambda acl: replace(acl, host="127.0.0.1"))
    yield f"deny {_told(right)} elsewhere", against(lambda acl: replace(acl, host="127.0.0.2"))
    if kind is not ResourceType.CLUSTER:
        prefixed = PatternType.PREFIXED
        yield (
            f"deny {_told(right)} everywhere",
            against(lambda acl: replace(acl, resource_name="*")),
        )
        yield (
            f"deny {_told(right)} by a prefix",
            against(
                lambda acl: replace(
                    acl, pattern_type=prefixed, resource_name=acl.resource_name[:-1]
                )
            ),
        )
        yield (
            f"deny {_told(right)} next to it",
            against(lambda acl: replace(acl, resource_name=acl.resource_name + "-")),
        )


# --- random cases --------------------------------------------------------------------------------

MOST_RULES: Final = 6
HOSTS: Final = ("*", "*", "*", "127.0.0.1", "127.0.0.2")
PRINCIPALS: Final = (ME, ME, ME, "User:other")


def drawn_cases(requests: Sequence[Request], seed: int, count: int) -> Iterator[Case]:
    """Yield requests with random rules for their resources and for similar names."""
    draw = random.Random(seed)
    for number in range(count):
        request = draw.choice(requests)
        kinds = {
            slot: draw.choice(request.kinds.get(slot, (HERE,)))
            for slot in request.slots
            if slot != "cluster"
        }
        names = dict(_named(request, kinds, DRAWN_FROM + seed * count + number))
        needed = _parsed(f"{request.rights},{request.others}")
        known = {**names, "cluster": CLUSTER_NAME}
        rules = [
            _drawn_rule(draw, *draw.choice(needed), known)
            for _ in range(draw.randint(0, MOST_RULES))
        ]
        title = f"{seed}/{number}: " + "; ".join(map(_short, rules))
        yield Case(request, draw.choice(request.versions), kinds, title, rules, names)


DRAWN_FROM: Final = 1_000_000
"""The number of the first random case, above the numbers of all other cases."""


def _drawn_rule(draw: random.Random, operation: str, slot: str, names: Mapping[str, str]) -> Acl:
    kind, name = SLOTS[slot], names[slot]
    if draw.random() < 0.4:
        operation = draw.choice([*OPERATIONS[kind].split(), "all"])
    pattern = PatternType.LITERAL
    if kind is not ResourceType.CLUSTER:
        name = draw.choice([name, name, name, "*", name[:-1], f"{name}x"])
        pattern = draw.choice([PatternType.LITERAL, PatternType.LITERAL, PatternType.PREFIXED])
    return Acl(
        kind,
        pattern,
        name or "*",
        draw.choice(PRINCIPALS),
        draw.choice(HOSTS),
        Operation[operation.upper()],
        Permission.DENY if draw.random() < 0.25 else Permission.ALLOW,
    )


def _short(acl: Acl) -> str:
    return (
        f"{acl.permission.name.lower()} {acl.operation.name.lower()} on {acl.resource_type.name}"
        f" {acl.pattern_type.name.lower()} {acl.resource_name} to {acl.principal} at {acl.host}"
    )
