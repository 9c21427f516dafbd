"""The Grafana dashboard and the alert rules in packaging/ match the series of a busy broker."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from confluent_kafka import Producer

from fencepost.coordinator.daemon.broker import Broker
from tests.support.certificates import Authority
from tests.support.cluster import Cluster
from tests.support.daemon import ROOT
from tests.support.requests import join_share_group
from tests.support.share import REJECT, RELEASE
from tests.support.waits import until
from tests.unit.coordinator.metrics.test_families import SETTINGS, matches, scraped, serving, used
from tests.wire.command_line import cli
from tests.wire.test_dead_letters import LEVEL, UPGRADE, Queue, set_share_version

RULES = yaml.safe_load((ROOT / "packaging/prometheus-rules.yaml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((ROOT / "packaging/grafana-dashboard.json").read_text(encoding="utf-8"))
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
OF_PROMETHEUS = frozenset({"instance"})
"""Labels that Prometheus adds to each sample of a scrape."""

_LABEL = re.compile(r"\{\{ *\$labels\.(\w+) *\}\}")
_DASHBOARD_LABEL = re.compile(r"\{\{(\w+)\}\}")

Labels = dict[str, str]


def parts(node: Any, grouped: frozenset[str] = frozenset()) -> Iterator[tuple[Any, frozenset[str]]]:
    """Yield the selectors of an expression, each with the labels by which it is aggregated."""
    match node:
        case promql_parser.VectorSelector():
            yield node, grouped
        case promql_parser.MatrixSelector():
            yield node.vector_selector, grouped
        case promql_parser.AggregateExpr():
            by = frozenset() if node.modifier is None else frozenset(node.modifier.labels)
            yield from parts(node.expr, grouped | by)
        case promql_parser.BinaryExpr():
            yield from parts(node.lhs, grouped)
            yield from parts(node.rhs, grouped)
        case promql_parser.Call():
            for argument in node.args:
                yield from parts(argument, grouped)
        case promql_parser.ParenExpr() | promql_parser.SubqueryExpr():
            yield from parts(node.expr, grouped)
        case promql_parser.NumberLiteral():
            pass
        case _:
            raise AssertionError(f"this test does not know {node!r}")


def dashboard_targets() -> Iterator[tuple[str, str, str]]:
    """Yield title, expression and legend of each graph."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def finds(node: Any, grouped: frozenset[str], series: Mapping[str, list[Labels]]) -> bool:
    """Return whether a selector matches a sample with all ``grouped`` labels."""
    # The series must have a label if a selector excludes values of the label.
    operators = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "=", "MatchOp.Re": "=~"}
    matchers = [
        (matcher.name, operators[str(matcher.op)], matcher.value)
        for matcher in node.matchers.matchers
    ]
    return any(
        grouped - OF_PROMETHEUS <= told.keys()
        and all(
            name in OF_PROMETHEUS or (name in told and matches(told, name, operator, value))
            for name, operator, value in matchers
        )
        for told in series.get(node.name, ())
    )


class Activity:
    """Clients of every kind: throttled, fenced, in share groups with dead letters."""

    def __init__(self, broker: Broker) -> None:
        self.cluster = Cluster(broker.bootstrap).__enter__()
        self._throttle(broker.bootstrap)
        self._fence(broker.bootstrap)
        set_share_version(self.cluster, LEVEL, UPGRADE)
        queue = Queue(self.cluster)
        queue.create()
        self._share(queue)
        assert len(queue.records(1)) == 1
        refused = Queue(self.cluster)
        refused.create(**{"max.message.bytes": "10"})
        self._share(refused)
        until(lambda: refused.is_done(0) or bool(refused.fetch(0)), "the released record")

    def _share(self, queue: Queue) -> None:
        self.cluster.produce(queue.source, [b"a", b"b", b"c"])
        assert queue.fetch(0) == [(0, 2, 1)]
        queue.acknowledge(0, 0, 0, REJECT)
        queue.acknowledge(0, 2, 2, RELEASE)
        body = join_share_group(queue.group, queue.member.member, queue.source)
        assert self.cluster.call("share_group_heartbeat", 1, **body)["error_code"] == "none"

    def _throttle(self, bootstrap: str) -> None:
        entity = [{"entity_type": "client-id", "entity_name": "greedy"}]
        ops = [{"key": "producer_byte_rate", "value": 20_000.0, "remove": False}]
        entries = [{"entity": entity, "ops": ops}]
        self.cluster.call("alter_client_quotas", 1, entries=entries, validate_only=False)
        waits: list[float] = []
        settings = {"bootstrap.servers": bootstrap, "client.id": "greedy"}
        producer = Producer(
            {**settings, "throttle_cb": lambda event: waits.append(event.throttle_time)}
        )
        producer.produce("t", b"x" * 240_000)
        assert producer.flush(30) == 0
        until(lambda: producer.poll(0.01) is not None and bool(waits), "the throttle time")

    def _fence(self, bootstrap: str) -> None:
        settings = {"bootstrap.servers": bootstrap, "transactional.id": "twice"}
        first, second = Producer(settings), Producer(settings)
        first.init_transactions()
        first.begin_transaction()
        first.produce("t", b"x")
        first.flush()
        second.init_transactions()

    def close(self) -> None:
        self.cluster.__exit__(None, None, None)


@pytest.fixture
async def busy(tmp_path: Path) -> AsyncIterator[tuple[str, dict[str, list[Labels]]]]:
    """Start a broker and its clients; yield its address and the labels of each series."""
    certificate = Authority(tmp_path / "ca").issue("broker")
    settings = {
        **SETTINGS,
        "fencepost.metrics.compat": "",
        "listeners": "PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:0",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificate),
        "share.coordinator.state.topic.num.partitions": "2",
    }
    async with serving(tmp_path / "data", settings) as broker, used(broker):
        activity = await asyncio.to_thread(Activity, broker)
        try:
            found: dict[str, list[Labels]] = {}
            for name, told in await scraped(broker):
                found.setdefault(name, []).append(dict(told))
            yield broker.bootstrap, found
        finally:
            await asyncio.to_thread(activity.close)


async def test_every_dashboard_and_alert_expression_matches_a_series(
    busy: tuple[str, dict[str, list[Labels]]],
) -> None:
    _, series = busy
    blind = []
    asked = [
        (title, text.replace("$instance", ".*").replace("$group", ".*"))
        for title, text, _ in dashboard_targets()
    ]
    asked += [(name, rule["expr"]) for name, rule in ALERTS.items()]
    for title, text in asked:
        selectors = list(parts(promql_parser.parse(text)))
        assert selectors, text
        blind += [
            (title, str(selector)) for selector, by in selectors if not finds(selector, by, series)
        ]
    assert blind == []
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            query = variable["query"]["query"]
            name, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()
            assert label in {*series[name][0], *OF_PROMETHEUS}


async def test_runbook_command_of_each_alert_runs(
    busy: tuple[str, dict[str, list[Labels]]],
) -> None:
    """Run each command against the broker, with an existing group and topic."""
    bootstrap, series = busy
    share = next(iter(series["fencepost_share_in_flight_records"]))["group"]
    names = {"group": "g", "topic": "t", "partition": "0", "instance": "localhost:9404"}
    run = set()
    for alert, rule in ALERTS.items():
        own = {**names, "group": share} if "Share" in alert or "DeadLetter" in alert else names
        text = _LABEL.sub(lambda label, own=own: own[label[1]], rule["annotations"]["runbook"])
        program, *words = shlex.split(text.replace("GROUP", "g").replace("TOPIC", "t"))
        if program == "fencepost":
            done = await asyncio.to_thread(cli, bootstrap, *words, status=None)
            # ``doctor`` exits with 1, because it reports findings about these clients.
            assert done.exit_code == (words[0] == "doctor"), (alert, done.output)
            run.add(tuple(words[:2]))
        elif "grep" in words:
            prefix = words[-1].removeprefix("^")
            assert any(name.startswith(prefix) for name in series), text
    assert len(run) > 8


def test_alert_and_legend_texts_use_only_labels_kept_by_their_expression() -> None:
    for name, rule in ALERTS.items():
        kept = frozenset().union(*(by for _, by in parts(promql_parser.parse(rule["expr"]))))
        for text in rule["annotations"].values():
            assert set(_LABEL.findall(text)) <= kept, (name, text)
    for title, text, legend in dashboard_targets():
        selectors = list(parts(promql_parser.parse(text)))
        kept = frozenset().union(*(by for _, by in selectors)) or OF_PROMETHEUS
        assert set(_DASHBOARD_LABEL.findall(legend)) <= kept, (title, legend)


def test_dashboard_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
