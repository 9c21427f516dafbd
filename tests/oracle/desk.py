"""Apache Kafka's command-line tools at work on a broker, and what they said, made comparable.

All of them run in one JVM (``KafkaTools.java``): a start costs more than most of them do.
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
"""How long a tool may take that ends by itself."""

VARYING = re.compile(r"Ms$|Timestamp$|Duration|^CoordinatorId$|CoordinatorEpoch$")
"""Columns of instants and ages; how often the coordinator was elected or started."""

LOGGED = re.compile(r"\d\d:\d\d:\d\d\.\d{3} ")
"""How a line of the tool's log begins: what a client warns of hangs on time."""

NO_LINE = re.compile(r"\tat |\s*\.\.\. \d+ more|\S*KafkaTools\$Ended: |exit \d+$|\s*$")
"""Lines of stack traces, and the end of a tool that its own code catches and tells of."""

WORDING = (
    re.compile(r"(?<=Exception: ).*"),
    re.compile(r"(?<=(?:topic|trics) command : ).*"),
)
"""What went wrong, in the broker's words. The exception's name has to be the same."""

NAMED = {
    "id": re.compile(r"A{8}QACA{10}Q|(?<![\w-])(?=[\w-]*[a-z])(?=[\w-]*[A-Z])[\w-]{22}(?![\w(-])"),
    "member": re.compile(r"[\w.-]*?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
}
"""What a broker or a client makes up: the same one gets the same name each time."""

MASKED = (
    (re.compile(r"\b1[6-9]\d{11}\b"), "an-instant"),
    (re.compile(r"(?<=Bytes\":)\d+"), "room"),
    (re.compile(r"Epoch: \d+"), "Epoch: …"),
)

Said = tuple[str, int, list[str]]
"""What was asked, the exit status, and the lines, in order of the alphabet."""


class Tools:
    """The JVM."""

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
        """Run a tool to its end; its exit status and what it said."""
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
    """Start the JVM; it ends with the block."""
    with subprocess.Popen(
        java_command(str(DRIVER)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Tools(process)
        finally:
            process.kill()


class Desk:
    """One broker and what was said about it. Producer ids are called by their owners' names."""

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
        """Call a producer id, and its transactional id too if that has one ``called`` for it."""
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
        """Run a tool and keep its exit status and its lines, or those with ``only`` in them.

        ``where`` is how the tool wants to be told the broker, nothing for one that does not.
        Without ``figures`` numbers do not count. A tool that ``stays`` is told to end when its time
        is over. Returns what the tool said.
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
        """``text`` without what differs between any two brokers by right."""
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
        """The lines, one space between words, without stack traces and without what may vary."""
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
                words = ["…" if VARYING.search(heads[i]) else one for i, one in enumerate(words)]
            found.append(self._shown(" ".join(words)))
        return found


def differences(ours: list[Said], theirs: list[Said]) -> list[str]:
    """Where two brokers' tools said something else."""
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
