"""All ACLs of an authorizer, indexed so that a lookup is cheap even with very many ACLs.

A table never changes: :meth:`RuleTable.changed` builds another one, in steps, that shares unchanged
parts. ACLs are indexed twice: by their resource, and by their principal and host.

Source: ``StandardAuthorizerData``, ``AclCache``, ``Authorizer.authorizeByResourceType``.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from typing import Final, NamedTuple
from uuid import UUID

from fencepost.cluster.acl import (
    ANYBODY,
    ANYTHING,
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from fencepost.coordinator.security.networks import NO_NETWORKS, Networks
from fencepost.coordinator.security.principal import canonical_host
from fencepost.protocol.steps import Steps, finish

NO_ID: Final = UUID(int=0)
"""The id of an ACL that does not come from the metadata."""

_EVERYTHING: Final = sum(1 << operation for operation in Operation if operation > Operation.ALL)

_ALSO_ALLOWED: Final[Mapping[Operation, Operation]] = {
    Operation.READ: Operation.DESCRIBE,
    Operation.WRITE: Operation.DESCRIBE,
    Operation.DELETE: Operation.DESCRIBE,
    Operation.ALTER: Operation.DESCRIBE,
    Operation.ALTER_CONFIGS: Operation.DESCRIBE_CONFIGS,
}
"""Operations that an allowed operation implies. A denied operation implies none."""

Holder = tuple[ResourceType, str, str]
"""A resource type, with the principal and host that ACLs apply to."""

Pattern = tuple[PatternType, str]
"""The resource names that an ACL applies to."""

_ALL_NAMES: Final[Pattern] = (PatternType.LITERAL, ANYTHING)


class AclRights(NamedTuple):
    """Denied and allowed operations: bits whose positions are the operations' numbers."""

    denied: int = 0
    allowed: int = 0


class AclDecision(NamedTuple):
    """A decision of the ACLs; ``rule`` is the deciding ACL, if there is one."""

    allowed: bool | None
    """None if no ACL applies to the resource, not even one for another principal."""
    rule: Acl | None = None


class _Grant(NamedTuple):
    """The ACLs of one holder for one pattern."""

    rules: tuple[Acl, ...]
    rights: AclRights
    named: AclRights
    """The rights without implied operations."""


class _Prefixes:
    """A set of prefixes of resource names.

    A lookup tries each length of the prefixes in the set, up to the length of the name.
    """

    __slots__ = ("_lengths", "_texts")

    def __init__(self, texts: Collection[str] = ()) -> None:
        self._texts = texts
        self._lengths = sorted({*map(len, texts)}, reverse=True)

    def of(self, name: str) -> Iterator[str]:
        """Yield the prefixes of ``name``, the longest first."""
        texts, longest = self._texts, len(name)
        for length in self._lengths:
            if length <= longest and (text := name[:length]) in texts:
                yield text

    def changed(self, texts: Collection[str], now: Container[Pattern]) -> _Prefixes:
        """Return a copy that is updated after ACLs of the prefixes ``texts`` have changed.

        A prefix in ``texts`` is kept or added if ``now``, the patterns after the change, contains
        it; otherwise it is removed.
        """
        new_texts = {*self._texts}
        new_texts.difference_update(texts)
        new_texts.update(text for text in texts if (PatternType.PREFIXED, text) in now)
        return _Prefixes(new_texts)


_NONE: Final = _Prefixes()


class _HolderRules:
    """All ACLs of one holder."""

    __slots__ = ("grants", "prefixes")

    def __init__(self, grants: dict[Pattern, _Grant], prefixes: _Prefixes) -> None:
        self.grants = grants
        self.prefixes = prefixes

    def on(self, name: str) -> Iterator[_Grant]:
        grants = self.grants
        for pattern in _patterns_of(name, self.prefixes):
            if pattern in grants:
                yield grants[pattern]


class RuleTable:
    """A set of ACLs with their ids."""

    def __init__(self) -> None:
        self._by_resource: dict[ResourceType, dict[Pattern, dict[Acl, UUID]]] = {}
        self._prefixes: dict[ResourceType, _Prefixes] = {}
        self._by_holder: dict[Holder, _HolderRules] = {}
        self._networks: dict[tuple[ResourceType, str], Networks] = {}
        """The address ranges that ACLs name as hosts, by resource type and principal."""
        self.count = 0
        """The number of ACLs."""

    @classmethod
    def of(cls, rules: Iterable[Acl]) -> RuleTable:
        """Return a table of these ACLs, built without yielding."""
        return finish(cls().changed(added=dict.fromkeys(rules, NO_ID)))

    # --- lookups ---

    def __contains__(self, rule: Acl) -> bool:
        return self.id_of(rule) is not None

    def id_of(self, rule: Acl) -> UUID | None:
        """Return an ACL's id in the metadata; None if there is no such ACL."""
        return self._by_resource.get(rule.resource_type, {}).get(_pattern(rule), {}).get(rule)

    def rights(self, principal: str, host: str, kind: ResourceType, name: str) -> AclRights:
        """Return the operations that ACLs allow and deny a client on a resource.

        The authorizer denies all other operations, unless :meth:`is_ruled` is false for the
        resource and ``allow.everyone.if.no.acl.found`` is set.
        """
        denied = allowed = 0
        for held in self._applicable(principal, host, kind):
            for grant in held.on(name):
                denied |= grant.rights.denied
                allowed |= grant.rights.allowed
        return AclRights(denied, allowed)

    def is_ruled(self, kind: ResourceType, name: str) -> bool:
        """Return whether any ACL applies to a resource, for any principal."""
        return any(self._matching_resource(kind, name))

    def decide(
        self, principal: str, host: str, operation: Operation, kind: ResourceType, name: str
    ) -> AclDecision:
        """Return the decision on an operation and the ACL behind it; slower than :meth:`rights`."""
        grants = [g for held in self._applicable(principal, host, kind) for g in held.on(name)]
        for permission in (Permission.DENY, Permission.ALLOW):
            for grant in grants:
                for rule in grant.rules:
                    if rule.permission is permission and _bits(rule) >> operation & 1:
                        return AclDecision(permission is Permission.ALLOW, rule)
        return AclDecision(False if self.is_ruled(kind, name) else None)

    def allows_some(
        self, principal: str, host: str, operation: Operation, kind: ResourceType
    ) -> bool:
        """Return whether a client may be allowed the operation on any resource of this type.

        Only the operation named by an ACL counts, not the operations that it implies. The function
        examines all ACLs of the client, so callers cache the result.
        """
        denied: set[Pattern] = set()
        allowed: set[Pattern] = set()
        for held in self._applicable(principal, host, kind):
            for pattern, grant in held.grants.items():
                if grant.named.denied >> operation & 1:
                    denied.add(pattern)
                if grant.named.allowed >> operation & 1:
                    allowed.add(pattern)
        if _ALL_NAMES in denied:
            return False
        if _ALL_NAMES in allowed:
            return True
        left = allowed - denied
        # A denied prefix covers every longer prefix and name.
        prefixes = _Prefixes({text for how, text in denied if how is PatternType.PREFIXED})
        return any(not any(prefixes.of(name)) for _, name in left)

    def find(self, acl_filter: AclFilter) -> Steps[list[Acl]]:
        """Return the ACLs that match a filter."""
        matching = []
        for rules in self._matching(acl_filter):
            for rule in rules:
                if acl_filter.matches(rule):
                    matching.append(rule)
                yield
        return matching

    def _matching(self, acl_filter: AclFilter) -> Iterator[Collection[Acl]]:
        """Yield the ACLs of each resource that matches a filter."""
        name, how = acl_filter.resource_name, acl_filter.pattern_type
        for kind, by_pattern in self._by_resource.items():
            if acl_filter.resource_type not in {ResourceType.ANY, kind}:
                continue
            if name is None:
                for pattern, rules in by_pattern.items():
                    if how in {PatternType.ANY, PatternType.MATCH, pattern[0]}:
                        yield rules
            elif how is PatternType.MATCH:
                yield from self._matching_resource(kind, name)
            else:
                for pattern_type in (PatternType.LITERAL, PatternType.PREFIXED):
                    if (
                        how in {PatternType.ANY, pattern_type}
                        and (pattern_type, name) in by_pattern
                    ):
                        yield by_pattern[pattern_type, name]

    def _applicable(self, principal: str, host: str, kind: ResourceType) -> Iterator[_HolderRules]:
        by_holder = self._by_holder
        for holder in (principal, ANYBODY) if principal != ANYBODY else (ANYBODY,):
            for allowed_host in (host, ANYTHING):
                held = by_holder.get((kind, holder, allowed_host))
                if held is not None:
                    yield held
            networks = self._networks.get((kind, holder))
            if networks is not None:
                for allowed_host in networks.containing(host):
                    yield by_holder[kind, holder, allowed_host]

    def _matching_resource(self, kind: ResourceType, name: str) -> Iterator[dict[Acl, UUID]]:
        by_pattern = self._by_resource.get(kind)
        if by_pattern:
            for pattern in _patterns_of(name, self._prefixes.get(kind, _NONE)):
                if pattern in by_pattern:
                    yield by_pattern[pattern]

    # --- changes ---

    def changed(
        self, *, removed: Iterable[Acl] = (), added: Mapping[Acl, UUID] | None = None
    ) -> Steps[RuleTable]:
        """Return a table without the ``removed`` ACLs and with the ``added`` ones and their ids."""
        new_table = RuleTable()
        new_table._by_resource, new_table._by_holder = (
            self._by_resource.copy(),
            self._by_holder.copy(),
        )
        new_table._prefixes, new_table.count = self._prefixes.copy(), self.count
        new_table._networks = self._networks.copy()
        draft = _TableBuilder(new_table)
        for rule in removed:
            if rule in new_table:
                draft.remove(rule)
            yield
        for rule, id_ in (added or {}).items():
            draft.add(rule, id_)
            yield
        yield from draft.finish()
        return new_table


class _TableBuilder:
    """A table under construction. Parts shared with another table are copied before a change."""

    def __init__(self, table: RuleTable) -> None:
        self._table = table
        self._kinds: set[ResourceType] = set()
        self._patterns: set[tuple[ResourceType, Pattern]] = set()
        self._holders: set[Holder] = set()
        self._changes: dict[tuple[Holder, Pattern], dict[Acl, bool]] = {}
        """For each grant, the changed ACLs and whether each was added. :meth:`finish` builds each
        grant only once, even if many of its ACLs change."""
        self._texts: dict[Holder, set[str]] = {}
        """Prefixes of changed ACLs, by holder."""

    def add(self, rule: Acl, id_: UUID) -> None:
        rules = self._rules(rule)
        is_new = rule not in rules
        rules[rule] = id_
        if not is_new:
            return
        self._table.count += 1
        self._changed_rules(rule)[rule] = True

    def remove(self, rule: Acl) -> None:
        rules, pattern = self._rules(rule), _pattern(rule)
        del rules[rule]
        if not rules:
            del self._table._by_resource[rule.resource_type][pattern]
            self._patterns.discard((rule.resource_type, pattern))
        self._table.count -= 1
        self._changed_rules(rule)[rule] = False

    def finish(self) -> Steps[None]:
        table = self._table
        for (holder, pattern), changes in self._changes.items():
            grants = table._by_holder[holder].grants
            before = grants[pattern].rules if pattern in grants else ()
            left = [rule for rule in before if rule not in changes]
            left += [rule for rule, is_there in changes.items() if is_there]
            if left:
                grants[pattern] = _grant(tuple(left))
            else:
                grants.pop(pattern, None)
            yield
        of_kind: dict[ResourceType, set[str]] = {}
        for holder, texts in self._texts.items():
            held = table._by_holder[holder]
            held.prefixes = held.prefixes.changed(texts, held.grants)
            of_kind.setdefault(holder[0], set()).update(texts)
            yield
        for kind, texts in of_kind.items():
            prefixes = table._prefixes.get(kind, _NONE)
            table._prefixes[kind] = prefixes.changed(texts, table._by_resource[kind])
            yield
        ranges: dict[tuple[ResourceType, str], tuple[list[str], list[str]]] = {}
        for holder in self._holders:
            kind, principal, host = holder
            if "/" in host:
                added, removed = ranges.setdefault((kind, principal), ([], []))
                (added if table._by_holder[holder].grants else removed).append(host)
            if not table._by_holder[holder].grants:
                del table._by_holder[holder]
            yield
        for place, (added, removed) in ranges.items():
            networks = table._networks.pop(place, NO_NETWORKS).changed(added, removed)
            if networks:
                table._networks[place] = networks
            yield

    def _rules(self, rule: Acl) -> dict[Acl, UUID]:
        """Return the table's own, modifiable copy of the ACLs for the resource of ``rule``."""
        table, kind, pattern = self._table, rule.resource_type, _pattern(rule)
        if kind not in self._kinds:
            self._kinds.add(kind)
            table._by_resource[kind] = table._by_resource.get(kind, {}).copy()
        by_pattern = table._by_resource[kind]
        if (kind, pattern) not in self._patterns:
            self._patterns.add((kind, pattern))
            by_pattern[pattern] = dict(by_pattern.get(pattern, ()))
        return by_pattern[pattern]

    def _changed_rules(self, rule: Acl) -> dict[Acl, bool]:
        """Return the pending changes to the ACLs with the holder and pattern of ``rule``.

        The first call for a holder copies the holder's grants, which another table may share.
        """
        by_holder, holder = self._table._by_holder, _holder(rule)
        if holder not in self._holders:
            self._holders.add(holder)
            rules = by_holder.get(holder)
            by_holder[holder] = (
                _HolderRules({}, _NONE)
                if rules is None
                else _HolderRules(rules.grants.copy(), rules.prefixes)
            )
        if rule.pattern_type is PatternType.PREFIXED:
            self._texts.setdefault(holder, set()).add(rule.resource_name)
        return self._changes.setdefault((holder, _pattern(rule)), {})


def _pattern(rule: Acl) -> Pattern:
    return rule.pattern_type, rule.resource_name


def _holder(rule: Acl) -> Holder:
    return rule.resource_type, rule.principal, canonical_host(rule.host)


def _patterns_of(name: str, prefixes: _Prefixes) -> Iterator[Pattern]:
    """Yield the patterns that match a name: the literal ones, and the matching ``prefixes``.

    Unlike in Kafka, the pattern for all names (``*``) also matches names that begin with ``*``.
    """
    yield PatternType.LITERAL, name
    if name != ANYTHING:
        yield _ALL_NAMES
    for prefix in prefixes.of(name):
        yield PatternType.PREFIXED, prefix


def _bits(rule: Acl, *, implied: bool = True) -> int:
    """Return the operations of an ACL as bits."""
    if rule.operation is Operation.ALL:
        return _EVERYTHING
    bits = 1 << rule.operation
    if implied and rule.permission is Permission.ALLOW and rule.operation in _ALSO_ALLOWED:
        bits |= 1 << _ALSO_ALLOWED[rule.operation]
    return bits


def _grant(rules: tuple[Acl, ...]) -> _Grant:
    sums = []
    for implied in (True, False):
        denied = allowed = 0
        for rule in rules:
            if rule.permission is Permission.DENY:
                denied |= _bits(rule, implied=implied)
            elif rule.permission is Permission.ALLOW:
                allowed |= _bits(rule, implied=implied)
        sums.append(AclRights(denied, allowed))
    return _Grant(rules, *sums)
