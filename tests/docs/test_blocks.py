"""The commands in the documentation run as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import ROOT
from tests.support.pages import RUN_LANGUAGES, SHOWN_LANGUAGES, Page, Reader, pages, shown

LONG = frozenset(
    {
        "README.md",
        "docs/causes.md",
        "docs/cluster-on-one-machine.md",
        "docs/configuration.md",
        "docs/getting-started.md",
        "docs/growing.md",
        "docs/moving.md",
        "docs/operating.md",
        "docs/pipelines.md",
        "docs/queues.md",
        "docs/recipes.md",
        "docs/resolving.md",
        "docs/security.md",
        "docs/testing.md",
        "testing/README.md",
    }
)
"""Pages whose commands take more than two seconds."""

PAGES = [(Page(path), shown(path)) for path in pages()]


def page_of(folder: Path, text: str) -> Page:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return Page(path)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=[pytest.mark.slow] if name in LONG else [])
        for page, name in PAGES
    ],
)
def test_code_blocks_of_a_page_run(page: Page, tmp_path: Path) -> None:
    Reader(tmp_path).read(page)


@pytest.mark.parametrize("page", [pytest.param(page, id=name) for page, name in PAGES])
def test_every_block_has_a_known_language(page: Page) -> None:
    """A block of output without a language would look like a block of commands."""
    known = RUN_LANGUAGES | SHOWN_LANGUAGES
    assert [str(block) for block in page.blocks if block.language not in known] == []
    empty = [str(block) for block in page.blocks if block.words.get("not run") == ""]
    assert empty == [], "not run: without a reason"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```sh\nfalse\necho on\n```", "ends with 1"),
        ("```sh\nfalse | true\n```", "ends with 1"),
        ("<!-- fails: 2 -->\n```sh\nexit 1\n```", "ends with 1"),
        ("```python\nraise SystemExit(3)\n```", "ends with 3"),
        ("```python\ndef test_it():\n    assert not 'so'\n```", "assert not 'so'"),
        ("<!-- stays: ready -->\n```sh\necho other\n```", "ended by itself"),
        ("```sh\nfencepost topics describe missing\n```", "missing"),
        ("```sh\necho a b c\n```\n\n<!-- printed: -->\n```text\na … b\n```", "and it is\na b c"),
    ],
)
def test_failing_block_is_reported(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=complaint):
        Reader(tmp_path / "reader", broker="fencepost" in text).read(page_of(tmp_path, text))


@pytest.mark.slow
def test_readme_shows_the_complete_report_of_its_test(tmp_path: Path) -> None:
    blocks = Page(ROOT / "README.md").blocks
    test = next(block.text for block in blocks if "def test_a_forgotten_order" in block.text)
    excerpt = next(block.text for block in blocks if block.text.startswith("TIME "))
    file = tmp_path / "test_it.py"
    file.write_text(f"{test}\n    assert not 'so'\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    printed = re.search(r"^TIME .*?(?=^data directory: )", done.stdout, re.DOTALL | re.MULTILINE)
    assert printed, done.stdout

    def without_times(report: str) -> str:
        return re.sub(r"^\d\d:\d\d:\d\d\.\d{3} ", "", report.strip(), flags=re.MULTILINE)

    assert without_times(excerpt) == without_times(printed[0])


GOOD = """
<!-- file: words.txt -->
```text
first
```

```sh
pip install nothing-of-this-name
fencepost serve --data-dir ./data
```

```sh
fencepost topics create words
fencepost produce words < words.txt
```

<!-- stays: first -->
```sh
fencepost consume words --follow
```

<!-- not run: it would fail -->
```sh
false
```

<!-- needs: no-command-of-this-name -->
```sh
false
```

```sh
echo first of all; echo last
```

<!-- printed: -->
```text
first … all
last
```

```python
import socket
socket.create_connection(("127.0.0.1", int("127.0.0.1:9092".rpartition(":")[2]))).close()
```
"""


def test_page_is_run_from_top_to_bottom(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "reader")
    reader.read(page_of(tmp_path, GOOD))
    assert (reader.here / "data" / "words-0").is_dir()
