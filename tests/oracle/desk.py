"""Runs of Apache Kafka's command-line tools on a broker, with comparable output.

All tools run in one JVM (``KafkaTools.java``), because starting a JVM takes longer than most runs.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import Cluster
from tests.support.kafka import java_command

DRIVER = Path(__file__).with_name("KafkaTools.java")
LIMIT_MS = 60_000
"""Time limit of a tool that ends by itself."""

VARYING = re.compile(r"Ms$|Timestamp$|Duration|^CoordinatorId$|CoordinatorEpoch$")
"""Columns with values that vary: timestamps, ages, coordinators and coordinator epochs."""

LOGGED = re.compile(r"\d\d:\d\d:\d\d\.\d{3} ")
"""The beginning of a log line of a tool: a client's warnings depend on timing."""

NO_LINE = re.compile(r"\tat |\s*\.\.\. \d+ more|\S*KafkaTools\$Ended: |exit \d+$|\s*$")
"""Lines of stack traces, and lines by which the driver reports a tool's exit."""

WORDING = (
    re.compile(r"(?<=Exception: ).*"),
    re.compile(r"(?<=(?:topic|trics) command : ).*"),
)
"""Messages of errors, which may differ. The names of the exceptions must be equal."""

NAMED = {
    "id": re.compile(r"A{8}QACA{10}Q|(?<![\w-])(?=[\w-]*[a-z])(?=[\w-]*[A-Z])[\w-]{22}(?![\w(-])"),
    "member": re.compile(r"[\w.-]*?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
}
"""Random ids of brokers and clients. Each id gets a name, which replaces all its occurrences."""

MASKED = (
    (re.compile(r"\b1[6-9]\d{11}\b"), "an-instant"),
    (re.compile(r"(?<=Bytes\":)\d+"), "room"),
    (re.compile(r"Epoch: \d+"), "Epoch: …"),
)

Said = tuple[str, int, list[str]]
"""The command, its exit status, and its output lines in alphabetical order."""


class Tools:
    """The JVM in which the tools run."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self,
        main: str,
        words: Sequence[str],
        read: str = "",
        limit_ms: int = LIMIT_MS,
        *,
        stays: bool = False,
    ) -> tuple[int, str]:
        """Run a tool to its end; return its exit status and its output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job: dict[str, object] = {"main": main, "args": list(words), "in": read}
        job |= {"limit_ms": limit_ms, "stays": stays}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                answer = json.loads(line.removeprefix("RESULT "))
                return answer["status"], answer["out"]
        raise AssertionError(f"the JVM of the tools has ended, with {self._process.wait()}")


@contextmanager
def tools_at_hand() -> Iterator[Tools]:
    """Start the JVM, which is stopped at the end of the block."""
    with subprocess.Popen(
        java_command(str(DRIVER)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Tools(process)
        finally:
            process.kill()


class Desk:
    """One broker and the tools' output for it, in which owners' names replace producer ids."""

    def __init__(self, tools: Tools, bootstrap: str, data_dir: Path, scratch: Path) -> None:
        self.bootstrap = bootstrap
        self.data_dir = data_dir
        self.scratch = scratch
        self.cluster = Cluster(bootstrap)
        self.said: list[Said] = []
        self._tools = tools
        self._names: dict[str, str] = {}
        self._made_up: dict[tuple[str, str], str] = {}

    def close(self) -> None:
        self.cluster.close()

    def named(self, name: str, producer_id: int, called: str = "") -> None:
        """Give a name to a producer id and, if ``called`` is set, to that transactional id."""
        self._names[str(producer_id)] = f"id-of-{called or name}"
        if called:
            self._names[name] = called

    def file(self, name: str, content: str) -> str:
        """Write a file for a tool to read; returns its path."""
        path = self.scratch / name
        path.write_text(content)
        return str(path)

    def run(
        self,
        main: str,
        *words: str,
        only: str = "",
        read: str = "",
        where: str = "--bootstrap-server",
        limit_ms: int = LIMIT_MS,
        figures: bool = True,
        stays: bool = False,
    ) -> str:
        """Run a tool; keep its exit status and its lines, or only the lines that have ``only``.

        ``where`` is the tool's option for the broker's address, "" for a tool without one. Without
        ``figures`` all numbers are masked. A tool that ``stays`` runs for ``limit_ms`` and is then
        interrupted. Return the tool's output.
        """
        place = [where, self.bootstrap] if where else []
        status, text = self._tools.run(main, [*place, *words], read, limit_ms, stays=stays)
        lines = [line for line in self._lines(text) if only in line]
        if not figures:
            lines = [re.sub(r"-?\d+([.,]\d+)*", "N", line) for line in lines]
        shown = " ".join(self._shown(word) for word in words)
        self.said.append((f"{main.rsplit('.', maxsplit=1)[-1]} {shown}", status, sorted(lines)))
        return text

    def _shown(self, text: str) -> str:
        """Return ``text`` without values that legitimately differ between two brokers."""
        text = text.replace(str(self.scratch), "SCRATCH").replace(str(self.data_dir), "DIRECTORY")
        text = text.replace(self.bootstrap, "ADDRESS")
        text = re.sub(r"(127\.0\.0\.1|localhost)[: ]\d+", "ADDRESS", text)
        for pattern in WORDING:
            text = pattern.sub("…", text)
        for pattern, name in MASKED:
            text = pattern.sub(name, text)
        for kind, pattern in NAMED.items():
            text = pattern.sub(lambda found, kind=kind: self._name(kind, found[0]), text)
        return " ".join(self._names.get(word, word) for word in text.split())

    def _name(self, kind: str, text: str) -> str:
        count = sum(other == kind for other, _ in self._made_up) + 1
        return self._made_up.setdefault((kind, text), f"{kind}-{count}")

    def _lines(self, text: str) -> list[str]:
        """Return the lines with single spaces, without stack traces and varying columns."""
        lines = [
            line for line in text.splitlines() if not NO_LINE.match(line) and not LOGGED.match(line)
        ]
        heads = lines[0].split() if lines else []
        if not any(VARYING.search(word) for word in heads):
            heads = []
        found = []
        for line in lines:
            words = line.split()
            if len(words) == len(heads) and words != heads:
                words = ["…" if VARYING.search(heads[i]) else word for i, word in enumerate(words)]
            found.append(self._shown(" ".join(words)))
        return found


def differences(ours: list[Said], theirs: list[Said]) -> list[str]:
    """Return the differences between the tools' output with the two brokers."""
    found = []
    for our, their in zip(ours, theirs, strict=True):
        if our[1] != their[1]:
            found.append(f"{their[0]}: ends with {our[1]} instead of {their[1]}")
        mine, other = list(our[2]), list(their[2])
        for line in [line for line in mine if line in other]:
            if line in other:
                mine.remove(line)
                other.remove(line)
        found += [f"{their[0]}: + {line}" for line in mine]
        found += [f"{their[0]}: - {line}" for line in other]
    return found
