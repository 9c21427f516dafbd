"""The reference of the public classes and functions, from their docstrings.

The sources are parsed and not imported: the dependencies of the Spark modules may be missing.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from docs.settings import cell, table

ROOT = Path(__file__).resolve().parents[1]

PUBLIC: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("fencepost", "coordinator/daemon/broker.py", ("Broker",)),
    ("fencepost", "coordinator/daemon/in_thread.py", ("BrokerThread",)),
    ("fencepost.testing", "testing/kafka.py", ("Kafka",)),
    ("fencepost.testing", "testing/cluster.py", ("Cluster",)),
    ("fencepost.testing", "testing/under_test.py", ("KafkaUnderTest",)),
    ("fencepost.testing", "testing/views.py", ("Record", "OpenTransaction", "ShareRecords")),
    ("fencepost.testing", "coordinator/history/entries.py", ("Entry",)),
    ("fencepost.testing", "testing/replaying.py", ("replay", "Replay", "ReplayError")),
    ("fencepost.testing", "client/queries/incident.py", ("IncidentError",)),
    ("fencepost.testing.broker", "testing/broker.py", ("OwnBroker",)),
    ("fencepost.testing.clock", "testing/clock.py", ("TestClock",)),
    ("fencepost.testing.deadlines", "testing/deadlines.py", ("Fired",)),
    ("fencepost.testing.faults", "testing/faults.py", ("Faults", "Fault")),
    ("fencepost.testing.replaying", "testing/replaying.py", ("ReplayedStep",)),
    ("fencepost.testing.requests", "testing/requests.py", ("SeenRequest",)),
    (
        "fencepost.client.queries.group_view",
        "client/queries/group_view.py",
        ("GroupView", "MemberView"),
    ),
    (
        "fencepost.client.queries.incident",
        "client/queries/incident.py",
        ("Incident", "Step", "Cause", "TopicOfIncident", "Payload"),
    ),
    ("fencepost.cluster.image", "cluster/image.py", ("PartitionRegistration",)),
    ("fencepost.pipelines", "pipelines/exactly_once.py", ("ExactlyOnce",)),
    ("fencepost.pipelines.exactly_once", "pipelines/exactly_once.py", ("Options",)),
    (
        "fencepost.pipelines.two_phase",
        "pipelines/two_phase.py",
        ("TwoPhase", "resolve", "Outcome"),
    ),
    ("fencepost.pipelines.postgres", "pipelines/postgres.py", ("Postgres",)),
    (
        "fencepost.pipelines.partners",
        "pipelines/partners.py",
        ("Partner", "Decision", "TransactionKey", "TransactionIdentity"),
    ),
    ("fencepost.pipelines.records", "pipelines/records.py", ("Record", "Output", "Batch")),
    ("fencepost.pipelines.batching", "pipelines/batching.py", ("Limits",)),
    ("fencepost.pipelines.metrics", "pipelines/metrics.py", ("Metrics",)),
    ("fencepost.pipelines.serde", "pipelines/serde.py", ("Serde",)),
    ("fencepost.pipelines.failures", "pipelines/failures.py", ("RetryBatch", "RetryPolicy")),
    ("fencepost.pipelines.assignors", "pipelines/assignors.py", ("Strategy",)),
    ("fencepost.pipelines.mqtt.bridge", "pipelines/mqtt/bridge.py", ("Bridge", "BridgeOptions")),
    ("fencepost.pipelines.mqtt.routes", "pipelines/mqtt/routes.py", ("Route", "MessageId")),
    ("fencepost.pipelines.spark.prepare", "pipelines/spark/prepare.py", ("prepare",)),
    ("fencepost.pipelines.spark.supervise", "pipelines/spark/supervise.py", ("run_supervised",)),
    ("fencepost.pipelines.spark.foreach", "pipelines/spark/foreach.py", ("exactly_once_batch",)),
    (
        "fencepost.pipelines.spark.lag",
        "pipelines/spark/lag.py",
        ("behind_latest", "SourceProgress"),
    ),
    ("fencepost.pipelines.spark.java", "pipelines/spark/java.py", ("use_shim", "launch")),
)
"""The module that programs import from, the file of the definitions, and the public names."""

NOT_DESCRIBED = {
    "Address": "made by the bridge's command",
    "ApiKey": "an API's name will do",
    "BrokerAccess": "of the settings users, tls and acls",
    "Clock": "a protocol; a TestClock is one",
    "ClientAssignor": "a strategy is given by its name",
    "ClusterAio": "its methods are those of the cluster",
    "ClusterBroker": "a broker of a cluster, reached by Broker",
    "Context": "inside of the broker",
    "FetchPositions": "shared by the brokers of a cluster",
    "FileSystem": "inside of the broker",
    "Handler": "inside of the broker, or a function of the program",
    "KafkaAio": "its methods are those of the broker",
    "Mapped": "made by the bridge's command of its routes",
    "MetadataImage": "all that the controllers know, for tests of Fencepost",
    "OwnId": "made by the bridge",
    "Refusal": "the outcome of refusing a batch",
    "Security": "made by `Security.of` from Kafka's client properties",
    "Served": "a protocol; a Broker is one",
}
"""Classes that signatures of described ones name, and why the reference omits them. Names of types
that are not classes, as ``Partition``, are explained where they are used."""

INSIDE = frozenset(
    {"Broker.services", "Broker.storage", "Broker.open", "Broker.warm_up"}
    | {"Broker.server", "Broker.repeated"}
    | {"PartitionRegistration.merge", "PartitionRegistration.of"}
    | {"ExactlyOnce.on_partitions_revoked", "ExactlyOnce.on_partitions_assigned"}
)
"""Internal methods without an underscore, which other parts or a client's callbacks call."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def class_reference() -> str:
    """Return the reference of all public classes and functions: signatures and docstrings."""
    parts: list[str] = []
    told = ""
    for module, path, names in PUBLIC:
        if module != told:
            parts.append(f"## {module}")
            told = module
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        defined = {
            node.name: node for node in tree.body if isinstance(node, ast.ClassDef | _Function)
        }
        for name in names:
            parts += _entry(module, defined[name])
    return "\n\n".join(parts)


def named_classes() -> Iterator[tuple[str, str]]:
    """Yield each public function's or method's name, and a class of ours that it names."""
    for _, path, names in PUBLIC:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        ours = dict.fromkeys(
            (statement.name for statement in tree.body if isinstance(statement, ast.ClassDef)), path
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fencepost."):
                file = str(node.module).removeprefix("fencepost.").replace(".", "/") + ".py"
                ours |= {alias.asname or alias.name: file for alias in node.names}
        for node in tree.body:
            if isinstance(node, ast.ClassDef | _Function) and node.name in names:
                for where, name in _annotated(node):
                    if name in ours and _is_class(ours[name], name):
                        yield where, name


def _annotated(node: ast.ClassDef | _Function) -> Iterator[tuple[str, str]]:
    """Yield the names in the annotations of a public function, or of a class's public methods."""
    methods = [node] if isinstance(node, _Function) else node.body
    for member in methods:
        where = node.name if member is node else f"{node.name}.{getattr(member, 'name', '')}"
        if isinstance(member, ast.AnnAssign):
            asked: list[ast.expr | None] = [member.annotation]
        elif isinstance(member, _Function) and where not in INSIDE and _is_described(member):
            arguments = (*member.args.posonlyargs, *member.args.args, *member.args.kwonlyargs)
            asked = [member.returns, *(each.annotation for each in arguments)]
        else:
            continue
        for annotation in filter(None, asked):
            for found in ast.walk(annotation):
                if isinstance(found, ast.Name):
                    yield where, found.id


def _is_described(function: _Function) -> bool:
    if function.name.startswith("_"):
        return function.name == "__init__"
    return ast.get_docstring(function) is not None


def _is_class(file: str, name: str) -> bool:
    path = ROOT / file
    if not path.exists():
        path = ROOT / file.removesuffix(".py") / "__init__.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body)


def _entry(module: str, node: ast.ClassDef | _Function) -> Iterator[str]:
    yield f"### {node.name}"
    if isinstance(node, ast.ClassDef):
        yield from _class(module, node)
    else:
        yield _code(f"from {module} import {node.name}\n\n{_signature(node, node.name)}")
        yield from _doc(node)


def _class(module: str, node: ast.ClassDef) -> Iterator[str]:
    methods = {
        statement.name: statement for statement in node.body if isinstance(statement, _Function)
    }
    made = methods.get("__init__")
    signature = _signature(made, node.name, bound=True) if made else _fields_signature(node)
    yield _code(f"from {module} import {node.name}\n\n{signature}")
    yield from _doc(node)
    fields = [
        (f"`{cell(field.target.id)}`", cell(" ".join(_markdown(doc).split())))
        for field, doc in _attributes(node)
        if isinstance(field.target, ast.Name) and not field.target.id.startswith("_")
    ]
    if any(meaning for _, meaning in fields):
        yield table(("field", "meaning"), fields)
    public = {name: method for name, method in methods.items() if not name.startswith("_")}
    for name, method in public.items():
        if ast.get_docstring(method) is None or f"{node.name}.{name}" in INSIDE:
            continue
        marks = {ast.unparse(mark) for mark in method.decorator_list}
        if "property" in marks:
            returns = f": {ast.unparse(method.returns)}" if method.returns else ""
            yield f"**`.{name}{returns}`**"
        else:
            is_awaited = " (awaited)" if isinstance(method, ast.AsyncFunctionDef) else ""
            yield f"**`.{_signature(method, name, bound=True, width=1_000)}`**{is_awaited}"
        yield from _doc(method)


def _attributes(node: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Yield the fields of a class, each with the docstring below it."""
    for statement, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            text = ""
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                text = inspect.cleandoc(str(below.value.value))
            yield statement, text


def _fields_signature(node: ast.ClassDef) -> str:
    fields = [ast.unparse(field) for field, _ in _attributes(node)]
    return _call(node.name, fields, "")


def _signature(node: _Function, name: str, *, bound: bool = False, width: int = 88) -> str:
    """Return the signature of ``node`` under ``name``; ``bound`` omits the first argument."""
    arguments = node.args
    if bound and "staticmethod" not in {ast.unparse(mark) for mark in node.decorator_list}:
        arguments = ast.arguments(
            arguments.posonlyargs,
            arguments.args[1:],
            arguments.vararg,
            arguments.kwonlyargs,
            arguments.kw_defaults,
            arguments.kwarg,
            arguments.defaults,
        )
    told = ast.unparse(arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and name != "__init__" else ""
    return _call(name, _split(told), "" if returns == " -> None" else returns, width)


def _split(arguments: str) -> list[str]:
    """Split ``arguments`` at its commas, except for commas inside brackets."""
    found, depth, begun = [], 0, 0
    for place, letter in enumerate(arguments):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append(arguments[begun:place].strip())
            begun = place + 1
    return [argument for argument in (*found, arguments[begun:].strip()) if argument]


def _call(name: str, arguments: list[str], returns: str, width: int = 88) -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= width:
        return line
    inner = "".join(f"    {argument},\n" for argument in arguments)
    return f"{name}(\n{inner}){returns}"


def _code(text: str) -> str:
    # Not "python": a signature is not a program.
    return f"```text\n{text}\n```"


def _doc(node: ast.ClassDef | _Function) -> Iterator[str]:
    text = ast.get_docstring(node)
    if text:
        yield _markdown(text)


def _markdown(text: str) -> str:
    """Convert a docstring to Markdown: names, cross references and code blocks."""
    text = re.sub(r":[a-z]+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    parts = re.split(r"::\n\n((?:(?: {4}.*)?\n?)+)", text)
    told = [parts[0]]
    for code, after in zip(parts[1::2], parts[2::2], strict=True):
        told.append(f":\n\n```text\n{inspect.cleandoc(code)}\n```\n\n{after}")
    return "".join(told).strip()
