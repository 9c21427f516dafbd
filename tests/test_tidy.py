"""Structural rules that no linter has. The first test shows that each rule finds a violation."""

from __future__ import annotations

import ast
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath

import pytest
from kio.schema.index import api_key_map

from fencepost.protocol.api import KNOWN_APIS
from tests.support.prose import MAX_PER_1000_WORDS, phrases, prose_of, statements

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    *("cli", "client", "cluster", "console", "coordinator", "groups", "logcore", "pipelines"),
    *("protocol", "testing", "tools", "txn"),
)
"""The parts of the package ``fencepost``; the package's folder has a symbolic link to each part."""

PACKAGES = ("fencepost", "pyspark_fencepost", *PARTS)
SHIPPED = (*PACKAGES, "bench", "docs", "examples")
EVERYTHING = (*SHIPPED, "tests")

FUNCTION_LINES, MODULE_LINES, LINE_LENGTH = 70, 600, 100

_ROOM = "coordinator/"
# The format of a record batch is only defined here, and client-side code needs the format, too.
_BATCHES = (
    "client",
    "protocol",
    *(f"logcore.{name}" for name in ("batch", "compression", "errors", "printable", "varint")),
    "logcore.system",
)
_BESIDE_MACHINES = tuple(
    f"logcore.{name}"
    for name in (
        *("budget", "machine", "errors", "fields", "regex", "regex_syntax"),
        *("steps", "tracebacks", "values"),
    )
)
# The check of topic names, which clients should make before they send a request.
_TOPIC_NAMES = ("cluster.topic_names", "logcore.machine")
ALLOWED_IMPORTS = {
    "fencepost": ("coordinator.daemon", "cli"),
    "groups": ("groups", *_BESIDE_MACHINES),
    "txn": ("txn", *_BESIDE_MACHINES),
    "cluster": ("cluster", *_BESIDE_MACHINES),
    "logcore": ("logcore",),
    # Assignors are pure functions, which client-side code needs as well.
    "pipelines": (
        "pipelines",
        "groups.assignors",
        "cli.profiles",
        *_BATCHES,
        *_TOPIC_NAMES,
    ),
    # The Spark modules work without aiokafka, which the other pipelines need.
    "pipelines/spark": ("pipelines.spark", *_BATCHES, *_TOPIC_NAMES),
    "pyspark_fencepost": ("pipelines.spark",),
    # The console is a client of any Kafka broker, like the commands.
    "console": (
        "console",
        "client",
        *(f"cli.{name}" for name in ("group_plan", "group_reset", "history_view", "printing")),
        "coordinator.history.entries",
        "coordinator.history.repeats",
        "coordinator.metadata.names",
        "protocol",
        "logcore.batch",
        "logcore.system",
    ),
    "testing": (
        "testing",
        "cli.history_view",
        "cli.output",
        "client",
        "cluster",
        "coordinator",
        "groups.errors",
        "logcore",
        "protocol",
        "tools.ports",
        "txn.errors",
    ),
    # The folders of the daemon. All of them may import the modules of its root.
    "coordinator": (
        "coordinator",
        "cluster",
        "protocol.added_errors",
        "groups.errors",
        "groups.share.errors",
        "txn.errors",
        "txn.ids",
        "logcore",
    ),
    "client": (
        "client",
        "protocol",
        *(f"logcore.{name}" for name in ("batch", "clock", "compression", "system")),
        *(f"logcore.{name}" for name in ("tracebacks", "values")),
    ),
    "protocol": (
        "protocol",
        *(f"logcore.{name}" for name in ("byte_count", "clock", "steps", "tracebacks", "values")),
    ),
    f"{_ROOM}runtime": ("coordinator.runtime", "logcore"),
    f"{_ROOM}config": (
        "coordinator.config",
        "coordinator.errors",
        # A failing config listener has the same log line as other unexpected errors.
        "coordinator.runtime.background",
        "groups.consumer_commands",
        "logcore",
    ),
    f"{_ROOM}metadata": (
        "coordinator.metadata",
        "cluster",
        "coordinator.config",
        "coordinator.errors",
        "coordinator.runtime",
        "logcore",
    ),
    # The controller role: the active controller of a single-voter quorum, and brokers' requests.
    f"{_ROOM}controller": (
        "coordinator.controller",
        "cluster",
        "coordinator.metadata",
        "coordinator.config",
        "coordinator.errors",
        "coordinator.runtime",
        "protocol",
        "logcore",
    ),
    # Connections to other brokers and to controllers.
    f"{_ROOM}replication": (
        "client",
        "coordinator.replication",
        "cluster",
        "coordinator.storage",
        "coordinator.metadata",
        "coordinator.config",
        "coordinator.errors",
        "coordinator.error_codes",
        "coordinator.runtime",
        "coordinator.security",
        "protocol",
        "groups.share",
        "txn",
        "logcore",
    ),
    # A cluster whose controller is elected on ZooKeeper: sessions, znodes, requests to brokers.
    f"{_ROOM}zookeeper": (
        "client",
        "coordinator.zookeeper",
        "cluster",
        "coordinator.controller",
        "coordinator.replication",
        "coordinator.metadata",
        "coordinator.config",
        "coordinator.errors",
        "coordinator.runtime",
        "coordinator.security",
        "protocol",
        "logcore",
    ),
    f"{_ROOM}storage": (
        "coordinator.storage",
        "cluster",
        "coordinator.metadata",
        "coordinator.config",
        "coordinator.errors",
        "coordinator.runtime",
        "protocol.steps",
        "txn.errors",
        "logcore",
    ),
    f"{_ROOM}security": (
        "coordinator.security",
        "cluster",
        "coordinator.metadata",
        "coordinator.config",
        "coordinator.errors",
        "coordinator.runtime",
        "protocol.jaas",
        "protocol.pem",
        "protocol.scram",
        "protocol.steps",
        "logcore",
    ),
    f"{_ROOM}history": (
        "coordinator.history",
        "coordinator.storage",
        "coordinator.metadata",
        "coordinator.config",
        "coordinator.runtime",
        "protocol.api",
        "logcore",
    ),
    f"{_ROOM}telemetry": (
        "coordinator.telemetry",
        "cluster",
        "coordinator.errors",
        "coordinator.history.entries",
        "coordinator.metadata",
        "coordinator.config",
        "coordinator.runtime",
        "logcore",
    ),
    f"{_ROOM}services": (
        "coordinator.services",
        "cluster",
        "coordinator.errors",
        "coordinator.error_codes",
        "coordinator.storage",
        "coordinator.metadata",
        "coordinator.config",
        "coordinator.runtime",
        "protocol.steps",
        "groups",
        "txn",
        "logcore",
    ),
    f"{_ROOM}handlers": (
        "coordinator.handlers",
        "cluster",
        "coordinator.controller",
        "coordinator.replication",
        "coordinator.broker_services",
        "coordinator.errors",
        "coordinator.error_codes",
        # Requests to the services, like ``storage.fetches``, but with share partitions.
        "coordinator.services.share_fetches",
        "coordinator.telemetry",
        "coordinator.storage",
        "coordinator.metadata",
        "coordinator.config",
        "coordinator.runtime",
        "coordinator.security",
        "protocol",
        "groups",
        "txn",
        "logcore",
    ),
    f"{_ROOM}server": (
        "cluster.acl",
        "coordinator.server",
        "coordinator.config.listener_config",
        "coordinator.handlers",
        "coordinator.broker_services",
        "coordinator.runtime",
        "coordinator.security",
        "protocol",
        "logcore",
    ),
    f"{_ROOM}metrics": (
        "coordinator.metrics",
        "cluster",
        "coordinator.server",
        "coordinator.broker_services",
        "coordinator.history.causes",
        "coordinator.telemetry",
        "coordinator.metadata",
        "coordinator.runtime",
        "coordinator.security",
        "protocol.api",
        "groups",
        "txn",
        "logcore",
    ),
    f"{_ROOM}daemon": (
        "coordinator.daemon",
        "cluster",
        "coordinator.controller",
        "coordinator.replication",
        "coordinator.zookeeper",
        "coordinator.history",
        "coordinator.metrics",
        "coordinator.light_imports",
        "coordinator.broker_services",
        "coordinator.error_codes",
        "coordinator.errors",
        "coordinator.server",
        "coordinator.handlers",
        "coordinator.storage",
        "coordinator.metadata",
        "coordinator.config",
        "coordinator.runtime",
        "coordinator.security",
        "protocol",
        "logcore",
    ),
    "cli": (
        "client",
        "console",
        "cluster",
        # Only for the option --test-hooks of ``fencepost serve``.
        "testing.hooks",
        "cli",
        "coordinator.daemon",
        "tools",
        "coordinator.errors",
        "coordinator.services.assignors",
        "coordinator.storage",
        "coordinator.metadata",
        "coordinator.config",
        "coordinator.history",
        "protocol",
        "groups",
        # The meaning of Spark's checkpoint and of the sink's progress.
        "pipelines.spark.checkpoint",
        "pipelines.spark.errors",
        "pipelines.spark.progress",
        "txn.epochs",
        "txn.records",
        "logcore",
    ),
    "client/queries": (
        "cluster.acl",
        "client",
        "coordinator.light_imports",
        "coordinator.config.durations",
        "coordinator.config.key",
        "coordinator.history.entries",
        "coordinator.history.recorded_apis",
        "coordinator.history.repeats",
        "coordinator.metadata.names",
        "coordinator.runtime.key_partition",
        "coordinator.security.principal",
        "coordinator.security.rules",
        "protocol",
        "groups.assignors.client.protocol",
        "logcore.batch",
        "logcore.errors",
        "logcore.machine",
        "logcore.values",
        # The records of ``__transaction_state``, and the rules for identities.
        *(f"txn.{name}" for name in ("epochs", "events", "records", "state")),
    ),
    "tools": (
        "tools",
        "cluster",
        "client",
        "coordinator.daemon",
        "coordinator.handlers",
        "coordinator.storage",
        "coordinator.metadata",
        "coordinator.config",
        "protocol",
        "groups.records",
        "txn.records",
        "logcore",
    ),
}
"""Folder → Fencepost's modules that the folder may import. The longest matching folder counts."""

IMPURE = frozenset(
    {
        "asyncio",
        "datetime",
        "logging",
        "os",
        "random",
        "secrets",
        "socket",
        "structlog",
        "threading",
        "time",
        "uuid",
    }
)
"""Modules that no state machine may import: clock, randomness and I/O come from its inputs."""

UUID = "uuid.UUID"
"""State machines of ``cluster/`` may import this class for ids of topics and directories.

``uuid.uuid4`` remains excluded, because it is random.
"""

DOORS = {
    "logcore/fs.py": frozenset({"os", "shutil", "mmap"}),
    "logcore/system.py": frozenset(
        {
            *("asyncio", "fcntl", "mmap", "os", "resource", "select", "signal", "socket"),
            *("tempfile", "threading", "time"),
        }
    ),
    "logcore/flush.py": frozenset({"threading"}),
}
"""The log's only access to the operating system, which a simulator can therefore replace.

``system.py`` has the calls that differ between systems, for all folders.
``flush.py`` only has a lock: its callers choose the thread in which a flush runs.
"""

BEHIND_DOORS = frozenset.union(*DOORS.values()) | {
    "asyncio",
    "secrets",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
}

SYSTEM = "logcore/system.py"
DISTINGUISHES = frozenset({"sys.platform", "os.name", "platform.system"})
ONLY_ON_SOME = frozenset({"fcntl", "grp", "msvcrt", "pwd", "resource", "winreg"})
"""Names by which a program distinguishes operating systems, and modules that some lack."""

CLOCKS = frozenset(
    f"{module}{name}{ns}"
    for module, name in (("time.", "time"), ("time.", "monotonic"), ("time.", "perf_counter"))
    for ns in ("", "_ns")
) | {"datetime.now", "datetime.utcnow", "dt.datetime.now"}
"""The clocks that a test with frozen time replaces (see ``logcore/clock.py``)."""

BESIDE_TESTS = ("logcore/", "coordinator/", "testing/")
"""Code that runs in the process of a test. Commands run in separate processes."""

ON_ITS_OWN = frozenset({"create_task", "ensure_future", "call_later", "call_at"})
"""Calls that start background work which no caller awaits."""

MAY_BEGIN = (
    "coordinator/runtime/background.py",
    # The task of a request, which always sends a response.
    "coordinator/server/connection.py",
    # Client-side code.
    "cli/",
    "protocol/",
)
"""The files and folders that may use the calls of ``ON_ITS_OWN``."""

PRINTING = "cli/printing.py"
PRINT_ONLY_BY_PRINTING = ("cli/", "client/", "tools/", "console/", "pipelines/mqtt/")
"""Code whose output goes to a terminal, where clients' names may contain control characters."""

WAYS_TO_PRINT = frozenset(
    {
        "print",
        "pprint",
        "pprint.pprint",
        "os.write",
        *(
            f"{prefix}{name}"
            for prefix in ("", "click.")
            for name in ("echo", "secho", "echo_via_pager", "progressbar")
        ),
    }
)
STREAMS = tuple(
    f"sys.{name}.{write}" for name in ("stdout", "stderr") for write in ("write", "buffer")
)

API_NAMES = frozenset({*api_key_map.values(), *(api.module for api in KNOWN_APIS.values())})
"""The valid names of handler modules; other modules in that folder are shared by handlers."""

DROPS = "without_traceback"
"""The function that makes an exception safe to store: see ``logcore/tracebacks.py``."""

KEEPERS = frozenset(
    {"add", "append", "appendleft", "partial", "put", "put_nowait", "set_result", "setdefault"}
)
"""Calls that store their arguments, as constructors do."""

SHORT_LIVED = (
    "bench/",
    "cli/",
    "docs/",
    "examples/",
    "pipelines/",
    "testing/",
    "tests/",
)
"""Code of short-lived processes, in which stored exceptions live no longer than the process."""

MAKERS = ("fencepost.cluster.records", "fencepost.cluster.image_records")
"""The modules of the metadata record types and of the function that makes a PartitionRecord."""

_OF_ZNODES = "says in records what znodes hold, which others have written"
RECORDS_ELSEWHERE: Mapping[str, str] = {
    "cluster/record_codec.py": "decodes a plain TopicRecord without the general reader",
    "cluster/image_records.py": "writes an image down: a snapshot",
    "coordinator/metadata/log.py": "frames a change of several batches as a metadata transaction",
    "coordinator/metadata/conversion.py": "says in records what a log of Fencepost 0.1 holds",
    "coordinator/zookeeper/access_znodes.py": _OF_ZNODES,
    "coordinator/zookeeper/requests.py": "makes records of the controller's requests",
    "coordinator/zookeeper/zk_controller.py": _OF_ZNODES,
    "coordinator/zookeeper/loading.py": _OF_ZNODES,
}
"""The only modules outside the controller that make metadata records, with the reason.

None of them makes a decision.
"""

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}

Rule = Callable[[str, str], Iterator[str]]
"""(path relative to the root, source text) → complaints."""


@lru_cache(maxsize=1)
def _parsed(source: str) -> ast.Module:
    # A finalizer that prints a traceback makes Python 3.11 parse the source lines. If this happens
    # during the parse below, the parse fails with "AST constructor recursion depth mismatch".
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


@lru_cache(maxsize=1)
def _nodes(source: str) -> list[ast.AST]:
    """Return all nodes of a file. They are cached, because all rules check a file in a row."""
    return list(ast.walk(_parsed(source)))


@cache
def _imported(source: str, path: str) -> tuple[tuple[int, str], ...]:
    """Return (line, dotted module) for each import in a file, also for nested imports."""
    return tuple(_imports(source, path))


def _imports(source: str, path: str) -> Iterator[tuple[int, str]]:
    package = PurePosixPath(path).parent.parts
    if package[0] in PARTS:
        package = ("fencepost", *package)
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            # `from groups import machine` imports the module groups.machine.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def imports_go_one_way(path: str, source: str) -> Iterator[str]:
    folders = [folder for folder in ALLOWED_IMPORTS if path.startswith(f"{folder}/")]
    if not folders:
        return
    allowed = ALLOWED_IMPORTS[max(folders, key=len)]
    for line, module in _imported(source, path):
        top, _, name = module.partition(".")
        if top in PARTS:
            yield f"{path}:{line} imports {module}: it is fencepost.{module}"
        elif (top == "fencepost" and not _within(name, allowed)) or (
            top in EVERYTHING and top != "fencepost" and not _within(module, allowed)
        ):
            yield f"{path}:{line} imports {module}; allowed here: {', '.join(allowed)}"


def state_machines_are_pure(path: str, source: str) -> Iterator[str]:
    if not path.startswith(("cluster/", "groups/", "txn/")):
        return
    for line, module in _imported(source, path):
        if module.split(".")[0] in IMPURE and not (path.startswith("cluster/") and module == UUID):
            yield f"{path}:{line} imports {module}: a state machine is told the time and its ids"


def the_log_has_two_doors(path: str, source: str) -> Iterator[str]:
    if not path.startswith("logcore/"):
        return
    for line, module in _imported(source, path):
        name = module.split(".")[0]
        if name in BEHIND_DOORS - DOORS.get(path, frozenset()):
            yield f"{path}:{line} imports {module}: that is for {', '.join(DOORS)}"


def a_frozen_clock_is_not_asked(path: str, source: str) -> Iterator[str]:
    if not path.startswith(BESIDE_TESTS) or path.startswith(("cli/", "tools/", SYSTEM)):
        return
    asked = [
        (node.lineno, ast.unparse(node))
        for node in _nodes(source)
        if isinstance(node, ast.Attribute)
    ]
    for line, name in [*asked, *_imported(source, path)]:
        if name in CLOCKS:
            yield f"{path}:{line} {name}: logcore/clock.py has clocks that no test freezes"


def systems_are_told_apart_in_one_place(path: str, source: str) -> Iterator[str]:
    if not path.startswith(tuple(f"{part}/" for part in PACKAGES)) or path == SYSTEM:
        return
    for line, module in _imported(source, path):
        if module.split(".")[0] in ONLY_ON_SOME or module in DISTINGUISHES:
            yield f"{path}:{line} imports {module}: {SYSTEM} has what differs between systems"
    for node in _nodes(source):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in DISTINGUISHES:
            yield f"{path}:{node.lineno} {ast.unparse(node)}: {SYSTEM} tells systems apart"


def work_in_the_background_is_begun_in_one_place(path: str, source: str) -> Iterator[str]:
    if not path.startswith("coordinator/") or path.startswith(MAY_BEGIN):
        return
    for node in _nodes(source):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ON_ITS_OWN
        ):
            yield f"{path}:{node.lineno} {node.func.attr}: runtime/background.py has a way"


def commands_print_in_one_place(path: str, source: str) -> Iterator[str]:
    if not path.startswith(PRINT_ONLY_BY_PRINTING) or path == PRINTING:
        return
    for line, module in _imported(source, path):
        if _within(module, ("rich.console", "rich.print")):
            yield f"{path}:{line} imports {module}: {PRINTING} prints tables"
    for node in _nodes(source):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in WAYS_TO_PRINT or called.startswith(STREAMS):
            yield f"{path}:{node.lineno} {called}: {PRINTING} escapes what it prints"


def kept_errors_drop_their_traceback(path: str, source: str) -> Iterator[str]:
    if path.startswith(SHORT_LIVED):
        return
    for node in _nodes(source):
        if isinstance(node, ast.ExceptHandler) and node.name:
            names = frozenset({node.name})
            for part in node.body:
                yield from _kept(path, part, names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.args, *node.args.kwonlyargs]
            names = frozenset(
                argument.arg for argument in arguments if _is_error(argument.annotation)
            )
            for part in node.body:
                yield from _kept(path, part, names, returned=False)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for value in _alternatives(node.exc):
                if isinstance(value, ast.Attribute) and not _is_class(value.attr):
                    yield f"{path}:{node.lineno} raises what is kept: each raise adds frames to it"
        elif isinstance(node, ast.Call) and _called(node) == "set_exception":
            for value in _alternatives(node.args[0]):
                if _called(value) != DROPS and not _is_class(_called(value)):
                    yield f"{path}:{node.lineno} set_exception without {DROPS}"


def _kept(
    path: str, part: ast.stmt, names: frozenset[str], *, returned: bool = True
) -> Iterator[str]:
    """Yield a complaint for each place at which an exception in ``names`` outlives its handler."""
    for node in ast.walk(part):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            values = [node.value]
        elif isinstance(node, ast.Return | ast.Yield):
            values = [node.value] if returned else []
        elif isinstance(node, ast.Call):
            name = _called(node)
            if name in KEEPERS or _is_class(name):
                values = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef):
            values = [leaf for leaf in ast.walk(node) if isinstance(leaf, ast.Name)]
        for value in values:
            for alternative in _alternatives(value):
                if isinstance(alternative, ast.Name) and alternative.id in names:
                    yield f"{path}:{alternative.lineno} keeps {alternative.id} without {DROPS}"


def _alternatives(node: ast.expr | None) -> Iterator[ast.expr]:
    """Yield the expressions whose values ``node`` may evaluate to, or contain as a display."""
    match node:
        case ast.IfExp():
            inner: list[ast.expr] = [node.body, node.orelse]
        case ast.BoolOp():
            inner = node.values
        case ast.Tuple() | ast.List() | ast.Set():
            inner = node.elts
        case ast.Dict():
            inner = node.values
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
            inner = [node.elt]
        case ast.BinOp():
            inner = [node.left, node.right]
        case ast.Starred() | ast.NamedExpr():
            inner = [node.value]
        case None:
            return
        case _:
            yield node
            return
    for expression in inner:
        yield from _alternatives(expression)


def _called(node: ast.expr) -> str:
    """Return the last part of the called function's name, "" if ``node`` is not a call."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _is_error(annotation: ast.expr | None) -> bool:
    """Return whether ``annotation`` names only exceptions, and perhaps None."""
    return annotation is not None and all(
        part.endswith(("Error", "Exception")) or part == "None"
        for part in ast.unparse(annotation).split(" | ")
    )


def functions_are_short(path: str, source: str) -> Iterator[str]:
    for node in statements(_parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno} {node.name}: {length} lines (most: {FUNCTION_LINES})"


def modules_are_short(path: str, source: str) -> Iterator[str]:
    length = len(source.splitlines())
    # Test modules may have any length, because many hold tables of cases.
    if length > MODULE_LINES and not path.startswith("tests/"):
        yield f"{path} has {length} lines (most: {MODULE_LINES})"


def lines_are_short(path: str, source: str) -> Iterator[str]:
    for number, line in enumerate(source.splitlines(), 1):
        # A directive for a linter cannot move to another line, so it is not counted.
        length = len(line.split("  # type: ignore")[0].split("  # noqa")[0])
        if length > LINE_LENGTH:
            yield f"{path}:{number} has {length} characters (most: {LINE_LENGTH})"


def checks_are_no_asserts(path: str, source: str) -> Iterator[str]:
    if path.startswith("tests/"):
        return
    for node in _nodes(source):
        if isinstance(node, ast.Assert):
            yield f"{path}:{node.lineno} asserts; `python -O` would drop the check"


def names_say_something(path: str, source: str) -> Iterator[str]:
    pure = PurePosixPath(path)
    for part in (*pure.parts[:-1], pure.stem):
        if part in VAGUE_NAMES:
            yield f"{path}: {part!r} says nothing of what is in it"


def handlers_declare_themselves(path: str, source: str) -> Iterator[str]:
    pure = PurePosixPath(path)
    if pure.parent.as_posix() != "coordinator/handlers" or pure.stem not in API_NAMES:
        return
    marks = [
        decorator
        for node in _parsed(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "run"
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id == "handles"
    ]
    if len(marks) != 1:
        yield f"{path}: one function `run` marked with @handles, not {len(marks)}"
        return
    (mark,) = marks
    named = {keyword.arg: keyword.value for keyword in mark.keywords}
    key = mark.args[0] if mark.args else None
    if not (isinstance(key, ast.Attribute) and key.attr.lower() == pure.stem):
        yield f"{path}:{mark.lineno} the first argument is ApiKey.{pure.stem.upper()}"
    versions = named.get("versions")
    if not (isinstance(versions, ast.Tuple) and len(versions.elts) == 2):
        yield f"{path}:{mark.lineno} versions=(lowest, highest)"
    permission = named.get("permission")
    if not (isinstance(permission, ast.Constant) and permission.value):
        yield f"{path}:{mark.lineno} permission says what a client would need"


def the_controller_makes_the_records(path: str, source: str) -> Iterator[str]:
    if path.startswith(("cluster/controller/", "tests/")) or path in RECORDS_ELSEWHERE:
        return
    yield from (f"{path}:{line} makes a record of metadata" for line in records_made(source))


def records_made(source: str) -> Iterator[int]:
    """Yield the lines of ``source`` that make a metadata record."""
    called, modules = set[str](), set[str]()
    for node in _nodes(source):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                if node.module in MAKERS and alias.name.lower().endswith("record"):
                    called.add(name)
                elif f"{node.module}.{alias.name}" in MAKERS:
                    modules.add(name)
    for node in _nodes(source):
        if isinstance(node, ast.Call):
            maker = ast.unparse(node.func)
            module, _, name = maker.rpartition(".")
            if maker in called or (module in modules and name.lower().endswith("record")):
                yield node.lineno


RULES: dict[Rule, tuple[tuple[str, str], ...]] = {
    imports_go_one_way: (
        ("groups/x.py", "from fencepost.txn.machine import TxnMachine"),
        ("txn/x.py", "import groups"),
        ("txn/x.py", "from txn import state"),
        ("groups/x.py", "from fencepost.logcore import fs"),
        ("groups/x.py", "def f():\n    import fencepost.logcore.partition"),
        ("logcore/x.py", "import fencepost.coordinator.daemon.broker"),
        ("pipelines/x.py", "from fencepost.coordinator.daemon.broker import Broker"),
        ("pipelines/x.py", "from fencepost.groups.machine import GroupMachine"),
        ("pipelines/x.py", "from fencepost.logcore.partition import Partition"),
        ("pipelines/spark/x.py", "from fencepost.pipelines import exactly_once"),
        ("pyspark_fencepost/x.py", "from fencepost.protocol import client"),
        ("protocol/x.py", "from .. import broker"),
        ("client/x.py", "from fencepost.coordinator.server import server"),
        ("coordinator/server/x.py", "from fencepost.coordinator.daemon import broker"),
        ("coordinator/config/x.py", "from fencepost.coordinator.metadata import log"),
        ("client/queries/x.py", "from fencepost.cli import output"),
        ("coordinator/x.py", "from tests.support import waits"),
    ),
    state_machines_are_pure: (
        ("groups/x.py", "import time"),
        ("groups/x.py", "from uuid import UUID"),
        ("cluster/x.py", "from uuid import uuid4"),
        ("cluster/x.py", "import uuid"),
        ("txn/x.py", "from datetime import datetime"),
        ("txn/x.py", "def f():\n    import os.path"),
    ),
    the_log_has_two_doors: (
        ("logcore/x.py", "import os"),
        ("logcore/fs.py", "import time"),
        ("logcore/clock.py", "import time"),
        ("logcore/x.py", "from time import time"),
    ),
    systems_are_told_apart_in_one_place: (
        ("pipelines/x.py", "import fcntl"),
        ("cli/x.py", "def f():\n    from resource import getrlimit"),
        ("logcore/fs.py", "import sys\nslow = sys.platform == 'win32'"),
        ("testing/x.py", "import os\nif os.name == 'nt': pass"),
    ),
    a_frozen_clock_is_not_asked: (
        ("testing/x.py", "import time\nuntil = time.monotonic() + 30"),
        ("coordinator/server/x.py", "from time import perf_counter"),
        ("logcore/x.py", "now = dt.datetime.now(dt.UTC)"),
    ),
    work_in_the_background_is_begun_in_one_place: (
        ("coordinator/x.py", "def f(loop):\n    loop.call_later(1, f)"),
        ("coordinator/handlers/x.py", "import asyncio\nasyncio.create_task(f())"),
    ),
    commands_print_in_one_place: (
        ("cli/x.py", "print(1)"),
        ("cli/x.py", "import click\nclick.echo(1)"),
        ("client/queries/x.py", "from click import echo\necho(1)"),
        ("cli/x.py", "import sys\nsys.stdout.write('')"),
        ("tools/x.py", "import sys\nsys.stderr.buffer.write(b'')"),
        ("console/x.py", "from rich.console import Console\nConsole().print('')"),
    ),
    kept_errors_drop_their_traceback: (
        ("txn/x.py", "def f(future, error):\n    future.set_exception(error)"),
        ("txn/x.py", "def f(self, future):\n    future.set_exception(self.x or Error())"),
        ("txn/x.py", "def f(self):\n    raise self.failure"),
        ("txn/x.py", "def f(self, error: DomainError | None):\n    self.error = error"),
        ("txn/x.py", "def f(items, error: Exception):\n    items.append((1, error))"),
        *(
            (
                "txn/x.py",
                f"def f():\n    try:\n        g()\n    except Error as error:\n        {x}",
            )
            for x in (
                "self.error = error",
                "found[key] = None if x else error",
                "return error",
                "yield 1, error",
                "answers.append(error)",
                "answers += [error]",
                "answers.append(Answer(1, error=error))",
                "loop.call_soon(partial(tell, error))",
                "loop.call_soon(lambda: tell(error))",
                "future.set_result({key: error})",
                "later = (Answer(one, error=error) for one in asked)",
            )
        ),
    ),
    the_controller_makes_the_records: (
        *(
            (
                path,
                "from fencepost.cluster.records import TopicRecord\ndef f():\n    TopicRecord(1)",
            )
            for path in ("coordinator/metadata/x.py", "cluster/x.py", "testing/x.py")
        ),
        (
            "coordinator/handlers/x.py",
            "from fencepost.cluster.records import NoOpRecord as N\nappend([N()])",
        ),
        ("coordinator/x.py", "from fencepost.cluster import records\nrecords.NoOpRecord()"),
        (
            "coordinator/x.py",
            "from fencepost.cluster.image_records import partition_record\npartition_record(1)",
        ),
    ),
    functions_are_short: (
        ("txn/x.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES),
        ("txn/x.py", "class A:\n  async def f(self):\n" + "    x = 1\n" * FUNCTION_LINES),
    ),
    modules_are_short: (("txn/x.py", "x = 1\n" * (MODULE_LINES + 1)),),
    lines_are_short: (("txn/x.py", "# " + "x" * (LINE_LENGTH - 1)),),
    checks_are_no_asserts: (("txn/x.py", "def f(x):\n    assert x"),),
    names_say_something: (("txn/utils.py", ""), ("txn/helpers/x.py", "")),
    handlers_declare_themselves: (
        ("coordinator/handlers/fetch.py", "def run(ctx): ..."),
        (
            "coordinator/handlers/fetch.py",
            "@handles(ApiKey.PRODUCE, versions=(0, 1), permission='READ Topic')\ndef run(c): ...",
        ),
        (
            "coordinator/handlers/fetch.py",
            "@handles(ApiKey.FETCH, versions=(0, 1), permission='')\ndef run(ctx): ...",
        ),
        (
            "coordinator/handlers/fetch.py",
            "@handles(ApiKey.FETCH, permission='READ Topic')\ndef run(ctx): ...",
        ),
    ),
}
"""Every rule, with snippets that violate the rule."""

GOOD: dict[str, str] = {
    "groups/good.py": (
        "from fencepost.logcore.machine import Decision"
        "\nfrom fencepost.groups.errors import GroupError"
    ),
    "logcore/fs.py": "import os\nimport mmap",
    "logcore/clock.py": "from fencepost.logcore import system",
    "logcore/system.py": "import fcntl, sys, time\nnow = time.time_ns\nlinux = sys.platform",
    "pipelines/good.py": (
        "from fencepost.client.client import WireClient"
        "\nfrom fencepost.groups.assignors import client"
        "\nfrom fencepost.logcore.batch import parse_header"
    ),
    "coordinator/services/good.py": (
        "from fencepost.txn import machine\nfrom fencepost.groups import machine as g\nimport os"
    ),
    "protocol/good.py": ("from .api import ApiKey\nfrom fencepost.protocol import codec"),
    "testing/good.py": "import time\nend = monotonic_s() + loop.time()\ntime.sleep(1)",
    "cli/good.py": (
        "import sys, time\nfrom fencepost.cli.printing import print_lines"
        "\nprint_lines(sys.stdout.name)\nend = time.monotonic()"
    ),
    "cluster/controller/good.py": (
        "from fencepost.cluster.records import NoOpRecord\nOutcome(None, (NoOpRecord(),))"
    ),
    "coordinator/replication/good.py": (
        "from fencepost.cluster.records import BrokerEndpoint, NoOpRecord"
        "\nBrokerEndpoint(1)\nisinstance(x, NoOpRecord)"
    ),
    "cli/printing.py": "import click\nclick.echo('')",
    "coordinator/runtime/background.py": "loop.create_task(f())",
    "coordinator/storage/cleaner.py": (
        "from fencepost.coordinator.runtime.background import call_later\ncall_later(f)"
    ),
    "coordinator/handlers/fetch.py": (
        "@handles(ApiKey.FETCH, versions=(4, 18), permission='READ Topic')\nasync def run(ctx): ..."
    ),
    "coordinator/server/good.py": (
        "try:\n    f()\nexcept Error as error:\n    log(error)\n    a = b.append(str(error))"
        "\n    c.set_exception(without_traceback(error))\n    d.set_exception(Error(str(error)))"
        "\n    raise Error(f'{error}') from error"
    ),
    "txn/limit.py": "def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 1),
    "txn/module.py": "x = 1\n" * MODULE_LINES,
    "txn/line.py": "# " + "x" * (LINE_LENGTH - 2),
    "tests/unit/good.py": "def test_it():\n    assert True",
}
"""Snippets that violate no rule; if a rule has a limit, they are exactly at the limit."""


def circles(modules: Mapping[str, str]) -> list[list[str]]:
    """Return one list of all modules in import cycles; none without a cycle.

    ``modules`` maps paths to sources. Lazy imports and imports for the type checker count as well,
    because they are dependencies too.
    """
    paths = {
        f"fencepost.{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}": path
        for path in modules
    }
    knows = {
        path: {
            known
            for _, module in _imported(source, path)
            for known in (paths.get(module) or paths.get(module.rpartition(".")[0]),)
            if known is not None and known != path
        }
        for path, source in modules.items()
    }
    found = []
    while knows:
        # A module is in no cycle if it imports no remaining module, or if none imports it.
        known = set().union(*knows.values())
        outside = [
            path for path, names in knows.items() if path not in known or not names & knows.keys()
        ]
        if not outside:
            found.append(sorted(knows))
            break
        for path in outside:
            del knows[path]
        knows = {path: names & knows.keys() for path, names in knows.items()}
    return found


@cache
def complaints() -> Mapping[Rule, list[str]]:
    """Return the complaints of each rule. Each file is read and parsed once for all rules."""
    found: dict[Rule, list[str]] = {rule: [] for rule in RULES}
    for path, source in sources():
        for rule in RULES:
            found[rule] += rule(path, source)
    return found


def sources() -> Iterator[tuple[str, str]]:
    for folder in EVERYTHING:
        # rglob does not follow links, so each file is read once.
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def _name(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_rule_finds_its_violations(rule: Rule) -> None:
    for path, snippet in RULES[rule]:
        assert list(rule(path, snippet)), f"{_name(rule)} lets pass: {path}: {snippet[:60]!r}"


@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_rule_accepts_valid_code(rule: Rule) -> None:
    assert [c for path, snippet in GOOD.items() for c in rule(path, snippet)] == []


@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_code_has_no_violation_of_the_rule(rule: Rule) -> None:
    found = complaints()[rule]
    assert not found, "\n" + "\n".join(found)


def test_import_cycle_is_found() -> None:
    apart = {
        "txn/a.py": "from fencepost.txn import b",
        "txn/b.py": "from fencepost.txn.c import C",
        "txn/c.py": "import os",
    }
    assert circles(apart) == []
    assert circles({**apart, "txn/c.py": "def f():\n    from fencepost.txn.a import A"}) == [
        ["txn/a.py", "txn/b.py", "txn/c.py"]
    ]


def test_shipped_code_has_no_import_cycle() -> None:
    shipped = tuple(f"{package}/" for package in PACKAGES)
    assert circles({path: text for path, text in sources() if path.startswith(shipped)}) == []


def test_modules_exempt_from_the_record_rule_make_records() -> None:
    made = {path: [*records_made(text)] for path, text in sources() if path in RECORDS_ELSEWHERE}
    assert made.keys() == RECORDS_ELSEWHERE.keys()
    assert [path for path, lines in made.items() if not lines] == []


def test_no_two_test_files_outside_packages_have_one_name() -> None:
    """pytest imports such files by their names alone, and cannot collect two with the same name."""
    first: dict[str, str] = {}
    for path, _ in sources():
        folder, _, name = path.rpartition("/")
        if name.startswith("test_") and not (ROOT / folder / "__init__.py").exists():
            assert first.setdefault(name, path) == path, f"{path} and {first[name]}"


def test_every_package_is_in_the_build_context_of_the_image() -> None:
    assert {path.name for path in (ROOT / "fencepost").iterdir() if path.is_symlink()} == {*PARTS}
    context = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{part}" for part in PACKAGES} <= {*context}


def _written(folder: str) -> list[Path]:
    """Return the modules and pages of a folder; "" stands for the root folder's pages."""
    if not folder:
        return sorted(ROOT.glob("*.md"))
    return sorted(path for kind in ("*.py", "*.md") for path in (ROOT / folder).rglob(kind))


@pytest.mark.parametrize("folder", ["", *EVERYTHING[2:], "pyspark_fencepost"])
def test_prose_is_plain(folder: str) -> None:
    words = 0
    found: Counter[str] = Counter()
    for path in _written(folder):
        text = prose_of(path)
        words += len(text.split())
        found[str(path.relative_to(ROOT))] += len(phrases(text))
    assert found.total() * 1000 <= MAX_PER_1000_WORDS * words, found.most_common(10)


def test_phrase_that_hides_its_noun_is_found() -> None:
    assert phrases("What a broker does. Tell who lags; nobody is to be asked anew.")
    assert not phrases("Users who read this may ask. The broker answers. What if it fails?")
