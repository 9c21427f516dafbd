"""Pages of the documentation: their blocks, which run as a reader would run them, and their links.

A comment directly above a block has further instructions:

* ``<!-- not run: REASON -->``: the block does not run;
* ``<!-- file: NAME -->``: the block is written to that file, in the folder where the others run;
* ``<!-- stays: PATTERN -->``: the command does not end by itself. The next block runs as soon as a
  line of its output matches; ``fencepost serve`` needs no such comment;
* ``<!-- stopped: WHAT -->``: before the block runs, running commands are ended, as by Ctrl-C;
* ``<!-- fails: STATUS -->``: the block ends with this exit status;
* ``<!-- needs: NAME -->``: the block only runs if this command exists; a block that needs
  ``pyspark`` only runs in `make package`;
* ``<!-- printed: -->``: the output of the block above, ``…`` standing for anything in a line.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from fencepost.tools.ports import hold_port
from tests.support.daemon import ROOT, Daemon
from tests.support.waits import until

RUN_S = 120.0
"""Timeout of one block in seconds."""

STOP_S = 20.0

RUN_LANGUAGES = frozenset({"sh", "python"})
SHOWN_LANGUAGES = frozenset(
    {"text", "toml", "ini", "yaml", "json", "properties", "dockerfile", "go", "java", "javascript"}
    | {"promql", "markdown"}
)
"""Languages of blocks that are not run, but only shown or written to a file."""

LARGE = frozenset({"pyspark"})
"""Slow dependencies: a block that needs one of these runs in `make package` only."""

WORDS = frozenset({"not run", "file", "stays", "stopped", "fails", "needs", "printed"})

_SERVE = re.compile(r"^(fencepost|python -m fencepost) serve\b", re.MULTILINE)
_LISTENING = r"^listening "
_ADDRESS = re.compile(r"\b(127\.0\.0\.1|localhost):(\d{2,5})\b")
_KAFKA_PORT = "9092"
_THE_CLONE = re.compile(r"(\s'?)\.((?:\[[a-z,-]+\])?'?(?=\s|$))")
_INSTALL = re.compile(r"^(python -m )?pip install\b.*\n?", re.MULTILINE)


def shown(path: Path) -> str:
    """Return a page's path relative to the project."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str
    words: Mapping[str, str]

    def __str__(self) -> str:
        return f"{shown(self.page)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN_LANGUAGES and "not run" not in self.words

    @property
    def serves(self) -> bool:
        """Return whether the block starts a broker that keeps running."""
        is_run = self.language == "sh" and self.runs and "fails" not in self.words
        return is_run and _SERVE.search(self.text) is not None


@dataclass(frozen=True)
class Link:
    """One link to another page, or into the same page."""

    page: Path
    line: int
    target: str

    def __str__(self) -> str:
        return f"{shown(self.page)}:{self.line} {self.target}"


class Page:
    """One Markdown file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.path.read_text("utf-8"))

    @cached_property
    def blocks(self) -> list[Block]:
        blocks: list[Block] = []
        words: dict[str, str] = {}
        for token in self._tokens:
            if token.type == "fence":
                assert token.map is not None
                language = token.info.split()[0] if token.info.strip() else ""
                line = token.map[0] + 1
                blocks.append(Block(self.path, line, language, token.content, words))
                words = {}
            elif token.type == "html_block":
                words |= _words(token.content)
            else:
                words = {}
        return blocks

    @cached_property
    def anchors(self) -> set[str]:
        """The anchors of the page's headings, by GitHub's rule."""
        anchors: set[str] = set()
        for before, token in zip(self._tokens, self._tokens[1:], strict=False):
            if before.type == "heading_open":
                is_ready = "".join(child.content for child in token.children or ())
                slug = re.sub(r"[^\w\- ]", "", is_ready.strip().lower()).replace(" ", "-")
                number = 0
                while (name := slug if not number else f"{slug}-{number}") in anchors:
                    number += 1
                anchors.add(name)
        return anchors

    @cached_property
    def links(self) -> list[Link]:
        return [
            Link(self.path, (token.map or [0])[0] + 1, str(target))
            for token in self._tokens
            for child in token.children or ()
            if (target := _target(child)) is not None
        ]


def _target(token: Token) -> str | int | float | None:
    return {"link_open": token.attrGet("href"), "image": token.attrGet("src")}.get(token.type)


def _words(comment: str) -> dict[str, str]:
    match = re.fullmatch(r"<!--\s*([a-z ]+):\s*(.*?)\s*-->", comment.strip(), re.DOTALL)
    return {match[1]: match[2]} if match and match[1] in WORDS else {}


class Reader:
    """Runs a page's blocks one after the other, in a new folder.

    Each port of this machine on the page is replaced by a free port. If neither a ``fencepost
    serve`` command nor its settings file has an address, the broker listens on the replacement of
    port 9092. ``pip install`` commands are skipped, because the packages are installed already.
    With ``clone``, the path of a wheel, they run with the wheel in place of the clone (``.``).
    """

    def __init__(
        self,
        home: Path,
        *,
        bin_dir: Path | None = None,
        clone: str = "",
        everything: bool = False,
        broker: bool = True,
    ) -> None:
        self.here = home / "page"
        self.here.mkdir(parents=True)
        (home / "home").mkdir()
        self._logs = home
        self._ports: dict[str, str] = {}
        self._tests: list[str] = []
        """Files of blocks with tests, which run together at the end: pytest starts slowly."""
        self._stack = ExitStack()
        self._staying = self._stack.enter_context(ExitStack())
        self._bin = bin_dir or Path(sysconfig.get_path("scripts"))
        self._clone = clone
        self._all = everything
        self._has_broker = broker
        self._env = {
            **os.environ,
            "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home / "home"),
            "FENCEPOST_BOOTSTRAP": f"127.0.0.1:{self._port(_KAFKA_PORT)}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": "" if bin_dir else str(ROOT),
        }

    def read(self, page: Page) -> None:
        """Run the page's blocks; raise AssertionError with the output of a failing block."""
        with self._stack:
            runs = [block for block in page.blocks if block.runs]
            if self._has_broker and runs and not any(block.serves for block in runs):
                self._stack.enter_context(self._broker())
            ran = 0
            for number, block in enumerate(page.blocks):
                if "file" in block.words:
                    path = self.here / block.words["file"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(self._with_own_ports(block.text), encoding="utf-8")
                elif block.runs and self._is_installed(block.words.get("needs")):
                    if "stopped" in block.words:
                        self._staying.close()
                    self._run(block, number)
                    ran = number
                elif "printed" in block.words:
                    self._compare(block, self._logs / f"block-{ran}.log")
            if self._tests:
                command = ["python", "-m", "pytest", "-q", *self._tests]
                what = Block(page.path, 0, "python", "\n".join(self._tests), {})
                self._start(command, what, self._logs / "tests.log")

    def _compare(self, block: Block, log: Path) -> None:
        printed = log.read_text(encoding="utf-8", errors="replace")
        pattern = ".*".join(re.escape(part) for part in block.text.split("…"))
        assert re.fullmatch(pattern, printed), f"{block} says\n{block.text}\nand it is\n{printed}"

    def _port(self, named: str) -> str:
        if named not in self._ports:
            held = self._stack.enter_context(hold_port())
            self._ports[named] = str(held.getsockname()[1])
        return self._ports[named]

    def _with_own_ports(self, text: str) -> str:
        return _ADDRESS.sub(lambda match: f"{match[1]}:{self._port(match[2])}", text)

    def _is_installed(self, need: str | None) -> bool:
        if need in LARGE:
            return self._all
        return need is None or shutil.which(need) is not None

    def _install(self, match: re.Match[str]) -> str:
        """Return the replacement of a ``pip install`` line: empty, or with the wheel's path."""
        return _THE_CLONE.sub(rf"\1{self._clone}\2", match[0]) if self._clone else ""

    @contextmanager
    def _broker(self) -> Iterator[None]:
        listen = f"127.0.0.1:{self._port(_KAFKA_PORT)}"
        settings = {"group.initial.rebalance.delay.ms": "0"}
        daemon = Daemon(self._logs / "data", settings, listen=listen).start()
        try:
            yield
        finally:
            daemon.stop()

    def _run(self, block: Block, number: int) -> None:
        text = self._with_own_ports(block.text)
        if block.language == "python":
            name = f"test_block_{number}.py" if "def test_" in text else f"block_{number}.py"
            (self.here / name).write_text(text, encoding="utf-8")
            if name.startswith("test_"):
                self._tests.append(name)
                return
            command = ["python", name]
        else:
            text = _INSTALL.sub(self._install, text)
            listen = f"127.0.0.1:{self._port(_KAFKA_PORT)}"
            if "--listen" not in text and not self._has_listeners(text):
                text = _SERVE.sub(rf"\g<0> --listen {listen}", text)
            command = ["bash", "-euo", "pipefail", "-c", text]
        self._start(command, block, self._logs / f"block-{number}.log")

    def _has_listeners(self, text: str) -> bool:
        """Return whether a settings file that ``text`` names has listeners."""
        files = re.findall(r"--config-file (\S+)", text)
        return any(b"listeners" in (self.here / file).read_bytes() for file in files)

    def _start(self, command: list[str], block: Block, log: Path) -> None:
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                cwd=self.here,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._staying.callback(_end, child)
        self._wait(block, child, log)

    def _wait(self, block: Block, child: subprocess.Popen[bytes], log: Path) -> None:
        stays = block.words.get("stays") or (_LISTENING if block.serves else None)
        if stays is None:
            try:
                status = child.wait(RUN_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{block} does not end:\n{log.read_text()}") from None
            expected = int(block.words.get("fails", "0"))
            assert status == expected, (
                f"{block} ends with {status}:\n{block.text}\n{log.read_text()}"
            )
            return

        def is_ready() -> bool:
            output = log.read_text(errors="replace")
            if re.search(stays, output, re.MULTILINE):
                return True
            assert child.poll() is None, f"{block} ended by itself:\n{output}"
            return False

        until(is_ready, f"{stays!r} of {block}", deadline_s=RUN_S)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a block and its background processes: all processes of its session."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)


def pages() -> list[Path]:
    """Return all pages whose blocks run."""
    tops = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "testing/README.md")
    named = [ROOT / name for name in tops if (ROOT / name).exists()]
    return [*named, *sorted((ROOT / "docs").rglob("*.md"))]
