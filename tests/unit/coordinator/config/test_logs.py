from __future__ import annotations

import json

import pytest
import structlog

from fencepost.coordinator.config import logs


@pytest.fixture(autouse=True)
def restored():
    logs.set_level("INFO")
    yield
    logs.set_level("INFO")
    structlog.reset_defaults()


def written(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_json_log_event_is_a_single_line(capsys):
    logs.configure(terminal=False)
    structlog.get_logger().info("topic created", topic="a\nb\x1b[31m", size=3, none=None)
    lines = written(capsys).splitlines()
    assert len(lines) == 1
    event = json.loads(lines[0])
    assert event.pop("timestamp")
    assert event == {
        "event": "topic created", "level": "info", "topic": "a\nb\x1b[31m", "size": 3, "none": None
    }  # fmt: skip


def test_text_log_event_escapes_control_characters(capsys):
    logs.configure(terminal=True)
    structlog.get_logger().warning("odd\r", client="a\nb\x1b[31m", path="with space", empty="")
    line = written(capsys)
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert r"odd\r client=a\nb\x1b[31m" in line
    assert 'path="with space" empty=""' in line
    structlog.get_logger().info("settings", changed=["a"], at_next_start=["b", "c"], no=[])
    assert written(capsys).endswith(""" changed="['a']" at_next_start="['b', 'c']" no="[]"\n""")


def test_long_log_values_are_truncated(capsys):
    logs.configure(terminal=False)
    limit = logs.MAX_VALUE_CHARACTERS
    structlog.get_logger().info(
        "x", whole="y" * limit, cut="y" * (limit + 1), big={"k": "v" * 2000}
    )
    event = json.loads(written(capsys))
    assert event["whole"] == "y" * limit
    assert event["cut"] == "y" * limit + "…"
    assert len(event["big"]) == limit + 1


@pytest.mark.parametrize("terminal", [True, False])
def test_log_events_include_stack_traces(capsys, terminal):
    logs.configure(terminal=terminal)
    log = structlog.get_logger()
    try:
        int("bad\x07")
    except ValueError as error:
        log.warning("one", exc_info=error)
        log.exception("two")
    text = written(capsys)
    assert text.count("Traceback") == 2
    assert "\x07" not in text


@pytest.mark.parametrize("end", ["\n", "\r\n", "\u2028", "\x85"])
def test_exception_message_with_line_breaks_cannot_forge_a_log_event(capsys, end):
    logs.configure(terminal=True)
    structlog.get_logger().info("real")
    forged = written(capsys).rstrip("\n")
    error = ValueError(f"name{end}{forged}")
    structlog.get_logger().warning("failed", exc_info=error, topic=f"t{end}{forged}")
    lines = written(capsys).split("\n")
    assert [line for line in lines[1:] if line and not line.startswith("  ")] == []
    assert "\u2028" not in "".join(lines)


def test_log_level_can_change_at_runtime(capsys):
    logs.configure(terminal=False)
    assert logs.level() == "INFO"
    structlog.get_logger().debug("hidden")
    logs.set_level("DEBUG")
    structlog.get_logger().debug("shown")
    assert logs.level() == "DEBUG"
    assert json.loads(written(capsys))["event"] == "shown"
    with pytest.raises(KeyError):
        logs.set_level("LOUD")


def test_existing_structlog_configuration_is_not_replaced(capsys):
    structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
    logs.configure_quietly()
    structlog.get_logger().info("hello")
    assert "event='hello'" in capsys.readouterr().out
    structlog.reset_defaults()
    logs.configure_quietly()
    structlog.get_logger().info("hidden")
    structlog.get_logger().warning("shown")
    assert "shown" in written(capsys)
