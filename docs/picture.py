"""Draw README's picture: a test that fails, and what its broker did (``python -m docs.picture``).

The test runs. Its times and paths differ from run to run, so no test compares the picture.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent / "images" / "failing-test.svg"

TEST = """\
from confluent_kafka import Producer


def test_each_order_is_written(kafka):
    orders = kafka.topic("orders", partitions=3)
    shop = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": "shop"})
    shop.init_transactions()
    shop.begin_transaction()
    shop.produce(orders, b"first")
    shop.flush()
    kafka.clock.advance(seconds=61)  # the shop pauses for a minute
    read = kafka.records(orders, isolation="read_committed")
    assert [record.value for record in read] == [b"first"]
"""

SHOWN = re.compile(r"^    def test_.*?^(?=data directory|-+ Captured)", re.MULTILINE | re.DOTALL)
"""The function, its error, and the history of its broker."""

COLORS = {
    r"^E .*": "bright_red",
    r"^> .*": "bold",
    r"^-+ Kafka at .*": "cyan",
    r"^TIME .*": "dim",
    r"producer-fenced|transaction-\S+|timer txn-timeout": "yellow",
}


def main() -> None:
    """Run the test, and draw the middle of its output."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_orders.py").write_text(TEST, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_orders.py"],
            cwd=folder,
            env={"COLUMNS": "112", "PATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    found = SHOWN.search(done.stdout)
    if done.returncode != 1 or found is None:
        raise SystemExit(done.stdout + done.stderr)
    text = Text("$ pytest test_orders.py\n\n" + found[0].rstrip())
    for pattern, color in COLORS.items():
        text.highlight_regex(re.compile(pattern, re.MULTILINE), color)
    console = Console(record=True, width=124, file=io.StringIO())
    console.print(text)
    drawn = console.export_svg(title="a test that fails")
    # A picture in a page loads no fonts from elsewhere.
    drawn = re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL)
    PICTURE.write_text(drawn.replace("Fira Code", "Consolas"), encoding="utf-8")


if __name__ == "__main__":
    main()
