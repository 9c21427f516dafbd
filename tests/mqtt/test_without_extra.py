"""``python -m fencepost.pipelines.mqtt`` when its extra is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.daemon import ROOT

WITHOUT = """
import runpy, sys
sys.modules[{name!r}] = None
sys.argv = ["mqtt", "--help"]
runpy.run_module("fencepost.pipelines.mqtt", run_name="__main__")
"""


@pytest.mark.parametrize("name", ["aiomqtt", "aiokafka", "paho"])
def test_missing_extra_is_named_in_one_line(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(name=name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"the bridge needs {name}")
    assert done.stderr.endswith("pip install '.[mqtt]' in a clone of Fencepost\n")
    assert done.stderr.count("\n") == 1
