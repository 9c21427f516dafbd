"""``fencepost acls``: access rules (ACLs)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.output import (
    EXIT_REFUSED,
    EXIT_UNDECIDED,
    CommandGroup,
    counted,
    emit,
    note_unknown_group,
    note_unknown_topic,
    table_options,
)
from fencepost.cli.printing import print_lines
from fencepost.coordinator.config.key import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fencepost.client.queries.session import ClusterSession
    from fencepost.cluster.acl import Acl, AclFilter, Operation

R = TypeVar("R")

COLUMNS = ("resource", "name", "pattern", "principal", "host", "operation", "permission")
PATTERNS = ("literal", "prefixed", "any", "match")
RESOURCES = {
    "topic": "TOPIC",
    "group": "GROUP",
    "transactional-id": "TRANSACTIONAL_ID",
    "user-principal": "USER",
    "delegation-token": "DELEGATION_TOKEN",
    "cluster": "CLUSTER",
}
"""Option names of resource types; the values are names of ``ResourceType``."""

PRODUCER = {"topic": ("WRITE", "DESCRIBE", "CREATE"), "transactional-id": ("WRITE", "DESCRIBE")}
CONSUMER = {"topic": ("READ", "DESCRIBE"), "group": ("READ",)}
"""The operations that a producer and a consumer need, as in Kafka's ``AclCommand``."""


@click.group("acls", cls=CommandGroup)
def command() -> None:
    """Show, add and remove access rules (ACLs), and ask which rule decides.

    A rule allows or denies a principal, such as User:alice or User:* for all users, one operation
    on the resources with a given name or prefix; * stands for all names. Rules that deny
    take precedence over rules that allow. The options have the names of Kafka's kafka-acls.
    """


class UndecidedError(click.ClickException):
    """The broker refused to answer the question of `acls why`."""

    exit_code = EXIT_UNDECIDED


class AclResources(NamedTuple):
    """The resources that the options name, by the keys of :data:`RESOURCES`."""

    names: dict[str, tuple[str, ...]]
    pattern: str


def resource_options(pattern: str, patterns: Sequence[str]) -> Callable[[Any], Any]:
    """Add ``--topic`` and the other resource options, whose values become the argument ``what``."""

    def add(function: Callable[..., R]) -> Any:
        from functools import wraps

        @wraps(function)
        def wrapped(*, resource_pattern_type: str, cluster: bool, **options: Any) -> R:
            names = {
                word: options.pop(word.replace("-", "_")) for word in RESOURCES if word != "cluster"
            }
            what = AclResources(
                {**names, "cluster": ("kafka-cluster",) * cluster}, resource_pattern_type
            )
            return function(what=what, **options)

        made: Any = click.option(
            "--resource-pattern-type",
            type=click.Choice(patterns, case_sensitive=False),
            default=pattern,
            show_default=True,
            help="How a name matches resources."
            if len(patterns) == 2
            else "How a name matches rules: `any` are rules with exactly this name, `match` all"
            " rules that affect it.",
        )(wrapped)
        made = click.option("--cluster", is_flag=True, help="The cluster itself.")(made)
        for word in reversed(
            [resource_type for resource_type in RESOURCES if resource_type != "cluster"]
        ):
            made = click.option(
                f"--{word}", multiple=True, metavar="NAME", help="May be repeated."
            )(made)
        return made

    return add


def rule_options(function: Any) -> Any:
    """Add the options for principals, hosts, operations and permissions."""
    for option in (
        click.option(
            "--idempotent",
            is_flag=True,
            help="Also allow IDEMPOTENT_WRITE, which Kafka before 2.8 requires.",
        ),
        click.option(
            "--consumer",
            is_flag=True,
            help="All operations of a consumer; requires --topic and --group.",
        ),
        click.option(
            "--producer", is_flag=True, help="All operations of a producer; requires --topic."
        ),
        click.option(
            "--operation", "operations", multiple=True, metavar="NAME", help="May be repeated."
        ),
        click.option("--deny-host", "deny_hosts", multiple=True, metavar="ADDRESS"),
        click.option("--allow-host", "allow_hosts", multiple=True, metavar="ADDRESS"),
        click.option("--deny-principal", "denied", multiple=True, metavar="TYPE:NAME"),
        click.option("--allow-principal", "allowed", multiple=True, metavar="TYPE:NAME"),
    ):
        function = option(function)
    return function


@command.command("list")
@resource_options("match", PATTERNS)
@click.option(
    "--principal",
    "principals",
    multiple=True,
    metavar="TYPE:NAME",
    help="Only rules for this principal.",
)
@table_options
def list_rules(
    session: ClusterSession, what: AclResources, principals: tuple[str, ...], form: str
) -> None:
    """Show all rules, or by default those that affect the given resources."""
    from fencepost.client.queries.acls import find
    from fencepost.cluster.acl import AclFilter

    filters = [
        replace(resource, principal=principal)
        for resource in _resources(what) or [AclFilter()]
        for principal in map(_principal, principals or (None,))
    ]
    emit([_row(rule) for rule in find(session, filters)], COLUMNS, form, "no rules")


@command.command("add")
@resource_options("literal", PATTERNS[:2])
@rule_options
@table_options
def add(session: ClusterSession, what: AclResources, form: str, **options: Any) -> None:
    """Add one rule for each combination of the options; without --operation, for all operations.

    Once a resource has a rule, principals without a rule of their own can no longer use it.
    """
    from fencepost.client.queries.acls import create, find
    from fencepost.cluster.acl import AclFilter

    if not options["allowed"] and not options["denied"]:
        raise click.UsageError("name a principal with --allow-principal or --deny-principal")
    for side, verdict in (("allow", "allowed"), ("deny", "denied")):
        if options[f"{side}_hosts"] and not options[verdict]:
            raise click.UsageError(f"--{side}-host goes with --{side}-principal")
    filters = list(_filters(what, **options))
    if not filters:
        raise click.UsageError("name a resource with --topic, --group, --cluster and so on")
    rules = list(dict.fromkeys(_rule(acl_filter) for acl_filter in filters))
    resources = {(rule.resource_type, rule.pattern_type, rule.resource_name) for rule in rules}
    existing = set(find(session, [AclFilter(*resource) for resource in resources]))
    create(session, [rule for rule in rules if rule not in existing])
    rows = [
        {**_row(rule), "result": "was there" if rule in existing else "added"} for rule in rules
    ]
    emit(rows, (*COLUMNS, "result"), form)


@command.command("remove")
@resource_options("literal", PATTERNS)
@rule_options
@click.option(
    "--principal",
    "principals",
    multiple=True,
    metavar="TYPE:NAME",
    help="Rules for this principal, of either kind; may be repeated.",
)
@execute_option
@table_options
def remove(
    session: ClusterSession,
    what: AclResources,
    principals: tuple[str, ...],
    form: str,
    *,
    execute: bool,
    **options: Any,
) -> None:
    """Show the rules that match the options; with --execute, remove them.

    An option that is not given matches everything: without a principal, rules for all principals
    are removed, without a resource, rules about all resources.
    """
    from fencepost.client.queries.acls import delete, find

    filters = list(_filters(what, principals=principals, is_for_new=False, **options))
    if not filters:
        raise click.UsageError("name a resource, a principal, a host or an operation")
    rules = find(session, filters)
    emit([_row(rule) for rule in rules], COLUMNS, form, "no rule matches")
    if not execute:
        show_only()
        return
    print_lines(f"removed {counted(delete(session, rules), 'rule')}", err=True)


@command.command("why")
@click.argument("principal")
@click.argument("operation")
@click.argument("resource")
@click.option("--host", metavar="ADDRESS", help="The client's address; any address if not given.")
@table_options
def why(
    session: ClusterSession,
    principal: str,
    operation: str,
    resource: str,
    host: str | None,
    form: str,
) -> None:
    """Show whether PRINCIPAL may do OPERATION on RESOURCE, and which rule decides that.

    RESOURCE is topic:NAME, group:NAME, transactional-id:NAME or cluster. A principal without a type
    is a user. Exit status 0 if it is allowed, 1 if it is denied. Without an answer it is 2 for an
    invalid command line, 3 for an unreachable broker, 5 for a refusal.
    """
    from fencepost.client.client import ApiError
    from fencepost.client.queries.acls import why as ask
    from fencepost.cluster.acl import CLUSTER_NAME, ResourceType

    word, colon, name = resource.partition(":")
    if word not in RESOURCES or (not name if word != "cluster" else colon):
        close = nearest(word, RESOURCES)
        raise click.UsageError(f"{resource!r} is not topic:NAME, group:NAME, cluster…{close}")
    kind = ResourceType[RESOURCES[word]]
    who = principal if ":" in principal else f"User:{principal}"
    try:
        verdict = ask(session, who, host, _operation(operation), (kind, name or CLUSTER_NAME))
    except ApiError as error:
        raise UndecidedError(str(error)) from error
    row = {
        "decision": "allowed" if verdict.is_allowed else "denied",
        "because": verdict.because,
        "rule": verdict.rule,
    }
    emit([row], ("decision", "because", "rule"), form)
    for note in verdict.notes:
        print_lines(f"note: {note}", err=True)
    if word == "topic":
        note_unknown_topic(session, name)
    elif word == "group":
        note_unknown_group(session, name)
    if not verdict.is_allowed:
        raise click.exceptions.Exit(EXIT_REFUSED)


def _filters(
    what: AclResources,
    *,
    allowed: Sequence[str],
    denied: Sequence[str],
    allow_hosts: Sequence[str],
    deny_hosts: Sequence[str],
    operations: Sequence[str],
    producer: bool,
    consumer: bool,
    idempotent: bool,
    principals: Sequence[str] = (),
    is_for_new: bool = True,
) -> Iterator[AclFilter]:
    """Yield a filter for each combination of the options. Raises click.UsageError.

    In a new rule, an option that is not given stands for every host or every operation.
    """
    from fencepost.cluster.acl import AclFilter, Operation, Permission

    is_given = any((allowed, denied, allow_hosts, deny_hosts, operations, principals))
    _check_convenience(what, producer, consumer, idempotent, operations, denied, deny_hosts)
    open_host = "*" if is_for_new else None
    open_operation = Operation.ALL if is_for_new else Operation.ANY
    sides: list[tuple[Permission, Sequence[str | None], Sequence[str]]] = [
        (Permission.ALLOW, allowed, allow_hosts),
        (Permission.DENY, denied, deny_hosts),
        (Permission.ANY, principals, ()),
    ]
    if not is_for_new and not any((allowed, denied, principals, allow_hosts, deny_hosts)):
        sides = [(Permission.ANY, (None,), ())]
    resources = _resources(what)
    if producer or consumer:
        pairs = list(
            _convenience(what, producer=producer, consumer=consumer, idempotent=idempotent)
        )
    else:
        named = [_operation(operation) for operation in operations] or [open_operation]
        pairs = [(resource, operation) for resource in resources for operation in named]
        if not pairs and not is_for_new and is_given:
            pairs = [(AclFilter(), operation) for operation in named]
    for permission, who, hosts in sides:
        for principal in who or ((None,) if hosts and not is_for_new else ()):
            for host in hosts or (open_host,):
                for resource, operation in pairs:
                    yield replace(
                        resource,
                        principal=_principal(principal),
                        host=host,
                        operation=operation,
                        permission=permission,
                    )


def _check_convenience(
    what: AclResources,
    producer: bool,
    consumer: bool,
    idempotent: bool,
    *others: Sequence[str],
) -> None:
    if (producer or consumer) and any(others):
        raise click.UsageError("--producer and --consumer determine the operations, and only allow")
    if producer and not what.names["topic"]:
        raise click.UsageError("--producer requires --topic")
    if consumer and not (what.names["topic"] and what.names["group"]):
        raise click.UsageError("--consumer requires --topic and --group")
    if idempotent and not producer:
        raise click.UsageError("--idempotent goes with --producer")


def _convenience(
    what: AclResources, *, producer: bool, consumer: bool, idempotent: bool
) -> Iterator[tuple[AclFilter, Operation]]:
    """Yield the resources and operations that a producer or a consumer needs."""
    from fencepost.cluster.acl import Operation

    for is_meant, needs in ((producer, PRODUCER), (consumer, CONSUMER)):
        for word, operations in needs.items() if is_meant else ():
            for resource in _resources(what, [word]):
                for name in operations:
                    yield resource, Operation[name]
    if idempotent:
        yield (
            _resources(what._replace(names={"cluster": ("kafka-cluster",)}))[0],
            (Operation.IDEMPOTENT_WRITE),
        )


def _resources(what: AclResources, words: Sequence[str] = tuple(RESOURCES)) -> list[AclFilter]:
    """Return a filter for the rules of each named resource."""
    from fencepost.cluster.acl import AclFilter, PatternType, ResourceType

    return [
        AclFilter(
            ResourceType[RESOURCES[word]],
            PatternType.LITERAL if word == "cluster" else PatternType[what.pattern.upper()],
            name,
        )
        for word in words
        for name in what.names.get(word, ())
    ]


def _rule(acl_filter: AclFilter) -> Acl:
    """Return the rule that has the values of ``acl_filter``; all must be set. Raises UsageError."""
    from fencepost.cluster.acl import OPERATIONS, Acl, Operation

    possible = (*OPERATIONS[acl_filter.resource_type], Operation.ALL)
    if acl_filter.operation not in possible:
        names = ", ".join(operation.name for operation in possible)
        raise click.UsageError(
            f"{acl_filter.operation.name} is not an operation on a {acl_filter.resource_type.name};"
            f" the operations are {names}"
        )
    return Acl(
        acl_filter.resource_type,
        acl_filter.pattern_type,
        str(acl_filter.resource_name),
        str(acl_filter.principal),
        str(acl_filter.host),
        acl_filter.operation,
        acl_filter.permission,
    )


def _principal(text: str | None) -> str | None:
    if text is not None and not all(text.partition(":")):
        raise click.UsageError(
            f"{text!r} is not a principal of the form TYPE:NAME, such as User:alice"
        )
    return text


def _operation(text: str) -> Operation:
    """Return the operation of that name, such as ``DescribeConfigs`` or ``describe_configs``."""
    from fencepost.cluster.acl import Operation

    operations = {
        operation.name.replace("_", ""): operation
        for operation in Operation
        if operation >= Operation.ALL
    }
    operation = operations.get(text.replace("_", "").replace("-", "").upper())
    if operation is None:
        names = ", ".join(operation.name for operation in operations.values())
        close = nearest(text, [operation.name for operation in operations.values()])
        raise click.UsageError(f"unknown operation {text}; the operations are {names}{close}")
    return operation


def _row(rule: Acl) -> dict[str, object]:
    return {
        "resource": rule.resource_type.name.lower().replace("_", "-"),
        "name": rule.resource_name,
        "pattern": rule.pattern_type.name.lower(),
        "principal": rule.principal,
        "host": rule.host,
        "operation": rule.operation.name,
        "permission": rule.permission.name,
    }
